"""Metrics merge to the value that one pass over everything would give."""

from __future__ import annotations

import math

import pytest

from jaxgrpo.metrics import Maximum, Mean, Minimum, finalize, merge


def test_merging_micro_batches_weights_by_count_not_by_batch() -> None:
    left = {"kl": Mean(2.0, 10.0), "high": Maximum(0.3), "low": Minimum(0.1)}
    right = {"kl": Mean(7.0, 70.0), "high": Maximum(0.2), "low": Minimum(-0.5), "only": Mean(1.0, 1.0)}
    result = finalize(merge(left, right))
    assert result == {"kl": 9.0 / 80.0, "high": 0.3, "low": -0.5, "only": 1.0}


def test_a_metric_that_saw_nothing_is_nan() -> None:
    result = finalize({"mean": Mean(0.0, 0.0), "max": Maximum(-math.inf), "min": Minimum(math.inf)})
    assert all(math.isnan(value) for value in result.values())


def test_one_name_cannot_be_two_kinds() -> None:
    with pytest.raises(TypeError, match="'kl' is a Mean here and a Maximum there"):
        merge({"kl": Mean(1, 1)}, {"kl": Maximum(1)})
