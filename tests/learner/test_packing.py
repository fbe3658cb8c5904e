"""What stands where in a packed row; shapes; errors."""

from __future__ import annotations

import numpy as np
import pytest

from jaxgrpo.errors import UserError
from jaxgrpo.learner.layout import Extent, Layout, choose_layout
from jaxgrpo.learner.packing import Denominators, Packed, Sample, pack, unpack
from jaxgrpo.types.rollout import Trajectory


def sample(
    group: str, prompt: list[int], completion: list[int], mask: list[int] | None = None, advantage: float = 1.0
) -> Sample:
    sampled = np.array([0] * len(prompt) + (mask or [1] * len(completion)), bool)
    tokens = np.array(prompt + completion, np.int32)
    trajectory = Trajectory(
        group,
        group,
        tokens,
        sampled,
        sampled,
        -tokens.astype(np.float32),
        np.zeros(len(tokens), np.int32),
        len(prompt),
        (),
    )
    return Sample(trajectory, advantage)


def random_update(seed: int, prompts: int = 6, generations: int = 4) -> list[Sample]:
    rng = np.random.default_rng(seed)
    result = []
    for group in range(prompts):
        prompt = rng.integers(0, 99, rng.integers(5, 33)).tolist()
        for _ in range(generations):
            completion = rng.integers(0, 99, rng.integers(1, 25)).tolist()
            result.append(sample(str(group), prompt, completion, None, float(rng.integers(-1, 2))))
    return result


def test_a_group_hangs_off_one_prompt() -> None:
    samples = [sample("a", [5, 6, 7], [1, 2]), sample("a", [5, 6, 7], [3, 4, 8], [1, 0, 1])]
    batch = pack(samples, Layout((Extent(8, 6, 3),), 8)).batches[0]
    # Each completion's last trained token is only predicted: it is not put in.
    assert batch.tokens.tolist() == [[5, 6, 7, 1, 3, 4, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 3, 4, 0, 0]]
    assert batch.segment.tolist() == [[0, 0, 0, 1, 2, 2, -1, -1]]
    assert batch.parent.tolist() == [[-1, -1, -1, 0, 0, 0, -1, -1]]
    assert batch.hidden_index.tolist() == [[2, 3, 2, 5, 0, 0]]
    assert batch.token.tolist() == [[1, 2, 3, 8, 0, 0]]
    assert batch.sequence.tolist() == [[0, 0, 1, 1, -1, -1]]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert batch.group.tolist() == [[0, 0, -1]]
    assert batch.rollout_logprobs.tolist() == [[-1, -2, -3, -8, 0, 0]]
    assert (batch.num_tokens, batch.num_sequences, batch.num_groups) == (4, 2, 1)


def test_without_sharing_a_trajectory_is_one_segment() -> None:
    samples = [sample("a", [5, 6], [1, 2]), sample("a", [5, 6], [3])]
    batch = pack(samples, Layout((Extent(8, 6, 3),), 8), share=False).batches[0]
    assert batch.tokens.tolist() == [[5, 6, 1, 5, 6, 0, 0, 0]]
    assert batch.segment.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert (batch.parent == -1).all()


def test_different_prompts_of_one_group_are_not_shared() -> None:
    samples = [sample("a", [5, 6], [1, 2]), sample("a", [5, 9], [3, 4])]
    batch = pack(samples, Layout((Extent(8, 6, 3),), 8)).batches[0]
    assert batch.tokens.tolist() == [[5, 6, 1, 5, 9, 3, 0, 0]]
    assert batch.group.tolist() == [[0, 0, -1]]


@pytest.mark.parametrize("seed", range(5))
def test_unpack_is_the_inverse_and_nothing_straddles(seed: int) -> None:
    samples = random_update(seed)
    layout = choose_layout(32, 24, 4, micro_batch_tokens=256, data_shards=2)
    packed = pack(samples, layout, keep_zero_advantage=True)
    for values, field in ((packed.batches, "token"), (packed.batches, "rollout_logprobs")):
        arrays = unpack(packed, [getattr(batch, field) for batch in values])
        for one, array in zip(samples, arrays, strict=True):
            mask = one.trajectory.loss_mask
            expected = one.trajectory.tokens if field == "token" else one.trajectory.logprobs
            np.testing.assert_array_equal(array, np.where(mask, expected, 0))
    for batch in packed.batches:
        assert batch.shapes in layout.shapes
        assert batch.shapes[0] % 2 == 0
    assert 0 <= packed.padding_share < 0.6


def test_same_samples_same_batches() -> None:
    layout = choose_layout(32, 24, 4, 256)
    first, second = (pack(random_update(3), layout) for _ in range(2))
    assert first.places == second.places
    for a, b in zip(first.batches, second.batches, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_small_micro_batches_take_the_rest() -> None:
    layout = Layout((Extent(256, 192, 8),), micro_batch_tokens=2048)
    shape = layout.rows[0]
    assert layout.row_counts(shape) == (8, 2)
    assert layout.split_rows(shape, 8) == [8]
    assert layout.split_rows(shape, 3) == [2, 2]
    assert layout.split_rows(shape, 10) == [8, 2]
    assert layout.split_rows(shape, 15) == [8, 8]
    assert Layout((shape,), 2048, data_shards=4).row_counts(shape) == (32, 8)
    assert Layout((shape,), 100).split_rows(shape, 3) == [1, 1, 1]
    for count in range(1, 40):
        assert count <= sum(layout.split_rows(shape, count)) < count + 8


def test_whole_groups_stand_in_one_row() -> None:
    samples = random_update(1)
    samples += [sample("zero", [1, 2], [3, 4], None, 0.0), sample("zero", [1, 2], [5], None, 0.0)]
    packed = pack(samples, choose_layout(32, 24, 4, 256, keep_groups_whole=True), keep_groups_whole=True)
    rows: dict[str, set[tuple[int, int]]] = {}
    for one, place in zip(samples, packed.places, strict=True):
        if one.trajectory.prompt_id == "zero":
            assert place is None
        else:
            assert place is not None
            rows.setdefault(one.trajectory.prompt_id, set()).add((place.batch, place.row))
    assert all(len(found) == 1 for found in rows.values())
    with pytest.raises(UserError, match=r"learner\.row_tokens"):
        pack(samples, choose_layout(32, 24, 4, 256, row_tokens=56), keep_groups_whole=True)


def test_a_trajectory_longer_than_a_row_is_the_users_error() -> None:
    with pytest.raises(UserError, match="at least 41"):
        pack([sample("a", [1] * 20, [2] * 22)], Layout((Extent(40, 40, 4),), 40))


def test_nothing_to_train_on() -> None:
    packed = pack([sample("a", [1], [2], [0]), sample("b", [1], [2], None, 0.0)], choose_layout(8, 8, 1, 64))
    assert packed.batches == [] and packed.places == (None, None)
    assert Denominators.of(packed.samples) == (1, 1, 1)
    assert isinstance(packed, Packed) and unpack(packed, []) == [None, None]


def test_off_policy_needs_old_logprobs() -> None:
    with pytest.raises(ValueError, match="old_logprobs"):
        pack([sample("a", [1], [2])], choose_layout(8, 8, 1, 64), on_policy=False)


def test_chosen_rows_hold_the_longest_trajectory_and_a_group() -> None:
    [length] = {shape.tokens for shape in choose_layout(1024, 512, 8, micro_batch_tokens=8192).rows}
    assert 1536 < length <= 5120
    assert {s.tokens for s in choose_layout(64, 24, 8, 4096).rows} == {256}  # a whole group of short completions
    assert {s.tokens for s in choose_layout(1024, 512, 8, 1024).rows} == {1536}
    assert {s.tokens for s in choose_layout(1024, 512, 8, 8192, keep_groups_whole=True).rows} == {5120}
    assert {s.tokens for s in choose_layout(1024, 512, 8, 8192, row_tokens=2000).rows} == {2000}
    assert {s.tokens for s in choose_layout(1024, 512, 1, 2048).rows} == {1536}
    assert len(choose_layout(1024, 512, 8, 65536).shapes) <= 4
