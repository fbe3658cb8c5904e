"""Which completions go into which row: groups split into chunks, chunks best-fit into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxgrpo.learner.layout import Extent, Layout


@dataclass(frozen=True)
class Chunk:
    """Samples that hang off one copy of their prompt.

    Attributes:
        prompt_tokens: length of the prompt.
        members: (sample index, extent of the part after the prompt).
    """

    prompt_tokens: int
    members: tuple[tuple[int, Extent], ...]

    @property
    def extent(self) -> Extent:
        """What the chunk takes up, its prompt included."""
        total = Extent(self.prompt_tokens, 0, 0)
        for _, extent in self.members:
            total = total.plus(extent)
        return total


@dataclass(frozen=True)
class Unit:
    """The chunks of one group; `whole` forbids to split them and to put them into different rows."""

    chunks: tuple[Chunk, ...]
    whole: bool

    def pieces(self, capacity: Extent) -> list[tuple[Chunk, ...]]:
        """What is placed as one: the whole unit, or its chunks, split with their prompt repeated where they are too large."""
        if self.whole:
            return [self.chunks]
        return [(piece,) for chunk in self.chunks for piece in _split(chunk, capacity)]


def choose_rows(units: Sequence[Unit], layout: Layout) -> tuple[Extent, list[list[Chunk]]] | None:
    """The row shape to use and the chunks of each row; None when no shape has room for everything.

    The first shape in the layout's order whose cost is within a tenth of the least: a small gain is not worth the
    compilation that another shape may need.
    """
    fitted = [(shape, rows) for shape in layout.rows if (rows := fit_rows(units, shape)) is not None]
    if not fitted:
        return None
    costs = [layout.cost(shape, len(rows)) for shape, rows in fitted]
    return next(choice for choice, cost in zip(fitted, costs, strict=True) if cost <= 1.1 * min(costs))


def fit_rows(units: Sequence[Unit], capacity: Extent) -> list[list[Chunk]] | None:
    """Best-fit decreasing: the largest piece first, each into the fullest row that takes it; None if one fits nowhere."""
    pieces = [(piece, _sum([chunk.extent for chunk in piece])) for unit in units for piece in unit.pieces(capacity)]
    bins = _best_fit([extent for _, extent in pieces], capacity)
    return None if bins is None else [[chunk for index in row for chunk in pieces[index][0]] for row in bins]


def _split(chunk: Chunk, capacity: Extent) -> list[Chunk]:
    """The fewest chunks (by best fit) that each fit a row; a member that fits none is left for `fit_rows` to reject."""
    if chunk.extent.fits(capacity):
        return [chunk]
    room = capacity._replace(tokens=capacity.tokens - chunk.prompt_tokens)
    bins = _best_fit([extent for _, extent in chunk.members], room)
    if bins is None:
        return [chunk]
    return [Chunk(chunk.prompt_tokens, tuple(chunk.members[index] for index in members)) for members in bins]


def _best_fit(extents: Sequence[Extent], capacity: Extent) -> list[list[int]] | None:
    """Indices by bin. Ties go to the earlier item and the earlier bin, so the result depends on nothing else."""
    bins: list[list[int]] = []
    used: list[Extent] = []
    for index in sorted(range(len(extents)), key=lambda i: (-extents[i].tokens, -extents[i].targets, i)):
        extent = extents[index]
        if not extent.fits(capacity):
            return None
        possible = [b for b, taken in enumerate(used) if taken.plus(extent).fits(capacity)]
        if possible:
            best = max(possible, key=lambda b: (used[b].tokens, used[b].targets, -b))
            bins[best].append(index)
            used[best] = used[best].plus(extent)
        else:
            bins.append([index])
            used.append(extent)
    return bins


def _sum(extents: Sequence[Extent]) -> Extent:
    total = Extent(0, 0, 0)
    for extent in extents:
        total = total.plus(extent)
    return total
