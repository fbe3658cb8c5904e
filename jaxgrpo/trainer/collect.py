"""One step's samples: prompts → episodes → rewards. Training and evaluation both collect, with other settings."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxgrpo.data.chat import ChatTokenizer
from jaxgrpo.errors import RunError
from jaxgrpo.rewards.scoring import Scorer, ScoreResult
from jaxgrpo.rollout.engine import Engine, SamplingParams
from jaxgrpo.rollout.episode import EpisodeSpec
from jaxgrpo.rollout.scheduler import Scheduler
from jaxgrpo.types.rollout import Prompt, Trajectory

FAILED = ("error", "abort")
"""Stop reasons of episodes that are neither scored nor trained on."""


@dataclass(frozen=True)
class Collected:
    """What was sampled in one step, in the order prompt by prompt, sample by sample.

    Attributes:
        trajectories: N of them.
        scores: rewards of each, NaN where a reward abstained or the episode failed.
        seconds: time spent in `sampling` and `scoring`.
    """

    trajectories: list[Trajectory]
    scores: ScoreResult
    seconds: dict[str, float]


@dataclass(frozen=True)
class Collector:
    """Plays episodes and scores them.

    Attributes:
        sampling: how to draw; the seed in it is replaced for every episode.
        num_generations: episodes of each prompt.
        seed: the run's seed; with step, prompt and sample number it decides every token.
    """

    engine: Engine
    scheduler: Scheduler
    chat: ChatTokenizer
    scorer: Scorer
    sampling: SamplingParams
    num_generations: int
    seed: int

    async def collect(self, prompts: Sequence[Prompt], step: int) -> Collected:
        """Samples and scores `num_generations` episodes of each prompt.

        Raises:
            RunError: every episode failed; the message is the first failure's.
        """
        begun = time.perf_counter()
        specs = [spec for place, prompt in enumerate(prompts) for spec in self._specs(prompt, step, place)]
        episodes = await asyncio.gather(*(self.scheduler.run(spec, self.engine, self.chat.decode) for spec in specs))
        prompt_of = {spec.episode_id: spec.prompt for spec in specs}
        trajectories = [trajectory for episode in episodes for trajectory in episode]
        sampled = time.perf_counter()
        scores = await self._score(trajectories, prompt_of, step)
        seconds = {"sampling": sampled - begun, "scoring": time.perf_counter() - sampled}
        return Collected(trajectories, scores, seconds)

    def _specs(self, prompt: Prompt, step: int, place: int) -> list[EpisodeSpec]:
        tokens = tuple(self.chat.encode_prompt(prompt))
        return [
            EpisodeSpec(
                prompt=prompt,
                prompt_tokens=tokens,
                # `place` tells two draws of one row in one step apart (a data set smaller than a step).
                episode_id=f"{step}.{place}.{sample}",
                sampling=replace(self.sampling, seed=episode_seed(self.seed, step, prompt.prompt_id, place, sample)),
            )
            for sample in range(self.num_generations)
        ]

    async def _score(self, trajectories: list[Trajectory], prompt_of: dict[str, Prompt], step: int) -> ScoreResult:
        good = [index for index, trajectory in enumerate(trajectories) if trajectory.stop not in FAILED]
        if not good:
            first = trajectories[0] if trajectories else None
            reason = first.infos.get("error", f"stop reason {first.stop!r}") if first else "no episode was played"
            raise RunError(f"step {step}: all {len(trajectories)} episodes failed; the first one's reason: {reason}")
        rows = [prompt_of[trajectories[index].episode_id] for index in good]
        scores = await self.scorer.score([trajectories[index] for index in good], rows, step)
        values = np.full((len(trajectories), scores.values.shape[1]), np.nan, np.float32)
        values[good] = scores.values
        return replace(scores, values=values)


def episode_seed(seed: int, step: int, prompt_id: str, place: int, sample: int) -> int:
    """A 63-bit seed: the same in every rerun, different for every episode of a run."""
    text = f"{seed}/{step}/{prompt_id}/{place}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Completion lengths in sampled tokens, the share cut by a limit, turns, and failures by stop reason."""
    lengths = np.asarray([trajectory.num_sampled for trajectory in trajectories], np.float64)
    cut = np.asarray([trajectory.stop == "length" for trajectory in trajectories])
    failed = [trajectory.stop for trajectory in trajectories if trajectory.stop in FAILED]
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/mean_terminated_length": float(lengths[~cut].mean()) if not cut.all() else float("nan"),
        "completions/clipped_ratio": float(cut.mean()),
        "num_turns": float(np.mean([trajectory.turns for trajectory in trajectories])),
        "episodes/failed": float(len(failed)),
    }
