"""From logical axis names to devices: one table, and no name that is not in it.

mesh = make_mesh({"data": 1, "fsdp": -1, "tensor": 2})
with jax.set_mesh(mesh):
    shardings = param_shardings(decoder.axes, shapes, mesh, decoder.axis_units)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgrpo.errors import Problem, UserError

MESH_AXES = ("data", "fsdp", "tensor")
TABLE: dict[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "norm": None,
}
"""Logical axis -> the mesh axis that splits it; None: every device holds it whole. Rows of a batch: data x fsdp."""


def make_mesh(sizes: Mapping[str, int], path: str = "learner.mesh") -> Mesh:
    """Arranges all devices (of all processes) by axis; -1 takes the rest; an axis that is left out has size 1.

    Raises:
        UserError: an unknown axis, two rests, or a product that is not the number of devices; `path` is the config key.
    """
    unknown = [axis for axis in sizes if axis not in MESH_AXES]
    if unknown:
        raise UserError(
            [Problem(f"{path}.{axis}", str(sizes[axis]), f"an axis of {', '.join(MESH_AXES)}") for axis in unknown]
        )
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    found = ", ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape, strict=True))
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise UserError(Problem(path, found, "positive sizes, at most one of them -1 (the rest)"))
    count = jax.device_count()
    fixed = math.prod(size for size in shape if size != -1)
    fits = count % fixed == 0 if -1 in shape else count == fixed
    if not fits:
        expected = f"sizes whose product {'divides' if -1 in shape else 'is'} the number of devices, {count}"
        raise UserError(Problem(path, found, expected, "let one axis be -1" if -1 not in shape else ""))
    shape = [count // fixed if size == -1 else size for size in shape]
    return jax.make_mesh(tuple(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def param_shardings(axes: Any, shapes: Any, mesh: Mesh, units: Mapping[str, int] | None = None) -> Any:
    """The sharding of every parameter.

    A dimension that its mesh axis does not divide stays whole on every device of that axis (3 key heads on tensor = 2):
    correct, and only its memory is not shared out.

    Args:
        axes: the tree of parameters with a tuple of logical axis names for each.
        shapes: the same tree with anything that has a `shape`.
        mesh: from `make_mesh`.
        units: how many indivisible units an axis has, where that is less than its size: an axis `heads` of size
            9 x 64 has 9, and is not cut through a head.

    Returns:
        The tree with a `NamedSharding` for each.

    Raises:
        ValueError: a logical axis that `TABLE` lacks, or names that do not fit a shape; it names the parameter.
    """
    units = units or {}

    def place(path: Any, names: tuple[str, ...], leaf: Any) -> NamedSharding:
        if len(names) != len(leaf.shape):
            raise ValueError(f"{jax.tree_util.keystr(path)}: axes {names} for shape {leaf.shape}")
        split = []
        for name, size in zip(names, leaf.shape, strict=True):
            if name not in TABLE:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: unknown logical axis {name!r}; known: {', '.join(TABLE)}"
                )
            axis = TABLE[name]
            split.append(axis if axis and units.get(name, size) % mesh.shape[axis] == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*split))

    return jax.tree_util.tree_map_with_path(place, axes, shapes, is_leaf=lambda node: isinstance(node, tuple))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is rows: split over data x fsdp, whole along `tensor`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
