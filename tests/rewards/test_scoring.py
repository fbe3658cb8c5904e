"""The calling convention, and P02, P11, P13, P61, P66: what rewards are given and what they may give back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from jaxgrpo.config.schema import RewardSection
from jaxgrpo.errors import RunError, UserError
from jaxgrpo.registry import register
from jaxgrpo.rewards.convention import Reward, build_rewards, check_columns, required_columns
from jaxgrpo.rewards.scoring import Scorer
from jaxgrpo.types.rollout import Prompt, Trajectory


def trajectory(text: str | None, sampled: int = 3) -> Trajectory:
    empty = np.zeros(sampled + 1)
    drew = np.arange(sampled + 1) > 0
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": text, "tool_calls": []})
    return Trajectory(
        "p", "e", empty.astype(np.int32), drew, drew, empty, empty.astype(np.int32), 1, messages, "stop", 1
    )


def score(rewards, texts, columns=None, steps=1, **options):
    prompts = [Prompt("p", ({"role": "user", "content": "q"},), None, row) for row in columns or [{}] * len(texts)]
    scorer = Scorer(rewards, **options)
    for step in range(1, steps + 1):
        result = asyncio.run(scorer.score([trajectory(text) for text in texts], prompts, step))
    return result


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


def test_functions_written_for_other_libraries_run_unchanged() -> None:
    def trl_accuracy(completions, answer, **kwargs):
        return [1.0 if gold in text else 0.0 for text, gold in zip(completions, answer, strict=True)]

    def trl_prompts(prompts, completions, **kwargs):
        assert kwargs["level"] == [1, 2] and kwargs["step"] == 1 and len(kwargs["trajectories"]) == 2
        return [len(prompt) + len(text) for prompt, text in zip(prompts, completions, strict=True)]

    class MathORM:
        def __init__(self, *, scale: float = 2.0):
            self.scale = scale

        def __call__(self, completions, solution, **kwargs):
            return [self.scale * (text == gold) for text, gold in zip(completions, solution, strict=True)]

    def other_name(infer_requests, **kwargs):
        assert "completions" not in kwargs
        return lengths(infer_requests)

    rewards = [Reward("a", trl_accuracy), Reward("b", trl_prompts), Reward("c", MathORM()), Reward("d", other_name)]
    rows = [{"answer": "4", "solution": "4", "level": 1}, {"answer": "5", "solution": "5", "level": 2}]
    result = score(rewards, ["4", "nope"], rows)
    assert result.values.dtype == np.float32
    np.testing.assert_array_equal(result.values, [[1, 2, 2, 1], [0, 5, 0, 4]])
    assert [required_columns(reward) for reward in rewards] == [("answer",), (), ("solution",), ()]


def test_async_and_sync_functions_run_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=5)

    def sync(completions):
        meeting.wait()
        return [1] * len(completions)

    async def other(completions):
        await asyncio.to_thread(meeting.wait)
        return [2] * len(completions)

    result = score([Reward("sync", sync, 0.5), Reward("async", other, 2.0)], ["x"])
    np.testing.assert_array_equal(result.values, [[1, 2]])
    np.testing.assert_array_equal(result.total, [4.5])


def test_abstention_is_not_zero() -> None:
    math_only = Reward("math", lambda completions: [None, 1.0, None])
    code_only = Reward("code", lambda completions: [0.5, None, None], 2.0)
    watched = Reward("watched", lambda completions: [9, 9, 9], 0.0)
    result = score([math_only, code_only, watched], ["a", "b", "c"])
    np.testing.assert_array_equal(result.total, np.array([1, 1, np.nan], np.float32))
    assert result.metrics["rewards/math/abstained"] == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "'bad' returned 1 scores for 2 completions"),
        ([1.0, float("nan")], "'bad' gave sample 1 nan"),
        ([float("inf"), 1], "'bad' gave sample 0 inf"),
        (["1", 1], "'bad' gave sample 0 '1', a str"),
        (None, "'bad' returned a NoneType"),
        ({"a": 1}, "'bad' returned a dict"),
    ],
)
def test_wrong_results_are_refused_by_name(returned, message: str) -> None:
    with pytest.raises(RunError) as raised:
        score([Reward("bad", lambda completions: returned)], ["a", "b"])
    assert message in str(raised.value)


def test_numpy_results_are_numbers() -> None:
    results = [np.array([1, 2]), [np.float32(0.5), np.int64(1)], (True, False)]
    values = score([Reward(str(i), lambda completions, r=r: r) for i, r in enumerate(results)], ["a", "b"]).values
    np.testing.assert_array_equal(values, [[1, 0.5, 1], [2, 1, 0]])


def test_a_raising_reward_stops_the_run_with_name_sample_and_line() -> None:
    def fragile(completions, answer):
        return [len(text.split(answer[i])) for i, text in enumerate(completions)]

    with pytest.raises(RunError) as raised:
        score([Reward("fragile", fragile)], ["fine", "bad one"], [{"answer": "x"}, {"answer": 7}])
    message = str(raised.value)
    assert "'fragile' raised TypeError" in message and "sample 1" in message and "'bad one'" in message
    assert f"test_scoring.py:{fragile.__code__.co_firstlineno + 1}" in message


def test_a_raising_reward_abstains_where_asked_to() -> None:
    def fragile(completions):
        return [1 / len(text) for text in completions]

    async def fragile_async(completions):
        return fragile(completions)

    rewards = [Reward("f", fragile, on_error="abstain"), Reward("g", fragile_async, on_error="abstain")]
    result = score(rewards, ["ab", "", "abcd"])
    np.testing.assert_array_equal(result.values[:, 0], np.array([0.5, np.nan, 0.25], np.float32))
    np.testing.assert_array_equal(result.values[:, 0], result.values[:, 1])
    assert result.metrics["rewards/f/errors"] == 1 == result.metrics["rewards/f/abstained"]


def test_text_is_never_none() -> None:
    np.testing.assert_array_equal(score([Reward("n", lengths)], [None, "", "ab"]).values[:, 0], [0, 0, 2])


def test_constant_rewards_are_reported_once() -> None:
    flat, varied = Reward("flat", lambda completions: [0, 0]), Reward("varied", lambda completions: [0, 1])
    assert score([flat, varied], ["a", "b"], steps=2, constant_steps=3).warnings == ()
    (warning,) = score([flat, varied], ["a", "b"], steps=3, constant_steps=3).warnings
    assert "'flat'" in warning and "3 scorings" in warning
    assert score([flat, varied], ["a", "b"], steps=4, constant_steps=3).warnings == ()


def test_counters_become_metrics() -> None:
    def counting(completions, counters):
        counters["odd"] += 2
        return [0] * len(completions)

    assert score([Reward("c", counting)], ["a"]).metrics["rewards/c/odd"] == 2


def test_missing_and_clashing_columns_are_found_before_a_model_loads() -> None:
    rewards = build_rewards(
        [RewardSection(name="accuracy"), RewardSection(name="last_number", options={"column": "gold"})]
    )
    problems = check_columns(rewards, ["question", "gold", "prompts"])
    assert len(problems) == 2
    assert "'answer'" in problems[0].expected and "question, gold" in problems[0].expected
    assert "'prompts'" in problems[1].found


def test_build_reports_every_problem_and_names_twins() -> None:
    with pytest.raises(UserError) as raised:
        build_rewards(
            [
                RewardSection(name="acuracy"),
                RewardSection(name="accuracy", options={"tolerence": 1}),
                RewardSection(name="regex"),
            ]
        )
    text = str(raised.value)
    assert (
        "did you mean 'accuracy'" in text and "did you mean 'tolerance'" in text and "rewards.2.options.pattern" in text
    )
    twins = build_rewards([RewardSection(name="regex", options={"pattern": p}) for p in "ab"])
    assert [twin.name for twin in twins] == ["regex", "regex_2"]


def test_a_registered_class_gets_its_options() -> None:
    @register("reward", "test_only_class")
    class Scaled:
        def __init__(self, *, factor: float = 1.0):
            self.factor = factor

        def __call__(self, completions, gold, **columns):
            return [self.factor] * len(completions)

    (reward,) = build_rewards([RewardSection(name="test_only_class", options={"factor": 3.0})])
    assert required_columns(reward) == ("gold",)
    assert score([reward], ["a"], [{"gold": 1}]).values[0, 0] == 3
    assert score([replace(reward, weight=2.0)], ["a"], [{"gold": 1}]).total[0] == 6
