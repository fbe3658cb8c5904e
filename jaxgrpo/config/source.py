"""YAML 1.2 text to plain values, with the line of every key, and `key.path=value` overrides on top.

Plain scalars follow the core schema of YAML 1.2 (section 10.3.2), so `1e-6` is a number, and `no`, `off` and
`2024-01-01` are text. A repeated key, which many readers let pass, is a problem, and so is a tag of someone's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from jaxgrpo.errors import Problem, UserError

KeyPath = tuple[str | int, ...]

_CONSTANTS = {
    name: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for name in (word, word.capitalize(), word.upper())
} | {"": None, "~": None}
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
)
_TAG = "tag:yaml.org,2002:"
_SHAPE = "a mapping of keys and values, such as `output_dir: runs/first`"


def scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain (unquoted) scalar in YAML 1.2's core schema."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for pattern, convert in _NUMBERS:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def dotted(path: Iterable[str | int]) -> str:
    """`("rewards", 0, "weight")` as `rewards.0.weight`, the spelling of an override."""
    return ".".join(str(part) for part in path)


@dataclass
class Source:
    """Values as written, and where each was written.

    Attributes:
        name: the file's name, for messages.
        values: the root mapping, plain Python values.
        places: key path -> `file:line` or `command line`.
        problems: what was wrong with the text itself.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """A path for a message: the key, and the file and line of it or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return f"{dotted(path)} ({self.places[path[:length]]})"
        return f"{dotted(path)} ({self.name})" if path else self.name

    def override(self, assignment: str) -> None:
        """Applies one `key.path=value`; a number in the path is an index into a list, or its length to append."""
        try:
            self._assign(assignment)
        except UserError as error:
            self.problems += error.problems

    def _assign(self, assignment: str) -> None:
        key, equals, text = assignment.partition("=")
        path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if not equals or "" in path:
            fix = f"write {key}=VALUE" if key and not equals else ""
            raise UserError(Problem("command line", repr(assignment), "key.path=value", fix))
        value, places = _parse_override(key, path, text)
        here: Any = self.values
        for depth, part in enumerate(path):
            slot = _slot(here, part, key, path[:depth])
            if depth == len(path) - 1:
                here[slot] = value
            elif here[slot] is None:
                here[slot] = {}
            here = here[slot]
        replaced = [place for place in self.places if place[: len(path)] == path]
        for place in replaced:
            del self.places[place]
        self.places |= places | {path: "command line"}


def _parse_override(key: str, path: KeyPath, text: str) -> tuple[Any, dict[KeyPath, str]]:
    """Flow values and quoted text as YAML reads them; anything else is one plain scalar, `: ` and `#` included."""
    if not text.lstrip().startswith(("[", "{", '"', "'")):
        return scalar(text.strip()), {}

    def fail(_: int | None, found: str) -> None:
        fix = "close every quote and bracket, or quote the whole value"
        raise UserError(Problem(f"{key} (command line)", f"{text}: {found}", "a YAML value", fix))

    node = _compose(text, fail)
    assert node is not None, "a text that begins with a bracket or a quote is no empty document"
    parsed = Source("command line")
    value = _Builder(parsed, place="command line").build(node, path)
    if parsed.problems:
        raise UserError(parsed.problems)
    return value, parsed.places


def _slot(holder: Any, part: str | int, key: str, outer: KeyPath) -> str | int:
    """The key or index in `holder` that a part of an override's path names; made, if it is not there yet."""
    label = f"{key} (command line)"
    if isinstance(holder, dict):
        holder.setdefault(str(part), None)
        return str(part)
    if not isinstance(holder, list):
        fix = f"set {dotted(outer)} itself, or write it as a section"
        raise UserError(Problem(label, f"{dotted(outer)} = {holder!r}", "a section there", fix))
    if not isinstance(part, int) or part > len(holder):
        expected = f"an index into {dotted(outer)}, 0 to {len(holder)} (which appends)"
        raise UserError(Problem(label, repr(part), expected))
    if part == len(holder):
        holder.append(None)
    return part


def read(file: Path | str) -> Source:
    """Reads a config file.

    Raises:
        UserError: the file cannot be read, is not YAML, or its root is not a mapping. Smaller mistakes (a repeated key)
            are left in `Source.problems`, so that they can be reported with the others.
    """
    name = str(file)
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(Problem(name, "no such file", "a config file", f"looked in {Path.cwd()}")) from None
    except UnicodeDecodeError as error:
        raise UserError(Problem(name, f"byte {error.start} that is not UTF-8", "a text file in UTF-8")) from None
    except OSError as error:
        raise UserError(Problem(name, error.strerror or str(error), "a readable config file")) from None

    def fail(line: int | None, found: str) -> None:
        fix = "look at the indentation, brackets and quotes of this line and the one before it"
        raise UserError(Problem(f"{name}:{line}" if line else name, found, "YAML 1.2", fix))

    node = _compose(text, fail)
    if node is None:
        raise UserError(Problem(name, "an empty file", _SHAPE))
    if not isinstance(node, MappingNode):
        found = "a list" if isinstance(node, SequenceNode) else f"the single value {node.value!r}"
        raise UserError(Problem(name, found, _SHAPE))
    source = Source(name)
    source.values = _Builder(source).build(node, ())
    return source


def _compose(text: str, fail: Callable[[int | None, str], None]) -> Node | None:
    """The node tree of the only document in a text; calls `fail(line, what)` if there is none to be had."""
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        fail(mark.line + 1 if mark else None, what)
    except YAMLError as error:
        fail(None, str(error).splitlines()[0])
    except RecursionError:
        fail(None, "brackets nested too deeply")
    return None


@dataclass
class _Builder:
    """Plain values out of a node tree; notes places and problems in `source`."""

    source: Source
    place: str | None = None
    open_nodes: list[Node] = field(default_factory=list)

    def build(self, node: Node, path: KeyPath) -> Any:
        if any(node is outer for outer in self.open_nodes):
            self._problem(node, path, "an alias of the value it stands in", "a value that ends")
            return None
        self.open_nodes.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            if isinstance(node, SequenceNode):
                return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self.open_nodes.pop()

    def _item(self, node: Node, path: KeyPath) -> Any:
        self.source.places[path] = self._place(node)
        return self.build(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self._problem(key, path, "a list or mapping as a key", "text as a key")
                continue
            here = (*path, key.value)
            if key.value in values:
                first = self.source.places[here].rpartition(":")[2]
                place = f"{dotted(here)} ({self._place(key)})"
                self.source.problems.append(
                    Problem(
                        place, f"the key again, after line {first}", "every key once", "delete one of the two lines"
                    )
                )
                continue
            self.source.places[here] = self._place(key)
            values[key.value] = self.build(value, here)
        return values

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        if not str(node.tag).startswith(_TAG):
            self._problem(node, path, f"the tag {node.tag}", "a plain value", "leave the tag out, or quote the text")
            return None
        return scalar(node.value) if node.style is None else node.value

    def _place(self, node: Node) -> str:
        return self.place or f"{self.source.name}:{node.start_mark.line + 1}"

    def _problem(self, node: Node, path: KeyPath, found: str, expected: str, fix: str = "") -> None:
        place = f"{dotted(path)} ({self._place(node)})" if path else self._place(node)
        self.source.problems.append(Problem(place, found, expected, fix))
