"""Rules over several keys: each broken config breaks one rule, and its message has the values and two ways out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxgrpo.config.check import check, check_context, check_output_dir
from jaxgrpo.config.schema import Config

BASE: dict[str, Any] = {
    "output_dir": "out",
    "steps": 10,
    "model": {"path": "m"},
    "data": {"train": "t.jsonl", "eval": "e.jsonl", "max_prompt_tokens": 100},
    "rewards": [{"name": "accuracy"}, {"name": "format", "weight": 0.5}],
    "rollout": {"prompts_per_step": 6, "num_generations": 4, "max_completion_tokens": 50},
}


def config(**changes: Any) -> Config:
    """BASE with keys replaced: `rollout__max_turns=3`; None at the top level deletes."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for name, value in changes.items():
        *sections, key = name.split("__")
        holder = values
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[key] = value
    return Config.model_validate(values)


def test_the_base_breaks_no_rule() -> None:
    assert check(config()) == []


@pytest.mark.parametrize(
    ("changes", "path", "parts"),
    [
        ({"steps": None}, "steps", ["neither", "steps: 100", "epochs: 1"]),
        ({"epochs": 2.0}, "steps", ["steps: 10 and epochs: 2"]),
        (
            {"learner__updates_per_step": 4},
            "learner.updates_per_step",
            ["4 with rollout.prompts_per_step: 6", "one of 1, 2, 3, 6", "multiple of 4, such as 8"],
        ),
        ({"rollout__num_generations": 1}, "rollout.num_generations", ["that of the preset", "2 or more", "to 8"]),
        ({"rollout__max_turn_tokens": 51}, "rollout.max_turn_tokens", ["51", "max_completion_tokens: 50"]),
        ({"rollout__max_turns": 3}, "rollout.max_turns", ["3 with scheduler: single_turn"]),
        (
            {"model__max_context": 149},
            "rollout.max_completion_tokens",
            ["50 + data.max_prompt_tokens: 100 = 150", "149", "max_completion_tokens to 49", "max_prompt_tokens to 99"],
        ),
        ({"model__max_context": 50}, "rollout.max_completion_tokens", ["at most 50", "lower both"]),
        ({"learner__row_tokens": 149}, "learner.row_tokens", ["149", "= 150", "150 or more"]),
        ({"optimizer__final_learning_rate": 1e-7}, "optimizer.final_learning_rate", ["schedule: constant"]),
        (
            {"optimizer__final_learning_rate": 1e-5, "optimizer__schedule": "linear"},
            "optimizer.final_learning_rate",
            ["1e-05 with learning_rate: 1e-06", "at most learning_rate"],
        ),
        ({"optimizer__frozen": ["embed/", "layers/("]}, "optimizer.frozen.1", ["'layers/('", "regular expression"]),
        ({"learner__mesh__tensor": 0}, "learner.mesh.tensor", ["≥ 1"]),
        ({"learner__mesh__data": -1}, "learner.mesh", ["-1 for data and fsdp", "at most one -1"]),
        ({"rewards": []}, "rewards", ["no reward function", "plug-in file"]),
        ({"rewards": [{"name": "a", "weight": 0.0}]}, "rewards", ["a weight of 0 for every reward"]),
        ({"data__eval": None, "eval__every_steps": 5}, "eval.every_steps", ["no data.eval", "delete the section"]),
        ({"eval__num_generations": 4}, "eval.num_generations", ["4 with temperature: 0"]),
        ({"eval__accuracy_reward": "acc"}, "eval.accuracy_reward", ["'acc'", "accuracy, format"]),
        ({"rollout__sampling__stop": ["x", ""]}, "rollout.sampling.stop.1", ["an empty text"]),
    ],
)
def test_rules(changes: dict[str, Any], path: str, parts: list[str]) -> None:
    (problem,) = check(config(**changes))
    assert problem.path == path
    for part in parts:
        assert part in str(problem)
    assert " or " in problem.fix or " both" in problem.fix, "two ways out"


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": None, "epochs": 1.5},
        {"learner__updates_per_step": 3},
        {"rollout__num_generations": 1, "objective__advantage": "mine"},
        {"rollout__max_turn_tokens": 50},
        {"rollout__max_turns": 1},
        {"model__max_context": 150},
        {"learner__row_tokens": 150},
        {"optimizer__final_learning_rate": 1e-6, "optimizer__schedule": "cosine"},
        {"eval__num_generations": 4, "eval__temperature": 1.0},
        {"eval__accuracy_reward": "format", "eval__every_steps": 99},
        {"rewards": [{"name": "regex"}, {"name": "regex"}], "eval__accuracy_reward": "regex_2"},
        {"checkpoint__every_steps": 1000},
        {"data__eval": None},
    ],
)
def test_the_edge_of_a_rule_is_allowed(changes: dict[str, Any]) -> None:
    assert check(config(**changes)) == []


def test_several_broken_rules_are_all_reported() -> None:
    broken = config(steps=None, rewards=[], learner__updates_per_step=5, eval__num_generations=2)
    assert {problem.path for problem in check(broken)} >= {
        "steps", "rewards", "learner.updates_per_step", "eval.num_generations"
    }  # fmt: skip


def test_context() -> None:
    assert check_context(config(), 150) == []
    (short,) = check_context(config(), 149)
    assert "= 150" in short.found and "149" in short.expected
    # With max_context, `check` compares the lengths, so that nothing is said twice.
    (above,) = check_context(config(model__max_context=200), 160)
    assert above.path == "model.max_context" and "160" in above.expected
    assert check_context(config(model__max_context=140), 160) == []


def test_output_dir(tmp_path: Path) -> None:
    fresh = config(output_dir=str(tmp_path / "fresh"))
    assert check_output_dir(fresh, resume=False) == []
    (missing,) = check_output_dir(fresh, resume=True)
    assert "does not exist" in missing.found and "--resume" in missing.fix

    used = tmp_path / "used"
    used.mkdir()
    run = config(output_dir=str(used))
    assert check_output_dir(run, resume=False) == [], "an empty directory is as good as none"
    (used / "metrics.jsonl").touch()
    (held,) = check_output_dir(run, resume=False)
    assert "metrics.jsonl" in held.found and "--resume" in held.fix and "another output_dir" in held.fix
    assert check_output_dir(run, resume=True) == []

    (tmp_path / "file").touch()
    for resume in (False, True):
        (file,) = check_output_dir(config(output_dir=str(tmp_path / "file")), resume)
        assert "a file" in file.found
