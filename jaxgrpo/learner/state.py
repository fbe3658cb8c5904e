"""The learner's state: parameters, optimizer state, counters, reference parameters; born sharded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxgrpo.learner.optimizer import Optimizer, Tree
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.sharding import param_shardings, replicated


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree; what a checkpoint holds of the learner.

    Attributes:
        params: float32 master weights.
        opt_state: of the trainable parameters.
        updates: int32 scalar, updates applied; what learning-rate schedules count.
        skipped: int32 scalar, updates left out because the loss or a gradient was not finite.
        skipped_in_a_row: int32 scalar, of these the ones since the last applied update.
        reference: the reference policy's parameters; None when the objective has no KL term.
    """

    params: Tree
    opt_state: Tree
    updates: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    reference: Tree | None = None

    def with_values(self, **values: Any) -> TrainState:
        """A copy with some fields replaced."""
        return replace(self, **values)


def init_params(decoder: Decoder, rng: jax.Array, mesh: Mesh) -> Tree:
    """Random parameters, each shard made where it lives."""
    return jax.jit(decoder.init, out_shardings=decoder_shardings(decoder, mesh))(rng)


def create(params: Tree, optimizer: Optimizer, *, with_reference: bool = False) -> TrainState:
    """The state at the beginning of a run.

    Args:
        params: float32 and sharded; the state takes them over (its first update donates them).
        with_reference: keep a copy of them as the reference policy.
    """
    param_places = jax.tree.map(lambda leaf: leaf.sharding, params)
    mesh = jax.tree.leaves(param_places)[0].mesh
    shapes = jax.eval_shape(lambda params: _initial(params, optimizer, with_reference), params)
    places = state_shardings(shapes, param_places, mesh)
    return jax.jit(lambda params: _initial(params, optimizer, with_reference), out_shardings=places)(params)


def abstract_state(decoder: Decoder, optimizer: Optimizer, mesh: Mesh, *, with_reference: bool = False) -> TrainState:
    """The state's shapes, types and shardings (`jax.ShapeDtypeStruct` leaves): what a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda rng: _initial(decoder.init(rng), optimizer, with_reference), jax.random.key(0))
    places = state_shardings(shapes, decoder_shardings(decoder, mesh), mesh)
    return jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place), shapes, places
    )


def decoder_shardings(decoder: Decoder, mesh: Mesh) -> Tree:
    """The parameters' shardings."""
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    return param_shardings(decoder.axes, shapes, mesh, decoder.axis_units)


def state_shardings(shapes: TrainState, param_places: Tree, mesh: Mesh) -> TrainState:
    """A state whose leaves are shardings.

    Whatever the optimizer keeps in the likeness of a parameter (its path ends like the parameter's, its shape is the same)
    lives where the parameter lives; everything else is small and replicated.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes.params)
    of_param = {
        path: (leaf.shape, place) for (path, leaf), place in zip(leaves, jax.tree.leaves(param_places), strict=True)
    }

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        likeness = next((of_param[path[start:]] for start in range(len(path)) if path[start:] in of_param), None)
        return likeness[1] if likeness and likeness[0] == leaf.shape else replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, shapes)


def _initial(params: Tree, optimizer: Optimizer, with_reference: bool) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    reference = jax.tree.map(jnp.copy, params) if with_reference else None
    return TrainState(params, optimizer.transform.init(optimizer.split(params)[0]), zero, zero, zero, reference)
