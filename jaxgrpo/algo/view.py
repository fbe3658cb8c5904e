"""What a policy loss or a token weight sees of a batch: cleaned float32 arrays, and sums by sequence and group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.algo.masking import clean, safe_exp, sum_by, take_by
from jaxgrpo.types.batch import TokenBatch

Need = Literal["entropy", "rollout_logprobs", "whole_groups"]
F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class TokenView:
    """The targets of a micro-batch: R rows of K targets, S sequences a row.

    Every [R, K] array is float32 and 0 where `mask` is 0, so a formula may use it without looking at the mask; what a
    formula returns at masked positions is ignored.

    Attributes:
        logprobs: the policy's log-probability of each target, nats; the only array with a gradient, besides `entropy`.
        old_logprobs: those of the policy that defines the ratio, constant.
        ref_logprobs, rollout_logprobs: the reference's and the sampler's; meaningful only if the objective asks for
            them.
        log_ratio: the log of the importance ratio at the objective's level (`ratios.py`), not yet clamped.
        advantages: per token.
        entropy: the policy's entropy at each target, nats, or None.
        mask: 1 where the target is trained on, else 0.
        position: int, the position in its sequence of the token that predicts the target, for distances within a
            sequence.
        sequence: int, row-local sequence index; -1 at padding.
        group: int [R, S], row-local group index of each sequence; -1 where there is none.
    """

    logprobs: Array
    old_logprobs: Array
    ref_logprobs: Array
    rollout_logprobs: Array
    log_ratio: Array
    advantages: Array
    entropy: Array | None
    mask: Array
    position: Array
    sequence: Array
    group: Array

    @property
    def ratio(self) -> Array:
        """exp(log_ratio), the exponent clamped to ±20; [R, K]."""
        return safe_exp(self.log_ratio)

    @property
    def token_count(self) -> Array:
        """Trained tokens of each sequence; [R, S]."""
        return self.sequence_sum(self.mask)

    @property
    def present(self) -> Array:
        """1 where a sequence has at least one trained token, else 0; [R, S]."""
        return (self.token_count > 0).astype(jnp.float32)

    def sequence_sum(self, values: Array) -> Array:
        """Sums [R, K] over each sequence's trained tokens; [R, S]."""
        return sum_by(values * self.mask, self.sequence, self.group.shape[1])

    def sequence_mean(self, values: Array) -> Array:
        """Averages [R, K] over each sequence's trained tokens, 0 for a sequence without any; [R, S]."""
        return self.sequence_sum(values) / jnp.maximum(self.token_count, 1.0)

    def group_sum(self, values: Array) -> Array:
        """Sums [R, S] over the sequences of each group that stand in the row; [R, S], indexed by group."""
        return sum_by(values, self.group, self.group.shape[1])

    def sequence_to_tokens(self, values: Array) -> Array:
        """Gives each target its sequence's value: [R, S] to [R, K]; 0 at padding."""
        return take_by(values, self.sequence)

    def group_to_tokens(self, values: Array) -> Array:
        """Gives each target its group's value: [R, S] (indexed by group) to [R, K]; 0 at padding."""
        return self.sequence_to_tokens(take_by(values, self.group))


def make_view(logprobs: Array, entropy: Array | None, batch: TokenBatch, log_ratio: Callable[..., Array]) -> TokenView:
    """Cleans a batch's arrays and computes the log ratio with a function of `ratios.py`.

    While `batch.on_policy` is 1 the old log-probs are the current ones, detached: every ratio is exactly 1.
    """
    mask = ((batch.loss_mask > 0) & (batch.sequence >= 0)).astype(jnp.float32)
    logprobs = clean(logprobs, mask)
    current = lax.stop_gradient(logprobs)
    old = jnp.where(batch.on_policy > 0, current, clean(lax.stop_gradient(batch.old_logprobs), mask))
    return TokenView(
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=clean(batch.ref_logprobs, mask),
        rollout_logprobs=clean(batch.rollout_logprobs, mask),
        log_ratio=log_ratio(logprobs, old, mask, batch.sequence, batch.group.shape[1]),
        advantages=clean(batch.advantages, mask),
        entropy=None if entropy is None else clean(entropy, mask),
        mask=mask,
        position=jnp.take_along_axis(jnp.asarray(batch.positions), jnp.asarray(batch.hidden_index), axis=1),
        sequence=jnp.asarray(batch.sequence),
        group=jnp.asarray(batch.group),
    )


def traits(*, needs: tuple[Need, ...] = (), policy_only: bool = False) -> Callable[[F], F]:
    """Declares, on a registered policy loss or token weight, what it needs beyond log-probs and advantages.

    Args:
        needs: `entropy` and `rollout_logprobs` must then be in the batch; `whole_groups`: every group in one row.
        policy_only: a token weight that leaves the KL and entropy terms alone.
    """

    def mark(function: F) -> F:
        function.needs = frozenset(needs)  # read back by `needs_of`; a plain attribute keeps the function's signature
        function.policy_only = policy_only
        return function

    return mark


def needs_of(function: Callable[..., object]) -> frozenset[str]:
    """What `traits` declared; empty for a function without traits."""
    return getattr(function, "needs", frozenset())
