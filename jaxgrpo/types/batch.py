"""The learner's input: packed rows in which completions share their prompt."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import jax

Array = Any
"""A NumPy array on the host, a `jax.Array` (or tracer) on the device."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch. R rows, T tokens a row, K predicted tokens (targets) a row, S sequences a row.

    A *segment* is a prompt or a completion. Its tokens attend to earlier tokens of their own segment and to all tokens of
    its *parent* segment, so a prompt stands once in a row and its completions hang off it; their positions go on from the
    prompt's end. Padding has segment -1. A *target* is a token that is predicted: it names the token position whose hidden
    state predicts it (`hidden_index`), so only those positions are ever unembedded. A sequence (the completion of one
    trajectory) never straddles rows.

    Attributes:
        tokens, positions, segment, parent: int32 [R, T]; `parent` is -1 where a segment has none.
        hidden_index: int32 [R, K], the position in the row whose hidden state predicts the target.
        token: int32 [R, K], the token predicted.
        sequence: int32 [R, K], row-local sequence index in [0, S); -1 at padding.
        loss_mask: float32 [R, K], 1 where the target is trained on, 0 elsewhere and at padding.
        advantages, old_logprobs, ref_logprobs, rollout_logprobs: float32 [R, K]. Anything may stand where `loss_mask` is
            0. `old_logprobs` is ignored while `on_policy` is 1; `ref_logprobs` when the objective has no KL term.
        group: int32 [R, S], row-local index in [0, S) of the sequence's group; -1 where there is no sequence.
        on_policy: float32 scalar; 1 when the parameters are those that define `old_logprobs`: the objective then uses the
            current log-probs, detached, and every ratio is exactly 1.
        num_tokens, num_sequences, num_groups: float32 scalars, the denominators of the *whole update* (all micro-batches,
            rows without advantage that were left out included), so that splitting and packing change nothing.
    """

    tokens: Array
    positions: Array
    segment: Array
    parent: Array
    hidden_index: Array
    token: Array
    sequence: Array
    loss_mask: Array
    advantages: Array
    old_logprobs: Array
    ref_logprobs: Array
    rollout_logprobs: Array
    group: Array
    on_policy: Array
    num_tokens: Array
    num_sequences: Array
    num_groups: Array

    def with_values(self, **values: Array) -> TokenBatch:
        """A copy with some fields replaced."""
        return replace(self, **values)

    @property
    def shapes(self) -> tuple[int, int, int, int]:
        """(R, T, K, S)."""
        return (*self.tokens.shape, self.token.shape[1], self.group.shape[1])


ROW_FIELDS = tuple(
    f.name for f in fields(TokenBatch) if f.name not in ("on_policy", "num_tokens", "num_sequences", "num_groups")
)
"""The fields whose first axis is rows: what is sharded over data axes."""
