"""Held-out evaluation: the same collection with other settings, and its means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgrpo.trainer.collect import Collected, Collector, length_metrics
from jaxgrpo.types.rollout import Prompt


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate on and what to call accuracy.

    Attributes:
        accuracy_reward: name of the reward whose mean is `eval/accuracy`.
    """

    collector: Collector
    prompts: Sequence[Prompt]
    accuracy_reward: str

    async def run(self, step: int) -> tuple[Collected, dict[str, float]]:
        """Samples all held-out prompts.

        Returns:
            The samples, and their metrics under `eval/`: accuracy, each reward's mean, the weighted reward, lengths.
            An abstained score is left out of its own mean and out of the weighted reward.
        """
        collected = await self.collector.collect(self.prompts, step)
        scores = collected.scores
        means = np.array([_mean(scores.values[:, f]) for f in range(len(scores.names))])
        metrics = {f"eval/rewards/{name}/mean": float(mean) for name, mean in zip(scores.names, means, strict=True)}
        metrics["eval/accuracy"] = metrics[f"eval/rewards/{self.accuracy_reward}/mean"]
        metrics["eval/reward"] = float(np.nansum(means * np.asarray(scores.weights)))
        lengths = length_metrics(collected.trajectories)
        metrics["eval/completions/mean_length"] = lengths["completions/mean_length"]
        metrics["eval/completions/clipped_ratio"] = lengths["completions/clipped_ratio"]
        metrics["eval/time"] = sum(collected.seconds.values())
        return collected, metrics


def _mean(values: np.ndarray) -> float:
    scored = values[np.isfinite(values)]
    return float(scored.mean()) if len(scored) else float("nan")
