"""Advantages: abstentions, groups without spread, episodes, and the invariances of every estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgrpo.algo.advantages import Scores, estimate, from_rewards, per_turn
from jaxgrpo.algo.reward_metrics import reward_metrics
from jaxgrpo.errors import UserError
from jaxgrpo.metrics import finalize
from jaxgrpo.registry import register

SETTINGS = [(e, s) for e in ("grpo", "rloo", "reinforce_pp") for s in ("group", "batch", "none")] + [
    ("dr_grpo", None),
    ("gdpo", None),
]
each = pytest.mark.parametrize(("estimator", "scale"), SETTINGS)
rewards_2 = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=6, max_size=6)


@each
@given(values=rewards_2, shift=st.floats(-100, 100))
@settings(max_examples=15, deadline=None)
def test_shifts_orders_and_prompt_names_change_nothing(
    estimator: str, scale: str | None, values: list[tuple[int, int]], shift: float
) -> None:
    rewards, prompts = np.array(values, float) / 4, np.array([0, 0, 0, 1, 1, 1])
    base = from_rewards(rewards, [1.0, 0.5], prompts, None, estimator, scale)
    assert np.all(np.isfinite(base))
    np.testing.assert_allclose(
        from_rewards(rewards + shift, [1.0, 0.5], prompts, None, estimator, scale), base, atol=1e-5
    )
    order = np.array([4, 0, 3, 5, 2, 1])
    permuted = from_rewards(rewards[order], [1.0, 0.5], [f"p{p}" for p in prompts[order]], None, estimator, scale)
    np.testing.assert_allclose(permuted, base[order], atol=1e-6)
    np.testing.assert_allclose([base[:3].sum(), base[3:].sum()], 0, atol=1e-4)


@each
@given(value=st.floats(-1e3, 1e3), size=st.integers(1, 7))
@settings(max_examples=15, deadline=None)
def test_equal_rewards_give_exactly_zero(estimator: str, scale: str | None, value: float, size: int) -> None:
    rewards = np.array([[value]] * size + [[0.0], [1.0]])
    result = from_rewards(rewards, None, [0] * size + [1, 1], None, estimator, scale)
    assert not np.any(result[:size]) and np.all(np.isfinite(result)) and result[-1] > 0


ABSTENTIONS: list[tuple[list[Any], list[bool], list[bool]]] = [
    ([None, 1, 0, 1], [False, True, True, True], [False] * 4),
    ([float("nan"), 1, 0, 1], [False, True, True, True], [False] * 4),
    ([float("inf"), 1, 0, 1], [False, True, True, True], [False] * 4),
    ([None, None, None, 1], [False, False, False, True], [True] * 4),
    ([None] * 4, [False] * 4, [True] * 4),
]


@each
@pytest.mark.parametrize(("rewards", "scored", "dead"), ABSTENTIONS)
def test_an_unscored_sample_leaves_its_group(
    estimator: str, scale: str | None, rewards: list[Any], scored: list[bool], dead: list[bool]
) -> None:
    """P13: with `[None, 1, 0, 1]` the others get what they would get if the first had never been drawn."""
    others = [0.0, 1.0, 1.0]
    result = estimate([*rewards, *others], None, [0] * 4 + [1] * 3, estimator=estimator, scale=scale)
    assert result.scored.tolist() == scored + [True] * 3
    assert result.group_dead.tolist() == dead + [False] * 3
    assert np.all(np.isfinite(result.values)) and not np.any(result.values[~result.included])
    keep = result.scored
    alone = from_rewards(
        np.array([*rewards, *others], float)[keep], None, np.array([0] * 4 + [1] * 3)[keep], None, estimator, scale
    )
    np.testing.assert_array_equal(result.values[keep], alone)


def test_baseline_is_the_mean_of_the_scored() -> None:
    result = from_rewards([None, 1, 0, 1], None, [0] * 4, None, "dr_grpo")
    np.testing.assert_allclose(result, [0, 1 / 3, -2 / 3, 1 / 3], atol=1e-6)


def test_functions_that_do_not_apply() -> None:
    both = estimate([[1, None], [0, None], [None, 3], [None, None]], [1, 1], [0] * 4, estimator="dr_grpo")
    assert both.scored.tolist() == [True, True, True, False]
    np.testing.assert_allclose(both.values, [1 - 4 / 3, -4 / 3, 3 - 4 / 3, 0], atol=1e-6)
    weightless = estimate([[1, 5], [0, None], [None, 3]], [1, 0], [0] * 3, estimator="dr_grpo")
    assert weightless.scored.tolist() == [True, True, False]
    np.testing.assert_allclose(weightless.values, [0.5, -0.5, 0], atol=1e-6)


def test_groups_of_one_and_no_rewards() -> None:
    """P17: a group of one contributes nothing and is never NaN; without reward functions every advantage is 0."""
    for estimator, scale in SETTINGS:
        single = estimate([1.0, 0.0, 1.0], None, ["a", "b", "b"], estimator=estimator, scale=scale)
        assert single.values[0] == 0 and single.group_dead.tolist() == [True, False, False]
    none = estimate(np.zeros((3, 0)), None, [0, 0, 1])
    assert none.included.all() and not np.any(none.values)


@each
def test_an_episode_counts_once_however_many_trajectories(estimator: str, scale: str | None) -> None:
    once = from_rewards([1, 0, 0.5, 2, 1], None, [0, 0, 0, 1, 1], None, estimator, scale)
    rows = np.array([0, 0, 0, 1, 2, 3, 3, 4])
    split = from_rewards(
        np.array([1, 0, 0.5, 2, 1])[rows], None, np.array([0, 0, 0, 1, 1])[rows], rows, estimator, scale
    )
    np.testing.assert_array_equal(split, once[rows])


def test_an_episode_has_one_reward_and_its_trajectories_share_the_penalty() -> None:
    with pytest.raises(ValueError, match="'a'"):
        from_rewards([1, 0, 0], None, [0, 0, 0], ["a", "a", "b"])
    with pytest.raises(ValueError, match="'a'"):
        from_rewards([1, 1, 0], None, [0, 1, 0], ["a", "a", "b"])
    paid = from_rewards([1, 1, 0], None, [0] * 3, ["a", "a", "b"], "dr_grpo", penalty=np.array([0.2, 0.3, 0.0]))
    np.testing.assert_allclose(paid, [0.25, 0.25, -0.25], atol=1e-6)


def test_rloo_is_leave_one_out() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 2.0])
    expected = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]
    np.testing.assert_allclose(from_rewards(rewards, None, [0] * 4, None, "rloo"), expected, atol=1e-6)


def test_gdpo_keeps_rewards_apart_that_a_sum_would_merge() -> None:
    rewards = np.array([[1, 0], [0, 1], [1, 1], [0, 1]])
    prompts = [0] * 4
    summed = from_rewards(rewards, None, prompts)
    assert summed[0] == summed[1] and from_rewards(rewards, None, prompts, None, "gdpo")[0] < 0


def test_mistakes_and_plug_ins() -> None:
    with pytest.raises(UserError, match=r"objective\.advantage"):
        from_rewards([1, 0], None, [0, 0], None, "grop")
    with pytest.raises(UserError, match=r"objective\.scale"):
        from_rewards([1, 0], None, [0, 0], None, "grpo", "groups")
    with pytest.raises(UserError, match=r"objective\.advantage_options\.scale"):
        from_rewards([1, 0], None, [0, 0], None, "gdpo", "group")

    @register("advantage", "test_algo_best_of_group")
    def best_of_group(scores: Scores, *, bonus: float = 1.0) -> np.ndarray:
        return bonus * (scores.total == scores.total.max())

    result = from_rewards([1, 0, None], None, [0, 0, 0], None, "test_algo_best_of_group", bonus=2.0)
    np.testing.assert_array_equal(result, [2, 0, 0])


def test_advantages_per_turn() -> None:
    turns = np.array([[0, 0, -1, 1], [0, 1, 1, -1]])
    np.testing.assert_array_equal(per_turn(np.array([[1.0, 2.0], [3.0, 4.0]]), turns), [[1, 1, 0, 2], [3, 4, 4, 0]])


def test_reward_metrics_count_dead_groups_and_abstentions() -> None:
    rewards = [[1, 0], [1, 0], [0, None], [0, None], [1, 1], [0, 1], [None, None], [None, None]]
    metrics = finalize(reward_metrics(rewards, [1, 1], np.repeat([0, 1, 2, 3], 2), None, ["right", "short"]))
    assert (
        metrics["unscored"] == 2 and metrics["rewards/right/unscored"] == 2 and metrics["rewards/short/unscored"] == 4
    )
    np.testing.assert_allclose(metrics["frac_reward_zero_std"], 2 / 3)
    np.testing.assert_allclose(metrics["frac_groups_all_right"], 1 / 3)
    np.testing.assert_allclose(metrics["frac_groups_all_wrong"], 1 / 3)
    np.testing.assert_allclose(metrics["reward"], (1 + 0 + 1.5) / 3)
    np.testing.assert_allclose(metrics["rewards/short/mean"], 0.5)
