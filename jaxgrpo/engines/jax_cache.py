"""What the embedded sampler keeps on the device between two tokens, and attention over it.

P rows of W slots: a row holds one prompt, whose keys and values are stored once and read once a step for all its slots;
each slot holds one completion. Keys are stored with time last, [P, Hk, Dh, T] and [P, Hk, W, Dh, T], values with time
before Dh: both products of attention then run over contiguous memory without a transposed copy.

A *layer store* holds one array a layer: a tuple of L arrays where the decoder is unrolled (a slice of a stacked array
would be copied for every token), one array with leading axis L where it is scanned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgrpo.engines.jax_sampling import Settings
from jaxgrpo.models.attention import causal_attention
from jaxgrpo.models.decoder import Decoder

Array = jax.Array
Store = Any  # a layer store
_MASKED = -1e30


class KeyValue(NamedTuple):
    """Two layer stores."""

    key: Store
    value: Store


class Capacity(NamedTuple):
    """Static sizes of a `State`: P rows, W slots a row, tokens a prompt, tokens a completion, end tokens a request."""

    rows: int
    width: int
    prompt: int
    completion: int
    stops: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """One entry a slot, [P, W].

    Attributes:
        token: int32, the token drawn last.
        count: int32, tokens drawn so far.
        remaining: int32, tokens it may still draw; 0 is an idle slot.
        stop_ids: int32 [P, W, E], end tokens, filled up with -1.
        settings: how it draws.
    """

    token: Array
    count: Array
    remaining: Array
    stop_ids: Array
    settings: Settings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything on the device; donated from call to call.

    Attributes:
        prefix: keys [P, Hk, Dh, Tp] and values [P, Hk, Tp, Dh] of the prompts, a layer each.
        own: keys [P, Hk, W, Dh, Tc] and values [P, Hk, W, Tc, Dh] of the completions, a layer each.
        prompt_length: int32 [P].
        hidden: [P, D], the final hidden state of the prompt's last token: what draws first tokens.
        slots: the sequences.
        counts: int32 [P, W, V], occurrences of tokens in the completion; None while no sequence has penalties.
        prompt_seen: bool [P, V]; likewise.
    """

    prefix: KeyValue
    own: KeyValue
    prompt_length: Array
    hidden: Array
    slots: Slots
    counts: Array | None = None
    prompt_seen: Array | None = None


def empty(decoder: Decoder, capacity: Capacity) -> State:
    """A state in which all slots are idle."""
    config, dtype = decoder.config, decoder.compute_dtype
    rows, width, prompt, completion, stops = capacity
    heads, size = config.num_kv_heads, config.head_dim

    def store(*shape: int) -> Store:
        if decoder.scan_layers:
            return jnp.zeros((config.num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    def zeros() -> Array:
        return jnp.zeros((rows, width), jnp.int32)

    settings = Settings(*(jnp.asarray(field) for field in Settings.neutral(rows, width)))
    return State(
        prefix=KeyValue(store(rows, heads, size, prompt), store(rows, heads, prompt, size)),
        own=KeyValue(store(rows, heads, width, size, completion), store(rows, heads, width, completion, size)),
        prompt_length=jnp.zeros(rows, jnp.int32),
        hidden=jnp.zeros((rows, config.hidden_size), dtype),
        slots=Slots(zeros(), zeros(), zeros(), jnp.full((rows, width, stops), -1, jnp.int32), settings),
    )


def placed(state: State, mesh: Mesh | None) -> State:
    """Lays a state out on a mesh: rows over data x fsdp, key heads over tensor, whole where these do not divide them."""
    if mesh is None or mesh.size == 1:
        return state
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    by_rows = ("data", "fsdp") if state.prompt_length.shape[0] % ways == 0 else None

    def rows(array: Array) -> Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(by_rows)))

    def store(array: Array, rank: int) -> Array:
        layers = [None] * (array.ndim - rank)
        heads = "tensor" if array.shape[len(layers) + 1] % mesh.shape["tensor"] == 0 else None
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*layers, by_rows, heads)))

    rest = jax.tree.map(rows, replace(state, prefix=None, own=None))
    prefix, own = (jax.tree.map(partial(store, rank=rank), pair) for pair, rank in ((state.prefix, 4), (state.own, 5)))
    return replace(rest, prefix=prefix, own=own)


def each_layer(function: Callable[..., Array], *stores: Store) -> Store:
    """Applies a function of one layer's arrays to every layer."""
    if isinstance(stores[0], tuple):
        return tuple(function(*arrays) for arrays in zip(*stores, strict=True))
    return jax.vmap(function)(*stores)


def fresh(decoder: Decoder, batch: int, length: int) -> KeyValue:
    """Where `attend` functions leave the keys and values [B, T, Hk, Dh] that the decoder computed, layer by layer."""
    config = decoder.config
    if not decoder.scan_layers:
        return KeyValue((None,) * config.num_layers, (None,) * config.num_layers)
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    return KeyValue(jnp.zeros(shape, decoder.compute_dtype), jnp.zeros(shape, decoder.compute_dtype))


def prefill_attention(positions: Array) -> Callable[..., tuple[Array, KeyValue]]:
    """`attend` for prompts [R, T], padded at their ends: causal, and it leaves keys and values in its cache."""
    causal = causal_attention(positions)

    def attend(
        query: Array, key: Array, value: Array, cache: KeyValue, layer: Any, window: Any
    ) -> tuple[Array, KeyValue]:
        out, _ = causal(query, key, value, None, layer, window)
        return out, _record(cache, layer, key, value)

    return attend


def decode_attention(state: State) -> Callable[..., tuple[Array, KeyValue]]:
    """`attend` for one new token of every slot (B = P * W, T = 1), over prompt, completion and the token itself.

    softmax over the three parts together; scores and sums in float32. The state is only read: the new keys and values
    are left in the cache and written by `append`, all layers at once.
    """
    prompt_length, done = state.prompt_length, state.slots.count - 1  # completion tokens that are stored
    rows, width = done.shape

    def attend(
        query: Array, key: Array, value: Array, cache: KeyValue, layer: Any, window: Any
    ) -> tuple[Array, KeyValue]:
        heads, size = query.shape[2:]
        kv_heads = key.shape[2]
        query = query.reshape(rows, width, kv_heads, heads // kv_heads, size).transpose(
            0, 2, 1, 3, 4
        )  # [P, Hk, W, G, Dh]
        new_key, new_value = (
            x.reshape(rows, width, kv_heads, size).transpose(0, 2, 1, 3)[:, :, :, None] for x in (key, value)
        )
        prefix_key, prefix_value, own_key, own_value = (_layer(store, layer) for store in (*state.prefix, *state.own))
        prefix_seen, own_seen = _visible(prefix_key.shape[-1], own_key.shape[-1], prompt_length, done, window)
        scores = {"preferred_element_type": jnp.float32}
        prefix = jnp.where(prefix_seen, jnp.einsum("pkwgd,pkdt->pkwgt", query, prefix_key, **scores), _MASKED)
        own = jnp.where(own_seen, jnp.einsum("pkwgd,pkwdt->pkwgt", query, own_key, **scores), _MASKED)
        itself = jnp.sum(query.astype(jnp.float32) * new_key, axis=-1, keepdims=True)
        top = jnp.maximum(itself, jnp.maximum(prefix.max(-1, keepdims=True), own.max(-1, keepdims=True)))
        prefix, own, itself = jnp.exp(prefix - top), jnp.exp(own - top), jnp.exp(itself - top)
        total = prefix.sum(-1, keepdims=True) + own.sum(-1, keepdims=True) + itself
        dtype = value.dtype
        out = jnp.einsum("pkwgt,pktd->pkwgd", prefix.astype(dtype), prefix_value, **scores)
        out += jnp.einsum("pkwgt,pkwtd->pkwgd", own.astype(dtype), own_value, **scores)
        out = ((out + itself * new_value) / total).astype(dtype)
        return out.transpose(0, 2, 1, 3, 4).reshape(rows * width, 1, heads, size), _record(cache, layer, key, value)

    return attend


def append(state: State, new: KeyValue, at: Array) -> State:
    """Writes keys and values [P * W, 1, Hk, Dh] of fed tokens to the places `at` [P, W] of their completions."""
    rows, width = at.shape
    row, slot = jnp.arange(rows)[:, None], jnp.arange(width)[None]
    # An idle slot's count stands still; what is written there is never read. A place past the end is dropped.
    at = jnp.maximum(at, 0)

    def put_key(stored: Array, key: Array) -> Array:
        key = key.reshape(rows, width, *key.shape[2:]).astype(stored.dtype)
        return stored.at[row, :, slot, :, at].set(key, mode="drop", unique_indices=True)

    def put_value(stored: Array, value: Array) -> Array:
        value = value.reshape(rows, width, *value.shape[2:]).astype(stored.dtype)
        return stored.at[row, :, slot, at].set(value, mode="drop", unique_indices=True)

    own = KeyValue(each_layer(put_key, state.own.key, new.key), each_layer(put_value, state.own.value, new.value))
    return replace(state, own=own)


def write_prompts(state: State, new: KeyValue, rows: Array, length: Array, hidden: Array) -> State:
    """Puts prompts [R, T] into rows [R] of the state; a row index out of range is dropped."""

    def put_key(stored: Array, key: Array) -> Array:
        return stored.at[rows, :, :, : key.shape[1]].set(key.transpose(0, 2, 3, 1).astype(stored.dtype), mode="drop")

    def put_value(stored: Array, value: Array) -> Array:
        return stored.at[rows, :, : value.shape[1]].set(value.transpose(0, 2, 1, 3).astype(stored.dtype), mode="drop")

    return replace(
        state,
        prefix=KeyValue(
            each_layer(put_key, state.prefix.key, new.key), each_layer(put_value, state.prefix.value, new.value)
        ),
        prompt_length=state.prompt_length.at[rows].set(length, mode="drop"),
        hidden=state.hidden.at[rows].set(hidden.astype(state.hidden.dtype), mode="drop"),
    )


def _record(cache: KeyValue, layer: Any, key: Array, value: Array) -> KeyValue:
    def put(store: Store, new: Array) -> Store:
        if isinstance(store, tuple):
            return (*store[:layer], new, *store[layer + 1 :])
        return jax.lax.dynamic_update_index_in_dim(store, new, layer, 0)

    return KeyValue(put(cache.key, key), put(cache.value, value))


def _layer(store: Store, layer: Any) -> Array:
    return store[layer] if isinstance(store, tuple) else jax.lax.dynamic_index_in_dim(store, layer, 0, keepdims=False)


def _visible(prompt: int, completion: int, prompt_length: Array, done: Array, window: Any) -> tuple[Array, Array]:
    """Which stored tokens the new one sees: bool, broadcastable to [P, Hk, W, G, Tp] and [P, Hk, W, G, Tc]."""
    in_prompt, in_completion = jnp.arange(prompt), jnp.arange(completion)
    prefix_seen = (in_prompt < prompt_length[:, None])[:, None, :]
    own_seen = in_completion < done[..., None]
    if window is not None:
        prefix_seen = prefix_seen & (prompt_length[:, None, None] + done[..., None] - in_prompt < window)
        own_seen = own_seen & (done[..., None] - in_completion < window)
    return prefix_seen[:, None, :, None, :], own_seen[:, None, :, None, :]
