"""Losses, gradients and metrics against numbers recorded from another implementation (objective_golden.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxgrpo.algo.objective import evaluate_padded

GOLDEN = json.loads((Path(__file__).parent / "objective_golden.json").read_text())
INPUTS = GOLDEN["inputs"]
ARRAYS = {
    "logprobs": INPUTS["lp"],
    "old_logprobs": INPUTS["old"],
    "ref_logprobs": INPUTS["ref"],
    "rollout_logprobs": INPUTS["roll"],
    "teacher_logprobs": INPUTS["teacher"],
    "entropy": INPUTS["entropy"],
    "loss_mask": INPUTS["mask"],
    "advantages": INPUTS["adv_seq"],
    "truncated": INPUTS["truncated"],
    "group": [0, 0, 1, 1],
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "token": {"ratio": "token"},
    "sequence": {"ratio": "sequence"},
    "sequence_token": {"ratio": "sequence_token"},
    "beta0.04": {"kl_coef": 0.04},
    "delta1.3": {"eps_dual": 1.3},
    "eps0.1,eps_high0.5": {"eps_low": 0.1, "eps_high": 0.5},
    "eps_high5": {"eps_high": 5.0},
    "overlong": {"drop_truncated": True},
    "entropy0.2+beta": {"kl_coef": 0.04, "top_entropy_quantile": 0.2},
    "log_offpolicy": {"sampler_diagnostics": True},
    "offmask-0.5": {"off_policy_mask_delta": -0.5},
    "delta1.3,both,thr1.1": {"eps_dual": 1.3, "policy_loss_options": {"high_only": False, "safety_threshold": 1.1}},
    "noclip": {"policy_loss_options": {"weight_range": None}},
    "sdar0.1": {"sdar_coef": 0.1},
} | {
    f"is_{mode}": {"kl_coef": 0.04, "sampler_correction": mode, "sampler_correction_threshold": 1.2}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}

# Cases in which we differ on purpose (docs/losses.md): the loss expected here, and our gradient over theirs. A dropped
# truncation counts in no denominator: 3 of 4 sequences, 11 of 17 tokens remain.
DEVIATIONS = {"grpo/overlong": (0.485757, 4 / 3), "dapo/overlong": (0.458709, 17 / 11)}

METRICS = {
    "low_clip_mean": "clip_ratio/low_mean",
    "high_clip_mean": "clip_ratio/high_mean",
    "region_clip_mean": "clip_ratio/region_mean",
    "cispo_clip_ratio": "cispo_clip_ratio",
    "entropy_threshold": "entropy/threshold",
    "sdar/gate_mean": "sdar/gate_mean",
    "sdar/gate_active_ratio": "sdar/gate_active_ratio",
    "sdar/teacher_gap_mean": "sdar/teacher_gap_mean",
}


def evaluate(case: str) -> dict[str, Any]:
    preset, variant = case.split("/", 1)
    objective = {"preset": preset, "kl_coef": 0.0, "max_completion_tokens": INPUTS["max_completion_length"]}
    if preset not in ("real", "sapo"):
        objective["eps_high"] = 0.2  # what the recorded runs used, also where our preset differs (dapo, cispo)
    return evaluate_padded(objective | OVERRIDES[variant], ARRAYS)


@pytest.mark.parametrize("case", GOLDEN["loss_cases"])
def test_loss_case(case: str) -> None:
    expected = GOLDEN["loss_cases"][case]
    result = evaluate(case)
    loss, factor = DEVIATIONS.get(case, (expected["loss"], 1.0))
    np.testing.assert_allclose(result["loss"], loss, atol=1e-5)
    np.testing.assert_allclose(result["grad"], np.array(expected["grad"]) * factor, atol=1e-5)

    recorded = {METRICS[k]: v for k, v in expected.get("clipping", {}).items() if k in METRICS}
    if case.endswith("offmask-0.5"):  # ours counts every trained token, also those that a weight of 0 takes out
        recorded = {"clip_ratio/low_mean": 2 / 17, "off_policy_sequence_mask/dropped": 1 / 4}
    recorded |= {METRICS[k]: v for k, v in expected.get("entropy", {}).items() if k in METRICS}
    recorded |= {METRICS[k]: v for k, v in expected.get("sdar", {}).items() if k in METRICS}
    recorded |= {f"fipo/{k}": v for k, v in expected.get("fipo", {}).items()}
    recorded |= {f"sampler_correction/{k}": v for k, v in expected.get("rollout_correction", {}).items()}
    if "kl" in expected:
        recorded["kl"] = expected["kl"]
    for name, value in recorded.items():
        np.testing.assert_allclose(result["metrics"][name], value, atol=1e-5, err_msg=name)


def test_all_sixteen_diagnostics_are_recorded() -> None:
    assert len(GOLDEN["loss_cases"]["grpo/is_token_mask"]["rollout_correction"]) == 16
    assert len(GOLDEN["loss_cases"]) == 43


def test_sdar_term() -> None:
    expected = GOLDEN["loss_cases"]["grpo/sdar0.1"]["sdar"]
    terms = evaluate("grpo/sdar0.1")["terms"]
    np.testing.assert_allclose(terms["sdar"], 0.1 * expected["sdar/loss"], atol=1e-6)
