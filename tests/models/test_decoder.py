"""The decoder's two ways through its layers, its recomputation, its parameters and their axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.models.attention import causal_attention
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.decoder import Decoder, unstack

CONFIG = ModelConfig("qwen3", 61, 24, 40, 3, 4, 2, 8, 128, qk_norm=True, windows=(4, None, 6), initializer_range=0.3)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 19), dtype=np.int32)
POSITIONS = np.broadcast_to(np.arange(19, dtype=np.int32), TOKENS.shape)


def value_and_grad(decoder: Decoder, params: Any) -> tuple[jax.Array, Any]:
    def loss(params: Any) -> jax.Array:
        hidden, _ = decoder.apply(params, TOKENS, POSITIONS, causal_attention(POSITIONS))
        return jnp.mean(jnp.square(decoder.unembed(params, hidden)))

    return jax.jit(jax.value_and_grad(loss))(params)


def hidden_of(decoder: Decoder, params: Any, tokens: np.ndarray = TOKENS) -> jax.Array:
    return jax.jit(lambda params: decoder.apply(params, tokens, POSITIONS, causal_attention(POSITIONS))[0])(params)


@pytest.fixture(scope="module")
def params() -> Any:
    return jax.jit(Decoder(CONFIG).init)(jax.random.key(0))


@pytest.fixture(scope="module")
def plain(params: Any) -> tuple[jax.Array, Any]:
    return value_and_grad(Decoder(CONFIG, scan_layers=False), params)


@pytest.mark.parametrize("scan, remat", [(True, "none"), (True, "full"), (True, "dots"), (False, "full")])
def test_scan_and_remat_change_nothing(scan: bool, remat: str, params: Any, plain: tuple[jax.Array, Any]) -> None:
    found, grad = value_and_grad(Decoder(CONFIG, scan_layers=scan, remat=remat), params)
    np.testing.assert_allclose(found, plain[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grad, plain[1])


def test_remat_keeps_less(params: Any) -> None:
    def residuals(remat: str) -> int:
        decoder = Decoder(CONFIG, scan_layers=False, remat=remat)

        def loss(params: Any) -> jax.Array:
            return decoder.apply(params, TOKENS, POSITIONS, causal_attention(POSITIONS))[0].sum()

        backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    none, dots, full = (residuals(remat) for remat in ("none", "dots", "full"))
    assert none > dots > full


def test_unstacking_is_a_concatenation_backwards() -> None:
    stacked = {"a": jnp.ones((5, 3, 2))}

    def loss(stacked: Any) -> jax.Array:
        return sum(jnp.sum(layer["a"] ** 2) * index for index, layer in enumerate(unstack(stacked, 5)))

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(stacked))
    assert jaxpr.count("concatenate") == 1
    assert "f32[5,3,2] = add" not in jaxpr and "pad" not in jaxpr
    expected = 2 * np.arange(5)[:, None, None] * np.ones((5, 3, 2))
    np.testing.assert_array_equal(jax.grad(loss)(stacked)["a"], expected)


@pytest.mark.parametrize("scan", [True, False])
def test_cache_and_layer_index_go_through_all_layers(scan: bool, params: Any) -> None:
    decoder = Decoder(CONFIG, scan_layers=scan)
    causal = causal_attention(POSITIONS)

    def attend(query, key, value, cache, layer, window):
        assert query.shape == (2, 19, 4, 8) and key.shape == value.shape == (2, 19, 2, 8)
        cache = {"keys": cache["keys"].at[layer].set(key), "seen": cache["seen"].at[layer].add(1)}
        return causal(query, key, value, None, layer, window)[0], cache

    cache = {"keys": jnp.zeros((3, 2, 19, 2, 8)), "seen": jnp.zeros(3, jnp.int32)}
    hidden, cache = jax.jit(lambda cache: decoder.apply(params, TOKENS, POSITIONS, attend, cache))(cache)
    np.testing.assert_array_equal(cache["seen"], [1, 1, 1])
    assert all(np.abs(keys).max() > 0 for keys in cache["keys"])
    np.testing.assert_allclose(hidden, hidden_of(decoder, params), atol=2e-5)


def test_axes_name_every_dimension() -> None:
    config = replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True)
    decoder = Decoder(config)
    params = jax.jit(decoder.init)(jax.random.key(0))
    jax.tree.map(lambda leaf, names: np.testing.assert_equal(leaf.ndim, len(names)), params, decoder.axes)
    assert decoder.axes["layers"]["attention"]["query"]["kernel"] == ("layers", "embed", "heads")
    assert decoder.axes["layers"]["mlp"]["down"]["kernel"] == ("layers", "mlp", "embed")
    assert decoder.axes["embed"]["embedding"] == decoder.axes["head"]["kernel"] == ("vocab", "embed")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    assert abs(float(kernel.std()) - config.initializer_range) < 0.02
    assert not np.array_equal(kernel[0], kernel[1])


def test_tied_head_is_the_embedding() -> None:
    decoder = Decoder(replace(CONFIG, tied_head=True))
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    assert "head" not in params and decoder.head(params) is params["embed"]["embedding"]


def test_bfloat16_compute_keeps_float32_parameters_and_logits(params: Any) -> None:
    fast = Decoder(CONFIG, compute_dtype=jnp.bfloat16)
    hidden, expected = hidden_of(fast, params), hidden_of(Decoder(CONFIG), params)
    assert hidden.dtype == jnp.bfloat16
    assert 0 < np.abs(hidden.astype(jnp.float32) - expected).mean() < 0.05
    assert jax.eval_shape(fast.unembed, params, hidden).dtype == jnp.float32
    _, grad = jax.eval_shape(lambda params: value_and_grad(fast, params), params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grad))


def test_a_token_outside_the_vocabulary_is_noticed(params: Any) -> None:
    tokens = np.where(POSITIONS == 3, 61, TOKENS)
    assert np.isnan(hidden_of(Decoder(CONFIG), params, tokens)[:, 3:]).all()


def test_unknown_remat_is_refused() -> None:
    with pytest.raises(ValueError, match="some"):
        Decoder(CONFIG, remat="some")
