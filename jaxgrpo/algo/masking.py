"""Sums over the tokens, sequences and groups of packed rows, safe against anything that stands at masked positions.

Rows hold several sequences, so nothing here reduces over a row: a sequence or group is found by its row-local index.
The sums compare indices instead of scattering, which fuses into one pass, splits over rows under any mesh, and adds in
float32 on every backend.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxgrpo.metrics import Maximum, Mean, Minimum

LOG_LIMIT = 20.0
"""Bound on every exponent, nats: exp(20) = 4.9e8 leaves room for float32 sums and products."""


def clean(values: Array, mask: Array) -> Array:
    """`values` in float32 where `mask` is non-zero, 0 elsewhere; [R, K].

    Used before any arithmetic: NaN and infinities at masked positions reach neither the value nor the gradient, which a
    multiplication by the mask afterwards does not achieve (0 * inf is NaN in the backward pass).
    """
    return jnp.where(mask > 0, jnp.asarray(values, jnp.float32), 0.0)


def safe_exp(exponent: Array) -> Array:
    """exp(clip(x, -20, 20)); the gradient is 0 outside the bounds."""
    return jnp.exp(jnp.clip(exponent, -LOG_LIMIT, LOG_LIMIT))


def sum_by(values: Array, index: Array, count: int) -> Array:
    """Sums by row-local index: `out[r, j] = sum of values[r, k] over k with index[r, k] == j`.

    Args:
        values: [R, K].
        index: int [R, K] in [-1, count); -1 belongs nowhere.
        count: number of sums a row.

    Returns:
        [R, count].
    """
    member = index[:, :, None] == jnp.arange(count)
    return jnp.sum(jnp.where(member, values[:, :, None], 0.0), axis=1)


def take_by(values: Array, index: Array) -> Array:
    """The inverse look-up: `out[r, k] = values[r, index[r, k]]`, 0 where the index is -1.

    Args:
        values: [R, count].
        index: int [R, K].

    Returns:
        [R, K].
    """
    member = index[:, :, None] == jnp.arange(values.shape[1])
    return jnp.sum(jnp.where(member, values[:, None, :], 0.0), axis=2)


def token_mean(values: Array, mask: Array) -> Mean:
    """A metric: the mean of `values` [R, K] over the tokens where `mask` is 1."""
    return Mean(jnp.sum(clean(values, mask)), jnp.sum(mask))


def maximum(values: Array, mask: Array) -> Maximum:
    """A metric: the largest of `values` where `mask` is non-zero; -inf when it is zero everywhere."""
    return Maximum(jnp.max(jnp.where(mask > 0, values, -jnp.inf)))


def minimum(values: Array, mask: Array) -> Minimum:
    """A metric: the smallest of `values` where `mask` is non-zero; +inf when it is zero everywhere."""
    return Minimum(jnp.min(jnp.where(mask > 0, values, jnp.inf)))


def masked_quantile(values: Array, mask: Array, q: float) -> Array:
    """The q-quantile of `values` where `mask` is non-zero, interpolated linearly; a scalar, 0 for an empty mask."""
    ordered = jnp.sort(jnp.where(mask > 0, values, jnp.inf).ravel())
    count = jnp.sum(mask > 0)
    rank = q * jnp.maximum(count - 1, 0)
    below = jnp.floor(rank).astype(jnp.int32)
    above = jnp.ceil(rank).astype(jnp.int32)
    part = rank - below
    ends = jnp.where(count > 0, jnp.stack([ordered[below], ordered[above]]), 0.0)
    return ends[0] * (1 - part) + ends[1] * part
