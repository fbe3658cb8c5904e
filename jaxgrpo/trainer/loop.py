"""The run, top to bottom: sample, score, update, publish, record, evaluate, save; and again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxgrpo.data.stream import PromptStream
from jaxgrpo.learner.checkpoint import Checkpoints
from jaxgrpo.learner.state import TrainState
from jaxgrpo.sinks import JsonLines, MetricsSink
from jaxgrpo.trainer.collect import Collected, Collector, length_metrics
from jaxgrpo.trainer.evaluate import Evaluation
from jaxgrpo.trainer.improve import Improver
from jaxgrpo.trainer.progress import Reporter


class PolicyHolder(Protocol):
    """A sampler that takes the learner's parameters as they are."""

    def load(self, params: Any, version: int) -> None:
        """Draws the next samples with these parameters."""
        ...


@dataclass
class Run:
    """Everything a run is made of; a door builds it, `train` runs it.

    Attributes:
        sampler: draws with the parameters it was given last.
        prompts: the training prompts and the cursor in them.
        evaluation: None when there are no held-out prompts.
        eval_every, checkpoint_every: in steps; 0: only at the ends.
        completions: None when the run does not record them.
    """

    total_steps: int
    prompts_per_step: int
    prompts: PromptStream
    sampler: PolicyHolder
    collector: Collector
    improver: Improver
    evaluation: Evaluation | None
    eval_every: int
    checkpoints: Checkpoints
    checkpoint_every: int
    metrics: MetricsSink
    completions: JsonLines | None
    reporter: Reporter
    stop_asked: bool = field(default=False, init=False)

    def close(self) -> None:
        """Ends the display and closes the record files."""
        self.reporter.close()
        self.metrics.close()
        if self.completions is not None:
            self.completions.close()
        self.checkpoints.close()


def train(run: Run, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Trains from `step` (0 for a new run) to the end, or until a signal asks to stop.

    Returns:
        The final state and the step it stands at; less than `run.total_steps` only when asked to stop.
    """
    with asyncio.Runner() as events, _stop_on_signals(run):
        run.sampler.load(state.params, version=step)
        if step == 0 and run.evaluation:
            run.reporter.note("evaluating before training")
            _record(run, 0, events.run(_evaluate(run, 0)))
        saved = step
        while step < run.total_steps and not run.stop_asked:
            step += 1
            state = _one_step(run, events, state, step)
            if run.checkpoint_every and step % run.checkpoint_every == 0:
                save(run, state, step)
                saved = step
        if step != saved:  # the end, or a request to stop: it may come at any moment
            save(run, state, step)
    return state, step


def _one_step(run: Run, events: asyncio.Runner, state: TrainState, step: int) -> TrainState:
    begun = time.perf_counter()
    prompts = run.prompts.next_batch(run.prompts_per_step)
    collected = events.run(run.collector.collect(prompts, step))
    for warning in collected.scores.warnings:
        run.reporter.note(f"warning: {warning}")
    advantages, metrics = run.improver.advantages(state, collected)
    state, of_update = run.improver.improve(state, collected, advantages)
    run.sampler.load(state.params, version=step)
    metrics |= of_update | length_metrics(collected.trajectories) | collected.scores.metrics
    metrics |= {f"time/{name}": seconds for name, seconds in collected.seconds.items()}
    metrics |= {"epoch": run.prompts.epoch, "time/step": time.perf_counter() - begun}
    _record_completions(run, step, "train", collected, advantages.values)
    if run.evaluation and (step == run.total_steps or (run.eval_every and step % run.eval_every == 0)):
        metrics |= events.run(_evaluate(run, step))
    _record(run, step, metrics)
    return state


async def _evaluate(run: Run, step: int) -> dict[str, float]:
    assert run.evaluation is not None
    collected, metrics = await run.evaluation.run(step)
    _record_completions(run, step, "eval", collected, None)
    return metrics


def save(run: Run, state: TrainState, step: int) -> None:
    """Writes a checkpoint from which `--resume` continues bit for bit."""
    progress = {
        "step": step,
        "prompts": run.prompts.state(),
        "metrics_bytes": run.metrics.lines.sync(),
        # None: not recorded at present; what an earlier part of the run recorded stays as it is.
        "completions_bytes": run.completions.sync() if run.completions else None,
    }
    run.checkpoints.save(step, state, progress)


def _record(run: Run, step: int, metrics: dict[str, float]) -> None:
    run.metrics.log(step, metrics)
    run.reporter.step(step, metrics)


def _record_completions(run: Run, step: int, split: str, collected: Collected, advantages: np.ndarray | None) -> None:
    if run.completions is None:
        return
    scores = collected.scores
    for index, trajectory in enumerate(collected.trajectories):
        run.completions.write(
            {
                "step": step,
                "split": split,
                "prompt_id": trajectory.prompt_id,
                "episode_id": trajectory.episode_id,
                "messages": trajectory.messages,
                "completion": trajectory.completion,
                "rewards": dict(zip(scores.names, scores.values[index], strict=True)),
                "advantage": None if advantages is None else advantages[index],
                "stop": trajectory.stop,
                "turns": trajectory.turns,
                "tokens": trajectory.num_sampled,
                "version": int(trajectory.versions.max()),
                "infos": trajectory.infos,
            }
        )
    run.completions.flush()


@contextmanager
def _stop_on_signals(run: Run) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a stop after the current step, with a checkpoint; a second one interrupts."""

    def ask(number: int, frame: Any) -> None:
        if run.stop_asked:
            raise KeyboardInterrupt
        run.stop_asked = True
        name = signal.Signals(number).name
        run.reporter.note(f"{name}: finishing this step, then saving a checkpoint (once more: stop at once)")

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
