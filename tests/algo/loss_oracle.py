"""Losses and gradients one token at a time, in plain Python and float64: the oracle. Shares no code with jaxgrpo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def clip_objective(
    arrays: dict[str, np.ndarray],
    *,
    ratio: str,
    eps_low: float,
    eps_high: float,
    aggregation: str,
    kl_coef: float = 0.0,
) -> tuple[float, np.ndarray]:
    """GRPO, GSPO, DAPO… with k3 KL: `arrays` are [B, T] (advantages [B]); returns the loss and its gradient [B, T]."""
    mask = arrays["loss_mask"]
    lengths = [int(sum(row)) for row in mask]
    tokens, sequences = sum(lengths), sum(length > 0 for length in lengths)
    loss, grad = 0.0, np.zeros(mask.shape)
    for b, length in enumerate(lengths):
        trained = [t for t in range(mask.shape[1]) if mask[b, t]]
        advantage = float(arrays["advantages"][b])
        logs = {t: float(arrays["logprobs"][b, t]) - float(arrays["old_logprobs"][b, t]) for t in trained}
        mean = sum(logs.values()) / length if length else 0.0
        for t in trained:
            share = 1 / tokens if aggregation == "token_mean" else 1 / (length * sequences)
            weight = math.exp(logs[t] if ratio == "token" else mean)
            clipped = min(max(weight, 1 - eps_low), 1 + eps_high)
            active = weight * advantage <= clipped * advantage
            loss -= share * min(weight * advantage, clipped * advantage)
            slope = -share * weight * advantage if active else 0.0
            if ratio == "sequence":
                for other in trained:
                    grad[b, other] += slope / length
            else:
                grad[b, t] += slope
            if kl_coef:
                d = float(arrays["ref_logprobs"][b, t]) - float(arrays["logprobs"][b, t])
                loss += kl_coef * share * (math.exp(d) - d - 1)
                grad[b, t] += kl_coef * share * (1 - math.exp(d))
    return loss, grad


def random_arrays(seed: int, rows: int = 4, width: int = 6, spread: float = 0.3, **fixed: Any) -> dict[str, np.ndarray]:
    """Random padded arrays; every row has a trained token, some have gaps; groups of two rows with opposite
    advantages."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, (rows, width))
    mask = (rng.random((rows, width)) < 0.7).astype(np.float32)
    mask[:, 0] = 1
    advantages = np.repeat(rng.normal(1.0, 0.3, (rows + 1) // 2), 2)[:rows] * np.where(np.arange(rows) % 2, -1, 1)
    arrays = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + spread * rng.normal(size=logprobs.shape),
        "ref_logprobs": logprobs + 0.5 * rng.normal(size=logprobs.shape),
        "rollout_logprobs": logprobs + 0.1 * rng.normal(size=logprobs.shape),
        "teacher_logprobs": logprobs + 0.5 * rng.normal(size=logprobs.shape),
        "entropy": rng.exponential(1.0, logprobs.shape),
        "loss_mask": mask,
        "advantages": advantages,
        "truncated": np.zeros(rows, bool),
        "group": np.arange(rows) // 2,
    }
    return {
        name: np.asarray(value, np.float32) if np.asarray(value).dtype == float else value
        for name, value in (arrays | fixed).items()
    }
