"""The decoder: a tree of parameters in, hidden states out. Attention, caches and masks are the caller's (`attend`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.layers import Array, Attend, DecoderLayer, Embedding, Unembedding, norm, rotation

Params = dict[str, Any]
_NO_WINDOW = 2**30  # what a layer without a window counts to, where other layers of a scan have one


@dataclass(frozen=True)
class Decoder:
    """Pure functions of a parameter tree; holds no array.

    Attributes:
        config: what is computed.
        compute_dtype: type of activations and matrix products; parameters are float32 whatever it is.
        scan_layers: run the layers in one compiled loop (fast to compile) or one after the other.
        remat: what the backward pass computes again: "none", "dots" (all but the results of projections) or "full"
            (all of a layer).

    Parameters are float32 and stacked over layers: `layers/attention/query/kernel` is [L, D, H * Dh].
    """

    config: ModelConfig
    compute_dtype: Any = jnp.float32
    scan_layers: bool = True
    remat: str = "none"

    def __post_init__(self) -> None:
        if self.remat not in ("none", "dots", "full"):
            raise ValueError(f"remat is none, dots or full, not {self.remat!r}")

    def init(self, rng: Array) -> Params:
        """Draws parameters: matrices from a normal distribution of `config.initializer_range`, scales 1, biases 0."""
        return jax.tree.map(lambda box: box.value, self._boxed(rng), is_leaf=_is_box)

    @cached_property
    def axes(self) -> Params:
        """The tree of `init` with each leaf's logical axis names; "layers" is the stacking axis."""
        boxed = jax.eval_shape(self._boxed, jax.random.key(0))
        axes = jax.tree.map(lambda box: box.names, boxed, is_leaf=_is_box)
        axes["layers"] = jax.tree.map(lambda names: ("layers", *names), axes["layers"], is_leaf=_is_names)
        return axes

    @property
    def axis_units(self) -> dict[str, int]:
        """How many indivisible units a logical axis has, where that is less than its size: heads are not cut."""
        return {"heads": self.config.num_heads, "kv_heads": self.config.num_kv_heads}

    def apply(
        self, params: Params, tokens: Array, positions: Array, attend: Attend, cache: Any = None
    ) -> tuple[Array, Any]:
        """Runs the layers on `tokens`, int32 [B, T], at `positions`, int32 [B, T].

        Returns:
            hidden [B, T, D] after the final norm, in `compute_dtype`, and the cache as `attend` left it.
        """
        cos_sin = rotation(self.config.rope, self.config.head_dim, positions)
        x = Embedding(self.config, self.compute_dtype).apply({"params": params["embed"]}, tokens)
        layer = self._layer_function(attend)
        if self.scan_layers:
            x, cache = self._scan(layer, params["layers"], x, cos_sin, cache)
        else:
            for index, weights in enumerate(unstack(params["layers"], self.config.num_layers)):
                x, cache = layer(weights, x, cos_sin, cache, index, self.config.windows[index])
        final_norm = norm(self.config, "norm", self.compute_dtype, None)
        return final_norm.apply({"params": params["final_norm"]}, x), cache

    def head(self, params: Params) -> Array:
        """The unembedding matrix [V, D]: the embedding itself where the two are tied."""
        return params["embed"]["embedding"] if self.config.tied_head else params["head"]["kernel"]

    def unembed(self, params: Params, hidden: Array) -> Array:
        """hidden [..., D] -> logits, float32 [..., V]."""
        return Unembedding(self.config, self.compute_dtype).apply({"params": {"kernel": self.head(params)}}, hidden)

    def _boxed(self, rng: Array) -> Params:
        """The parameters in the boxes in which Linen keeps axis names."""
        config, dtype = self.config, self.compute_dtype
        embed_key, head_key, layers_key = jax.random.split(rng, 3)
        tokens, hidden = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, config.hidden_size), dtype)
        cos_sin = rotation(config.rope, config.head_dim, tokens)

        def layer(key: Array) -> Params:
            values = DecoderLayer(config, dtype).init(key, hidden, cos_sin, _see_nothing, None, 0, None)
            return values["params"]

        params = {
            "embed": Embedding(config, dtype).init(embed_key, tokens)["params"],
            "layers": jax.vmap(layer)(jax.random.split(layers_key, config.num_layers)),
            "final_norm": norm(config, "norm", dtype, None).init(head_key, hidden)["params"],
        }
        if not config.tied_head:
            params["head"] = Unembedding(config, dtype).init(head_key, hidden)["params"]
        return params

    def _layer_function(self, attend: Attend) -> Callable[..., tuple[Array, Any]]:
        module = DecoderLayer(self.config, self.compute_dtype)

        def layer(weights: Params, x: Array, cos_sin: Any, cache: Any, index: Any, window: Any) -> tuple[Array, Any]:
            def run(weights: Params, x: Array, cos_sin: Any, cache: Any) -> tuple[Array, Any]:
                return module.apply({"params": weights}, x, cos_sin, attend, cache, index, window)

            if self.remat == "full":
                run = jax.checkpoint(run)
            elif self.remat == "dots":
                run = jax.checkpoint(run, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
            return run(weights, x, cos_sin, cache)

        return layer

    def _scan(
        self, layer: Callable[..., tuple[Array, Any]], stacked: Params, x: Array, cos_sin: Any, cache: Any
    ) -> tuple[Array, Any]:
        indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        windows = None
        if any(self.config.windows):
            windows = jnp.asarray([window or _NO_WINDOW for window in self.config.windows], jnp.int32)

        def body(carry: tuple[Array, Any], one: tuple[Params, Array, Any]) -> tuple[tuple[Array, Any], None]:
            weights, index, window = one
            return layer(weights, carry[0], cos_sin, carry[1], index, window), None

        return jax.lax.scan(body, (x, cache), (stacked, indices, windows))[0]


def unstack(stacked: Params, count: int) -> list[Params]:
    """Takes a tree stacked on axis 0 apart, layer by layer.

    By `lax.split`, whose transpose is one concatenation: indexing would make the gradient a sum of `count` arrays of
    the stacked size.
    """
    leaves, structure = jax.tree.flatten(stacked)
    split = [[jnp.squeeze(piece, 0) for piece in jax.lax.split(leaf, [1] * count)] for leaf in leaves]
    return [structure.unflatten(of_layer) for of_layer in zip(*split, strict=True)]


def _see_nothing(query: Array, key: Array, value: Array, cache: Any, layer: Any, window: Any) -> tuple[Array, Any]:
    return query, cache


def _is_box(node: Any) -> bool:
    return isinstance(node, nn.LogicallyPartitioned)


def _is_names(node: Any) -> bool:
    return isinstance(node, tuple)
