"""How a reward function is called, read from its signature.

    def reward(completions, answer, *, tolerance=1e-4, **columns) -> list[float | None]: ...

- `completions`: list of N strings, never None. It is passed by name; a function whose first parameter has another name
  gets it by position (unless that name is one of `PROVIDED`).
- Positional-or-keyword parameters without a default are *required columns* of the data set, each a list of N values;
  with a default they are optional columns.
- Keyword-only parameters are *options*, set in the config under `rewards[i].options`. An option called `column` (or
  `columns`, a list) names a further required column, so that a built-in works with any column name.
- `**anything` receives every column that was not named.
- `PROVIDED` can be asked for like a column.
- A class is instantiated with its options once; its instance is called.

Functions written for TRL (`f(completions, answer, **kwargs)`, `f(prompts, completions, **kwargs)`) and ms-swift's
`ORM.__call__(self, completions, solution, **kwargs)` already follow this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxgrpo.config.schema import RewardSection
from jaxgrpo.errors import Problem, UserError
from jaxgrpo.registry import check_options, lookup

PROVIDED = {
    "completions": "the text of the last assistant message, N strings",
    "prompts": "N prompts: lists of messages, or strings",
    "prefills": "N strings: what the template already opened of the assistant's turn, such as `<think>`; mostly empty",
    "trajectories": "N Trajectory records: tokens, messages, infos, stop reason",
    "step": "the number of the step",
    "counters": "a collections.Counter of the function's own; its entries become metrics",
}
"""Names that reward functions may ask for besides columns; a data column must not be called so."""

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Reward:
    """A reward function, ready to be called.

    Attributes:
        name: what metrics call it; unique in a run.
        function: the function, or the instance of a registered class.
        weight: its factor in the summed reward.
        options: its keyword-only arguments.
        on_error: `stop` the run when it raises, or let the samples that raise `abstain` (and count them).
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    on_error: Literal["stop", "abstain"] = "stop"


def build_rewards(sections: Sequence[RewardSection]) -> list[Reward]:
    """Looks up the rewards of a config; the second reward of one name is called `name_2`, and so on.

    Raises:
        UserError: unknown names, unknown or missing options; all of them together.
    """
    rewards: list[Reward] = []
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for index, section in enumerate(sections):
        path = f"rewards.{index}"
        try:
            entry = lookup("reward", section.name, f"{path}.name")
        except UserError as error:
            problems += error.problems
            continue
        wrong = check_options(entry, section.options, f"{path}.options")
        problems += wrong
        seen[section.name] = seen.get(section.name, 0) + 1
        name = section.name if seen[section.name] == 1 else f"{section.name}_{seen[section.name]}"
        if not wrong:
            is_class = inspect.isclass(entry)
            function, options = (entry(**section.options), {}) if is_class else (entry, section.options)
            rewards.append(Reward(name, function, section.weight, options, section.on_error))
    if problems:
        raise UserError(problems)
    return rewards


def required_columns(reward: Reward) -> tuple[str, ...]:
    """The data columns without which the reward cannot be called."""
    named = [
        name
        for name, parameter in _column_parameters(reward.function).items()
        if parameter.default is inspect.Parameter.empty and name not in PROVIDED
    ]
    signature = inspect.signature(reward.function).parameters
    for option in ("column", "columns"):
        if option in signature and signature[option].kind is inspect.Parameter.KEYWORD_ONLY:
            value = reward.options.get(option, signature[option].default)
            named += [value] if isinstance(value, str) else list(value or ())
    return tuple(dict.fromkeys(named))


def check_columns(rewards: Sequence[Reward], columns: Iterable[str], source: str = "data.train") -> list[Problem]:
    """Compares what the rewards need with what the data set has; runs before any model is loaded.

    Returns:
        One problem for each missing column of each reward, and one for each column with a name in `PROVIDED`.
    """
    present = list(columns)
    problems = [
        Problem(
            f"rewards.{reward.name}",
            "",
            f"a column {name!r} in {source}, which has {', '.join(present) or 'none'}",
            f"rename a column to {name!r}, or point the reward at one that exists",
        )
        for reward in rewards
        for name in required_columns(reward)
        if name not in present
    ]
    problems += [
        Problem(
            source,
            f"a column called {name!r}",
            f"another name: reward functions get {PROVIDED[name]} under it",
            "rename the column",
        )
        for name in present
        if name in PROVIDED
    ]
    return problems


def arguments(reward: Reward, columns: Mapping[str, list[Any]], provided: Mapping[str, Any]) -> tuple[list, dict]:
    """Positional and keyword arguments of one call.

    Args:
        columns: every data column, N values each. A column that has an option's name is left out: the option wins.
        provided: the values of `PROVIDED`.
    """
    parameters = inspect.signature(reward.function).parameters
    takes_rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    available = {**columns, **provided}
    options = {name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    keyword = {
        name: value
        for name, value in available.items()
        if name not in options and (takes_rest or (name in parameters and parameters[name].kind in _BY_KEYWORD))
    }
    unnamed = _takes_completions(reward.function)
    positional = [provided["completions"]] if unnamed and unnamed != "completions" else []
    if positional:
        keyword = {name: value for name, value in keyword.items() if name not in (unnamed, "completions")}
    return positional, keyword | dict(reward.options)


def _column_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Positional-or-keyword parameters, without the one that takes the completions."""
    unnamed = _takes_completions(function)
    return {
        name: p
        for name, p in inspect.signature(function).parameters.items()
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name != unnamed
    }


def _takes_completions(function: Callable[..., Any]) -> str:
    """The parameter that gets the completions: `completions`, or the first; empty when that is another of `PROVIDED`."""
    parameters = inspect.signature(function).parameters
    first = next(iter(parameters), "")
    return "completions" if "completions" in parameters else first if first not in PROVIDED else ""
