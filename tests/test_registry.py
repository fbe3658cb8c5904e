"""Plug-ins: registration, look-up with suggestions, option checks against the signature, files that fail to load."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxgrpo import registry
from jaxgrpo.errors import UserError


@pytest.fixture(autouse=True)
def _own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", {kind: {} for kind in registry.KINDS})
    monkeypatch.setattr(registry, "_loaded", [])


def test_lookup_names_what_is_registered_and_suggests_the_nearest() -> None:
    @registry.register("reward", "accuracy")
    def accuracy(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    assert registry.lookup("reward", "accuracy", "rewards.0.name") is accuracy
    with pytest.raises(UserError) as error:
        registry.lookup("reward", "acuracy", "rewards.0.name")
    message = str(error.value)
    assert "rewards.0.name" in message and "'acuracy'" in message and "did you mean 'accuracy'" in message


def test_two_different_objects_cannot_share_a_name() -> None:
    registry.register("tool", "same")(lambda: 1)
    with pytest.raises(ValueError, match="two tool plug-ins are called 'same'"):
        registry.register("tool", "same")(lambda: 2)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown plug-in kind 'rewards'"):
        registry.register("rewards", "x")


def test_options_are_compared_with_the_keyword_only_parameters() -> None:
    def reward(completions: list[str], *, scale: float, floor: float = 0.0, **columns: object) -> list[float]:
        return []

    assert registry.check_options(reward, {"scale": 2.0}, "rewards.0.options") == []
    problems = registry.check_options(reward, {"flor": 1.0}, "rewards.0.options")
    assert [problem.path for problem in problems] == ["rewards.0.options.flor", "rewards.0.options.scale"]
    assert "did you mean 'floor'" in str(problems[0]) and "no default" in str(problems[1])


def test_a_plugin_file_is_loaded_once_and_may_be_named_twice(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from jaxgrpo.registry import register\n@register('reward', 'mine')\ndef mine(completions):\n    return []\n"
    )
    registry.load_plugins(["mine.py"], tmp_path)
    registry.load_plugins(["mine.py"], tmp_path)
    assert registry.names("reward") == ["mine"]


def test_every_plugin_that_fails_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "syntax.py").write_text("x = 1\ndef broken(:\n")
    (tmp_path / "raises.py").write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(UserError) as error:
        registry.load_plugins(["syntax.py", "raises.py", "absent.py", "no.such.module"], tmp_path)
    problems = error.value.problems
    assert [problem.path for problem in problems] == [f"plugins.{index}" for index in range(4)]
    message = str(error.value)
    assert "syntax.py:2" in message and "raises.py:2: ZeroDivisionError" in message
    assert "absent.py" in message and "no.such.module" in message
