"""The four compiled programs of the embedded sampler: prefill, copy, admit and decode; and the move between layouts.

Each takes the `State` and returns its successor in the same buffers (donated). Shapes are static and come from
`Capacity`; every new combination of shapes and features is one compilation, which `Programs.compilations` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.engines.jax_cache import (
    Capacity,
    KeyValue,
    Slots,
    State,
    append,
    decode_attention,
    each_layer,
    empty,
    fresh,
    placed,
    prefill_attention,
    write_prompts,
)
from jaxgrpo.engines.jax_sampling import Features, sample
from jaxgrpo.models.decoder import Decoder, Params, unstack

Array = jax.Array


class Programs:
    """The compiled functions of one decoder.

    Args:
        decoder: what computes; `decoder.scan_layers` decides how caches are laid out (see `jax_cache`).
        mesh: where the parameters are, if on more than one device; axes as in `jaxgrpo.sharding`.

    Attributes:
        compilations: programs compiled so far.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh | None = None):
        self.decoder, self.mesh = decoder, mesh
        self.compilations = 0
        # On a CPU a matrix product reads its operand from a buffer of its own: with an unrolled decoder a slice of
        # stacked weights would be copied for every token. So weights are taken apart once, when they are loaded.
        self._apart = not decoder.scan_layers and jax.default_backend() == "cpu"
        self._prepare = jax.jit(self._prepared)
        self.prefill = self._compiled(self._prefill, donate_argnums=1)
        self.copy = self._compiled(_copy, donate_argnums=0)
        self.admit = self._compiled(self._admit, donate_argnums=1, static_argnames="features")
        self.decode = self._compiled(self._decode, donate_argnums=1, static_argnames=("steps", "features"))
        self._move = self._compiled(_move, static_argnames=("axis", "size"))

    def prepare(self, params: Params) -> Params:
        """The learner's parameters as the programs want them.

        Those that need no change are the same arrays; matrices are cast once where the decoder computes in a narrower
        type, and taken apart by layer where that pays.
        """
        changed = self._apart or self.decoder.compute_dtype != jnp.float32
        if not changed:
            return params
        if self.decoder.compute_dtype != jnp.float32:
            return self._prepare(params)
        rest = {name: tree for name, tree in params.items() if name != "layers"}
        return {**rest, **self._prepare({"layers": params["layers"]})}

    def move(self, state: State, rows: np.ndarray, slots: np.ndarray, capacity: Capacity) -> State:
        """A state of other sizes: row p takes the prompt of old row `rows[p]`, slot (p, w) the sequence of old slot
        `slots[p, w]` (counted row by row); -1 leaves it idle."""
        width, source = state.slots.count.shape[1], np.maximum(slots, 0)
        of_row, of_slot = (np.maximum(rows, 0),), (source // width, source % width)
        heads = np.arange(self.decoder.config.num_kv_heads)
        own = (of_slot[0][:, None], heads[:, None], of_slot[1][:, None])  # [P, Hk, W]

        def stores(pair: KeyValue, index: tuple[Any, ...], time: int) -> KeyValue:
            key, value = (partial(self._move, index=index, axis=axis, size=time) for axis in (-1, -2))
            return KeyValue(each_layer(key, pair.key), each_layer(value, pair.value))

        # What is small moves on the host, where nothing needs to be compiled for it.
        moved = jax.tree.map(lambda array: np.asarray(array)[of_slot], state.slots)
        stops = moved.stop_ids[..., : capacity.stops]
        stops = np.pad(stops, ((0, 0), (0, 0), (0, capacity.stops - stops.shape[-1])), constant_values=-1)
        state = State(
            prefix=stores(state.prefix, of_row, capacity.prompt),
            own=stores(state.own, own, capacity.completion),
            prompt_length=np.asarray(state.prompt_length)[of_row],
            hidden=np.asarray(state.hidden)[of_row],
            slots=replace(moved, stop_ids=stops, remaining=np.where(slots < 0, 0, moved.remaining)),
            counts=None if state.counts is None else self._move(state.counts, index=of_slot),
            prompt_seen=None if state.prompt_seen is None else self._move(state.prompt_seen, index=of_row),
        )
        return placed(state, self.mesh)

    def empty(self, capacity: Capacity) -> State:
        """A state in which all slots are idle."""
        return placed(empty(self.decoder, capacity), self.mesh)

    def _compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`jax.jit`, counting the traces."""

        @partial(jax.jit, **options)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self.compilations += 1
            out = function(*args, **kwargs)
            if isinstance(out, State):
                return placed(out, self.mesh)
            return (placed(out[0], self.mesh), *out[1:]) if isinstance(out, tuple) else out

        return traced

    def _prepared(self, params: Params) -> Params:
        dtype = self.decoder.compute_dtype

        def cast(path: tuple[Any, ...], leaf: Array) -> Array:
            return leaf.astype(dtype) if path[-1].key in ("kernel", "embedding") else leaf

        params = jax.tree_util.tree_map_with_path(cast, params)
        if self._apart:
            params = {**params, "layers": unstack(params["layers"], self.decoder.config.num_layers)}
        return params

    def _whole(self, params: Params) -> Params:
        """Stacks layers that were taken apart: XLA sees slices of a concatenation and reads the pieces themselves."""
        if not self._apart:
            return params
        return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}

    def _prefill(self, params: Params, state: State, tokens: Array, length: Array, rows: Array) -> State:
        """Computes prompts [R, T], padded at their ends, of `length` [R], and puts them into `rows` [R]."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        cache = fresh(self.decoder, *tokens.shape)
        hidden, new = self.decoder.apply(self._whole(params), tokens, positions, prefill_attention(positions), cache)
        last = jnp.take_along_axis(hidden, jnp.maximum(length - 1, 0)[:, None, None], axis=1)[:, 0]
        return write_prompts(state, new, rows, length, last)

    def _admit(
        self, params: Params, state: State, taken: Array, slots: Slots, prompts: Array | None, *, features: Features
    ) -> tuple[State, Array, Array]:
        """Starts sequences in the slots `taken`, bool [P, W], and draws their first tokens.

        `slots` has their `remaining`, `stop_ids` and `settings`; `prompts` are the tokens [P, Tp] of the rows, -1
        elsewhere, where `features.penalties`. Returns the state, tokens and log-probs [P, W].
        """
        rows, width = taken.shape
        merged = jax.tree.map(
            lambda old, new: jnp.where(taken.reshape(*taken.shape, *[1] * (old.ndim - 2)), new, old), state.slots, slots
        )
        merged = replace(merged, count=jnp.where(taken, 0, merged.count))
        counts, seen = state.counts, state.prompt_seen
        if features.penalties:
            counts = jnp.where(taken[..., None], 0, counts)
            row_seen = (
                jnp.zeros_like(seen)
                .at[jnp.arange(rows)[:, None], prompts]
                .set(True, mode="drop", wrap_negative_indices=False)
            )
            seen = jnp.where(jnp.any(taken, axis=1)[:, None], row_seen, seen)
        state = replace(state, slots=merged, counts=counts, prompt_seen=seen)
        logits = self.decoder.unembed(self._whole(params), state.hidden)
        return _draw(state, jnp.repeat(logits, width, axis=0), taken, features)

    def _decode(
        self, params: Params, state: State, live: Array, *, steps: int, features: Features
    ) -> tuple[State, Array, Array]:
        """Draws up to `steps` more tokens in every slot that is `live` [P, W] and not at its end.

        Returns the state, tokens and log-probs [steps, P, W]; what lies behind a sequence's end is meaningless.
        """
        rows, width = live.shape
        state = replace(state, slots=replace(state.slots, remaining=jnp.where(live, state.slots.remaining, 0)))

        def step(state: State) -> tuple[State, Array, Array]:
            slots = state.slots
            positions = state.prompt_length[:, None] + slots.count - 1
            whole = self._whole(params)
            hidden, new = self.decoder.apply(
                whole,
                slots.token.reshape(rows * width, 1),
                jnp.maximum(positions, 0).reshape(rows * width, 1),
                decode_attention(state),
                fresh(self.decoder, rows * width, 1),
            )
            logits = self.decoder.unembed(whole, hidden[:, 0])
            drawn, token, logprob = _draw(state, logits, slots.remaining > 0, features)
            # The place depends on the drawn token (which is never negative) so that stored keys and values are written
            # after every layer has read them: in any other order XLA would have to copy them.
            at = jnp.where(token < 0, -1, slots.count - 1)
            return append(drawn, new, at), token, logprob

        if steps == 1:
            state, token, logprob = step(state)
            return state, token[None], logprob[None]

        def body(carry: tuple[Array, State, Array, Array]) -> tuple[Array, State, Array, Array]:
            index, state, tokens, logprobs = carry
            state, token, logprob = step(state)
            return index + 1, state, tokens.at[index].set(token), logprobs.at[index].set(logprob)

        def unfinished(carry: tuple[Array, State, Array, Array]) -> Array:
            return (carry[0] < steps) & jnp.any(carry[1].slots.remaining > 0)

        out = jnp.zeros((steps, rows, width), jnp.int32)
        carry = (jnp.int32(0), state, out, out.astype(jnp.float32))
        return jax.lax.while_loop(unfinished, body, carry)[1:]


@lru_cache
def programs(decoder: Decoder, mesh: Mesh | None = None) -> Programs:
    """The compiled functions of a decoder; engines with equal decoders share them."""
    return Programs(decoder, mesh)


def _draw(state: State, logits: Array, active: Array, features: Features) -> tuple[State, Array, Array]:
    """Draws a token from `logits` [P * W, V] in every slot and books it in those that are `active` [P, W]."""
    slots = state.slots
    rows, width = active.shape

    def flat(array: Array) -> Array:
        return array.reshape(rows * width, *array.shape[2:])

    counts, seen = state.counts, state.prompt_seen
    if features.penalties:
        seen = jnp.repeat(seen, width, axis=0)
    settings = jax.tree.map(flat, slots.settings)
    flat_counts = flat(counts) if features.penalties else None
    token, logprob = sample(logits, settings, flat(slots.count), features, flat_counts, seen)
    token, logprob = token.reshape(rows, width), logprob.reshape(rows, width)
    ended = jnp.any(token[..., None] == slots.stop_ids, axis=-1)
    booked = replace(
        slots,
        token=jnp.where(active, token, slots.token),
        count=slots.count + active,
        remaining=jnp.where(active, jnp.where(ended, 0, slots.remaining - 1), slots.remaining),
    )
    if features.penalties:
        row, slot = jnp.arange(rows)[:, None], jnp.arange(width)[None]
        counts = counts.at[row, slot, token].add(active.astype(jnp.int32))
    return replace(state, slots=booked, counts=counts), token, logprob


def _copy(state: State, source: Array, target: Array) -> State:
    """Copies the prompts of rows `source` [K] to rows `target` [K]; a target out of range is dropped."""

    def move(array: Array) -> Array:
        return array.at[target].set(array[source], mode="drop")

    prefix = KeyValue(*(each_layer(move, store) for store in state.prefix))
    return replace(state, prefix=prefix, prompt_length=move(state.prompt_length), hidden=move(state.hidden))


def _move(array: Array, *, index: tuple[Array, ...], axis: int = 0, size: int | None = None) -> Array:
    """Gathers along the leading axes, then cuts, or pads with zeros, one axis to `size`."""
    taken = array[index]
    if size is None:
        return taken
    taken = jax.lax.slice_in_dim(taken, 0, min(size, taken.shape[axis]), axis=axis)
    pad = [(0, 0)] * taken.ndim
    pad[axis] = (0, size - taken.shape[axis])
    return jnp.pad(taken, pad)


def capacity_of(state: State) -> Capacity:
    """The sizes of a state."""
    rows, width, stops = state.slots.stop_ids.shape
    prefix, own = (store[0] if isinstance(store, tuple) else store for store in (state.prefix.key, state.own.key))
    return Capacity(rows, width, prefix.shape[-1], own.shape[-1], stops)
