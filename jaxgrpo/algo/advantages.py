"""From rewards to advantages, in NumPy: one number per trajectory, relative to its group.

An estimator is `fn(scores: Scores, *, options) -> [E]`, registered under kind `advantage`; it sees episodes that were
scored. What stands around it is the same for all: an episode that yields several trajectories counts once; an episode
that no reward function scored leaves the statistics and the loss; a group with fewer than two scored episodes
contributes nothing. r is the weighted reward, mean_g and std_g are the group's (std with ddof 1). Equal rewards give
exactly 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgrpo.errors import Problem, UserError
from jaxgrpo.registry import check_options, lookup, register

EPS = 1e-4
"""Added to standard deviations of rewards."""
GDPO_EPS = 1e-8
"""Added to GDPO's standard deviations."""
SAME = 1e-8
"""A group whose rewards differ by no more than this has no spread; a computed std is not exactly 0 for equal values."""


@dataclass(frozen=True)
class Scores:
    """What an estimator sees: E scored episodes.

    Attributes:
        rewards: float64 [E, F], one column a reward function; NaN where it abstained.
        weights: float64 [F].
        penalty: float64 [E], already weighted, to be subtracted from the reward (KL in the reward).
        group: int [E], in [0, number of groups).
    """

    rewards: np.ndarray
    weights: np.ndarray
    penalty: np.ndarray
    group: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """r = sum_f w_f R_f - penalty, abstentions left out; [E]."""
        return total_reward(self.rewards, self.weights) - self.penalty


@dataclass(frozen=True)
class Advantages:
    """The result for N trajectories.

    Attributes:
        values: float32 [N]; 0 where not `included`.
        scored: bool [N], at least one reward function with a weight scored the trajectory's episode.
        group_dead: bool [N], the group has fewer than two scored episodes.
    """

    values: np.ndarray
    scored: np.ndarray
    group_dead: np.ndarray

    @property
    def included(self) -> np.ndarray:
        """bool [N], the trajectory takes part in the loss and its denominators."""
        return self.scored & ~self.group_dead


def total_reward(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """sum_f w_f R_f over the columns that did not abstain; 0 if all did. [N, F], [F] to [N]."""
    return np.nansum(rewards * weights, axis=1)


def group_mean(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Each element's group mean; [E]."""
    return (np.bincount(group, values) / np.maximum(np.bincount(group), 1))[group]


def group_std(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Each element's group standard deviation, ddof 1; exactly 0 in a group of one or without spread; [E]."""
    squares = np.bincount(group, np.square(values - group_mean(values, group)))
    std = np.sqrt(squares / np.maximum(np.bincount(group) - 1, 1))[group]
    return np.where(has_spread(values, group), std, 0.0)


def has_spread(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Whether the group's largest and smallest value differ; bool [E]."""
    high = np.full(group.max(initial=-1) + 1, -np.inf)
    low = -high
    np.maximum.at(high, group, values)
    np.minimum.at(low, group, values)
    return (high - low > SAME)[group]


def centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """values - mean_g, exactly 0 in a group without spread; [E]."""
    return np.where(has_spread(values, group), values - group_mean(values, group), 0.0)


@register("advantage", "grpo")
def grpo(scores: Scores, *, scale: str = "group") -> np.ndarray:
    """A = (r - mean_g) / (s + 1e-4), s = std_g (`group`), the std of all r (`batch`), or A = r - mean_g (`none`).

    GRPO, arXiv:2402.03300; scaling by the batch follows REINFORCE++, arXiv:2501.03262.
    """
    r = scores.total
    return _scaled(centred(r, scores.group), r, scores.group, scale)


@register("advantage", "dr_grpo")
def dr_grpo(scores: Scores) -> np.ndarray:
    """A = r - mean_g.

    Dividing by std_g would favour prompts that are nearly always or never solved (Dr. GRPO, arXiv:2503.20783).
    """
    return centred(scores.total, scores.group)


@register("advantage", "rloo")
def rloo(scores: Scores, *, scale: str = "none") -> np.ndarray:
    """A = r - mean of the *other* samples of the group = n/(n-1) (r - mean_g), n the group's size; scaled as in `grpo`.

    Leave-one-out baseline: arXiv:2402.14740.
    """
    r = scores.total
    size = np.bincount(scores.group)[scores.group]
    return _scaled(centred(r, scores.group) * size / np.maximum(size - 1, 1), r, scores.group, scale)


@register("advantage", "reinforce_pp")
def reinforce_pp(scores: Scores, *, scale: str = "batch") -> np.ndarray:
    """A = c / (s + 1e-4), c = r - mean_g, s the std of c over the batch (`batch`) or the group; `none`: A = c.

    The group-baseline variant of REINFORCE++, arXiv:2501.03262.
    """
    c = centred(scores.total, scores.group)
    return _scaled(c, c, scores.group, scale)


@register("advantage", "gdpo")
def gdpo(scores: Scores) -> np.ndarray:
    """z_f = (R_f - mean_g R_f) / (std_g R_f + 1e-8), s = sum_f w_f z_f, A = (s - mean s) / (std s + 1e-8).

    The last mean and std are the batch's. Each reward is scaled by itself before they are added; a column that abstains, or has no spread, adds 0
    (GDPO, arXiv:2601.05242).
    """
    group, total = scores.group, np.zeros(len(scores.rewards))
    alive = np.zeros(group.max(initial=-1) + 1, bool)
    for column, weight in zip(scores.rewards.T, scores.weights, strict=True):
        valid = ~np.isnan(column)
        own, values = group[valid], column[valid]
        total[valid] += weight * centred(values, own) / (group_std(values, own) + GDPO_EPS)
        alive[own[has_spread(values, own)]] |= weight != 0
    return np.where(alive[group], (total - total.mean()) / (_batch_std(total) + GDPO_EPS), 0.0) if len(total) else total


def estimate(
    rewards: Any,
    weights: Sequence[float] | None,
    prompt_ids: Sequence[Any],
    episode_ids: Sequence[Any] | None = None,
    *,
    estimator: str = "grpo",
    penalty: np.ndarray | None = None,
    **options: Any,
) -> Advantages:
    """Advantages of N trajectories from their rewards.

    Args:
        rewards: [N, F] (or [N] for one function); None, NaN and infinities abstain. F = 0: no reward, all advantages 0.
        weights: [F]; None: all 1. A function with weight 0 does not make a trajectory scored.
        prompt_ids: [N]; equal ids form a group, of any size.
        episode_ids: [N]; trajectories of one episode share its reward and count once. None: each is its own episode.
        estimator: a registered advantage.
        penalty: [N], subtracted from the reward; an episode's trajectories add theirs up.
        options: the estimator's, such as `scale`; None means its default.

    Raises:
        UserError: an unknown estimator or option. ValueError: trajectories of one episode disagree in reward or prompt.
    """
    function = lookup("advantage", estimator, "objective.advantage")
    options = {name: value for name, value in options.items() if value is not None}
    problems = check_options(function, options, "objective.advantage_options")
    if problems:
        raise UserError(problems)
    rewards = as_matrix(rewards)
    count = len(rewards)
    if rewards.shape[1] == 0:
        return Advantages(np.zeros(count, np.float32), np.ones(count, bool), np.zeros(count, bool))
    weights = np.ones(rewards.shape[1]) if weights is None else np.asarray(weights, np.float64)
    group, episode, first = index_episodes(rewards, prompt_ids, episode_ids)
    paid = np.zeros(count) if penalty is None else np.asarray(penalty, np.float64)
    paid = np.bincount(episode, paid)

    scored = ~np.isnan(rewards[first][:, weights != 0]).all(axis=1)
    own = group[first]
    dead = np.bincount(own[scored], minlength=group.max(initial=-1) + 1)[own] < 2
    values = np.zeros(len(first))
    values[scored] = function(Scores(rewards[first][scored], weights, paid[scored], own[scored]), **options)
    values = np.where(dead, 0.0, values).astype(np.float32)
    return Advantages(values[episode], scored[episode], dead[episode])


def from_rewards(
    rewards: Any,
    weights: Sequence[float] | None,
    prompt_ids: Sequence[Any],
    episode_ids: Sequence[Any] | None = None,
    estimator: str = "grpo",
    scale: str | None = None,
    **options: Any,
) -> np.ndarray:
    """`estimate(...).values`: float32 [N], 0 for a trajectory that takes no part. Arguments as in `estimate`."""
    return estimate(rewards, weights, prompt_ids, episode_ids, estimator=estimator, scale=scale, **options).values


def per_turn(values: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Spreads one advantage a turn over the turn's tokens: values [N, U], turn int [N, T] (-1: none) to [N, T]."""
    turn = np.asarray(turn)
    return np.where(turn >= 0, np.take_along_axis(np.asarray(values), np.maximum(turn, 0), axis=1), 0.0)


def as_matrix(rewards: Any) -> np.ndarray:
    """Rewards as float64 [N, F] in which every abstention (None, NaN, infinite) is NaN."""
    matrix = np.asarray(rewards, np.float64)
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    return np.where(np.isfinite(matrix), matrix, np.nan)


def index_episodes(
    rewards: np.ndarray, prompt_ids: Sequence[Any], episode_ids: Sequence[Any] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Dense group and episode indices of each trajectory, [N] both, and the first trajectory of each episode, [E].

    Raises:
        ValueError: trajectories of one episode disagree in reward or prompt.
    """
    group = np.unique(np.asarray(prompt_ids), return_inverse=True)[1]
    ids = np.arange(len(rewards)) if episode_ids is None else np.asarray(episode_ids)
    names, first, episode = np.unique(ids, return_index=True, return_inverse=True)
    same = np.isclose(rewards, rewards[first][episode], atol=1e-6, rtol=0, equal_nan=True).all(axis=1)
    same &= group == group[first][episode]
    if not same.all():
        name = names[episode[np.argmin(same)]]
        raise ValueError(f"the trajectories of episode {name!r} differ in reward or prompt: an episode has one of each")
    return group, episode, first


def _scaled(advantages: np.ndarray, spread_of: np.ndarray, group: np.ndarray, scale: str) -> np.ndarray:
    if scale == "none":
        return advantages
    if scale == "group":
        return advantages / (group_std(spread_of, group) + EPS)
    if scale == "batch":
        return advantages / (_batch_std(spread_of) + EPS)
    raise UserError(Problem("objective.scale", repr(scale), "group, batch or none"))


def _batch_std(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
