"""What hurts in practice: overflow, empty masks, clamps, KL, denominators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracle import clip_objective, random_arrays

from jaxgrpo.algo.kl import ESTIMATORS, k1, k2, k3, sequence_penalty
from jaxgrpo.algo.masking import masked_quantile, sum_by, take_by
from jaxgrpo.algo.objective import evaluate_padded
from jaxgrpo.algo.policy_losses import future_kl


def test_truncated_rows_count_in_no_denominator() -> None:
    """P12: 4 rows of 6 tokens, two truncated: the divisors are 12 tokens and 2 sequences."""
    arrays = random_arrays(0, loss_mask=np.ones((4, 6), np.float32), truncated=np.array([0, 1, 0, 1], bool))
    kept = {name: value[[0, 2]] for name, value in arrays.items()}
    for aggregation in ("token_mean", "sequence_mean"):
        result = evaluate_padded({"preset": "dapo", "aggregation": aggregation, "drop_truncated": True}, arrays)
        loss, grad = clip_objective(kept, ratio="token", eps_low=0.2, eps_high=0.28, aggregation=aggregation)
        np.testing.assert_allclose(result["loss"], loss, atol=1e-6)
        np.testing.assert_allclose(result["grad"][[0, 2]], grad, atol=1e-6)
        assert not np.any(result["grad"][[1, 3]])


@pytest.mark.parametrize("preset", ["grpo", "gspo", "gspo_token", "cispo", "sapo", "fipo", "real"])
def test_runaway_ratios_stay_finite_and_are_counted(preset: str) -> None:
    """P14: log ratios of ±200 on trained tokens."""
    arrays = random_arrays(1, loss_mask=np.ones((4, 6), np.float32))
    arrays["old_logprobs"] = arrays["logprobs"] + np.array([-200, 200, -200, 200], np.float32)[:, None]
    arrays["advantages"] = np.array([1, 1, -1, -1], np.float32)
    result = evaluate_padded({"preset": preset, "kl_coef": 0.0}, arrays)
    assert np.isfinite(result["loss"]) and np.all(np.isfinite(result["grad"]))
    assert result["metrics"]["ratio/clamped_frac"] == 1.0


@pytest.mark.parametrize("preset", ["grpo", "gspo", "real", "fipo"])
def test_no_nan_is_made_on_the_way(preset: str) -> None:
    """Even intermediate values are never NaN: JAX's own check is on."""
    arrays = random_arrays(2)
    for name in ("logprobs", "old_logprobs", "ref_logprobs"):
        arrays[name] = np.where(arrays["loss_mask"] > 0, arrays[name], np.float32(-np.inf))
    with jax.debug_nans(True):
        evaluate_padded({"preset": preset}, arrays)


def test_kl_estimators() -> None:
    """P19: values by hand, zero for equal policies, finite far away; k2 and k3 have the gradients they are named
    for."""
    ours, reference = jnp.array([-1.0, -1.0, -1.0]), jnp.array([-1.0, -1.5, 99.0])
    np.testing.assert_allclose(k1(ours, reference), [0, 0.5, -20], atol=1e-6)
    np.testing.assert_allclose(k2(ours, reference), [0, 0.125, 10], atol=1e-6)
    np.testing.assert_allclose(k3(ours, reference), [0, np.exp(-0.5) + 0.5 - 1, 10], atol=1e-6)
    for estimator in ESTIMATORS.values():
        assert np.all(np.isfinite(jax.grad(lambda x, f=estimator: f(x, reference).sum())(ours)))

    logits, target = jnp.array([0.3, -0.2, 0.9]), jax.nn.log_softmax(jnp.array([-0.5, 0.4, 0.1]))
    policy = jax.nn.log_softmax(logits)
    forward = jax.grad(lambda x: jnp.sum(jnp.exp(jax.nn.log_softmax(x)) * (jax.nn.log_softmax(x) - target)))(logits)
    reverse = jax.grad(lambda x: jnp.sum(jnp.exp(target) * (target - jax.nn.log_softmax(x))))(logits)

    def expected_gradient(estimator: str) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jnp.exp(policy) * ESTIMATORS[estimator](jax.nn.log_softmax(x), target)))(
            logits
        )

    np.testing.assert_allclose(expected_gradient("k1"), 0, atol=1e-6)
    np.testing.assert_allclose(expected_gradient("k2"), forward, atol=1e-6)
    np.testing.assert_allclose(expected_gradient("k3"), reverse, atol=1e-6)


def test_kl_in_the_reward_and_absent_kl() -> None:
    arrays = random_arrays(3)
    mask = arrays["loss_mask"]
    expected = ((arrays["old_logprobs"] - arrays["ref_logprobs"]) * mask).sum(axis=1)
    np.testing.assert_allclose(
        sequence_penalty(arrays["old_logprobs"], arrays["ref_logprobs"], mask), expected, atol=1e-5
    )
    assert "kl" not in evaluate_padded({"preset": "dapo"}, arrays)["metrics"]
    equal = evaluate_padded({"preset": "grpo"}, arrays | {"ref_logprobs": arrays["logprobs"]})
    assert equal["metrics"]["kl"] == 0 and equal["terms"]["kl"] == 0


def test_a_group_without_signal() -> None:
    """P17: with advantages of 0 the KL term still pulls, documented; without it nothing moves."""
    arrays = random_arrays(4, advantages=np.zeros(4, np.float32))
    assert not np.any(evaluate_padded({"preset": "grpo", "kl_coef": 0.0}, arrays)["grad"])
    assert np.any(evaluate_padded({"preset": "grpo", "kl_coef": 0.04}, arrays)["grad"])


def test_sequence_weights_of_gspo() -> None:
    """P16: sequences of 2 and 4 tokens weigh the same."""
    lengths = np.array([2, 4, 0, 0])
    arrays = random_arrays(
        5, loss_mask=(np.arange(6) < lengths[:, None]).astype(np.float32), advantages=np.ones(4, np.float32)
    )
    result = evaluate_padded({"preset": "gspo"}, arrays | {"old_logprobs": arrays["logprobs"]})
    np.testing.assert_allclose(result["grad"].sum(axis=1), [-0.5, -0.5, 0, 0], atol=1e-6)
    assert all(isinstance(value, float) for value in result["metrics"].values())


def test_clip_ratio_extremes_are_over_sequences() -> None:
    lengths = np.array([4, 4, 0, 0])
    arrays = random_arrays(
        6, loss_mask=(np.arange(6) < lengths[:, None]).astype(np.float32), advantages=np.ones(4, np.float32)
    )
    arrays["old_logprobs"] = arrays["logprobs"] - (np.arange(6) < np.array([3, 1, 6, 6])[:, None])
    metrics = evaluate_padded({"preset": "dapo"}, arrays)["metrics"]
    assert metrics["clip_ratio/high_mean"] == 0.5 and metrics["clip_ratio/high_max"] == 0.75
    assert metrics["clip_ratio/region_mean"] == 0.5 and metrics["clip_ratio/low_min"] == 0.0


def test_future_kl_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    sequence = np.array([[0, 0, 0, 1, 1, -1, 2, 2]], np.int32)
    position = np.array(
        [[3, 4, 9, 3, 4, 0, 5, 6]], np.int32
    )  # a gap of five positions between two targets of sequence 0
    shift = (rng.normal(size=(1, 8)) * (sequence >= 0)).astype(np.float32)
    expected = np.zeros(8)
    for t in range(8):
        for k in range(t, 8):
            if sequence[0, k] == sequence[0, t] >= 0:
                expected[t] += 2 ** (-(position[0, k] - position[0, t]) / 3.0) * shift[0, k]
    np.testing.assert_allclose(future_kl(shift, position, sequence, 3.0)[0], expected, atol=1e-6)


def test_sums_by_index() -> None:
    values, index = jnp.array([[1.0, 2.0, 4.0, 8.0]]), jnp.array([[1, -1, 0, 1]])
    np.testing.assert_array_equal(sum_by(values, index, 3), [[4, 9, 0]])
    np.testing.assert_array_equal(take_by(jnp.array([[5.0, 6.0, 7.0]]), index), [[6, 0, 5, 6]])


@pytest.mark.parametrize("q", [0.0, 0.3, 0.8, 1.0])
def test_masked_quantile(q: float) -> None:
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(3, 5)).astype(np.float32), rng.random((3, 5)) < 0.6
    np.testing.assert_allclose(masked_quantile(values, mask, q), np.quantile(values[mask], q), rtol=1e-5)
    assert masked_quantile(values, mask * 0, q) == 0
