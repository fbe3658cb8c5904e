"""The blockwise log-probs equal the plain ones, value and gradient, and never hold tokens × vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.learner.logprobs import num_blocks, token_logprobs

N, D, V = 13, 8, 50


def plain(hidden: jax.Array, head: jax.Array, tokens: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    logp = jax.nn.log_softmax(hidden.astype(jnp.float32) @ head.T.astype(jnp.float32) / temperature)
    return jnp.take_along_axis(logp, tokens[:, None], 1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=1)


def inputs(dtype: Any = jnp.float32, n: int = N, v: int = V) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    hidden, head = jax.random.normal(keys[0], (n, D)), jax.random.normal(keys[1], (v, D))
    tokens = jax.random.randint(keys[2], (n,), 0, v).at[:3].set(jnp.array([0, v - 1, v // 2]))
    weights = jax.random.normal(keys[3], (2, n))
    return hidden.astype(dtype), head, tokens, weights


def value_and_gradient(function: Any, weights: jax.Array, hidden: jax.Array, head: jax.Array) -> Any:
    def scalar(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, Any]:
        logprobs, entropy = function(hidden, head)
        total = jnp.sum(logprobs * weights[0])
        return (total if entropy is None else total + jnp.sum(entropy * weights[1])), (logprobs, entropy)

    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(hidden, head)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("block", [1, 7, 16, 25, 50, 64])
def test_equal_to_plain(block: int, temperature: float) -> None:
    hidden, head, tokens, weights = inputs()

    def blockwise(hidden: jax.Array, head: jax.Array) -> Any:
        return token_logprobs(hidden, head, tokens, temperature, block=block, with_entropy=True)

    got = value_and_gradient(blockwise, weights, hidden, head)
    expected = value_and_gradient(lambda h, w: plain(h, w, tokens, temperature), weights, hidden, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


def test_without_entropy() -> None:
    hidden, head, tokens, weights = inputs()

    def expected(hidden: jax.Array, head: jax.Array) -> Any:
        return plain(hidden, head, tokens, 1.0)[0], None

    got = value_and_gradient(lambda h, w: token_logprobs(h, w, tokens, block=16), weights, hidden, head)
    assert got[0][1][1] is None
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
        got,
        value_and_gradient(expected, weights, hidden, head),
    )


def test_bfloat16_hidden_float32_head() -> None:
    hidden, head, tokens, weights = inputs(jnp.bfloat16)
    rounded = head.astype(jnp.bfloat16).astype(jnp.float32)

    def blockwise(hidden: jax.Array, head: jax.Array) -> Any:
        return token_logprobs(hidden, head, tokens, block=16, with_entropy=True)

    (value, _), grads = value_and_gradient(blockwise, weights, hidden, head)
    (expected, _), plain_grads = value_and_gradient(lambda h, w: plain(h, w, tokens, 1.0), weights, hidden, rounded)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    for got, exact in zip(grads, plain_grads, strict=True):
        np.testing.assert_allclose(
            got.astype(jnp.float32), exact.astype(jnp.float32), atol=0.03 * float(abs(exact).max())
        )


def test_extreme_logits_stay_finite() -> None:
    hidden, head, tokens, weights = inputs()
    got = value_and_gradient(
        lambda h, w: token_logprobs(h, w, tokens, block=16, with_entropy=True), weights, hidden * 1e4, head
    )
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize(
    ("vocabulary", "block", "count"), [(49152, 2048, 24), (151936, 2048, 128), (50257, 2048, 29), (53, 8, 7)]
)
def test_blocks_divide_where_a_divisor_is_near(vocabulary: int, block: int, count: int) -> None:
    assert num_blocks(vocabulary, block) == count


def test_compiled_memory_stays_below_tokens_times_vocabulary() -> None:
    n, v = 256, 16384
    hidden, head, tokens, weights = inputs(n=n, v=v)
    temporary = {}
    for name, function in {
        "block": lambda h, w: token_logprobs(h, w, tokens, block=512, with_entropy=True),
        "plain": lambda h, w: plain(h, w, tokens, 1.0),
    }.items():
        compiled = (
            jax.jit(lambda h, w, f=function: value_and_gradient(f, weights, h, w)[1]).lower(hidden, head).compile()
        )
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes
    logits = n * v * 4
    assert temporary["plain"] >= logits
    assert temporary["block"] < logits / 4
