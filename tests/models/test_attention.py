"""Packed attention: the same as a full mask, as separate sequences, and harmless where there is padding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgrpo.models.attention import block_size, causal_attention, packed_attention

HEADS, KV_HEADS, SIZE = 6, 2, 8


def draw(rows: int, length: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    heads_of = zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    return tuple(jax.random.normal(key, (rows, length, heads, SIZE)) for key, heads in heads_of)


def reference(query, key, value, visible):
    """Attention with a full mask [B, T, T] in float64, key heads repeated."""
    key, value = (np.repeat(np.asarray(x, np.float64), HEADS // KV_HEADS, axis=2) for x in (key, value))
    scores = np.einsum("bthd,bshd->bhts", np.asarray(query, np.float64), key)
    scores = np.where(visible[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)


def visible_pairs(segment: np.ndarray, parent: np.ndarray, positions: np.ndarray, window: int | None) -> np.ndarray:
    """The definition, pair by pair."""
    rows, length = segment.shape
    seen = np.zeros((rows, length, length), bool)
    for b in range(rows):
        for i in range(length):
            for j in range(i + 1):
                own = segment[b, j] == segment[b, i]
                parents = segment[b, j] >= 0 and segment[b, j] == parent[b, i]
                near = window is None or positions[b, i] - positions[b, j] < window
                seen[b, i, j] = (own or parents) and near
    return seen


@partial(jax.jit, static_argnames=("block", "windowed"))
def attend(query, key, value, segment, parent, positions, window, *, block, windowed):
    of_block = packed_attention(segment, parent, positions, block=block)
    return of_block(query, key, value, None, 0, window if windowed else None)[0]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    parents=st.lists(st.integers(-1, 4), min_size=6, max_size=6),
    padding=st.integers(0, 2),
    window=st.sampled_from([None, 1, 4]),
    block=st.sampled_from([7, 64]),
)
def test_equals_a_full_mask(lengths, parents, padding, window, block) -> None:
    parents = [parent if parent < index else -1 for index, parent in enumerate(parents)]
    segment, parent, positions = (np.full((1, 50), fill, np.int32) for fill in (-1, -1, 0))
    at = padding  # in front: a segment without a parent must not take it for one
    for index, length in enumerate(lengths):
        start = lengths[parents[index]] if parents[index] >= 0 else 0
        segment[0, at : at + length], parent[0, at : at + length] = index, parents[index]
        positions[0, at : at + length] = range(start, start + length)
        at += length
    query, key, value = draw(1, 50)
    out = attend(query, key, value, segment, parent, positions, window or 0, block=block, windowed=window is not None)
    expected = reference(query, key, value, visible_pairs(segment, parent, positions, window))
    real = segment >= 0
    np.testing.assert_allclose(np.asarray(out)[real], expected[real], atol=2e-6)
    assert np.isfinite(out).all()


def test_shared_prompt_equals_separate_sequences_in_values_and_gradients() -> None:
    prompt, completions = 37, (20, 45, 1)
    segment = np.repeat([0, 1, 2, 3, -1], [prompt, *completions, 6])[None]
    parent = np.where(segment > 0, 0, -1)
    query, key, value = draw(1, segment.shape[1])
    weight = jax.random.normal(jax.random.key(9), query.shape) * (segment > 0)[..., None, None]

    def packed(query, key, value):
        return jnp.sum(packed_attention(segment, parent)(query, key, value, None, 0, None)[0] * weight)

    def separate(query, key, value):
        total = 0.0
        for index in (1, 2, 3):
            of = np.flatnonzero((segment[0] == 0) | (segment[0] == index))
            positions = np.arange(len(of))[None]
            out, _ = causal_attention(positions)(query[:, of], key[:, of], value[:, of], None, 0, None)
            total += jnp.sum(out * weight[:, of])
        return total

    arguments = (0, 1, 2)
    (a, grads_a), (b, grads_b) = (
        jax.jit(jax.value_and_grad(f, arguments))(query, key, value) for f in (packed, separate)
    )
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for grad_a, grad_b in zip(grads_a, grads_b, strict=True):
        np.testing.assert_allclose(grad_a, grad_b, atol=1e-5)
        assert np.isfinite(grad_a).all()


def test_gradient_is_that_of_the_formula() -> None:
    """Finite differences in float64 of the full-mask reference."""
    segment = np.asarray([[0, 0, 0, 1, 1, 2, 2, -1]])
    parent = np.asarray([[-1, -1, -1, 0, 0, 0, 0, -1]])
    inputs = draw(1, 8, seed=3)
    visible = visible_pairs(segment, parent, np.zeros_like(segment), None)
    weight = np.asarray(jax.random.normal(jax.random.key(1), inputs[0].shape))
    of_blocks = packed_attention(segment, parent, block=4)
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(of_blocks(*x, None, 0, None)[0] * weight), (0, 1, 2)))
    grads = gradient(*inputs)
    rng = np.random.default_rng(0)
    for which in range(3):
        step = rng.standard_normal(inputs[which].shape)
        ends = []
        for sign in (1e-4, -1e-4):
            moved = [np.asarray(x, np.float64) for x in inputs]
            moved[which] = moved[which] + sign * step
            ends.append((reference(*moved, visible) * weight).sum())
        np.testing.assert_allclose((grads[which] * step).sum(), (ends[0] - ends[1]) / 2e-4, rtol=1e-4)


def test_no_array_of_size_length_squared() -> None:
    length = 2048
    positions = np.arange(length)[None]
    query, key, value = (
        jax.ShapeDtypeStruct((1, length, heads, SIZE), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def loss(*x):
        return causal_attention(positions)(*x, None, 0, None)[0].sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, value).as_text()
    assert f"{block_size(length)}x{length}xf32" in text
    assert f"{length}x{length}x" not in text


def test_a_window_needs_positions() -> None:
    segment = np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match="positions"):
        packed_attention(segment, segment - 1)(*draw(1, 4), None, 0, 3)
