"""Attention over packed rows: completions share their prompt, and no T x T array exists."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgrpo.models.layers import Array, Attend

_MASKED = -1e30  # finite, so that neither a row nor its gradient can become NaN


def packed_attention(segment: Array, parent: Array, positions: Array | None = None, block: int | None = None) -> Attend:
    """Attention within segments and to parent segments, for training and prefill.

    Token i sees token j <= i of the same row when both have the same segment or j's segment is i's parent. Padding
    (segment -1) is seen by padding only.

    Args:
        segment, parent: int32 [B, T]; -1 is padding, or no parent.
        positions: int32 [B, T], what a sliding window counts; needed by models that have one.
        block: queries that are scored at once, against the keys up to their end; by default `block_size(T)`.

    Returns:
        An `attend` function that leaves `cache` alone. Scores and softmax are float32; key heads are not repeated.
    """
    length = segment.shape[1]
    block = block or block_size(length)

    def attend(query: Array, key: Array, value: Array, cache: Any, layer: Any, window: Any) -> tuple[Array, Any]:
        if window is not None and positions is None:
            raise ValueError("a sliding window counts positions: give packed_attention the positions")
        batch, _, heads, size = query.shape
        kv_heads = key.shape[2]
        # Heads first, so that both products are plain batched matrix products.
        query = query.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)
        key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        outs = []
        for start in range(0, length, block):
            end = min(start + block, length)
            visible = _visible(segment, parent, positions, window, start, end)
            outs.append(_attend_block(query[:, :, :, start:end], key[:, :, :end], value[:, :, :end], visible))
        out = jnp.concatenate(outs, axis=3)
        return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size), cache

    return attend


def causal_attention(positions: Array) -> Attend:
    """Plain causal attention: each row of `positions` [B, T] is one sequence without padding."""
    segment = jnp.zeros_like(positions)
    return packed_attention(segment, segment - 1, positions)


def block_size(length: int) -> int:
    """Queries scored at once for rows of `length` tokens: at least 64 (fastest on a CPU), at most 16 blocks a row."""
    return max(64, -(-length // 16))


def _visible(segment: Array, parent: Array, positions: Array | None, window: Any, start: int, end: int) -> Array:
    """bool [B, 1, 1, end - start, end]: which keys before `end` each query of the block sees."""
    of_query, of_key = (slice(None), slice(start, end), None), (slice(None), None, slice(0, end))
    keys = segment[of_key]
    seen = (keys == segment[of_query]) | ((keys == parent[of_query]) & (keys >= 0))
    seen &= jnp.arange(end) <= jnp.arange(start, end)[:, None]
    if window is not None:
        seen &= positions[of_query] - positions[of_key] < window
    return seen[:, None, None]


# The backward pass makes the weights again, block by block: storing them would take T^2 / 2 numbers a head.
@jax.checkpoint
def _attend_block(query: Array, key: Array, value: Array, visible: Array) -> Array:
    """query [B, Hk, G, t, Dh], key and value [B, Hk, s, Dh], visible [B, 1, 1, t, s] -> [B, Hk, G, t, Dh]."""
    batch, kv_heads, group, rows, size = query.shape
    # Query heads of a group are further rows of the same matrix: one product a key head, and keys are never repeated.
    flat = query.reshape(batch, kv_heads, group * rows, size)
    scores = jnp.einsum("bkrd,bksd->bkrs", flat, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, group, rows, -1)
    weights = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1).astype(value.dtype)
    out = jnp.einsum("bkrs,bksd->bkrd", weights.reshape(batch, kv_heads, group * rows, -1), value)
    return out.reshape(query.shape)
