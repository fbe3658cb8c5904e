"""Advantages against numbers recorded from another implementation (objective_golden.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxgrpo.algo.advantages import as_matrix, from_rewards, total_reward
from jaxgrpo.algo.distillation import rlsd_advantages, teacher_advantages
from jaxgrpo.algo.reward_metrics import reward_metrics
from jaxgrpo.metrics import finalize

GOLDEN = json.loads((Path(__file__).parent / "objective_golden.json").read_text())
INPUTS, EXPECTED = GOLDEN["inputs"], GOLDEN["advantages"]
PROMPTS = np.repeat([0, 1], 4)
NAMES = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp"}
SCALES = ("group", "batch", "none", "gdpo")
# gdpo is an estimator of its own here: asked for together with another estimator, or with variable group sizes, the
# recorded implementation falls back to centred rewards; ours is always GDPO. One reward function, groups (a, b), (c,
# d), (e): z = ±1/sqrt(2) in each pair, then scaled by the batch's std (sqrt(1/2)): ±1, and 0 for the group of one.
GDPO_DYNAMIC = [1.0, 1.0, -1.0, 1.0, -1.0, 0.0]


def advantages(estimator: str, scale: str, **inputs: object) -> np.ndarray:
    if scale == "gdpo":
        return from_rewards(estimator="gdpo", **inputs)
    return from_rewards(estimator=NAMES[estimator], scale=scale, **inputs)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("estimator", NAMES)
def test_fixed_groups(estimator: str, scale: str) -> None:
    expected = EXPECTED["grpo/gdpo" if scale == "gdpo" else f"{estimator}/{scale}"]
    result = advantages(estimator, scale, rewards=INPUTS["R"], weights=INPUTS["w"], prompt_ids=PROMPTS)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert not np.any(result[4:]), "equal rewards give exactly 0"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("estimator", NAMES)
def test_episodes_of_several_trajectories(estimator: str, scale: str) -> None:
    expected = GDPO_DYNAMIC if scale == "gdpo" else EXPECTED[f"dynamic/{estimator}/{scale}"]
    inputs = dict(
        rewards=INPUTS["dyn_R"],
        weights=None,
        prompt_ids=INPUTS["dyn_prompt_ids"],
        episode_ids=INPUTS["dyn_request_ids"],
    )
    np.testing.assert_allclose(advantages(estimator, scale, **inputs), expected, atol=1e-5)


def test_the_recorded_fallback_of_gdpo_is_reachable_by_name() -> None:
    plain = from_rewards(INPUTS["R"], INPUTS["w"], PROMPTS, estimator="reinforce_pp", scale="none")
    np.testing.assert_allclose(plain, EXPECTED["reinforce_plus_plus/gdpo"], atol=1e-5)
    dynamic = from_rewards(INPUTS["dyn_R"], None, INPUTS["dyn_prompt_ids"], INPUTS["dyn_request_ids"], "dr_grpo")
    for estimator in ("grpo", "reinforce_plus_plus"):
        np.testing.assert_allclose(dynamic, EXPECTED[f"dynamic/{estimator}/gdpo"], atol=1e-5)
    rloo = from_rewards(INPUTS["dyn_R"], None, INPUTS["dyn_prompt_ids"], INPUTS["dyn_request_ids"], "rloo")
    np.testing.assert_allclose(rloo, EXPECTED["dynamic/rloo/gdpo"], atol=1e-5)


def test_kl_in_reward() -> None:
    penalty = 0.1 * np.array(INPUTS["kl_values"])
    result = from_rewards(INPUTS["R"], INPUTS["w"], PROMPTS, estimator="rloo", scale="none", penalty=penalty)
    np.testing.assert_allclose(result, EXPECTED["rloo/none/kl_in_reward0.1"], atol=1e-5)


def test_weighted_rewards() -> None:
    total = total_reward(as_matrix(INPUTS["R"]), np.array(INPUTS["w"]))
    np.testing.assert_allclose(total, EXPECTED["weighted_rewards"], atol=1e-6)


def test_reward_metrics() -> None:
    expected = EXPECTED["metrics/group"]
    metrics = finalize(reward_metrics(INPUTS["R"], INPUTS["w"], PROMPTS, None, ["a", "b"]))
    np.testing.assert_allclose(metrics["reward"], expected["reward_mean"], atol=1e-6)
    np.testing.assert_allclose(metrics["reward_std"], expected["reward_std"], atol=1e-6)
    np.testing.assert_allclose(metrics["frac_reward_zero_std"], expected["frac_reward_zero_std"])
    for name in ("a", "b"):
        np.testing.assert_allclose(metrics[f"rewards/{name}/mean"], expected["per_func_mean"][name], atol=1e-6)
        np.testing.assert_allclose(metrics[f"rewards/{name}/std"], expected["per_func_std"][name], atol=1e-6)


def test_teacher_terms() -> None:
    teacher, old, mask = (np.array(INPUTS[name]) for name in ("teacher", "old", "mask"))
    base = np.array(INPUTS["adv_seq"])[:, None]
    np.testing.assert_allclose(rlsd_advantages(base, teacher, old, mask), EXPECTED["rlsd/lam0.5"], atol=1e-5)
    np.testing.assert_allclose(teacher_advantages(base, teacher, old, mask), EXPECTED["opd/coef1"], atol=1e-5)
