"""Where numbers and texts of a run go: JSON lines always, TensorBoard and Weights & Biases when asked for.

`metrics.jsonl` and `completions.jsonl` are the record: strict JSON (NaN and infinities become null), any text losslessly
escaped. A checkpoint notes their sizes, and a resumed run cuts them back to it, so that no step is recorded twice. The
other sinks are a view: when one fails, training goes on and the failure is counted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class JsonLines:
    """An append-only file of JSON objects, one a line."""

    def __init__(self, path: Path, size: int = 0):
        """Opens `path` and cuts it back to `size` bytes (0: starts anew).

        Raises:
            ValueError: the file is shorter than `size`: it is not the file that was checkpointed.
        """
        self.path = path
        path.touch()
        if path.stat().st_size < size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, the checkpoint knew {size}: lines were lost")
        os.truncate(path, size)
        self._file = open(path, "a", encoding="utf-8", newline="\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object."""
        # ASCII escapes keep lone surrogates, U+2028 and every other text intact and each record on one line.
        self._file.write(json.dumps(to_json(record), ensure_ascii=True, allow_nan=False) + "\n")

    def sync(self) -> int:
        """Makes everything written so far durable and returns the file's size in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def flush(self) -> None:
        """Hands what was written to the operating system, so that a reader sees it."""
        self._file.flush()

    def close(self) -> None:
        """Makes everything durable and closes the file."""
        self.sync()
        self._file.close()


def to_json(value: Any) -> Any:
    """Plain JSON data for NumPy scalars and arrays, tuples and sets; non-finite numbers become null, the rest `str`."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    return str(value)


class Tracker(Protocol):
    """A view of the metrics in some other program."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of one step."""
        ...

    def close(self) -> None:
        """Ends the view."""
        ...


class TensorBoard:
    """Event files that TensorBoard reads."""

    def __init__(self, directory: Path, first_step: int):
        # Imported here: a run that does not use it should not pay for it.
        from tensorboardX import SummaryWriter

        # purge_step hides what an interrupted run wrote after the checkpoint it is resumed from.
        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes finite values as scalars."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandB:
    """A Weights & Biases run; a resumed run goes on in the same one."""

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any]):
        import wandb

        identity = directory / "wandb_id"
        if not identity.exists():
            identity.write_text(wandb.util.generate_id())
        self._run = wandb.init(
            project=project, dir=str(directory), config=dict(config), id=identity.read_text(), resume="allow"
        )
        # Our own step axis: the tracker's counter must never go back, ours does after a resume.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one step's metrics."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MetricsSink:
    """`metrics.jsonl` and the trackers that follow it."""

    def __init__(self, lines: JsonLines, trackers: list[Tracker]):
        self.lines = lines
        self.tracker_errors = 0
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records one object: `step`, then the metrics by name.

        A tracker that raises is counted in `tracker_errors` and reported on the next line; the record is complete anyway.
        """
        extra = {"logging/errors": float(self.tracker_errors)} if self.tracker_errors else {}
        self.lines.write({"step": step, **metrics, **extra})
        self.lines.flush()
        for tracker in self._trackers:
            try:
                tracker.log(step, metrics)
            except Exception:  # a view's failure must not end training; the count is in the record
                self.tracker_errors += 1

    def close(self) -> None:
        """Closes the record and the trackers."""
        self.lines.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception:  # see `log`
                self.tracker_errors += 1
