"""The example in examples/reward_plugin.py loads, is checked and scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxgrpo.config.schema import RewardSection
from jaxgrpo.registry import load_plugins
from jaxgrpo.rewards.convention import build_rewards, check_columns
from tests.rewards.test_scoring import score


def test_plugin_example() -> None:
    load_plugins(["reward_plugin.py"], Path(__file__).parents[2] / "examples")
    rewards = build_rewards(
        [RewardSection(name="brevity", options={"max_words": 2}), RewardSection(name="closeness", weight=0.5)]
    )
    assert "'answer'" in check_columns(rewards, ["question"])[0].expected
    result = score(rewards, ["it is 4", "4", "none"], [{"answer": "5"}, {"answer": "4"}, {"answer": None}])
    assert result.values[:, 0] == pytest.approx([0.5, 1, 1])
    assert result.total == pytest.approx([0.75, 1.5, 1])
