"""The optimizer's chain: schedules, decay on matrices only, frozen parameters, clipping, extra transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgrpo.config.schema import OptimizerSection
from jaxgrpo.errors import UserError
from jaxgrpo.learner.optimizer import make_optimizer, make_schedule

AXES = {
    "embed": {"embedding": ("vocab", "embed")},
    "layers": {"query": {"kernel": ("layers", "embed", "heads"), "bias": ("layers", "heads")}},
    "final_norm": {"scale": ("norm",)},
}
PARAMS = {
    "embed": {"embedding": jnp.ones((6, 4))},
    "layers": {"query": {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.ones((2, 4))}},
    "final_norm": {"scale": jnp.ones(4)},
}


def one_step(grads: Any, extra: Any = (), **section: Any) -> Any:
    optimizer = make_optimizer(OptimizerSection(**{"learning_rate": 0.1, **section}), 10, AXES, extra)
    params, frozen = optimizer.split(PARAMS)
    steps, _ = optimizer.transform.update(optimizer.split(grads)[0], optimizer.transform.init(params), params)
    return optimizer.join(optax.apply_updates(params, steps), frozen)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 12: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 8: 0.6, 12: 0.2, 99: 0.2}),
        ("cosine", {3: 1.0, 4: 1.0, 8: 0.6, 12: 0.2, 99: 0.2}),
    ],
)
def test_schedules(schedule: str, expected: dict[int, float]) -> None:
    section = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=4, final_learning_rate=0.2)
    rate = make_schedule(section, 12)
    for count, value in expected.items():
        assert float(rate(count)) == pytest.approx(value), count


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_weight_decay_reaches_matrices_only(name: str) -> None:
    after = one_step(jax.tree.map(jnp.zeros_like, PARAMS), name=name, weight_decay=0.5)
    np.testing.assert_allclose(after["embed"]["embedding"], 0.95, rtol=1e-6)
    np.testing.assert_allclose(after["layers"]["query"]["kernel"], 0.95, rtol=1e-6)
    np.testing.assert_array_equal(after["layers"]["query"]["bias"], 1)
    np.testing.assert_array_equal(after["final_norm"]["scale"], 1)


def test_adamw_is_optax_adamw() -> None:
    grads = jax.tree.map(lambda p: jnp.arange(p.size, dtype=jnp.float32).reshape(p.shape) - 3, PARAMS)
    mask = {
        "embed": {"embedding": True},
        "layers": {"query": {"kernel": True, "bias": False}},
        "final_norm": {"scale": False},
    }
    reference = optax.adamw(0.1, 0.8, 0.9, 1e-6, weight_decay=0.2, mask=mask)
    steps, _ = reference.update(grads, reference.init(PARAMS), PARAMS)
    after = one_step(grads, weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6, max_grad_norm=None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after, optax.apply_updates(PARAMS, steps))


def test_sgd_clips_then_transforms() -> None:
    grads = jax.tree.map(jnp.zeros_like, PARAMS) | {"final_norm": {"scale": jnp.full(4, 50.0)}}
    clipped = one_step(grads, name="sgd", beta1=0.0)  # norm 100 -> 1, so 0.5 a component
    np.testing.assert_allclose(clipped["final_norm"]["scale"], 0.95, rtol=1e-6)
    doubled = one_step(grads, (optax.scale(2.0),), name="sgd", beta1=0.0)
    np.testing.assert_allclose(doubled["final_norm"]["scale"], 0.9, rtol=1e-6)


def test_frozen_parameters_have_no_state_and_do_not_move() -> None:
    optimizer = make_optimizer(OptimizerSection(frozen=["^embed/", "bias$"]), 10, AXES)
    state = optimizer.transform.init(optimizer.split(PARAMS)[0])
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * (32 + 4) + 2
    )  # two moments of what trains, two counts
    after = one_step(jax.tree.map(jnp.ones_like, PARAMS), frozen=["^embed/", "bias$"], weight_decay=0.5)
    np.testing.assert_array_equal(after["embed"]["embedding"], 1)
    np.testing.assert_array_equal(after["layers"]["query"]["bias"], 1)
    assert (after["layers"]["query"]["kernel"] < 1).all()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["nothing_like_this"], r"optimizer\.frozen\[0\]"),
        (["embed", "("], "regular expression"),
        ([""], "left to train"),
    ],
)
def test_patterns_that_cannot_be_meant(patterns: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_optimizer(OptimizerSection(frozen=patterns), 10, AXES)
