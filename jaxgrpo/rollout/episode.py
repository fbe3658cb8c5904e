"""How a trajectory grows. Each function returns a new one with all its arrays extended together, so they cannot disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxgrpo.rollout.engine import Choice, SamplingParams
from jaxgrpo.types.rollout import Message, Prompt, StopReason, Trajectory


@dataclass(frozen=True)
class EpisodeSpec:
    """What it takes to play one episode.

    Attributes:
        prompt: the data row.
        prompt_tokens: its ids.
        episode_id: unique in the run.
        sampling: how to draw; `max_tokens` is the episode's budget, `seed` the episode's.
    """

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    episode_id: str
    sampling: SamplingParams


def begin(spec: EpisodeSpec) -> Trajectory:
    """A trajectory that holds the prompt and nothing else."""
    length = len(spec.prompt_tokens)
    return Trajectory(
        prompt_id=spec.prompt.prompt_id,
        episode_id=spec.episode_id,
        tokens=np.asarray(spec.prompt_tokens, np.int32),
        sampled=np.zeros(length, bool),
        loss_mask=np.zeros(length, bool),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        prompt_length=length,
        messages=spec.prompt.messages,
    )


def append_sampled(trajectory: Trajectory, choice: Choice, text: str, *, train: bool = True) -> Trajectory:
    """Appends what an engine drew, as one assistant message with the given text.

    Args:
        train: whether the tokens carry loss.
    """
    count = len(choice.token_ids)
    return _extended(
        trajectory,
        tokens=choice.token_ids,
        sampled=np.ones(count, bool),
        loss_mask=np.full(count, train),
        logprobs=choice.logprobs,
        versions=choice.versions,
        messages=({"role": "assistant", "content": text},),
        turns=trajectory.turns + 1,
    )


def append_observation(trajectory: Trajectory, tokens: Sequence[int], messages: Sequence[Message]) -> Trajectory:
    """Appends tokens the policy did not draw (separators, tool results, user turns); they carry no loss."""
    count = len(tokens)
    return _extended(
        trajectory,
        tokens=tokens,
        sampled=np.zeros(count, bool),
        loss_mask=np.zeros(count, bool),
        logprobs=np.zeros(count, np.float32),
        versions=np.full(count, -1, np.int32),
        messages=tuple(messages),
        turns=trajectory.turns,
    )


def finish(trajectory: Trajectory, stop: StopReason, infos: dict[str, Any] | None = None) -> Trajectory:
    """Closes a trajectory with its stop reason and merges `infos`."""
    return replace(trajectory, stop=stop, infos={**trajectory.infos, **(infos or {})})


def _extended(
    trajectory: Trajectory,
    *,
    tokens: Sequence[int],
    sampled: np.ndarray,
    loss_mask: np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    versions: Sequence[int] | np.ndarray,
    messages: tuple[Message, ...],
    turns: int,
) -> Trajectory:
    return replace(
        trajectory,
        tokens=np.concatenate([trajectory.tokens, np.asarray(tokens, np.int32)]),
        sampled=np.concatenate([trajectory.sampled, sampled]),
        loss_mask=np.concatenate([trajectory.loss_mask, loss_mask]),
        logprobs=np.concatenate([trajectory.logprobs, np.asarray(logprobs, np.float32)]),
        versions=np.concatenate([trajectory.versions, np.asarray(versions, np.int32)]),
        messages=trajectory.messages + messages,
        turns=turns,
    )
