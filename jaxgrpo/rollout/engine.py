"""The two protocols every sampler implements, and the records they exchange. Tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end token or a stop string; length: `max_tokens` or the context limit; abort: cut by the engine, not graded."""


@dataclass(frozen=True)
class SamplingParams:
    """How to draw one completion. Every field is always sent: an engine never fills one from a checkpoint's own settings.

    Attributes:
        max_tokens: at most this many sampled tokens.
        temperature: logits are divided by it; 0 is greedy (log-probs are then those of temperature 1).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: drop tokens less likely than `min_p` times the most likely one; 0 keeps all.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens seen in prompt or completion; 1 is off.
        presence_penalty, frequency_penalty: subtracted once, or once an occurrence, for tokens of the completion; 0 is off.
        stop_token_ids: end tokens; the one that was drawn is part of the completion.
        stop: stop strings; the completion is cut after the token that completes one.
        seed: 63-bit seed of this request; the same seed, prompt and weights give the same tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens get probability 0 or a changed logit, which the learner's log-probs do not reproduce."""
        return (
            self.top_k > 0
            or self.top_p < 1
            or self.min_p > 0
            or self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True)
class Choice:
    """One drawn completion.

    Attributes:
        token_ids: the sampled tokens, a drawn end token included.
        logprobs: processed log-probability of each (after temperature, penalties and truncation), nats.
        finish_reason: why it ended.
        versions: policy version that drew each token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"an engine returned {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; the three must agree"
            )


class Engine(Protocol):
    """Something that completes token sequences."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Choice:
        """Draws one completion of `token_ids`. Concurrent calls are batched by the engine."""
        ...

    @property
    def max_context(self) -> int:
        """Prompt and completion together may have at most this many tokens."""
        ...


class WeightSink(Protocol):
    """Something that follows the learner's weights. Tensors arrive under Hugging Face names."""

    async def start(self, version: int) -> None:
        """Opens an update; samples are refused or held until it is finished."""
        ...

    async def update(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Hands over some of the tensors of the open update."""
        ...

    async def finish(self, version: int) -> None:
        """Closes the update: all tensors have arrived, caches are reset, `version` draws the next samples."""
        ...

    async def info(self) -> dict[str, Any]:
        """Model identity, dtype and policy version of the sink."""
        ...
