"""How token losses become one number: a sum over the micro-batch with denominators of the whole update.

Because the denominators (`num_tokens`, `num_sequences`, `num_groups`) are those of the update and not of the
micro-batch, the results of micro-batches add up, and splitting, packing, padding and sharding change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxgrpo.algo.view import TokenView
from jaxgrpo.types.batch import TokenBatch


def token_mean(values: Array, view: TokenView, batch: TokenBatch, max_tokens: int | None) -> Array:
    """sum_t v_t / num_tokens: every token weighs the same (DAPO, arXiv:2503.14476)."""
    return jnp.sum(values * view.mask) / _count(batch.num_tokens)


def sequence_mean(values: Array, view: TokenView, batch: TokenBatch, max_tokens: int | None) -> Array:
    """(1 / num_sequences) sum_b (1 / |b|) sum_t v_t: every sequence weighs the same (GRPO, arXiv:2402.03300)."""
    return jnp.sum(view.sequence_mean(values)) / _count(batch.num_sequences)


def sequence_sum(values: Array, view: TokenView, batch: TokenBatch, max_tokens: int | None) -> Array:
    """sum_t v_t / num_sequences: the policy gradient of whole sequences, which weighs long ones more."""
    return jnp.sum(values * view.mask) / _count(batch.num_sequences)


def constant(values: Array, view: TokenView, batch: TokenBatch, max_tokens: int | None) -> Array:
    """sum_t v_t / (num_sequences × max_completion_tokens): `sequence_sum` by the token (Dr. GRPO, arXiv:2503.20783)."""
    assert max_tokens is not None, "`constant` needs max_completion_tokens"
    return sequence_sum(values, view, batch, max_tokens) / max_tokens


def group_mean(values: Array, view: TokenView, batch: TokenBatch, max_tokens: int | None) -> Array:
    """(1 / num_groups) sum_g (1 / tokens of g) sum_t v_t: every prompt weighs the same. Needs whole groups in a row."""
    tokens = view.group_sum(view.token_count)
    means = view.group_sum(view.sequence_sum(values)) / jnp.maximum(tokens, 1.0)
    return jnp.sum(means) / _count(batch.num_groups)


AGGREGATIONS: dict[str, Callable[[Array, TokenView, TokenBatch, int | None], Array]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
    "group_mean": group_mean,
}
"""The aggregation slot, by name."""


def _count(count: Array) -> Array:
    return jnp.maximum(jnp.asarray(count, jnp.float32), 1.0)
