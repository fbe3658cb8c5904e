"""One decoder layer, as Flax Linen modules with logical axis names on every parameter.

Parameters are float32 and cast to the compute type where they are used; norms and rotations are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.rope import Rope, rope_frequencies

Array = jax.Array
Attend = Callable[[Array, Array, Array, Any, Any, Any], tuple[Array, Any]]
"""`attend(query, key, value, cache, layer, window) -> (out, cache)`.

query and out are [B, T, H, Dh], key and value [B, T, Hk, Dh].

The query is rotated and scaled, the key is rotated. `layer` is an int or a traced int32 (scanned layers); `window` is
None or how many last positions a token sees, itself included; `cache` is the caller's, handed through all layers.
"""


def rotation(rope: Rope, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines of the angles at `positions` [B, T]: two float32 arrays [B, T, 1, head_dim / 2]."""
    angles = positions.astype(jnp.float32)[..., None, None] * rope_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(heads: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Rotates each pair (x_m, x_{m + Dh/2}) of `heads` [B, T, H, Dh] by its angle, in float32; returns float32."""
    cos, sin = cos_sin
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def norm(config: ModelConfig, axis: str, dtype: Any, name: str) -> nn.RMSNorm:
    """The RMS norm x / sqrt(mean(x^2) + eps) * scale, over the last axis, in float32; the result has type `dtype`."""
    scale = nn.with_logical_partitioning(nn.initializers.ones, (axis,))
    return nn.RMSNorm(config.rms_norm_eps, dtype=dtype, param_dtype=jnp.float32, scale_init=scale, name=name)


def dense(config: ModelConfig, size: int, axes: tuple[str, str], dtype: Any, bias: bool, name: str) -> nn.Dense:
    """A projection with kernel [in, size], its axes named `axes`, and perhaps a bias [size]."""
    draw = nn.initializers.normal(config.initializer_range)
    return nn.Dense(
        size,
        use_bias=bias,
        dtype=dtype,
        param_dtype=jnp.float32,
        kernel_init=nn.with_logical_partitioning(draw, axes),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, axes[1:]),
        dot_general=_flat_product,
        name=name,
    )


def _flat_product(x: Array, kernel: Array, dimensions: Any, precision: Any = None, **options: Any) -> Array:
    """x [..., in] times kernel [in, out], as one product of matrices: for the kernel's gradient of a product with more
    axes XLA transposes both operands on a CPU, which halves its speed."""
    flat = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), precision, **options)
    return flat.reshape(*x.shape[:-1], kernel.shape[1])


class Attention(nn.Module):
    """Projects to heads, normalises (where the family does), rotates, and leaves the attending to `attend`."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Array, cos_sin: tuple[Array, Array], attend: Attend, cache: Any, layer: Any, window: Any
    ) -> tuple[Array, Any]:
        """x [B, T, D] -> (out [B, T, D], cache)."""
        config = self.config

        def project(name: str, heads: int, axis: str) -> Array:
            flat = dense(config, heads * config.head_dim, ("embed", axis), self.dtype, config.qkv_bias, name)(x)
            return flat.reshape(*x.shape[:-1], heads, config.head_dim)

        query = project("query", config.num_heads, "heads")
        key = project("key", config.num_kv_heads, "kv_heads")
        value = project("value", config.num_kv_heads, "kv_heads")
        if config.qk_norm:
            query = norm(config, "head_dim", jnp.float32, "query_norm")(query)
            key = norm(config, "head_dim", jnp.float32, "key_norm")(key)
        query = (rotate(query, cos_sin) * config.head_dim**-0.5).astype(self.dtype)
        key = rotate(key, cos_sin).astype(self.dtype)
        out, cache = attend(query, key, value, cache, layer, window)
        out = out.reshape(*x.shape[:-1], config.num_heads * config.head_dim)
        return dense(config, config.hidden_size, ("heads", "embed"), self.dtype, config.output_bias, "output")(
            out
        ), cache


class MLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [B, T, D] -> [B, T, D]."""
        config = self.config
        width, bias = config.intermediate_size, config.mlp_bias
        gate = dense(config, width, ("embed", "mlp"), self.dtype, bias, "gate")(x)
        up = dense(config, width, ("embed", "mlp"), self.dtype, bias, "up")(x)
        return dense(config, config.hidden_size, ("mlp", "embed"), self.dtype, bias, "down")(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Array, cos_sin: tuple[Array, Array], attend: Attend, cache: Any, layer: Any, window: Any
    ) -> tuple[Array, Any]:
        """x [B, T, D] -> (x [B, T, D], cache)."""
        normed = norm(self.config, "norm", self.dtype, "attention_norm")(x)
        out, cache = Attention(self.config, self.dtype, name="attention")(normed, cos_sin, attend, cache, layer, window)
        x = x + out
        normed = norm(self.config, "norm", self.dtype, "mlp_norm")(x)
        return x + MLP(self.config, self.dtype, name="mlp")(normed), cache


class Embedding(nn.Module):
    """Looks tokens up: int32 [B, T] -> [B, T, D]."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        """The rows of the table; a token outside the vocabulary gives NaN, so that it cannot go unnoticed."""
        return jnp.take(vocabulary_table(self, "embedding"), tokens, axis=0).astype(self.dtype)


class Unembedding(nn.Module):
    """Scores every token of the vocabulary: hidden [..., D] -> float32 logits [..., V]."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """The product with the table, accumulated in float32."""
        kernel = vocabulary_table(self, "kernel").astype(self.dtype)
        return jnp.einsum("...d,vd->...v", hidden, kernel, preferred_element_type=jnp.float32)


def vocabulary_table(module: Embedding | Unembedding, name: str) -> Array:
    """Declares the [V, D] parameter of `module`."""
    config = module.config
    draw = nn.with_logical_partitioning(nn.initializers.normal(config.initializer_range), ("vocab", "embed"))
    return module.param(name, draw, (config.vocab_size, config.hidden_size), jnp.float32)
