"""Records are strict, lossless JSON, survive a crash, and never repeat a step (pain point P64)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from jaxgrpo.sinks import JsonLines, MetricsSink, TensorBoard, to_json


def strict(line: str) -> dict:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(line, parse_constant=refuse)


def test_nan_becomes_null_and_any_text_survives(tmp_path: Path) -> None:
    text = "ok \ud83d and \u2028 and \x00 and 数学"
    lines = JsonLines(tmp_path / "records.jsonl")
    lines.write(
        {"nan": math.nan, "inf": np.float32(np.inf), "text": text, "array": np.arange(2), "flag": np.bool_(True)}
    )
    lines.close()
    raw = (tmp_path / "records.jsonl").read_text()
    assert raw.count("\n") == len(raw.splitlines()) == 1
    assert strict(raw) == {"nan": None, "inf": None, "text": text, "array": [0, 1], "flag": True}


def test_resuming_cuts_back_to_the_checkpoint_even_through_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 1})
    size = lines.sync()
    lines.write({"step": 2})
    lines.close()
    with open(path, "a") as file:
        file.write('{"step": 3, "rew')
    lines = JsonLines(path, size)
    lines.write({"step": 2, "again": True})
    lines.close()
    assert [strict(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2, "again": True}]


def test_a_file_shorter_than_the_checkpoint_knew_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="lines were lost"):
        JsonLines(tmp_path / "metrics.jsonl", 10)


class Broken:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("the tracker is down")

    def close(self) -> None:
        raise ConnectionError("still down")


def test_a_failing_tracker_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    sink = MetricsSink(JsonLines(tmp_path / "metrics.jsonl"), [Broken()])
    sink.log(1, {"reward": 0.5})
    sink.log(2, {"reward": 0.6})
    sink.close()
    records = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["reward"] for record in records] == [0.5, 0.6]
    assert records[1]["logging/errors"] == 1 and sink.tracker_errors == 3


def test_tensorboard_skips_what_it_cannot_show(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, first_step=0)
    board.log(1, {"reward": 0.5, "kl": math.nan})
    board.close()
    assert any(file.stat().st_size > 0 for file in tmp_path.iterdir())


def test_odd_objects_become_text() -> None:
    assert to_json({1: {Path("a")}, "b": (1, np.int64(2))}) == {"1": ["a"], "b": [1, 2]}
