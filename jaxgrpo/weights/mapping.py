"""Converts between our parameter tree and Hugging Face tensors, checked to be one to one. JAX is not needed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxgrpo.errors import Problem, UserError
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.weights.families import IGNORED_SUFFIXES, Entry, entries, tensors

TIED_HEAD = "lm_head.weight"
FLOAT_TYPES = ("float32", "bfloat16", "float16", "float64")
_MAX_PROBLEMS = 20


def to_hf(params: Mapping[str, Any], config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) for every tensor of the checkpoint, in the parameters' own dtype, one at a time.

    Parameters may be sharded over devices and processes; then every process must run this to the end.
    """
    for tensor in tensors(config):
        leaf = _leaf(params, tensor.entry.path)
        array = _fetch(leaf[tensor.layer] if tensor.entry.per_layer else leaf)
        yield tensor.name, np.ascontiguousarray(array.T if tensor.entry.transposed else array)


def from_hf(
    source: Mapping[str, Any],
    config: ModelConfig,
    path: str,
    dtype: Any = np.float32,
    place: Callable[[str, np.ndarray], Any] = lambda _, array: array,
) -> dict[str, Any]:
    """Builds the parameter tree from tensors.

    Args:
        source: name -> an array, or anything with `shape`, `dtype` and `__array__`, which reads one at a time.
        config: the model.
        path: where the tensors come from, for messages.
        dtype: the type the parameters get.
        place: called with each parameter's path and array (stacked over layers) as soon as it is complete; what it
            returns goes into the tree. It bounds the host's memory when it puts the array on devices.

    Raises:
        UserError: tensors that are missing, extra, of a wrong shape or not floating point, up to 20 at once by name.
    """
    shapes = {name: (tuple(source[name].shape), str(source[name].dtype)) for name in source}
    check_tensors(shapes, config, path)
    check_tied_head(source, config, path)
    params: dict[str, Any] = {}
    for entry in entries(config):
        array = _stack(source, entry, config, dtype)
        node = params
        *parents, last = entry.path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = place(entry.path, array)
    return params


def check_tensors(found: Mapping[str, tuple[tuple[int, ...], str]], config: ModelConfig, path: str) -> None:
    """Compares name -> (shape, dtype) with the model's table.

    Raises:
        UserError: as `from_hf`, tied heads apart.
    """
    expected = {tensor.name: tensor for tensor in tensors(config)}
    problems = []
    for name, tensor in expected.items():
        if name not in found:
            problems.append(Problem(f"{path}: {name}", "", f"a tensor of shape {list(tensor.shape)}, it is missing"))
            continue
        shape, dtype = found[name]
        if shape != tensor.shape:
            problems.append(Problem(f"{path}: {name}", f"shape {list(shape)}", f"shape {list(tensor.shape)}"))
        if dtype not in FLOAT_TYPES:
            problems.append(Problem(f"{path}: {name}", f"type {dtype}", f"one of {', '.join(FLOAT_TYPES)}"))
    for name in found:
        tied = config.tied_head and name == TIED_HEAD
        if name not in expected and not name.endswith(IGNORED_SUFFIXES) and not tied:
            problems.append(
                Problem(f"{path}: {name}", "a tensor", f"no such tensor in a {config.family!r} model of this config")
            )
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        rest = [Problem(path, f"{more} more tensors that do not fit", "the tensors of config.json")] if more > 0 else []
        raise UserError(problems[:_MAX_PROBLEMS] + rest)


def check_tied_head(source: Mapping[str, Any], config: ModelConfig, path: str) -> None:
    """A head in the file of a model whose head is tied must be the embedding, bit for bit.

    Raises:
        UserError: it differs.
    """
    if config.tied_head and TIED_HEAD in source:
        embedding = next(tensor.name for tensor in tensors(config) if tensor.entry.path == "embed/embedding")
        if not np.array_equal(np.asarray(source[TIED_HEAD]), np.asarray(source[embedding])):
            expected = f"no such tensor, or the values of {embedding}: config.json says tie_word_embeddings"
            fix = "set tie_word_embeddings to false if the head is a separate matrix"
            raise UserError(Problem(f"{path}: {TIED_HEAD}", "other values", expected, fix))


def _stack(source: Mapping[str, Any], entry: Entry, config: ModelConfig, dtype: Any) -> np.ndarray:
    if not entry.per_layer:
        return np.array(_ours(source[entry.name], entry), dtype=dtype)
    first = _ours(source[entry.name.format(layer=0)], entry)
    stacked = np.empty((config.num_layers, *first.shape), dtype)
    for layer in range(config.num_layers):
        stacked[layer] = first if layer == 0 else _ours(source[entry.name.format(layer=layer)], entry)
    return stacked


def _ours(array: Any, entry: Entry) -> np.ndarray:
    array = np.asarray(array)
    return array.T if entry.transposed else array


def _leaf(params: Mapping[str, Any], path: str) -> Any:
    node: Any = params
    for key in path.split("/"):
        node = node[key]
    return node


def _fetch(array: Any) -> np.ndarray:
    if getattr(array, "is_fully_addressable", True):
        return np.asarray(array)
    from jax.experimental import multihost_utils  # only sharded JAX arrays come here

    return multihost_utils.process_allgather(array, tiled=True)
