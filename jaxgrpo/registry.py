"""One registry for everything a user can plug in, and the loader of plug-in files.

    @register("reward", "brevity")
    def brevity(completions, *, weight_per_token=0.01, **columns):
        ...

A plug-in's options are its keyword-only parameters; `check_options` compares a config's options with that signature at
start, so a misspelt option is an error with a suggestion and never a silent default.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxgrpo.errors import Problem, UserError

KINDS = (
    "reward",
    "reward_model",
    "scheduler",
    "env",
    "tool",
    "engine",
    "policy_loss",
    "advantage",
    "token_weights",
    "logprobs",
    "surgery",
    "gradient_transform",
)

T = TypeVar("T", bound=Callable[..., Any])
_entries: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in KINDS}
_loaded: list[str] = []


def register(kind: str, name: str) -> Callable[[T], T]:
    """Registers a function or class under `name`.

    Raises:
        ValueError: `kind` is not one of `KINDS`, or another object already has this name.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown plug-in kind {kind!r}; the kinds are {', '.join(KINDS)}")

    def add(entry: T) -> T:
        present = _entries[kind].get(name)
        # The same file imported twice (by path and by module name) defines the same thing again: not a clash.
        if present is not None and _origin(present) != _origin(entry):
            raise ValueError(f"two {kind} plug-ins are called {name!r}: {_origin(present)} and {_origin(entry)}")
        _entries[kind][name] = entry
        return entry

    return add


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    return sorted(_entries[kind])


def lookup(kind: str, name: str, path: str) -> Callable[..., Any]:
    """The object registered under `name`; `path` is the config key that asked, for the message.

    Raises:
        UserError: nothing is registered under that name; the message lists the names and the plug-in files loaded.
    """
    if name in _entries[kind]:
        return _entries[kind][name]
    near = difflib.get_close_matches(name, names(kind), n=1)
    loaded = f"; plug-ins loaded: {', '.join(_loaded)}" if _loaded else "; no plug-in file was loaded (key `plugins`)"
    fix = f"did you mean {near[0]!r}?" if near else f"register it with @register({kind!r}, {name!r}) in a plug-in file"
    raise UserError(Problem(path, repr(name), f"a registered {kind}: {', '.join(names(kind)) or 'none'}{loaded}", fix))


def check_options(entry: Callable[..., Any], options: Mapping[str, Any], path: str) -> list[Problem]:
    """Compares options from a config with an entry's keyword-only parameters.

    Returns one problem for each option that the entry does not take and for each required option that is missing.
    """
    parameters = inspect.signature(entry).parameters
    accepted = {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    problems = []
    for name in options:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=1)
            expected = f"one of {', '.join(accepted)}" if accepted else "no options at all"
            problems.append(
                Problem(f"{path}.{name}", repr(options[name]), expected, f"did you mean {near[0]!r}?" if near else "")
            )
    for name, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            problems.append(Problem(f"{path}.{name}", "", "a value: this option has no default", f"add `{name}: …`"))
    return problems


def load_plugins(plugins: list[str], base: Path, path: str = "plugins") -> None:
    """Imports plug-in files (`my_file.py`, relative to `base` or the working directory) and modules (`my.module`).

    Raises:
        UserError: a file is missing, or importing it raised; the message names the line.
    """
    problems = []
    for index, plugin in enumerate(plugins):
        key = f"{path}.{index}"
        try:
            _import_plugin(plugin, base)
            _loaded.append(plugin)
        except FileNotFoundError as error:
            problems.append(Problem(key, repr(plugin), "a Python file or an importable module", str(error)))
        except Exception as error:  # whatever the user's file raises is the user's to see
            problems.append(
                Problem(key, repr(plugin), "a file that imports", f"{_where(error)}: {type(error).__name__}: {error}")
            )
    if problems:
        raise UserError(problems)


def _import_plugin(plugin: str, base: Path) -> None:
    if not plugin.endswith(".py"):
        if importlib.util.find_spec(plugin) is None:
            raise FileNotFoundError(f"no module named {plugin!r} is installed; a file's name ends in .py")
        importlib.import_module(plugin)
        return
    candidates = [base / plugin, Path(plugin)]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"looked for {' and '.join(str(c.absolute()) for c in candidates)}")
    name = f"jaxgrpo_plugin_{file.stem}_{abs(hash(str(file.resolve()))):x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that dataclasses and pickling inside the plug-in find their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _origin(entry: Callable[..., Any]) -> str:
    code = getattr(entry, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{inspect.getsourcefile(entry) or '?'}:{getattr(entry, '__qualname__', entry)}"


def _where(error: BaseException) -> str:
    """The user's own line: the deepest one outside this package (`register` raises inside it)."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((str(Path(__file__).parent), "<frozen"))]
    return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}"
