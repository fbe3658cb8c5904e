"""Trajectories into packed rows of fixed shapes, and values of packed targets back to trajectories. NumPy inside.

    samples ──▶ groups ──▶ chunks (one prompt copy + some of its completions) ──▶ rows ──▶ micro-batches (TokenBatch)

A token is put into a row only if the prediction of some trained token depends on it: what follows the last trained token
of a trajectory, that token itself included, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxgrpo.errors import Problem, UserError
from jaxgrpo.learner.fitting import Chunk, Unit, choose_rows
from jaxgrpo.learner.layout import Extent, Layout
from jaxgrpo.types.batch import ROW_FIELDS, TokenBatch
from jaxgrpo.types.rollout import Trajectory

PADDING = {"segment": -1, "parent": -1, "sequence": -1, "group": -1}
TARGET_VALUES = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True)
class Sample:
    """A trajectory with what the objective needs to know of it.

    Attributes:
        trajectory: its `prompt_id` names its group; its `logprobs` become `rollout_logprobs`.
        advantages: float32 [T], one for each token of the trajectory, or a scalar for all of them.
        old_logprobs, ref_logprobs: float32 [T] in nats, read where `loss_mask` is set; None: not known.
    """

    trajectory: Trajectory
    advantages: np.ndarray | float
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None

    @property
    def counts(self) -> bool:
        """Whether any token is trained on; a sample without one (an error, a dropped truncation) counts nowhere."""
        return bool(self.trajectory.loss_mask.any())

    @property
    def has_advantage(self) -> bool:
        """Whether some trained token has an advantage other than 0."""
        mask = self.trajectory.loss_mask
        return bool(np.any(np.broadcast_to(self.advantages, mask.shape)[mask] != 0))


class Denominators(NamedTuple):
    """What losses are divided by: trained tokens, sequences and groups of one whole update."""

    num_tokens: int
    num_sequences: int
    num_groups: int

    @staticmethod
    def of(samples: Sequence[Sample]) -> Denominators:
        """Counts over all samples with a trained token, also those that `pack` leaves out for want of an advantage."""
        counted = [sample.trajectory for sample in samples if sample.counts]
        tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in counted)
        return Denominators(tokens, len(counted), len({trajectory.prompt_id for trajectory in counted}))


class Place(NamedTuple):
    """Where a sample's targets went: targets [start, start + count) of a row of a micro-batch."""

    batch: int
    row: int
    start: int
    count: int


@dataclass(frozen=True)
class Packed:
    """The micro-batches of one update.

    Attributes:
        batches: NumPy leaves; empty when there is nothing to train on.
        samples: what `pack` was given, in its order.
        places: where each sample went; None for a sample that was left out.
        padding_share: the share of the row tokens of all micro-batches that is padding; NaN without batches.
    """

    batches: list[TokenBatch]
    samples: tuple[Sample, ...]
    places: tuple[Place | None, ...]
    padding_share: float


def pack(
    samples: Sequence[Sample],
    layout: Layout,
    *,
    denominators: Denominators | None = None,
    on_policy: bool = True,
    share: bool = True,
    keep_zero_advantage: bool = False,
    keep_groups_whole: bool = False,
) -> Packed:
    """Packs the samples of one update; the same samples give the same batches.

    Args:
        samples: every sample of the update.
        layout: the shapes that may be used.
        denominators: of the whole update; default: `Denominators.of(samples)`. Another value when the samples are a part.
        on_policy: the parameters to be trained are those that define the old log-probs. If not, every packed sample must
            carry `old_logprobs`.
        share: completions of one group with the same prompt tokens hang off one copy of them.
        keep_zero_advantage: also pack samples whose advantages are all 0: an objective with a KL or entropy term learns
            from them, and scoring wants every sample.
        keep_groups_whole: every sample of a group with a trained token goes into one row (an objective compares them);
            a group is then left out only if all of it is without advantage.

    Raises:
        UserError: a trajectory (or, with `keep_groups_whole`, a group) is longer than the longest row.
    """
    counts = denominators or Denominators.of(samples)
    units = _units(samples, share, keep_zero_advantage, keep_groups_whole)
    if not units:
        return Packed([], tuple(samples), (None,) * len(samples), float("nan"))
    chosen = choose_rows(units, layout)
    if chosen is None:
        raise _too_long(units, layout)
    shape, rows = chosen
    sizes = layout.split_rows(shape, len(rows))
    scalars = {name: np.float32(count) for name, count in counts._asdict().items()}
    places: list[Place | None] = [None] * len(samples)
    batches, first = [], 0
    for number, size in enumerate(sizes):
        arrays = _empty_arrays(size, shape)
        for row, chunks in enumerate(rows[first : first + size]):
            views = {name: array[row] for name, array in arrays.items()}
            for index, start, count in _write_row(views, chunks, samples, on_policy):
                places[index] = Place(number, row, start, count)
        batches.append(TokenBatch(**arrays, **scalars, on_policy=np.float32(on_policy)))
        first += size
    used = sum(chunk.extent.tokens for row in rows for chunk in row)
    return Packed(batches, tuple(samples), tuple(places), 1 - used / (sum(sizes) * shape.tokens))


def unpack(packed: Packed, values: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Brings values of targets, one array [R, K] a micro-batch, back to the trajectories.

    Returns one float32 [T] a sample, 0 where the token is not trained on; None for a sample that was not packed.
    """
    result: list[np.ndarray | None] = []
    for sample, place in zip(packed.samples, packed.places, strict=True):
        if place is None:
            result.append(None)
            continue
        mask = sample.trajectory.loss_mask
        array = np.zeros(mask.shape, np.float32)
        array[mask] = np.asarray(values[place.batch])[place.row, place.start : place.start + place.count]
        result.append(array)
    return result


def _units(samples: Sequence[Sample], share: bool, keep_zero: bool, whole: bool) -> list[Unit]:
    """One unit a group that has something to train on, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.counts:
            groups.setdefault(sample.trajectory.prompt_id, []).append(index)
    units = []
    for members in groups.values():
        useful = [index for index in members if keep_zero or samples[index].has_advantage]
        chunks = _chunks(samples, members if whole and useful else useful, share)
        if chunks:
            units.append(Unit(tuple(chunks), whole))
    return units


def _chunks(samples: Sequence[Sample], members: Sequence[int], share: bool) -> list[Chunk]:
    """The members of a group by prompt: one chunk for each distinct prompt, or for each member when nothing is shared."""
    families: dict[object, list[int]] = {}
    for index in members:
        trajectory = samples[index].trajectory
        prompt = trajectory.tokens[: trajectory.prompt_length]
        families.setdefault(prompt.astype(np.int32).tobytes() if share else index, []).append(index)
    return [
        Chunk(samples[family[0]].trajectory.prompt_length, tuple((index, _extent(samples[index])) for index in family))
        for family in families.values()
    ]


def _extent(sample: Sample) -> Extent:
    """What a sample takes up after its prompt: only the tokens before its last target."""
    trajectory = sample.trajectory
    targets = np.flatnonzero(trajectory.loss_mask)
    if targets[0] == 0:
        raise ValueError(f"episode {trajectory.episode_id}: the first token is trained on, but nothing predicts it")
    return Extent(max(0, int(targets[-1]) - trajectory.prompt_length), len(targets), 1)


def _too_long(units: Sequence[Unit], layout: Layout) -> UserError:
    """The error that names the largest thing that must stand in one row."""
    longest = max(layout.rows, key=lambda shape: shape.tokens)
    if any(unit.whole for unit in units):
        what = "group"
        size = max(sum(chunk.extent.tokens for chunk in unit.chunks) for unit in units)
    else:
        what = "trajectory"
        size = max(
            chunk.prompt_tokens + part.tokens for unit in units for chunk in unit.chunks for _, part in chunk.members
        )
    return UserError(
        Problem(
            "learner.row_tokens",
            f"rows of {longest.tokens} tokens and {longest.sequences} sequences, and a {what} of {size} tokens",
            f"rows that hold every {what}"
            + (": this objective compares the samples of a group" if what == "group" else ""),
            f"set learner.row_tokens to at least {size}, or lower rollout.max_completion_tokens",
        )
    )


def _empty_arrays(rows: int, shape: Extent) -> dict[str, np.ndarray]:
    """The row fields of a batch of padding only."""
    width = {"tokens": shape.tokens, "positions": shape.tokens, "segment": shape.tokens, "parent": shape.tokens}
    width["group"] = shape.sequences
    floats = ("loss_mask", *TARGET_VALUES)
    return {
        name: np.full(
            (rows, width.get(name, shape.targets)), PADDING.get(name, 0), np.float32 if name in floats else np.int32
        )
        for name in ROW_FIELDS
    }


def _write_row(
    row: dict[str, np.ndarray], chunks: Sequence[Chunk], samples: Sequence[Sample], on_policy: bool
) -> list[tuple[int, int, int]]:
    """Writes chunks into one row (views of a batch's arrays); returns (sample, first target, targets) of every member."""
    written: list[tuple[int, int, int]] = []
    groups: dict[str, int] = {}
    at = segment = target = 0
    for chunk in chunks:
        prompt_at, prompt_segment, prompt_tokens = at, segment, chunk.prompt_tokens
        trajectory = samples[chunk.members[0][0]].trajectory
        _write_tokens(row, at, trajectory.tokens[:prompt_tokens], 0, segment, -1)
        at += prompt_tokens
        for index, extent in chunk.members:
            trajectory = samples[index].trajectory
            part = trajectory.tokens[prompt_tokens : prompt_tokens + extent.tokens]
            alone = len(chunk.members) == 1  # a trajectory that shares nothing is one segment
            segment = segment if alone else segment + 1
            _write_tokens(row, at, part, prompt_tokens, segment, -1 if alone else prompt_segment)
            before = np.flatnonzero(trajectory.loss_mask) - 1
            where = slice(target, target + extent.targets)
            # Position t - 1 predicts token t; the prompt and the part after it stand at different places of the row.
            row["hidden_index"][where] = np.where(
                before < prompt_tokens, prompt_at + before, at + before - prompt_tokens
            )
            row["sequence"][where] = len(written)
            _write_targets({name: array[where] for name, array in row.items()}, samples[index], on_policy)
            row["group"][len(written)] = groups.setdefault(trajectory.prompt_id, len(groups))
            written.append((index, target, extent.targets))
            target += extent.targets
            at += extent.tokens
        segment += 1
    return written


def _write_tokens(
    row: dict[str, np.ndarray], at: int, tokens: np.ndarray, position: int, segment: int, parent: int
) -> None:
    """Writes one run of tokens at `at`, the first of which has position `position`."""
    where = slice(at, at + len(tokens))
    row["tokens"][where] = tokens
    row["positions"][where] = np.arange(position, position + len(tokens))
    row["segment"][where] = segment
    row["parent"][where] = parent


def _write_targets(row: dict[str, np.ndarray], sample: Sample, on_policy: bool) -> None:
    """Writes a sample's target values into the part of a row that is its own."""
    trajectory = sample.trajectory
    mask = trajectory.loss_mask
    if sample.old_logprobs is None and not on_policy:
        raise ValueError(f"episode {trajectory.episode_id}: off-policy training needs old_logprobs")
    row["token"][:] = trajectory.tokens[mask]
    row["loss_mask"][:] = 1
    values = (sample.advantages, sample.old_logprobs, sample.ref_logprobs, trajectory.logprobs)
    for name, value in zip(TARGET_VALUES, values, strict=True):
        if value is not None:
            row[name][:] = np.broadcast_to(value, mask.shape)[mask]
