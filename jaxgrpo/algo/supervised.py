"""CHORD: a supervised loss on demonstrations beside the policy loss (arXiv:2508.11408)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.algo.masking import clean


def chord_mu(step: Array, *, warmup_steps: int, decay_steps: int, peak: float, valley: float) -> Array:
    """The share mu of the supervised loss: linear warm-up to `peak`, cosine decay to `valley`, then constant.

    mu = peak step / warmup for step < warmup; valley + (peak - valley)(1 + cos(pi (step - warmup) / decay)) / 2 for
    the next `decay_steps`; valley afterwards.
    """
    rising = peak * step / max(warmup_steps, 1)
    progress = jnp.clip((step - warmup_steps) / max(decay_steps, 1), 0.0, 1.0)
    falling = valley + 0.5 * (peak - valley) * (1.0 + jnp.cos(jnp.pi * progress))
    falling = jnp.where(step >= warmup_steps + decay_steps, valley, falling)
    return jnp.where(step < warmup_steps, rising, falling)


def supervised_loss(logprobs: Array, mask: Array, num_tokens: Array, *, phi: bool = False) -> Array:
    """-sum_t phi_t log pi(y_t) / num_tokens over demonstrated tokens; phi_t = sg(p (1 - p)), p = pi(y_t), or 1.

    phi fades tokens that the policy is sure of, either way. `logprobs` [R, K] are taken at temperature 1.
    """
    logprobs = clean(logprobs, mask)
    probability = lax.stop_gradient(jnp.exp(jnp.minimum(logprobs, 0.0)))
    weight = probability * (1.0 - probability) if phi else 1.0
    return -jnp.sum(clean(weight * logprobs, mask)) / jnp.maximum(num_tokens, 1.0)


def mix(policy_loss: Array, supervised: Array, mu: Array) -> Array:
    """(1 - mu) policy_loss + mu supervised; scalars."""
    return (1.0 - mu) * policy_loss + mu * supervised
