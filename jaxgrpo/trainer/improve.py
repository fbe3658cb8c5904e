"""Scored samples → updates: advantages, mini-batches, passes, and the log-probs that stand still meanwhile.

collected ──▶ advantages ──▶ samples ──▶ mini-batches ──▶ [old, reference log-probs] ──▶ update, update, …
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxgrpo.algo.advantages import Advantages, estimate
from jaxgrpo.algo.kl import sequence_penalty
from jaxgrpo.algo.objective import Objective
from jaxgrpo.algo.reward_metrics import reward_metrics
from jaxgrpo.errors import RunError
from jaxgrpo.learner.layout import Layout
from jaxgrpo.learner.packing import Packed, Sample, pack, unpack
from jaxgrpo.learner.state import TrainState
from jaxgrpo.learner.step import Learner
from jaxgrpo.metrics import Mean, Metrics, finalize, merge
from jaxgrpo.trainer.collect import Collected
from jaxgrpo.types.batch import TokenBatch


@dataclass(frozen=True)
class Improver:
    """Turns the samples of a step into updates of the parameters.

    Attributes:
        objective: also the learner's; its advantage estimator and filters are applied here.
        layout: the shapes of packed batches.
        updates_per_step: mini-batches that one pass over the samples is split into, by prompt.
        num_iterations: passes over the samples.
        share_prompts: let the completions of a group share one copy of their prompt.
        max_skipped_updates: so many updates in a row may be skipped for want of finite numbers.
    """

    learner: Learner
    objective: Objective
    layout: Layout
    updates_per_step: int
    num_iterations: int
    share_prompts: bool
    max_skipped_updates: int

    def advantages(self, state: TrainState, collected: Collected) -> tuple[Advantages, dict[str, float]]:
        """Advantages of all trajectories, and the metrics of rewards and groups."""
        scores, trajectories = collected.scores, collected.trajectories
        prompt_ids = [trajectory.prompt_id for trajectory in trajectories]
        episode_ids = [trajectory.episode_id for trajectory in trajectories]
        penalty = self._kl_penalty(state, collected) if self.objective.needs_reference_for_reward else None
        advantages = estimate(
            scores.values,
            scores.weights,
            prompt_ids,
            episode_ids,
            estimator=self.objective.advantage,
            penalty=penalty,
            **dict(self.objective.advantage_options),
        )
        metrics = finalize(reward_metrics(scores.values, scores.weights, prompt_ids, episode_ids, scores.names))
        if penalty is not None:
            metrics["kl"] = float(penalty.mean()) / self.objective.kl_coef
        return advantages, metrics

    def improve(
        self, state: TrainState, collected: Collected, advantages: Advantages
    ) -> tuple[TrainState, dict[str, float]]:
        """Applies all updates of one step; `state` is used up.

        Returns:
            The new state, and the metrics of the updates: the objective's, the optimizer's, `time/update`, and how much of
            the samples was packed.

        Raises:
            RunError: too many updates in a row were skipped because the loss or a gradient was not finite.
        """
        begun = time.perf_counter()
        samples = self._samples(collected, advantages)
        parts = [self._pack(part) for part in self._split(samples)]
        mini_batches = self._with_frozen_logprobs(state, parts)
        metrics: Metrics = {}
        for iteration in range(self.num_iterations):
            for index, batches in enumerate(mini_batches):
                on_policy = np.float32(iteration == 0 and index == 0)
                batches = [batch.with_values(on_policy=on_policy) for batch in batches]
                state, of_update = self.learner.update(state, batches)
                metrics = merge(metrics, of_update)
                metrics = merge(metrics, {"update/empty": Mean(float(not batches), 1.0)})
                self._check_skips(state)
        result = finalize(metrics) | _packing_metrics(samples, parts)
        result["time/update"] = time.perf_counter() - begun
        return state, result

    def _samples(self, collected: Collected, advantages: Advantages) -> list[Sample]:
        """Trajectories with their advantages; those that take no part keep their place but lose their mask."""
        samples = []
        for index, trajectory in enumerate(collected.trajectories):
            cut = self.objective.drop_truncated and trajectory.stop == "length"
            if cut or not advantages.included[index]:
                trajectory = replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))
            samples.append(Sample(trajectory, float(advantages.values[index])))
        return samples

    def _split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Whole groups, in order, in `updates_per_step` parts of (nearly) as many groups each."""
        order = {prompt_id: None for prompt_id in (sample.trajectory.prompt_id for sample in samples)}
        part_of = {prompt_id: place * self.updates_per_step // len(order) for place, prompt_id in enumerate(order)}
        parts: list[list[Sample]] = [[] for _ in range(self.updates_per_step)]
        for sample in samples:
            parts[part_of[sample.trajectory.prompt_id]].append(sample)
        return parts

    def _pack(self, samples: Sequence[Sample], *, everything: bool = False) -> Packed:
        # Without a term that learns from every sample, one without advantage has a gradient of exactly 0: spare it.
        return pack(
            samples,
            self.layout,
            share=self.share_prompts,
            keep_zero_advantage=self.objective.needs_zero_advantages or everything,
            keep_groups_whole=self.objective.needs_whole_groups,
        )

    def _with_frozen_logprobs(self, state: TrainState, parts: Sequence[Packed]) -> list[list[TokenBatch]]:
        """The micro-batches of each update, with old log-probs if a later update needs them, and reference log-probs.

        The first update needs no old log-probs: its policy *is* the old one (`TokenBatch.on_policy`).
        """
        updates = self.num_iterations * self.updates_per_step
        result = []
        for packed in parts:
            batches = packed.batches
            if updates > 1:
                batches = _with(batches, "old_logprobs", self.learner.logprobs(state.params, batches))
            if self.objective.needs_reference:
                batches = _with(batches, "ref_logprobs", self.learner.logprobs(state.reference, batches))
            result.append(batches)
        return result

    def _kl_penalty(self, state: TrainState, collected: Collected) -> np.ndarray:
        """kl_coef · KL of each trajectory, float [N], to be subtracted from its reward."""
        samples = [Sample(trajectory, 0.0) for trajectory in collected.trajectories]
        packed = self._pack(samples, everything=True)
        old = unpack(packed, self.learner.logprobs(state.params, packed.batches))
        reference = unpack(packed, self.learner.logprobs(state.reference, packed.batches))
        penalty = np.zeros(len(samples))
        for index, sample in enumerate(samples):
            if old[index] is not None:
                arrays = (old[index][None], reference[index][None], sample.trajectory.loss_mask[None])
                penalty[index] = sequence_penalty(*arrays, estimator=self.objective.kl_estimator)[0]
        return self.objective.kl_coef * penalty

    def _check_skips(self, state: TrainState) -> None:
        in_a_row = int(state.skipped_in_a_row)
        if in_a_row > self.max_skipped_updates:
            raise RunError(
                f"{in_a_row} updates in a row were skipped because the loss or a gradient was not finite "
                f"(optimizer.max_skipped_updates: {self.max_skipped_updates}); the parameters are those of the last "
                "good update. Lower optimizer.learning_rate, and look at completions.jsonl for the samples of this step"
            )


def _with(batches: Sequence[TokenBatch], name: str, values: Sequence[Any]) -> list[TokenBatch]:
    return [batch.with_values(**{name: value}) for batch, value in zip(batches, values, strict=True)]


def _packing_metrics(samples: Sequence[Sample], parts: Sequence[Packed]) -> dict[str, float]:
    """How much of the step's samples went into the update, and how much of the packed rows is padding."""
    packed = sum(place is not None for part in parts for place in part.places)
    row_tokens = [sum(batch.tokens.size for batch in part.batches) for part in parts]
    padding = sum(part.padding_share * tokens for part, tokens in zip(parts, row_tokens, strict=True) if tokens)
    total = sum(row_tokens)
    return {
        "update/sequences_share": packed / len(samples),
        "update/row_tokens": float(total),
        "update/padding_share": padding / total if total else float("nan"),
    }
