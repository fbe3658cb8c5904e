"""Importance ratios, as logarithms: token, sequence (GSPO) and sequence_token (GSPO-token).

Each function takes `logprobs, old_logprobs [R, K]` (nats, 0 where masked), `mask [R, K]`, the sequence `index [R, K]`
and the number of sequences a row, and returns the log ratio [R, K]. None of them clamps; `TokenView.ratio` does.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.algo.masking import sum_by, take_by


def token(logprobs: Array, old_logprobs: Array, mask: Array, index: Array, count: int) -> Array:
    """log w_t = log pi(y_t) - log pi_old(y_t): one ratio a token (PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300)."""
    return logprobs - old_logprobs


def sequence(logprobs: Array, old_logprobs: Array, mask: Array, index: Array, count: int) -> Array:
    """log s = (1/|y|) sum_t (log pi(y_t) - log pi_old(y_t)): one length-normalised ratio a sequence.

    Every token of the sequence gets it, with the full gradient through the mean (GSPO, arXiv:2507.18071).
    """
    total = sum_by((logprobs - old_logprobs) * mask, index, count)
    length = sum_by(mask, index, count)
    return take_by(total / jnp.maximum(length, 1.0), index)


def sequence_token(logprobs: Array, old_logprobs: Array, mask: Array, index: Array, count: int) -> Array:
    """log s_t = sg[log s] + log pi(y_t) - sg[log pi(y_t)]: the sequence's value, the token's own gradient.

    GSPO-token (arXiv:2507.18071): it allows advantages that differ between the tokens of a sequence. `sg` is
    stop_gradient.
    """
    level = sequence(logprobs, old_logprobs, mask, index, count)
    return lax.stop_gradient(level) + logprobs - lax.stop_gradient(logprobs)


RATIOS: dict[str, Callable[..., Array]] = {"token": token, "sequence": sequence, "sequence_token": sequence_token}
"""The ratio slot, by name."""
