"""Rotary position embedding: its options in a Hugging Face config, and the frequencies they define. NumPy only.

A pair of coordinates m of a head is rotated at position p by the angle p f_m, with f_m = theta^(-2m / head_dim); the
scaling kinds change f_m so that a model reads contexts longer than those it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgrpo.errors import Problem

DEFAULT_THETA = 10_000.0
_OPTIONS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor",
        "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_REQUIRED = {"factor", "low_freq_factor", "high_freq_factor"}


@dataclass(frozen=True)
class Rope:
    """How positions become angles; `kind` says which of the fields after `theta` count.

    Attributes:
        theta: the base of the wavelengths.
        kind: default, linear (all frequencies / factor), llama3 or yarn (long wavelengths only).
        factor: by how much the context grows.
        original_max_positions: the context before it grew, tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: wavelengths over original / low are stretched, under original / high kept
            (llama3).
        beta_fast, beta_slow: rotations in the original context above which a frequency is kept, below which divided
            (yarn).
        truncate: round the bounds between kept and divided coordinates to whole coordinates (yarn).
        attention_factor: multiplies cosines and sines (yarn).
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(config: Mapping[str, Any], max_positions: int, path: str) -> tuple[Rope, list[Problem]]:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older files) of a config.json.

    `path` names the file in problems. A key or a kind that is not known is a problem, never an approximation.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    key = "rope_scaling" if old else "rope_parameters"
    options = dict(old or new or {})
    if old and new and old != new:
        expected = "one of rope_scaling and rope_parameters, or the same in both"
        return Rope(), [Problem(f"{path}: rope_scaling", repr(old), expected, "delete one of the two keys")]
    kinds = {options.pop(name) for name in ("rope_type", "type") if options.get(name) is not None}
    kind = kinds.pop() if kinds else "default"
    if kinds or kind not in _OPTIONS:
        found = repr(kind) if not kinds else f"{kind!r} and {kinds.pop()!r}"
        return Rope(), [Problem(f"{path}: {key}.rope_type", found, f"one of {', '.join(_OPTIONS)}")]
    theta = options.pop("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    partial = options.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    problems = []
    if partial not in (None, 1, 1.0):
        problems.append(Problem(f"{path}: partial_rotary_factor", repr(partial), "1: heads are rotated whole"))
    for name, value in options.items():
        if name not in _OPTIONS[kind]:
            fix = f"delete it if transformers ignores it for rope_type {kind!r}"
            problems.append(
                Problem(f"{path}: {key}.{name}", repr(value), f"one of {_OPTIONS[kind] or 'no options'}", fix)
            )
        elif name != "truncate" and value is not None and not _is_positive(value):
            problems.append(Problem(f"{path}: {key}.{name}", repr(value), "a positive number"))
    for name in _OPTIONS[kind]:
        if name in _REQUIRED and options.get(name) is None:
            problems.append(Problem(f"{path}: {key}.{name}", "", f"a positive number: rope_type {kind!r} needs it"))
    if not _is_positive(theta):
        problems.append(Problem(f"{path}: rope_theta", repr(theta), "a positive number"))
    return (Rope(), problems) if problems else (_rope(theta, kind, options, max_positions), [])


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _rope(theta: float, kind: str, options: dict[str, Any], max_positions: int) -> Rope:
    given = {name: value for name, value in options.items() if value is not None}
    original = given.pop("original_max_position_embeddings", max_positions)
    mscale, mscale_all = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
    if kind == "yarn" and "attention_factor" not in given:
        both = mscale and mscale_all
        given["attention_factor"] = _mscale(given["factor"], mscale if both else 1)
        given["attention_factor"] /= _mscale(given["factor"], mscale_all) if both else 1
    return Rope(theta=float(theta), kind=kind, original_max_positions=int(original), **given)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """The frequencies f_m, float32 [head_dim / 2], radians a position; `rope.attention_factor` is not applied.

    llama3: with n_m = original f_m / 2 pi rotations in the original context, f_m is kept where n_m > high, divided by
    `factor` where n_m < low, and interpolated linearly in n_m between. yarn: likewise, linear in m between the
    coordinates that make `beta_fast` and `beta_slow` rotations.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(rope.theta) ** exponents
    if rope.kind == "default":
        return frequencies
    stretched = frequencies / np.float32(rope.factor)
    if rope.kind == "linear":
        return stretched
    if rope.kind == "llama3":
        rotations = rope.original_max_positions * frequencies / np.float32(2 * math.pi)
        kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        kept = 1 - _yarn_ramp(rope, head_dim)
    kept = np.clip(kept, 0, 1).astype(np.float32)
    return stretched * (1 - kept) + frequencies * kept


def _yarn_ramp(rope: Rope, head_dim: int) -> np.ndarray:
    def coordinate(rotations: float) -> float:
        ratio = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = coordinate(rope.beta_fast), coordinate(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # as published: a step where the two bounds meet
    return (np.arange(head_dim // 2, dtype=np.float32) - low) / width
