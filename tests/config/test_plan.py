"""The plan's arithmetic against a count of the work itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgrpo.config.check import check
from jaxgrpo.config.plan import plan
from jaxgrpo.config.schema import Config
from jaxgrpo.errors import UserError


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "output_dir": "o",
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rewards": [{"name": "a"}],
    }
    return Config.model_validate(values | changes)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12), st.integers(2, 4), st.integers(1, 12), st.integers(1, 3), st.integers(1, 40),
    st.one_of(st.integers(1, 30), st.sampled_from([0.3, 0.5, 1.0, 2.0, 2.5])), st.integers(0, 7), st.integers(0, 5),
)  # fmt: skip
def test_the_plan_counts_what_a_run_does(
    prompts: int,
    generations: int,
    updates: int,
    passes: int,
    rows: int,
    duration: int | float,
    every: int,
    held_out: int,
) -> None:
    run = config(
        **{"steps" if isinstance(duration, int) else "epochs": duration},
        rollout={"prompts_per_step": prompts, "num_generations": generations, "max_completion_tokens": 7},
        learner={"updates_per_step": updates, "num_iterations": passes},
        eval={"every_steps": every} if held_out else {},
        data={"train": "t", "eval": "e" if held_out else None, "max_prompt_tokens": 5},
    )
    if prompts % updates:
        (problem,) = check(run)
        assert "updates_per_step" in problem.path and "prompts_per_step" in problem.found
        return
    assert check(run) == []
    # The run, played with counters: the prompts pass by, epoch after epoch, and a step takes the next ones.
    budget = duration * prompts if isinstance(duration, int) else round(duration * rows * 1000) // 1000
    stream = itertools.islice(itertools.cycle(range(rows)), budget)
    drawn = steps = samples = optimizer_updates = evaluations = 0
    while len(batch := list(itertools.islice(stream, prompts))) == prompts:
        if steps == 0 and held_out:
            evaluations += 1
        steps, drawn, samples = steps + 1, drawn + prompts, samples + prompts * generations
        for _ in range(passes):
            for start in range(0, prompts, prompts // updates):
                optimizer_updates += bool(batch[start : start + prompts // updates])
        last = drawn + prompts > budget
        evaluations += bool(held_out and (last or (every and steps % every == 0)))
    if steps == 0:
        with pytest.raises(UserError, match=r"0 whole steps") as error:
            plan(run, rows, held_out, 1)
        assert "epochs" in str(error.value) and "rollout.prompts_per_step" in str(error.value)
        return
    result = plan(run, rows, held_out, 1)
    assert (result.steps, result.total_updates, result.samples * result.steps) == (steps, optimizer_updates, samples)
    assert result.evaluations == evaluations and result.epochs == pytest.approx(drawn / rows)
    assert result.step_tokens == prompts * generations * 7 and result.longest == 12
    assert f"{steps:,} step" in "\n".join(result.lines())


def test_fixes_of_a_run_without_steps_work() -> None:
    """10 prompts, 16 a step: both ways out that the message names lead to a plan."""
    with pytest.raises(UserError) as error:
        plan(config(epochs=1.0, rollout={"prompts_per_step": 16}), 10, 0, 1)
    assert "epochs to 1.6 or more" in str(error.value) and "prompts_per_step to 10" in str(error.value)
    assert plan(config(epochs=1.6, rollout={"prompts_per_step": 16}), 10, 0, 1).steps == 1
    assert plan(config(epochs=1.0, rollout={"prompts_per_step": 10}), 10, 0, 1).steps == 1


def test_a_data_set_smaller_than_a_step_is_said() -> None:
    result = plan(config(steps=3, rollout={"prompts_per_step": 16}), 10, 0, 1)
    assert result.epochs == pytest.approx(4.8) and any("more than once" in line for line in result.lines())


@pytest.mark.parametrize(
    ("changes", "rows", "part"),
    [
        ({"steps": 3}, 0, "no prompts"),
        ({"steps": 3, "optimizer": {"warmup_steps": 4}}, 10, "4 with 3 updates"),
        ({"steps": 3, "learner": {"mesh": {"data": 3}}}, 10, "data 3 × fsdp -1 × tensor 1 on 8 devices"),
        ({"steps": 3, "learner": {"mesh": {"fsdp": 4}}}, 10, "equal to the number of devices"),
        ({"steps": 3, "learner": {"mesh": {"fsdp": 16}}}, 10, "16 devices"),
    ],
)
def test_plans_that_cannot_be(changes: dict[str, Any], rows: int, part: str) -> None:
    with pytest.raises(UserError, match=part) as error:
        plan(config(**changes), rows, 0, 8)
    assert " or " in str(error.value)


def test_mesh_takes_the_rest() -> None:
    assert plan(config(steps=1), 10, 0, 8).mesh == {"data": 1, "fsdp": 8, "tensor": 1}
    mesh = {"data": 2, "fsdp": 2, "tensor": -1}
    assert plan(config(steps=1, learner={"mesh": mesh}), 10, 0, 8).mesh == {"data": 2, "fsdp": 2, "tensor": 2}


def test_warnings() -> None:
    quiet = plan(config(steps=1), 10, 0, 1)
    assert quiet.warnings == ()
    loud = plan(
        config(
            steps=1,
            rollout={"sampling": {"top_p": 0.9, "repetition_penalty": 1.1, "temperature": 0.7}},
            data={"train": ["a.jsonl", "b.jsonl"], "eval": "b.jsonl"},
        ), 10, 5, 1,
    )  # fmt: skip
    text = "\n".join(loud.lines())
    assert "rollout.sampling.top_p, rollout.sampling.repetition_penalty" in text and "b.jsonl is also training" in text
    assert "temperature" not in text, "the learner divides by the temperature too"
