"""The quickstart's data: the same bytes for the same arguments, disjoint splits, right answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_sums.py"


def make(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, "--out", out, *options], capture_output=True, text=True, check=False)


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_sums(tmp_path: Path) -> None:
    options = ("--seed", "3", "--min", "-2", "--max", "9", "--operations", "+-*", "--train", "50", "--eval", "20")
    for name in ("a", "b"):
        assert make(tmp_path / name, *options).returncode == 0
        assert (tmp_path / "a" / "train.jsonl").read_bytes() == (tmp_path / name / "train.jsonl").read_bytes()
    train, held_out = rows(tmp_path / "a" / "train.jsonl"), rows(tmp_path / "a" / "eval.jsonl")
    assert (len(train), len(held_out)) == (50, 20)
    assert len({row["prompt"] for row in train + held_out}) == 70
    for row in train + held_out:
        a, sign, b = re.fullmatch(
            r"What is (-?\d+)([-+*])(-?\d+)\? Answer with just a number\.", row["prompt"]
        ).groups()
        assert int(row["answer"]) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert -2 <= int(a) <= 9 and -2 <= int(b) <= 9


def test_too_many_rows_is_a_message(tmp_path: Path) -> None:
    done = make(tmp_path, "--max", "2", "--train", "50")
    assert done.returncode == 2 and "9 questions" in done.stderr and "Traceback" not in done.stderr
