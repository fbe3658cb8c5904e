"""Fixtures: a sound run in a directory of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_run import SmallRun, write_model


@pytest.fixture(scope="session")
def sound_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data, made once; tests change copies."""
    root = tmp_path_factory.mktemp("sound")
    write_model(root / "model")
    rows = [{"prompt": f"What is {a}+{b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    run = SmallRun(root)
    run.write_rows("train.jsonl", rows[:12])
    run.write_rows("eval.jsonl", rows[12:])
    return root


@pytest.fixture
def small_run(sound_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    """A sound run of two steps in a directory of its own, which becomes the working directory."""
    root = tmp_path / "run"
    shutil.copytree(sound_files, root)
    monkeypatch.chdir(root)
    return SmallRun(
        root,
        {
            "output_dir": "out",
            "steps": 2,
            "model": {"path": "model"},
            "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_prompt_tokens": 128},
            "rewards": [{"name": "last_number"}],
            "rollout": {"prompts_per_step": 4, "num_generations": 2, "max_completion_tokens": 16},
        },
    )
