"""Which sequence sits where: rows that share a prompt, slots, and when another shape of the batch pays. No JAX here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxgrpo.rollout.engine import SamplingParams

Prompt = tuple[int, ...]
_GAIN = 1.5  # how much more throughput another layout must promise: each one seen for the first time is compiled


@dataclass(eq=False)
class Request:
    """One completion under way.

    Attributes:
        prompt: its tokens.
        sampling: how to draw.
        limit: most tokens it may have: `max_tokens`, or less where the context ends earlier.
        token_ids, logprobs, versions: what was drawn so far.
        cancelled: nobody waits for it any more.
    """

    prompt: Prompt
    sampling: SamplingParams
    limit: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(eq=False)
class Row:
    """A row of the batch: the prompt whose keys and values it holds (None: none of use), and who sits in its slots."""

    width: int
    prompt: Prompt | None = None
    slots: list[Request | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = self.slots or [None] * self.width

    @property
    def active(self) -> int:
        """Number of its sequences."""
        return sum(request is not None for request in self.slots)


class Demand(NamedTuple):
    """Sequences with one prompt: already decoding, and waiting."""

    active: int
    pending: int


class Cost(NamedTuple):
    """Time of a decode step, in units of one slot's share: `step` + slots + rows * `row`.

    Attributes:
        step: what every step costs, however few slots: reading the weights, launching.
        row: reading the prompt of a row.
    """

    step: float
    row: float

    def of(self, rows: int, width: int) -> float:
        """A step of rows x width slots."""
        return self.step + rows * width + rows * self.row


def bucket(size: int, least: int = 1) -> int:
    """The smallest of least * 2^k and least * 1.5 * 2^k that is at least `size`: 1, 2, 3, 4, 6, 8, 12 …"""
    value = least
    while value < size:
        if value * 3 % 2 == 0 and value * 3 // 2 >= size:
            return value * 3 // 2
        value *= 2
    return value


def demands(rows: Sequence[Row], pending: Sequence[Request]) -> list[Demand]:
    """What there is to do, prompt by prompt, those already decoding first, then in order of arrival."""
    counts: dict[Prompt, list[int]] = {}
    for row in rows:
        if row.prompt is not None and row.active:
            counts.setdefault(row.prompt, [0, 0])[0] += row.active
    for request in pending:
        counts.setdefault(request.prompt, [0, 0])[1] += 1
    return [Demand(*pair) for pair in counts.values()]


def seated(work: Sequence[Demand], rows: int, width: int) -> int:
    """How many sequences decode at once in a fresh layout of rows x width; -1 if those that are active do not fit."""
    free = rows - sum(-(-demand.active // width) for demand in work)
    if free < 0:
        return -1
    total = 0
    for active, pending in work:
        beside = min(pending, -active % width)
        took = min(-(-(pending - beside) // width), free)
        free -= took
        total += active + beside + min(pending - beside, took * width)
    return total


def best_layout(
    work: Sequence[Demand], slots: int, cost: Cost, width: int | None = None
) -> tuple[tuple[int, int], float]:
    """The (rows, width) with the most sequences a unit of time, and that number; among equals the widest.

    A row has `width` slots (default: the size of the largest group) or one, and rows are a power of two unless they fill
    the batch: every layout seen for the first time is compiled, so there are few. rows * width <= `slots`.
    """
    sizes = [demand.active + demand.pending for demand in work]
    widths = {1, width or min(max(sizes, default=1), slots)}
    best, best_rate = (1, 1), 0.0
    for width in sorted(widths, reverse=True):
        needed = sum(-(-size // width) for size in sizes)
        rows = min(1 << (needed - 1).bit_length(), slots // width)
        rate = seated(work, rows, width) / cost.of(rows, width)
        if rate > best_rate * 1.001:
            best, best_rate = (rows, width), rate
    return best, best_rate


def places(rows: Sequence[Row], pending: Sequence[Request]) -> Iterator[tuple[Request, int, int]]:
    """Seats for waiting requests, (request, row, slot), in order of arrival, in the layout as it is.

    A request goes beside sequences with its prompt, else to an idle row, one that still holds its prompt if there is
    one. A prompt that finds no seat does not hold up those behind it that have a seat beside their own.
    """
    free = {index: [w for w, request in enumerate(row.slots) if request is None] for index, row in enumerate(rows)}
    idle = [index for index, row in enumerate(rows) if not row.active]
    beside: dict[Prompt, list[int]] = {}
    for index, row in enumerate(rows):
        if row.active and row.prompt is not None and free[index]:
            beside.setdefault(row.prompt, []).append(index)
    for request in pending:
        open_rows = beside.setdefault(request.prompt, [])
        if not open_rows:
            if not idle:
                continue
            index = next((i for i in idle if rows[i].prompt == request.prompt), idle[0])
            idle.remove(index)
            open_rows.append(index)
        index = open_rows[0]
        yield request, index, free[index].pop(0)
        if not free[index]:
            open_rows.pop(0)


def relayout(rows: Sequence[Row], pending: Sequence[Request], slots: int, cost: Cost) -> tuple[int, int] | None:
    """Another (rows, width) when it promises clearly more throughput than the present one, else None.

    With no sequence under way the best one is always taken: steps of a run begin with the same demand, so it is the same
    layout every time.
    """
    work = demands(rows, pending)
    under_way = any(row.active for row in rows)
    (count, width), rate = best_layout(work, slots, cost, rows[0].width if under_way else None)
    if not under_way:
        return (count, width) if [row.width for row in rows] != [width] * count else None
    present = sum(row.active for row in rows) + sum(1 for _ in places(rows, pending))
    gains = rate > _GAIN * present / cost.of(len(rows), rows[0].width)
    return (count, width) if gains and (count, width) != (len(rows), rows[0].width) else None


def rearranged(rows: Sequence[Row], count: int, width: int) -> tuple[list[Row], list[int], list[list[int]]]:
    """Moves what is active into `count` rows of `width` slots.

    Returns the new rows; for each the old row with its prompt; for each new slot the number of the old one, row by row.
    -1 where there is none.
    """
    members: dict[Prompt, list[tuple[int, int, Request]]] = {}
    for r, row in enumerate(rows):
        for w, request in enumerate(row.slots):
            if request is not None:
                assert row.prompt is not None
                members.setdefault(row.prompt, []).append((r, w, request))
    new = [Row(width) for _ in range(count)]
    from_row, from_slot = [-1] * count, [[-1] * width for _ in range(count)]
    target = 0
    for prompt, seats in members.items():
        for start in range(0, len(seats), width):
            new[target].prompt, from_row[target] = prompt, seats[start][0]
            for w, (r, old, request) in enumerate(seats[start : start + width]):
                new[target].slots[w] = request
                from_slot[target][w] = r * rows[r].width + old
            target += 1
    return new, from_row, from_slot
