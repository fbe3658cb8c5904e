#!/usr/bin/env python
"""Kills a real training run again and again, resumes it each time, and compares the end with an uninterrupted run.

    python scripts/check_resume.py [--kills 10] [--steps 8] [--seed 0] [--config configs/quickstart.yaml] [key.path=value …]

One run is left alone. The other is killed with SIGKILL at random moments, at least once while a checkpoint is being
written, and resumed with --resume after each. Compared are the final parameters and optimizer state (bit for bit), every
line of metrics.jsonl (times left out) and every line of completions.jsonl. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def command(arguments: argparse.Namespace, output: Path, *more: str) -> list[str]:
    """The command line of a shortened run."""
    overrides = [
        f"output_dir={output}",
        f"steps={arguments.steps}",
        "eval.every_steps=4",
        "eval.num_prompts=16",
        "checkpoint.every_steps=2",
        "checkpoint.export=false",
        *arguments.overrides,
    ]
    return [sys.executable, "-m", "jaxgrpo.train", "--config", str(arguments.config), *more, *overrides]


def writing(output: Path) -> bool:
    """Whether a checkpoint is being written right now."""
    return any("tmp" in entry.name for entry in (output / "checkpoints").glob("*"))


def run_until(process: subprocess.Popen, output: Path, seconds: float, in_write: bool) -> str:
    """Waits for a moment and kills; returns what happened."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if in_write and writing(output):
            time.sleep(random.uniform(0, 1.0))
            inside = writing(output)
            process.kill()
            process.wait()
            return "killed inside a checkpoint write" if inside else "killed just after a checkpoint write"
        if not in_write and time.monotonic() > deadline:
            process.kill()
            process.wait()
            return f"killed after {seconds:.1f} s"
        time.sleep(0.002)
    return f"ended by itself, exit code {process.returncode}"


def lines(file: Path) -> list[dict]:
    """JSON lines without wall-clock times."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    timed = ("time", "seconds", "per_second")
    return [{k: v for k, v in record.items() if not any(word in k for word in timed)} for record in records]


def state(output: Path) -> tuple[int, list[np.ndarray]]:
    """The newest checkpoint's step and arrays."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager((output / "checkpoints").absolute()) as manager:
        step = manager.latest_step()
        restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    import jax

    return step, [np.asarray(leaf) for leaf in jax.tree.leaves(restored)]


def compare(whole: Path, killed: Path) -> list[str]:
    """What differs between two runs."""
    differences = []
    (step, arrays), (other_step, others) = state(whole), state(killed)
    equal = [a.tobytes() == b.tobytes() for a, b in zip(arrays, others, strict=True)]
    if step != other_step or not all(equal):
        differences.append(f"state: step {step} and {other_step}, {equal.count(False)} of {len(equal)} arrays differ")
    for name in ("metrics.jsonl", "completions.jsonl"):
        left, right = lines(whole / name), lines(killed / name)
        unequal = [i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
        if len(left) != len(right) or unequal:
            differences.append(f"{name}: {len(left)} and {len(right)} lines, first difference at line {unequal[:1]}")
    return differences


def main() -> int:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "check_resume")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    random.seed(arguments.seed)
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    whole, killed = arguments.out / "whole", arguments.out / "killed"
    begun = time.monotonic()
    subprocess.run(command(arguments, whole), check=True, stdout=subprocess.DEVNULL)
    duration = time.monotonic() - begun
    print(f"uninterrupted: {duration:.1f} s")
    kills, inside, more = 0, 0, []
    while kills < arguments.kills:
        process = subprocess.Popen(command(arguments, killed, *more), stdout=subprocess.DEVNULL)
        outcome = run_until(process, killed, random.uniform(0, duration), in_write=kills % 4 == 1)
        print(f"{kills + 1}: {outcome}", flush=True)
        if outcome.startswith("ended"):
            if process.returncode:
                return 1
            shutil.rmtree(killed)  # it got through: begin another one to kill
            more = []
            continue
        kills += 1
        inside += "inside" in outcome
        more = ["--resume"] if killed.exists() else []  # killed before it had begun: begin again
    subprocess.run(command(arguments, killed, *more), check=True, stdout=subprocess.DEVNULL)
    differences = compare(whole, killed)
    print(
        "\n".join(differences)
        or f"after {kills} kills: parameters, optimizer, metrics and completions are bit-identical"
    )
    if not inside:
        print("no kill hit a checkpoint write: try another --seed or more --kills")
    return 1 if differences or not inside else 0


if __name__ == "__main__":
    sys.exit(main())
