"""The objective against a one-token-at-a-time oracle, and the properties every preset must have."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_oracle import clip_objective, random_arrays

from jaxgrpo.algo.objective import PRESETS, Objective, evaluate_padded, from_preset
from jaxgrpo.errors import UserError
from jaxgrpo.registry import names, register

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=8, deadline=None)
TOKEN_FIELDS = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs", "entropy")
MAXIMAL = {  # every slot in use at once
    "preset": "grpo",
    "ratio": "sequence_token",
    "eps_dual": 3.0,
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "sdar_coef": 0.1,
    "sampler_correction": "sequence_mask",
    "top_entropy_quantile": 0.5,
    "off_policy_mask_delta": 0.1,
}
OBJECTIVES: dict[str, dict[str, Any]] = {name: {"preset": name, "max_completion_tokens": 6} for name in PRESETS}
OBJECTIVES |= {
    "maximal": MAXIMAL,
    "reinforce": {"preset": "dapo", "policy_loss": "reinforce"},
    "sequence_sum": {"preset": "dapo", "aggregation": "sequence_sum"},
    "group_mean": {"preset": "dapo", "aggregation": "group_mean"},
}


def same(left: dict[str, Any], right: dict[str, Any], grad: Any = None, metrics: bool = True) -> None:
    np.testing.assert_allclose(left["loss"], right["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(left["grad"] if grad is None else grad, right["grad"], rtol=1e-5, atol=1e-6)
    if metrics:
        for name, value in right["metrics"].items():
            np.testing.assert_allclose(left["metrics"][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@given(seeds, st.sampled_from(["token", "sequence"]), st.sampled_from(["token_mean", "sequence_mean"]))
@few
def test_agrees_with_the_oracle(seed: int, ratio: str, aggregation: str) -> None:
    arrays = random_arrays(seed)
    options = dict(ratio=ratio, eps_low=0.1, eps_high=0.15, aggregation=aggregation, kl_coef=0.05)
    loss, grad = clip_objective(arrays, **options)
    result = evaluate_padded({"preset": "grpo", **options}, arrays)
    np.testing.assert_allclose(result["loss"], loss, atol=2e-6)
    np.testing.assert_allclose(result["grad"], grad, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("real", "maximal")])
def test_on_policy_every_loss_has_the_reinforce_gradient(name: str) -> None:
    arrays = random_arrays(3)
    aggregation = from_preset(**_named(OBJECTIVES[name])).aggregation
    plain = {
        "preset": "grpo",
        "policy_loss": "reinforce",
        "kl_coef": 0.0,
        "aggregation": aggregation,
        "max_completion_tokens": 6,
    }
    ours = OBJECTIVES[name] | {"kl_coef": 0.0}
    expected = evaluate_padded(plain, arrays)["grad"]
    equal_old = arrays | {"old_logprobs": arrays["logprobs"]}
    np.testing.assert_allclose(evaluate_padded(ours, equal_old)["grad"], expected, atol=1e-6)
    without_old = {key: value for key, value in arrays.items() if key != "old_logprobs"}
    np.testing.assert_allclose(evaluate_padded(ours, without_old)["grad"], expected, atol=1e-6)


def test_real_on_policy_pushes_positives_up_and_negatives_down_equally() -> None:
    arrays = random_arrays(4)
    grad = evaluate_padded({"preset": "real"}, arrays | {"old_logprobs": arrays["logprobs"]})["grad"].sum(axis=1)
    # s = 0: each side has weight (1 / tau) / (1 + its size), over 2 groups.
    np.testing.assert_allclose(grad, np.array([-1, 1, -1, 1]) * 2 / 2 / 2, atol=1e-6)


@given(seeds)
@few
def test_gspo_token_has_the_value_of_gspo_and_the_gradient_of_a_token(seed: int) -> None:
    arrays = random_arrays(seed, spread=0.5)
    objective = {"preset": "gspo", "eps_low": 0.1, "eps_high": 0.1}
    whole = evaluate_padded(objective, arrays)
    token = evaluate_padded(objective | {"preset": "gspo_token"}, arrays)
    np.testing.assert_allclose(token["loss"], whole["loss"], atol=1e-6)
    np.testing.assert_allclose(token["grad"], whole["grad"], atol=1e-6)  # equal advantages: the sums coincide
    per_token = arrays | {"advantages": arrays["advantages"][:, None] * np.linspace(0.1, 1.0, 6, dtype=np.float32)}
    uneven = evaluate_padded(objective | {"preset": "gspo_token"}, per_token)["grad"]
    log_ratio = (arrays["logprobs"] - arrays["old_logprobs"]) * arrays["loss_mask"]
    length = arrays["loss_mask"].sum(axis=1, keepdims=True)
    ratio, advantages = np.exp(log_ratio.sum(axis=1, keepdims=True) / length), per_token["advantages"]
    inside = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages) == ratio * advantages
    expected = -1.0 * inside * ratio * advantages / length / 4 * arrays["loss_mask"]
    np.testing.assert_allclose(uneven, expected, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_garbage_changes_nothing(name: str) -> None:
    arrays = random_arrays(5)
    arrays["advantages"] = np.repeat(arrays["advantages"][:, None], 6, axis=1)
    masked = arrays["loss_mask"] == 0
    poisoned, rng = dict(arrays), np.random.default_rng(0)
    for field in (*TOKEN_FIELDS, "advantages"):
        garbage = rng.choice(np.array([1e4, -1e4, np.nan, np.inf, -np.inf], np.float32), masked.shape)
        poisoned[field] = np.where(masked, garbage, arrays[field])
    clean, dirty = evaluate_padded(OBJECTIVES[name], arrays), evaluate_padded(OBJECTIVES[name], poisoned)
    assert dirty["loss"] == clean["loss"]
    np.testing.assert_array_equal(dirty["grad"], clean["grad"])
    assert dirty["metrics"] == clean["metrics"]
    assert not np.any(dirty["grad"][masked])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_all_masked_batch_is_exactly_zero(name: str) -> None:
    everything_truncated = random_arrays(6, truncated=np.ones(4, bool))
    result = evaluate_padded(OBJECTIVES[name] | {"drop_truncated": True}, everything_truncated)
    assert result["loss"] == 0 and not np.any(result["grad"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_order_and_padding_change_nothing(name: str) -> None:
    arrays = random_arrays(7)
    base = evaluate_padded(OBJECTIVES[name], arrays)
    order = np.array([2, 0, 3, 1])
    shuffled = evaluate_padded(OBJECTIVES[name], {field: value[order] for field, value in arrays.items()})
    same(shuffled, base, shuffled["grad"][np.argsort(order)])
    rng = np.random.default_rng(0)
    padded = {
        field: np.concatenate([value, 30 * rng.normal(size=(4, 5)).astype(np.float32)], axis=1)
        if value.ndim == 2
        else value
        for field, value in arrays.items()
    }
    padded["loss_mask"][:, 6:] = 0
    wide = evaluate_padded(OBJECTIVES[name], padded)
    same(wide, base, wide["grad"][:, :6])


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "real", "sequence_sum", "group_mean", "maximal"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    # sdar, the entropy mask and sequence_token stop gradients, by design: their gradient is not that of their value.
    objective = {
        key: value for key, value in OBJECTIVES[name].items() if key not in ("top_entropy_quantile", "sdar_coef")
    }
    objective |= {"ratio": "sequence"} if name == "maximal" else {}
    arrays = random_arrays(8, spread=0.05)
    direction = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    up, down = (
        evaluate_padded(objective, arrays | {"logprobs": arrays["logprobs"] + step * direction})["loss"]
        for step in (5e-3, -5e-3)
    )
    slope = float((evaluate_padded(objective, arrays)["grad"] * direction).sum())
    np.testing.assert_allclose(slope, (up - down) / 1e-2, atol=3e-4, rtol=3e-3)


def test_entropy_bonus_differentiates_through_entropy() -> None:
    result = evaluate_padded({"preset": "dapo", "entropy_coef": 0.5}, random_arrays(9))
    np.testing.assert_allclose(result["terms"]["entropy"], -0.5 * result["metrics"]["entropy"], rtol=1e-5)


def test_terms_add_up_to_the_loss() -> None:
    result = evaluate_padded(MAXIMAL, random_arrays(10))
    assert set(result["terms"]) == {"policy", "kl", "entropy", "sdar"}
    np.testing.assert_allclose(sum(result["terms"].values()), result["loss"], rtol=1e-5)


def test_needs() -> None:
    grpo, dapo = from_preset("grpo"), from_preset("dapo")
    assert (
        grpo.needs_reference
        and grpo.needs_zero_advantages
        and not dapo.needs_reference
        and not dapo.needs_zero_advantages
    )
    rloo = from_preset("rloo")
    assert rloo.kl_estimator == "k1" and not rloo.needs_reference and rloo.needs_reference_for_reward
    assert from_preset("real").needs_whole_groups and not grpo.needs_whole_groups
    assert from_preset("dapo", top_entropy_quantile=0.2).needs_entropy and not dapo.needs_entropy
    assert from_preset("dapo", entropy_coef=0.1).needs_entropy
    assert (
        from_preset("dapo", sampler_correction="token_mask").needs_rollout_logprobs and not dapo.needs_rollout_logprobs
    )
    assert from_preset("dapo", sdar_coef=0.1).needs_teacher


def test_objectives_are_hashable_values() -> None:
    left, right = from_preset("dapo", top_entropy_quantile=0.2), from_preset("dapo", top_entropy_quantile=0.2)
    assert left == right and hash(left) == hash(right)
    assert hash(from_preset("dapo")) != hash(left)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ({"preset": "grp"}, "objective.preset"),
        ({"ratio": "tokens"}, "objective.ratio"),
        ({"beta": 0.1}, "objective.beta"),
        ({"policy_loss": "cisp"}, "objective.policy_loss"),
        ({"policy_loss": "sapo", "eps_low": 0.1}, "objective.policy_loss_options.eps_low"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "objective.kl_estimator"),
        ({"preset": "dr_grpo"}, "objective.max_completion_tokens"),
        ({"preset": "real", "aggregation": "token_mean"}, "objective.aggregation"),
        ({"preset": "real", "top_entropy_quantile": 0.2}, "objective.token_weights"),
        ({"sampler_correction_threshold": 2.0}, "objective.sampler_correction_threshold"),
        ({"token_weights": {"top_entropy": {"quantil": 0.1}}}, "objective.token_weights.top_entropy.quantil"),
        ({"advantage": "gdpo", "kl_in_reward": True}, "objective.kl_in_reward"),
        ({"advantage": "gdpo", "scale": "group"}, "objective.advantage_options.scale"),
    ],
)
def test_mistakes_are_named(overrides: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        from_preset(**_named({"preset": "dapo", **overrides}))
    assert where in [problem.path for problem in caught.value.problems]


def test_another_policy_loss_drops_the_presets_options() -> None:
    assert from_preset("dapo", policy_loss="sapo").policy_loss_options == ()
    assert dict(from_preset("sapo", policy_loss_options={"tau_neg": 2.0}).policy_loss_options) == {
        "tau_pos": 1.0,
        "tau_neg": 2.0,
    }


def test_built_ins_are_registered_and_users_add_their_own() -> None:
    assert set(names("policy_loss")) >= {"clip", "cispo", "sapo", "real", "fipo", "reinforce"}
    assert set(names("token_weights")) >= {"top_entropy", "off_policy_sequence_mask", "token_mask", "sequence_truncate"}
    assert set(names("advantage")) >= {"grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"}

    @register("policy_loss", "test_algo_unclipped")
    def unclipped(view: Any, *, gain: float = 1.0) -> tuple[jax.Array, dict[str, Any]]:
        return -gain * view.ratio * view.advantages, {}

    arrays = random_arrays(11)
    wide = evaluate_padded({"preset": "dapo", "eps_low": 0.99, "eps_high": 1e6}, arrays)
    own = evaluate_padded({"preset": "dapo", "policy_loss": "test_algo_unclipped"}, arrays)
    np.testing.assert_allclose(own["grad"], wide["grad"], atol=1e-6)
    twice = evaluate_padded(
        {"preset": "dapo", "policy_loss": "test_algo_unclipped", "policy_loss_options": {"gain": 2.0}}, arrays
    )
    np.testing.assert_allclose(twice["grad"], 2 * own["grad"], atol=1e-6)


def _named(objective: dict[str, Any]) -> dict[str, Any]:
    return {"name" if key == "preset" else key: value for key, value in objective.items()}


def test_from_preset_is_reachable_from_the_class() -> None:
    assert Objective.from_preset("gspo") == from_preset("gspo")
