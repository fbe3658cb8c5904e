"""Runs the reward functions of a step side by side and checks what they return."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgrpo.errors import RunError
from jaxgrpo.rewards.convention import Reward, arguments
from jaxgrpo.types.rollout import Prompt, Trajectory

CONSTANT_STEPS = 10
"""After this many scorings with one and the same value, a reward is reported as constant."""


@dataclass(frozen=True)
class ScoreResult:
    """The scores of N trajectories by F rewards.

    Attributes:
        values: float32 [N, F]; NaN where a reward abstained.
        names: F names.
        weights: float32 [F].
        seconds: wall-clock time of the scoring.
        metrics: `rewards/<name>/seconds`, `/abstained`, `/errors` and the function's own counters, summed over samples.
        warnings: what the user should be told, once.
    """

    values: np.ndarray
    names: tuple[str, ...]
    weights: np.ndarray
    seconds: float
    metrics: dict[str, float]
    warnings: tuple[str, ...] = ()

    @property
    def total(self) -> np.ndarray:
        """float32 [N], Σ_f weight_f · value_f over the rewards that did not abstain; NaN where all did.

        A reward of weight 0 is only measured: it does not make a sample scored.
        """
        counts = np.isfinite(self.values) & (self.weights != 0)
        total = np.where(counts, self.values * self.weights, 0).sum(axis=1)
        return np.where(counts.any(axis=1), total, np.nan).astype(np.float32)


@dataclass(frozen=True)
class _Scored:
    """What one reward returned."""

    values: list[float]
    seconds: float
    counters: Counter[str]


class Scorer:
    """Scores trajectories with several rewards at once.

    Args:
        rewards: at least none; `build_rewards` makes them from a config.
        prefill: tells what the chat template already opened of the assistant's turn (`ChatTokenizer.prefill`), for
            format rewards; None means nothing.
        constant_steps: warn when a reward was constant for this many scorings.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        prefill: Callable[[Prompt], str] | None = None,
        constant_steps: int = CONSTANT_STEPS,
    ):
        self.rewards = tuple(rewards)
        self._prefill = prefill
        self._constant_steps = constant_steps
        self._constant: dict[str, tuple[float, int]] = {}

    async def score(self, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt], step: int) -> ScoreResult:
        """Scores N trajectories; `prompts[i]` is the row that `trajectories[i]` came from.

        Synchronous functions run in threads, asynchronous ones on the event loop, all at the same time.

        Raises:
            RunError: a reward raised, or returned a wrong length, something that is no number, NaN or infinity; the
                message names the reward and the sample.
        """
        begun = time.perf_counter()
        columns = gather_columns(prompts)
        provided = {
            "completions": [trajectory.completion for trajectory in trajectories],
            "prompts": [prompt.text if prompt.text is not None else list(prompt.messages) for prompt in prompts],
            "prefills": [self._prefill(prompt) if self._prefill else "" for prompt in prompts],
            "trajectories": list(trajectories),
            "step": step,
        }
        scored = await asyncio.gather(*(_run(reward, columns, provided) for reward in self.rewards))
        names = tuple(reward.name for reward in self.rewards)
        values = np.array([one.values for one in scored], np.float32).reshape(len(names), len(trajectories)).T
        return ScoreResult(
            values=values,
            names=names,
            weights=np.array([reward.weight for reward in self.rewards], np.float32),
            seconds=time.perf_counter() - begun,
            metrics=_metrics(names, scored),
            warnings=tuple(text for f, name in enumerate(names) for text in self._watch(name, values[:, f], step)),
        )

    def _watch(self, name: str, values: np.ndarray, step: int) -> list[str]:
        seen = values[np.isfinite(values)]
        if not len(seen):
            return []
        if seen.min() != seen.max():
            self._constant.pop(name, None)
            return []
        value, count = self._constant.get(name, (float(seen[0]), 0))
        count = count + 1 if value == float(seen[0]) else 1
        self._constant[name] = (float(seen[0]), count)
        if count != self._constant_steps:
            return []
        return [
            f"reward {name!r} has been {seen[0]:g} for every sample of the last {count} scorings (step {step}): "
            "it teaches nothing; see completions.jsonl for what it is given"
        ]


def gather_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Every column of any row, as a list of N values; None where a row does not have it."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


async def _run(reward: Reward, columns: Mapping[str, list[Any]], provided: Mapping[str, Any]) -> _Scored:
    begun = time.perf_counter()
    counters: Counter[str] = Counter()
    count = len(provided["completions"])
    try:
        values = _checked(reward, await _call(reward, columns, provided, counters), count)
    except RunError:
        raise
    except Exception as error:  # a user's function may raise anything; it is reported or counted, never swallowed
        if reward.on_error == "stop":
            raise await _explained(reward, error, columns, provided) from error
        counters.clear()
        values = await _one_by_one(reward, columns, provided, counters)
    counters["abstained"] += sum(math.isnan(value) for value in values)
    return _Scored(values, time.perf_counter() - begun, counters)


async def _call(
    reward: Reward, columns: Mapping[str, list[Any]], provided: Mapping[str, Any], counters: Counter[str]
) -> Any:
    positional, keyword = arguments(reward, columns, {**provided, "counters": counters})
    function = reward.function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*positional, **keyword)
    result = await asyncio.to_thread(function, *positional, **keyword)
    return await result if inspect.isawaitable(result) else result


async def _one_by_one(
    reward: Reward, columns: Mapping[str, list[Any]], provided: Mapping[str, Any], counters: Counter[str]
) -> list[float]:
    """Scores each sample alone, so that one that raises costs no other its score."""

    async def one(index: int) -> float:
        try:
            result = await _call(reward, *_slice(columns, provided, index), counters)
        except Exception:  # the option `abstain` asks for exactly this; the count is a metric
            counters["errors"] += 1
            return math.nan
        return _checked(reward, result, 1)[0]

    return list(await asyncio.gather(*(one(index) for index in range(len(provided["completions"])))))


async def _explained(
    reward: Reward, error: Exception, columns: Mapping[str, list[Any]], provided: Mapping[str, Any]
) -> RunError:
    """Finds the first sample on which the reward raises by itself, for the message."""
    culprit = "the whole batch (each sample alone is scored without an error)"
    for index, completion in enumerate(provided["completions"]):
        try:
            await _call(reward, *_slice(columns, provided, index), Counter())
        except Exception as alone:
            error, culprit = alone, f"sample {index}, completion {_short(completion)}"
            break
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return RunError(f"reward {reward.name!r} raised {type(error).__name__}: {error}\n    at {where}, on {culprit}")


def _slice(columns: Mapping[str, list[Any]], provided: Mapping[str, Any], index: int) -> tuple[dict, dict]:
    def alone(value: Any) -> Any:
        return [value[index]] if isinstance(value, list) else value

    return {k: alone(v) for k, v in columns.items()}, {k: alone(v) for k, v in provided.items()}


def _checked(reward: Reward, result: Any, count: int) -> list[float]:
    if hasattr(result, "tolist"):  # NumPy arrays and tensors of any library
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RunError(
            f"reward {reward.name!r} returned a {type(result).__name__}; a list of {count} numbers was expected"
        )
    if len(result) != count:
        raise RunError(f"reward {reward.name!r} returned {len(result)} scores for {count} completions")
    return [_number(reward, value, index) for index, value in enumerate(result)]


def _number(reward: Reward, value: Any, index: int) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RunError(
            f"reward {reward.name!r} gave sample {index} {_short(value)}, a {type(value).__name__}; "
            "expected a number, or None to abstain"
        )
    if not math.isfinite(np.float32(value)):  # scores are kept in float32
        raise RunError(f"reward {reward.name!r} gave sample {index} {value}; return None to abstain")
    return float(value)


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _metrics(names: Sequence[str], scored: Sequence[_Scored]) -> dict[str, float]:
    metrics = {}
    for name, one in zip(names, scored, strict=True):
        metrics[f"rewards/{name}/seconds"] = one.seconds
        metrics |= {f"rewards/{name}/{key}": float(value) for key, value in one.counters.items()}
    return metrics
