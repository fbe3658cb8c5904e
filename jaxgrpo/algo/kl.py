"""Estimators of the KL divergence from the policy to the reference, per token.

John Schulman, "Approximating KL divergence" (2020): with x drawn from the policy p and r = q(x) / p(x), q the
reference, k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 - log r all estimate KL(p || q); k1 and k3 without bias.
As a *loss* only the gradient counts: that of k1 is the score function, zero in expectation whatever the reference;
that of k2 is the exact gradient of KL in expectation; that of k3 is the gradient of the reverse direction, KL(q || p).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxgrpo.algo.masking import LOG_LIMIT, clean

VALUE_LIMIT = 10.0
"""Bound on one token's k2 or k3, nats: one token that ran away must not decide the update."""


def k1(logprobs: Array, ref_logprobs: Array) -> Array:
    """k1 = log pi - log pi_ref; any sign; shape of the inputs."""
    return jnp.clip(logprobs - ref_logprobs, -LOG_LIMIT, LOG_LIMIT)


def k2(logprobs: Array, ref_logprobs: Array) -> Array:
    """k2 = (log pi - log pi_ref)^2 / 2, at most 10; shape of the inputs."""
    return jnp.minimum(0.5 * jnp.square(k1(logprobs, ref_logprobs)), VALUE_LIMIT)


def k3(logprobs: Array, ref_logprobs: Array) -> Array:
    """k3 = exp(d) - d - 1 with d = log pi_ref - log pi clamped to ±20, at most 10; shape of the inputs."""
    d = jnp.clip(ref_logprobs - logprobs, -LOG_LIMIT, LOG_LIMIT)
    return jnp.minimum(jnp.exp(d) - d - 1.0, VALUE_LIMIT)


ESTIMATORS: dict[str, Callable[[Array, Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators, by name."""


def sequence_penalty(old_logprobs: Array, ref_logprobs: Array, mask: Array, *, estimator: str = "k1") -> Array:
    """KL in the reward: sum_t k(old_t, ref_t) over each trajectory's trained tokens, to be subtracted from its reward.

    Args:
        old_logprobs, ref_logprobs, mask: [N, T], one trajectory a row.
        estimator: a name in `ESTIMATORS`.

    Returns:
        [N], nats.
    """
    values = ESTIMATORS[estimator](clean(old_logprobs, mask), clean(ref_logprobs, mask))
    return jnp.sum(clean(values, mask), axis=-1)
