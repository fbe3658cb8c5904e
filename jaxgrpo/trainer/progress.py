"""What a person sees while a run works: a live bar in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter(Protocol):
    """Shows a run to a person."""

    def note(self, text: str) -> None:
        """Shows a sentence: what the run is doing now, or a warning."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


def make_reporter(style: Literal["auto", "rich", "plain", "none"], first_step: int, total_steps: int) -> Reporter:
    """The reporter for a style; `auto` is rich when standard output is a terminal and plain otherwise."""
    if style == "auto":
        style = "rich" if sys.stdout.isatty() else "plain"
    if style == "none":
        return _Silent()
    return (_Rich if style == "rich" else _Plain)(first_step, total_steps)


def describe(metrics: Mapping[str, float]) -> str:
    """One step in one line: reward, length, where the time went."""
    parts = []
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f} ±{metrics.get('reward_std', float('nan')):.2f}")
    if "completions/mean_length" in metrics:
        parts.append(f"length {metrics['completions/mean_length']:.0f}")
    if metrics.get("completions/clipped_ratio", 0) > 0:
        parts.append(f"cut {metrics['completions/clipped_ratio']:.0%}")
    if "eval/accuracy" in metrics:
        parts.append(f"eval accuracy {metrics['eval/accuracy']:.1%}")
    if "time/step" in metrics:
        split = " + ".join(f"{name} {metrics[f'time/{name}']:.1f}" for name in ("sampling", "scoring", "update"))
        parts.append(f"{metrics['time/step']:.1f} s ({split})")
    return "  ".join(parts)


class _Eta:
    """Time left, from the median of the latest steps: compilation in the first ones must not spoil it."""

    def __init__(self, first_step: int, total_steps: int):
        self._total = total_steps
        self._durations: list[float] = []
        self._last = time.monotonic()

    def after(self, step: int) -> str:
        now = time.monotonic()
        self._durations = [*self._durations[-19:], now - self._last]
        self._last = now
        median = sorted(self._durations)[len(self._durations) // 2]
        return str(timedelta(seconds=round(median * (self._total - step))))


class _Silent:
    def note(self, text: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class _Plain:
    def __init__(self, first_step: int, total_steps: int):
        self._total = total_steps
        self._eta = _Eta(first_step, total_steps)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        print(f"step {step}/{self._total}  {describe(metrics)}  left {self._eta.after(step)}", flush=True)

    def close(self) -> None:
        pass


class _Rich:
    def __init__(self, first_step: int, total_steps: int):
        self._eta = _Eta(first_step, total_steps)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[eta]}"),
            TextColumn("{task.fields[text]}"),
            console=Console(),
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step, eta="?", text="")
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        text = describe(metrics)
        if "eval/accuracy" in metrics:
            self.note(f"step {step}: {text}")
        self._progress.update(self._task, completed=step, eta=self._eta.after(step), text=text)

    def close(self) -> None:
        self._progress.stop()
