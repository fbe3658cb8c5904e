"""Metrics as small sums that merge, so that micro-batches, shards and hosts cannot change their value.

A metric is a total and a weight (`Mean`), or an extreme (`Maximum`, `Minimum`). They are named tuples, hence JAX pytrees
without importing JAX: a jitted function returns a dictionary of them, the host merges and finalises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Mean(NamedTuple):
    """A weighted mean: `total / weight`. Both are scalars; `weight` 0 means "nothing was seen"."""

    total: Any
    weight: Any


class Maximum(NamedTuple):
    """The largest value seen; -inf means "nothing was seen"."""

    value: Any


class Minimum(NamedTuple):
    """The smallest value seen; +inf means "nothing was seen"."""

    value: Any


Metric = Mean | Maximum | Minimum
Metrics = dict[str, Metric]


def merge(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> Metrics:
    """Merges two dictionaries of metrics; a name in only one of them is kept as it is."""
    merged = dict(left)
    for name, metric in right.items():
        merged[name] = _merge_one(name, merged[name], metric) if name in merged else metric
    return merged


def finalize(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Turns metrics into plain floats; a metric that saw nothing becomes NaN."""
    return {name: _value(metric) for name, metric in metrics.items()}


def _merge_one(name: str, left: Metric, right: Metric) -> Metric:
    if type(left) is not type(right):
        raise TypeError(f"metric {name!r} is a {type(left).__name__} here and a {type(right).__name__} there")
    if isinstance(left, Mean):
        return Mean(left.total + right.total, left.weight + right.weight)
    if isinstance(left, Maximum):
        return Maximum(max(float(left.value), float(right.value)))
    return Minimum(min(float(left.value), float(right.value)))


def _value(metric: Metric) -> float:
    if isinstance(metric, Mean):
        weight = float(metric.weight)
        return float(metric.total) / weight if weight else math.nan
    value = float(metric.value)
    return value if math.isfinite(value) else math.nan
