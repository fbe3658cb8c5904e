"""The shapes an update may use. They are few, so the number of compilations is bounded before the run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

TARGET_COST = 0.3
"""Cost of a target (its share of the vocabulary head) when a token's way through the layers costs 1; for choosing only."""

QUADRATIC_TOKENS = 1024
"""Row length at which attention costs as much as the rest of a layer; a small model's on a CPU; for choosing only."""

BATCH_COST = 128
"""What a micro-batch costs besides its tokens, in tokens: writing and adding a gradient of the size of the parameters."""

SMALL_TOKENS = 512
"""Tokens of a small micro-batch: enough to keep matrix products busy, few enough to waste little on padding."""


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
        return (
            self.tokens <= capacity.tokens and self.targets <= capacity.targets and self.sequences <= capacity.sequences
        )


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
        """Rows of a full and of a small micro-batch; small ones spare an update's last rows most of the padding."""
        full = max(1, self.micro_batch_tokens // shape.tokens)
        small = min(full, max(1, SMALL_TOKENS // shape.tokens))
        return full * self.data_shards, small * self.data_shards

    def split_rows(self, shape: Extent, count: int) -> list[int]:
        """Sizes R of the micro-batches that hold `count` rows at the least cost: full ones, then small ones."""
        full, small = self.row_counts(shape)

        def sizes(fulls: int) -> list[int]:
            return [full] * fulls + [small] * -(-max(0, count - fulls * full) // small)

        def cost(split: list[int]) -> tuple[float, int]:
            return sum(split) / self.data_shards * shape.tokens + BATCH_COST * len(split), len(split)

        return min((sizes(fulls) for fulls in sorted({0, count // full, -(-count // full)})), key=cost)

    def cost(self, shape: Extent, count: int) -> float:
        """Relative time of an update of `count` rows of this shape, padding included."""
        row = shape.tokens * (1 + shape.tokens / QUADRATIC_TOKENS) + TARGET_COST * shape.targets
        split = self.split_rows(shape, count)
        return sum(split) / self.data_shards * row + BATCH_COST * len(split)

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
    """Chooses the shapes for a run: one row length, at most two numbers of targets, at most two numbers of rows.

    A row must take the longest trajectory. A longer one repeats a prompt less often, and a row for a whole group never,
    but attention grows with its square: the length that costs least a completion of the longest kind is taken.

    Args:
        max_prompt_tokens, max_completion_tokens: the longest that can occur; observations between turns belong to the
            completion here.
        num_generations: samples of a prompt.
        micro_batch_tokens: packed tokens of a micro-batch on each data shard.
        row_tokens: the row length to use; None: chosen as above.
        data_shards: shards of a batch's rows (data × fsdp).
        share: completions will share their prompt.
        keep_groups_whole: only rows for whole groups are of use.
    """
    prompts = 1 if share else num_generations
    group = prompts * max_prompt_tokens + num_generations * max_completion_tokens

    def completions(length: int) -> int:
        """The longest completions, with their prompts, that a row of this length takes."""
        if not share:
            return max(1, length // (max_prompt_tokens + max_completion_tokens))
        return max(1, min(num_generations, (length - max_prompt_tokens) // max_completion_tokens))

    def cost(length: int) -> float:
        return length * (1 + length / QUADRATIC_TOKENS) / completions(length)

    sizes = range(1, num_generations + 1)
    lengths = [_aligned(prompts_of(size, share) * max_prompt_tokens + size * max_completion_tokens) for size in sizes]
    within = [length for length in lengths if length <= micro_batch_tokens] or lengths[:1]
    length = row_tokens or (_aligned(group) if keep_groups_whole else min(within, key=cost))
    # As many targets as the longest completions have; or, of prompts shorter than the longest, as there are tokens.
    targets = min(length, _aligned(completions(length) * max_completion_tokens))
    sequences = max(num_generations, length // 8)
    rows = tuple(Extent(length, size, sequences) for size in sorted({targets, length}))
    return Layout(rows, micro_batch_tokens, data_shards)


def prompts_of(completions: int, share: bool) -> int:
    """Copies of the prompt that completions of one group need in a row."""
    return 1 if share else completions


def _aligned(length: int) -> int:
    """Rounds up to what matrix units like, without wasting much of a short row."""
    step = 128 if length > 512 else 32
    return -(-length // step) * step
