"""Packing, sharing, micro-batches, order, padding: none of them changes the loss or the gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import (
    LAYOUT,
    assert_close,
    make_learner,
    make_params,
    plain_gradient,
    random_samples,
    trajectory,
)

from jaxgrpo.algo.objective import Objective
from jaxgrpo.learner.layout import Extent, Layout
from jaxgrpo.learner.packing import Denominators, Sample, pack
from jaxgrpo.types.batch import TokenBatch

OBJECTIVES = {
    "sequence_mean": Objective(kl_coef=0.1),
    "token_mean": Objective(aggregation="token_mean"),
    "constant": Objective(aggregation="constant", max_completion_tokens=12),
    "sequence_ratio": Objective(ratio="sequence", policy_loss_options=(("eps_high", 4.0), ("eps_low", 0.9))),
}
LEARNERS = {name: make_learner(objective) for name, objective in OBJECTIVES.items()}
PARAMS = make_params()
# The same tokens in other rows and micro-batches.
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "unshared": {"share": False},
    "narrow rows": {"layout": Layout((Extent(21, 16, 6),), 84)},
    "a row a micro-batch": {"layout": Layout((Extent(24, 24, 8),), 24)},
    "one long row": {"layout": Layout((Extent(256, 192, 64),), 256)},
}


def gradient(name: str, samples: list[Sample], layout: Layout = LAYOUT, **options: Any) -> tuple[Any, Any]:
    packed = pack(samples, layout, on_policy=False, **options)
    grads, loss, _ = LEARNERS[name].gradients(PARAMS, packed.batches)
    return loss, grads


@pytest.mark.slow  # every way compiles its own shapes
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_equals_one_trajectory_a_row(name: str, way: str) -> None:
    samples = random_samples(1)
    assert_close(gradient(name, samples, **WAYS[way]), plain_gradient(OBJECTIVES[name], PARAMS, samples))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(2, 10**6), groups=st.integers(1, 5), generations=st.integers(1, 5), shuffle=st.randoms())
def test_any_samples_in_any_order(seed: int, groups: int, generations: int, shuffle: Any) -> None:
    samples = random_samples(seed, groups, generations)
    permuted = shuffle.sample(samples, len(samples))
    assert_close(gradient("token_mean", permuted), gradient("token_mean", samples, **WAYS["a row a micro-batch"]))


def test_tokens_weigh_the_same_in_short_and_long_micro_batches() -> None:
    # 10, 10, 10 and 70 trained tokens: each weighs 1/100, neither 1/40 nor 1/280.
    rng = np.random.default_rng(0)
    samples = []
    for group, length in enumerate((10, 10, 10, 70)):
        one = trajectory(str(group), 0, np.arange(3), rng.integers(0, 61, length), np.ones(length), np.zeros(length))
        zeros = np.zeros(len(one.tokens), np.float32)
        samples.append(Sample(one, 1.0, zeros, zeros))
    layout = Layout((Extent(73, 73, 1),), micro_batch_tokens=73)
    packed = pack(samples, layout, on_policy=True)
    assert sorted(int(b.loss_mask.sum()) for b in packed.batches) == [10, 10, 10, 70]
    learner = LEARNERS["token_mean"]
    batch = learner.place(packed.batches[0])

    def by_token(logprobs: jax.Array) -> jax.Array:
        return learner.objective(logprobs, None, batch)[0]

    weights = jax.grad(by_token)(np.full(batch.token.shape, -1.0, np.float32))
    np.testing.assert_allclose(weights[np.asarray(batch.loss_mask) > 0], -1 / 100, rtol=1e-6)
    one_batch = gradient("token_mean", samples, Layout((Extent(300, 300, 8),), 300))
    assert_close(gradient("token_mean", samples, layout), one_batch)


def test_samples_without_advantage_count_but_are_not_computed() -> None:
    samples = random_samples(3)
    samples[2] = dataclasses.replace(samples[2], advantages=0.0)
    samples[5] = dataclasses.replace(samples[5], advantages=np.zeros(len(samples[5].trajectory.tokens), np.float32))
    left_out = pack(samples, LAYOUT, on_policy=False)
    assert [i for i, place in enumerate(left_out.places) if place is None] == [2, 5]
    assert_close(gradient("token_mean", samples), gradient("token_mean", samples, keep_zero_advantage=True))
    assert_close(gradient("token_mean", samples), plain_gradient(OBJECTIVES["token_mean"], PARAMS, samples))


def test_samples_without_trained_tokens_count_nowhere() -> None:
    samples = random_samples(4)
    failed = dataclasses.replace(samples[0].trajectory, loss_mask=np.zeros_like(samples[0].trajectory.loss_mask))
    with_failure = [*samples, dataclasses.replace(samples[0], trajectory=failed)]
    assert Denominators.of(with_failure) == Denominators.of(samples)
    assert_close(gradient("sequence_mean", with_failure), gradient("sequence_mean", samples), tolerance=0)


@pytest.mark.parametrize("poison", [1e3, -np.inf, np.nan])
def test_poison_where_nothing_is_trained_on_is_harmless(poison: float) -> None:
    samples = random_samples(5)

    def poisoned(sample: Sample) -> Sample:
        mask = sample.trajectory.loss_mask
        values = {n: np.where(mask, getattr(sample, n), poison) for n in ("advantages", "old_logprobs", "ref_logprobs")}
        return dataclasses.replace(sample, **values)

    learner = LEARNERS["sequence_mean"]
    clean = pack(samples, LAYOUT, on_policy=False).batches
    dirty = [_poison_padding(b, poison) for b in pack([poisoned(s) for s in samples], LAYOUT, on_policy=False).batches]
    assert_close(learner.gradients(PARAMS, dirty)[:2], learner.gradients(PARAMS, clean)[:2], tolerance=0)


def _poison_padding(batch: TokenBatch, poison: float) -> TokenBatch:
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    assert (batch.loss_mask == 0).any()
    return batch.with_values(**{n: np.where(batch.loss_mask > 0, getattr(batch, n), np.float32(poison)) for n in names})
