"""Whole runs of a tiny model through the door: what is written, what is resumed, what several updates a step mean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import SmallRun

from jaxgrpo import export, train

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("time", "seconds", "per_second")


def run(small_run: SmallRun, *arguments: str) -> int:
    """`python -m jaxgrpo.train` in this process."""
    return train.main(["--config", str(small_run.write_config()), *arguments])


def lines(file: Path) -> list[dict[str, Any]]:
    """JSON lines without times."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [{k: v for k, v in record.items() if not any(word in k for word in TIMES)} for record in records]


def exported(output: Path) -> dict[str, np.ndarray]:
    """The tensors of a run's export."""
    from safetensors.numpy import load_file

    return load_file(output / "export" / "model.safetensors")


def assert_same_run(left: Path, right: Path) -> None:
    """Parameters bit for bit, every metric, every completion."""
    first, second = exported(left), exported(right)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name].tobytes() != second[name].tobytes()] == []
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert lines(left / name) == lines(right / name), name


def test_a_run_leaves_a_record_of_everything(small_run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small_run) == 0
    out = small_run.root / "out"
    metrics = lines(out / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert "eval/accuracy" in metrics[0] and "eval/accuracy" in metrics[2] and "reward" not in metrics[0]
    for name in (
        "reward",
        "reward_std",
        "rewards/last_number/mean",
        "completions/mean_length",
        "grad_norm",
        "learning_rate",
    ):
        assert name in metrics[1], name
    assert metrics[1]["ratio/min"] == metrics[1]["ratio/max"] == 1.0
    completions = lines(out / "completions.jsonl")
    train_rows = [record for record in completions if record["split"] == "train"]
    assert len(train_rows) == 2 * 4 * 2 and len(completions) - len(train_rows) == 2 * 4
    assert len({record["episode_id"] for record in train_rows}) == len(train_rows)
    assert {record["version"] for record in train_rows if record["step"] == 2} == {1}
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["2"]
    assert (out / "export" / "tokenizer.json").exists() and any((out / "tensorboard").iterdir())
    printed = capsys.readouterr().out
    assert "held-out accuracy" in printed and "8 samples, 1 update" in printed and "step 2/2" in printed


def test_check_trains_nothing(small_run: SmallRun) -> None:
    assert run(small_run, "--check") == 0
    assert not (small_run.root / "out").exists()


GRID = [
    {},
    {"learner.updates_per_step": 2, "learner.num_iterations": 2},
    {"objective.kl_coef": 0.1, "optimizer.schedule": "cosine", "optimizer.warmup_steps": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", GRID, ids=["plain", "several updates", "kl and schedule"])
def test_resumed_equals_uninterrupted(small_run: SmallRun, options: dict[str, Any]) -> None:
    """Pain points P53, P55, P56: the cursor, every seed, the schedule and the reference survive."""
    settings = {
        "steps": 4,
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 9,
        "objective.kl_coef": 0.0,
        "optimizer.learning_rate": 1e-2,
    }
    for key, value in {**settings, **options}.items():
        small_run.set(key, value)
    assert run(small_run, "output_dir=whole") == 0
    assert run(small_run, "output_dir=parts") == 0
    parts = small_run.root / "parts"
    cut_back_to(parts, step=2)
    assert run(small_run, "output_dir=parts", "--resume") == 0
    assert_same_run(small_run.root / "whole", parts)


def cut_back_to(output: Path, step: int) -> None:
    """Makes a finished run look as if it had been killed after the checkpoint of `step`."""
    import shutil

    for checkpoint in (output / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(output / "export")
    with open(output / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')  # and in the middle of a line


def test_what_was_recorded_survives_a_part_that_does_not_record(small_run: SmallRun) -> None:
    small_run.set("checkpoint.every_steps", 1)
    completions = small_run.root / "out" / "completions.jsonl"
    assert run(small_run, "steps=1") == 0
    recorded = completions.read_bytes()
    assert run(small_run, "steps=2", "logging.completions=false", "--resume") == 0
    assert run(small_run, "steps=3", "--resume") == 0
    assert recorded and completions.read_bytes().startswith(recorded)
    assert {record["step"] for record in lines(completions)} == {0, 1, 3}


def test_a_resumed_run_cannot_end_before_it_begins(small_run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small_run, "steps=2") == 0
    assert run(small_run, "steps=1", "--resume") == 2
    assert "checkpoint in out is of step 2" in capsys.readouterr().err


def test_export_loads_the_plugins_of_the_run(small_run: SmallRun, tmp_path: Path) -> None:
    (small_run.root / "mine.py").write_text(
        "import jax.numpy as jnp\nfrom jaxgrpo.registry import register\n\n@register('policy_loss', 'mine')\n"
        "def mine(view):\n    return -view.ratio * view.advantages, {}\n"
    )
    small_run.set("plugins", ["mine.py"])
    small_run.set("objective", {"preset": "grpo", "policy_loss": "mine", "kl_coef": 0})
    assert run(small_run, "steps=1", "checkpoint.export=false") == 0
    code = (
        f"import sys; from jaxgrpo.export import main; sys.exit(main(['{small_run.root / 'out'}', '--out', 'written']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=small_run.root, env=environment, check=False)
    assert done.returncode == 0 and (small_run.root / "written" / "model.safetensors").exists()


def test_an_output_directory_is_never_overwritten(small_run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small_run, "steps=1") == 0
    before = (small_run.root / "out" / "metrics.jsonl").read_bytes()
    assert run(small_run, "steps=1") == 2
    assert "--resume" in capsys.readouterr().err
    assert (small_run.root / "out" / "metrics.jsonl").read_bytes() == before


def test_export_writes_any_checkpoint(small_run: SmallRun) -> None:
    assert run(small_run) == 0
    assert export.main(["out"]) == 0
    from safetensors.numpy import load_file

    again, at_end = load_file("out/export-2/model.safetensors"), exported(small_run.root / "out")
    assert all(again[name].tobytes() == at_end[name].tobytes() for name in at_end)
    assert export.main(["out", "--step", "7"]) == 2
    assert export.main(["nowhere"]) == 2


def test_a_reward_that_raises_stops_the_run_with_its_name(
    small_run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_run.root / "mine.py").write_text(
        "from jaxgrpo.registry import register\n\n@register('reward', 'breaks')\n"
        "def breaks(completions, answer):\n    return [1 / 0 for _ in completions]\n"
    )
    small_run.set("plugins", ["mine.py"])
    small_run.set("rewards", [{"name": "breaks"}])
    assert run(small_run) == 1
    error = capsys.readouterr().err
    assert "'breaks' raised ZeroDivisionError" in error and "mine.py:5" in error and "Traceback" not in error


def start(small_run: SmallRun, *arguments: str) -> subprocess.Popen[str]:
    """The door as a process of its own."""
    command = [sys.executable, "-m", "jaxgrpo.train", "--config", str(small_run.write_config()), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=small_run.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Polls; fails if the process ends first or time runs out."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_bit_for_bit(small_run: SmallRun) -> None:
    """SIGKILL in the middle of steps and of a checkpoint write; pain points P44, P57."""
    for key, value in {"steps": 12, "checkpoint.every_steps": 2, "optimizer.learning_rate": 1e-2}.items():
        small_run.set(key, value)
    assert run(small_run, "output_dir=whole") == 0
    output = small_run.root / "killed"
    checkpoints = output / "checkpoints"

    def reached(step: int) -> bool:
        file = output / "metrics.jsonl"
        return file.exists() and f'"step": {step},' in file.read_text()

    moments = [
        lambda: checkpoints.exists(),
        lambda: any("tmp" in path.name for path in checkpoints.glob("*")),
        lambda: reached(5),
        lambda: reached(9),
    ]
    for index, moment in enumerate(moments):
        process = start(small_run, "output_dir=killed", *(["--resume"] if index else []))
        wait_for(moment, process)
        process.kill()
        process.wait()
    assert run(small_run, "output_dir=killed", "--resume") == 0
    assert_same_run(small_run.root / "whole", output)


@pytest.mark.slow
def test_sigterm_finishes_the_step_and_saves(small_run: SmallRun) -> None:
    small_run.set("steps", 1000)
    process = start(small_run)
    metrics = small_run.root / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"step": 2,' in metrics.read_text(), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "go on with --resume" in output, output
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert [path.name for path in (small_run.root / "out" / "checkpoints").iterdir()] == [str(last)]
