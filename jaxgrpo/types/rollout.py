"""What the sampling side hands to the learning side. NumPy and plain Python only; nothing here imports JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Message = dict[str, Any]
"""One chat message: `role`, `content`, and whatever the chat template understands (`tool_calls`, `name`, …)."""

StopReason = Literal["stop", "length", "max_turns", "env_done", "error", "abort"]
"""Why an episode ended. stop: the policy ended its turn; length: a token limit cut it; max_turns: the scheduler's limit;
env_done: the environment said so; error: a scheduler, environment or tool failed; abort: the engine gave up the request."""


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready to be sampled from.

    Attributes:
        prompt_id: identifies the row: the same row has the same id in every epoch and every run.
        messages: the conversation so far (a text prompt has none: see `text`).
        text: a plain-text prompt, used as it is, without a chat template; None for a chat.
        columns: every other column of the row, passed to reward functions.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    text: str | None
    columns: dict[str, Any]


@dataclass(frozen=True)
class Trajectory:
    """One trainable sequence of an episode; grown only by the functions of `rollout/episode.py`.

    Attributes:
        prompt_id: the data row it came from; trajectories with one `prompt_id` in one step form a group.
        episode_id: an episode that rewrote its history yields several trajectories with one `episode_id` and one reward.
        tokens: int32 [T], prompt first.
        sampled: bool [T], the policy drew this token.
        loss_mask: bool [T], train on this token; implies `sampled`.
        logprobs: float32 [T], the sampler's log-probability of the token, nats; 0 where not sampled.
        versions: int32 [T], the policy version that drew the token; -1 where not sampled.
        prompt_length: number of leading tokens that belong to the prompt.
        messages: the conversation, the completion included.
        stop: why the episode ended.
        turns: number of assistant turns.
        infos: JSON-able facts from schedulers and environments, visible to rewards and metrics.
        media: images, audio or video that belong to the prompt, passed through untouched.
    """

    prompt_id: str
    episode_id: str
    tokens: np.ndarray
    sampled: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    prompt_length: int
    messages: tuple[Message, ...]
    stop: StopReason = "abort"
    turns: int = 0
    infos: dict[str, Any] = field(default_factory=dict)
    media: dict[str, Any] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        """Number of tokens the policy drew, all turns together."""
        return int(self.sampled.sum())

    @property
    def completion(self) -> str:
        """The text of the last assistant message; empty when there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return message.get("content") or ""
        return ""
