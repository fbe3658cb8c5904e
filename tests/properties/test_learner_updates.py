"""Whole updates: what changes the state, what must not, what is reported, how often something is compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_cases import DECODER, LAYOUT, assert_close, make_learner, make_params, plain_gradient, random_samples

from jaxgrpo.algo.objective import Objective
from jaxgrpo.learner.layout import choose_layout
from jaxgrpo.learner.packing import pack, unpack
from jaxgrpo.learner.state import abstract_state, create, init_params
from jaxgrpo.learner.step import Learner
from jaxgrpo.metrics import finalize
from jaxgrpo.types.batch import TokenBatch

OBJECTIVE = Objective(kl_coef=0.1)
LEARNER = make_learner(OBJECTIVE)


def new_state(learner: Learner = LEARNER, with_reference: bool = False) -> Any:
    return create(
        init_params(DECODER, jax.random.key(0), learner.mesh), learner.optimizer, with_reference=with_reference
    )


def copied(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def assert_same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_an_update_is_the_optimizer_on_the_plain_gradient() -> None:
    samples = random_samples(0)
    state = new_state(with_reference=True)
    before = copied(state.params)
    _, grads = plain_gradient(OBJECTIVE, before, samples)
    batches = pack(samples, LAYOUT, on_policy=False).batches
    state, metrics = LEARNER.update(state, batches)
    transform = LEARNER.optimizer.transform
    steps, _ = transform.update(grads, transform.init(before), before)
    assert_close(state.params, optax.apply_updates(before, steps), tolerance=2e-4)
    assert_same(state.reference, before)  # a copy, not the donated buffers
    values = finalize(metrics)
    assert values["grad_norm"] == pytest.approx(float(optax.global_norm(grads)), rel=1e-4)
    assert values["learning_rate"] == pytest.approx(1e-2)
    assert values["update_skipped"] == 0 and math.isfinite(values["loss"]) and "kl" in values
    assert (int(state.updates), int(state.skipped)) == (1, 0)


def test_first_update_on_policy_has_ratio_one_and_scored_log_probs_agree() -> None:
    samples = random_samples(1)
    packed = pack(samples, LAYOUT)
    params = make_params()
    values = LEARNER.logprobs(params, packed.batches)
    scored = [dataclasses.replace(s, old_logprobs=a) for s, a in zip(samples, unpack(packed, values), strict=True)]
    on_policy = LEARNER.gradients(params, packed.batches)
    with_old = LEARNER.gradients(params, pack(scored, LAYOUT, on_policy=False).batches)
    assert_close(on_policy[:2], with_old[:2])
    for array, one in zip(unpack(packed, values), samples, strict=True):
        assert array is not None and (array[one.trajectory.loss_mask] < 0).all()


def test_update_without_anything_to_train_on_changes_no_bit() -> None:
    samples = [dataclasses.replace(s, advantages=0.0) for s in random_samples(2)]
    state = new_state()
    before = copied(state)
    state, metrics = LEARNER.update(state, pack(samples, LAYOUT).batches)
    assert metrics == {}
    assert_same(state, before)


@pytest.mark.parametrize("where", ["advantages", "old_logprobs"])
def test_non_finite_update_is_skipped_and_counted(where: str) -> None:
    samples = random_samples(3)
    state = new_state()
    before = copied(state)
    good = pack(samples, LAYOUT, on_policy=False).batches
    mask = good[0].loss_mask
    bad = [
        good[0].with_values(
            **{where: np.where(np.cumsum(mask).reshape(mask.shape) == 5, np.nan, getattr(good[0], where))}
        )
    ]
    for count in (1, 2):
        state, metrics = LEARNER.update(state, bad + good[1:])
        assert finalize(metrics) == {"update_skipped": 1.0}
        assert (int(state.skipped), int(state.skipped_in_a_row), int(state.updates)) == (count, count, 0)
        assert_same((state.params, state.opt_state), (before.params, before.opt_state))
    state, metrics = LEARNER.update(state, good)
    assert (int(state.skipped), int(state.skipped_in_a_row), int(state.updates)) == (2, 0, 1)
    assert finalize(metrics)["update_skipped"] == 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


def test_frozen_parameters_get_no_gradient_and_stay() -> None:
    learner = make_learner(OBJECTIVE, frozen=["^embed/", "query"])
    state = new_state(learner)
    before = copied(state.params)
    batches = pack(random_samples(4), LAYOUT, on_policy=False).batches
    grads, _, _ = learner.gradients(state.params, batches)
    assert grads["embed"]["embedding"] is None and grads["layers"]["attention"]["query"]["kernel"] is None
    whole, _, _ = LEARNER.gradients(state.params, batches)
    assert_close(grads["layers"]["mlp"], whole["layers"]["mlp"])
    state, _ = learner.update(state, batches)
    assert_same(state.params["embed"], before["embed"])
    assert (np.array(state.params["layers"]["mlp"]["up"]["kernel"]) != before["layers"]["mlp"]["up"]["kernel"]).any()


def test_function_between_log_probs_and_objective_changes_the_gradient_only() -> None:
    @jax.custom_vjp
    def tripled(logprobs: jax.Array) -> jax.Array:
        return logprobs

    tripled.defvjp(lambda logprobs: (logprobs, None), lambda _, cotangent: (3 * cotangent,))
    learner = dataclasses.replace(LEARNER, through=lambda logprobs, batch: tripled(logprobs))
    params, batches = make_params(), pack(random_samples(5), LAYOUT, on_policy=False).batches
    grads, loss, _ = learner.gradients(params, batches)
    plain_grads, plain_loss, _ = LEARNER.gradients(params, batches)
    assert float(loss) == pytest.approx(float(plain_loss))
    assert_close(grads, jax.tree.map(lambda g: 3 * g, plain_grads))


def test_entropy_bonus_has_a_gradient() -> None:
    learner = make_learner(Objective(entropy_coef=0.5))
    params, batches = make_params(), pack(random_samples(6), LAYOUT, on_policy=False).batches
    batch = learner.place(batches[0])
    zero = batch.with_values(advantages=jnp.zeros_like(batch.advantages))
    direction = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1), p.shape), params)

    def loss(step: float) -> float:
        moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
        return float(learner.loss(moved, zero)[0])

    grads = jax.grad(lambda p: learner.loss(p, zero)[0])(params)
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
    assert slope == pytest.approx((loss(1e-3) - loss(-1e-3)) / 2e-3, rel=2e-2)


def test_compilations_are_bounded_by_the_layout() -> None:
    layout = choose_layout(8, 12, 4, micro_batch_tokens=256)
    learner = make_learner(OBJECTIVE)
    state, shapes = new_state(learner), set()
    for seed in range(20):
        groups = 1 + seed % 5
        packed = pack(random_samples(seed, groups), layout, on_policy=False)
        shapes |= {batch.shapes for batch in packed.batches}
        assert len(shapes) == 1 or packed.padding_share < 0.9
        state, _ = learner.update(state, packed.batches)
    assert shapes <= set(layout.shapes)
    assert learner._gradient._cache_size() == len(shapes) <= len(layout.shapes)
    assert learner._apply._cache_size() == 1
    assert int(state.updates) == 20


def test_a_restored_checkpoint_has_the_states_structure() -> None:
    state = new_state(with_reference=True)
    abstract = abstract_state(DECODER, LEARNER.optimizer, LEARNER.mesh, with_reference=True)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


def test_batches_of_one_update_need_nothing_but_their_fields() -> None:
    batch = pack(random_samples(7), LAYOUT).batches[0]
    placed = LEARNER.place(batch)
    assert isinstance(placed, TokenBatch) and placed.shapes == batch.shapes
