"""The named objectives: one row each, read by `Objective.from_preset`. docs/losses.md explains every choice."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # name: ratio, policy loss and its options, aggregation, advantage and its scale, KL.
    "grpo": dict(
        ratio="token", policy_loss="clip", eps_low=0.2, eps_high=0.2, aggregation="sequence_mean",
        advantage="grpo", scale="group", kl_coef=0.04,
    ),
    "dr_grpo": dict(
        ratio="token", policy_loss="clip", eps_low=0.2, eps_high=0.2, aggregation="constant",
        advantage="dr_grpo",
    ),
    "bnpo": dict(
        ratio="token", policy_loss="clip", eps_low=0.2, eps_high=0.2, aggregation="token_mean",
        advantage="grpo", scale="group",
    ),
    "dapo": dict(
        ratio="token", policy_loss="clip", eps_low=0.2, eps_high=0.28, aggregation="token_mean",
        advantage="grpo", scale="group",
    ),
    "gspo": dict(
        ratio="sequence", policy_loss="clip", eps_low=3e-4, eps_high=4e-4, aggregation="sequence_mean",
        advantage="grpo", scale="group",
    ),
    "gspo_token": dict(
        ratio="sequence_token", policy_loss="clip", eps_low=3e-4, eps_high=4e-4, aggregation="sequence_mean",
        advantage="grpo", scale="group",
    ),
    "cispo": dict(
        ratio="token", policy_loss="cispo", eps_high=5.0, aggregation="token_mean",
        advantage="grpo", scale="group",
    ),
    "sapo": dict(
        ratio="token", policy_loss="sapo", policy_loss_options=dict(tau_pos=1.0, tau_neg=1.05),
        aggregation="sequence_mean", advantage="grpo", scale="group",
    ),
    "rloo": dict(
        ratio="token", policy_loss="clip", eps_low=0.2, eps_high=0.2, aggregation="sequence_mean",
        advantage="rloo", scale="none", kl_coef=0.04, kl_in_reward=True,
    ),
    "reinforce_pp": dict(
        ratio="token", policy_loss="clip", eps_low=0.2, eps_high=0.2, aggregation="sequence_mean",
        advantage="reinforce_pp", scale="batch", kl_coef=0.04, kl_in_reward=True,
    ),
    "real": dict(
        ratio="token", policy_loss="real", policy_loss_options=dict(tau=0.5), aggregation="group_mean",
        advantage="grpo", scale="none", kl_aggregation="token_mean",
    ),
    "fipo": dict(
        ratio="token", policy_loss="fipo", eps_low=0.2, eps_high=0.2,
        policy_loss_options=dict(half_life=32.0, weight_range=0.2, high_only=True, safety_threshold=4.0),
        aggregation="token_mean", advantage="grpo", scale="group",
    ),
}
"""Preset name to overrides of `Objective`'s defaults."""
