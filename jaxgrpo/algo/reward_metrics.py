"""Metrics of a step's rewards, in NumPy. Names follow TRL; `docs/metrics.md` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.algo.advantages import as_matrix, group_mean, group_std, has_spread, index_episodes, total_reward
from jaxgrpo.metrics import Mean, Metrics


def reward_metrics(
    rewards: Any,
    weights: Sequence[float] | None,
    prompt_ids: Sequence[Any],
    episode_ids: Sequence[Any] | None,
    names: Sequence[str],
    *,
    right_above: float = 0.0,
) -> Metrics:
    """Reward statistics; episodes count once, unscored ones not at all, except in the counts of unscored ones.

    Args:
        rewards, weights, prompt_ids, episode_ids: as in `advantages.estimate`.
        names: [F], the reward functions' names.
        right_above: a group without spread is "all right" if its reward lies above this, else "all wrong".

    Returns:
        `reward` (mean of group means), `reward_std` (mean of group stds), `frac_reward_zero_std`,
        `frac_groups_all_right` and `frac_groups_all_wrong` (over groups with a scored episode), `unscored` (episodes
        without any score) and, for each function, `rewards/<name>/mean`, `/std` (ddof 1, over the episodes it scored)
        and `/unscored` (a count).
    """
    matrix = as_matrix(rewards)
    if matrix.size == 0:
        return {}
    weights = np.ones(matrix.shape[1]) if weights is None else np.asarray(weights, np.float64)
    group, _, first = index_episodes(matrix, prompt_ids, episode_ids)
    matrix, group = matrix[first], group[first]
    scored = ~np.isnan(matrix[:, weights != 0]).all(axis=1)
    metrics: Metrics = {"unscored": Mean(float(np.sum(~scored)), 1.0)}
    if scored.any():
        metrics |= _group_metrics(total_reward(matrix[scored], weights), group[scored], right_above)
    for name, column in zip(names, matrix.T, strict=True):
        valid = column[~np.isnan(column)]
        std = float(np.std(valid, ddof=1)) if len(valid) > 1 else 0.0
        metrics[f"rewards/{name}/mean"] = Mean(float(valid.sum()), float(len(valid)))
        metrics[f"rewards/{name}/std"] = Mean(std * len(valid), float(len(valid)))
        metrics[f"rewards/{name}/unscored"] = Mean(float(len(column) - len(valid)), 1.0)
    return metrics


def _group_metrics(total: np.ndarray, group: np.ndarray, right_above: float) -> Metrics:
    one_each = np.unique(group, return_index=True)[1]
    count = float(len(one_each))
    means, stds = group_mean(total, group)[one_each], group_std(total, group)[one_each]
    flat = ~has_spread(total, group)[one_each]
    right = means > right_above
    return {
        "reward": Mean(float(means.sum()), count),
        "reward_std": Mean(float(stds.sum()), count),
        "frac_reward_zero_std": Mean(float(flat.sum()), count),
        "frac_groups_all_right": Mean(float((flat & right).sum()), count),
        "frac_groups_all_wrong": Mean(float((flat & ~right).sum()), count),
    }
