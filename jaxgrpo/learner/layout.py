"""The shapes an update may use. They are few, so the number of compilations is bounded before the run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

TARGET_COST = 0.3
"""Cost of a target (its share of the vocabulary head) when a token's way through the layers costs 1; for choosing only."""

QUADRATIC_TOKENS = 6144
"""Row length at which attention costs as much as the rest of a layer: a small model's; for choosing only."""


class Extent(NamedTuple):
    """What a row offers, or what something takes up in it: tokens T, targets K, sequences S."""

    tokens: int
    targets: int
    sequences: int

    def plus(self, other: Extent) -> Extent:
        """The sum."""
        return Extent(*(mine + more for mine, more in zip(self, other, strict=True)))

    def fits(self, capacity: Extent) -> bool:
        """Whether `capacity` has room for this."""
        return self.tokens <= capacity.tokens and self.targets <= capacity.targets and self.sequences <= capacity.sequences


@dataclass(frozen=True)
class Layout:
    """The shapes of an update's micro-batches.

    Attributes:
        rows: the shapes of a row, in order of preference. All rows of one update have one shape.
        micro_batch_tokens: packed tokens of a micro-batch on each data shard; at least one row goes there.
        data_shards: the number of rows of a micro-batch is a multiple of it.
    """

    rows: tuple[Extent, ...]
    micro_batch_tokens: int
    data_shards: int = 1

    def row_counts(self, shape: Extent) -> tuple[int, int]:
        """Rows of a full and of a small micro-batch; the small one, a quarter, spares the last rows most of the padding."""
        full = max(1, self.micro_batch_tokens // shape.tokens)
        return full * self.data_shards, -(-full // 4) * self.data_shards

    def split_rows(self, shape: Extent, count: int) -> list[int]:
        """Sizes R of the micro-batches that hold `count` rows: full ones, then at most three small ones."""
        full, small = self.row_counts(shape)
        sizes = []
        while count > 0:
            rounded = -(-count // small) * small
            sizes.append(full if rounded >= full else small)
            count -= sizes[-1]
        return sizes

    def cost(self, shape: Extent, count: int) -> float:
        """Relative time of an update of `count` rows of this shape, padding included."""
        row = shape.tokens * (1 + shape.tokens / QUADRATIC_TOKENS) + TARGET_COST * shape.targets
        return sum(self.split_rows(shape, count)) * row

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Every (R, T, K, S) a batch can have: at most so many compilations of a function of a batch."""
        return tuple((count, *shape) for shape in self.rows for count in sorted(set(self.row_counts(shape))))


def choose_layout(
    max_prompt_tokens: int,
    max_completion_tokens: int,
    num_generations: int,
    micro_batch_tokens: int,
    row_tokens: int | None = None,
    data_shards: int = 1,
    *,
    share: bool = True,
    keep_groups_whole: bool = False,
) -> Layout:
    """Chooses the shapes for a run.

    A row must take the longest trajectory; rows twice and four times as long waste less on padding and on repeated
    prompts, and a row for a whole group repeats none. Long rows pay for it in attention, so `pack` picks by cost.

    Args:
        max_prompt_tokens, max_completion_tokens: the longest that can occur; observations between turns belong to the
            completion here.
        num_generations: samples of a prompt.
        micro_batch_tokens: packed tokens of a micro-batch on each data shard.
        row_tokens: the one row length to use; None: chosen as above.
        data_shards: shards of a batch's rows (data × fsdp).
        share: completions will share their prompt.
        keep_groups_whole: only rows for whole groups are of use.
    """
    longest = max_prompt_tokens + max_completion_tokens
    prompts = 1 if share else num_generations
    group = prompts * max_prompt_tokens + num_generations * max_completion_tokens
    if row_tokens is not None:
        lengths = [row_tokens]
    elif keep_groups_whole:
        lengths = [_aligned(group)]
    else:
        least = _aligned(longest)
        within = [n for n in (2 * least, 4 * least, _aligned(group)) if least < n <= micro_batch_tokens]
        # A row that takes one trajectory shares nothing, so it is of use only where nothing is shared or nothing else fits.
        lengths = sorted(set(within if share and num_generations > 1 and within else [least, *within]))
    # All targets of the longest rows, or as many as there are tokens: prompts are shorter than the longest one.
    share_of_targets = num_generations * max_completion_tokens / group
    rows = [
        Extent(length, targets, max(num_generations, length // 8))
        for length in lengths
        for targets in sorted({min(length, _aligned(round(length * share_of_targets))), length})
    ]
    return Layout(tuple(rows), micro_batch_tokens, data_shards)


def _aligned(length: int) -> int:
    """Rounds up to what matrix units like, without wasting much of a short row."""
    step = 128 if length > 512 else 32
    return -(-length // step) * step
