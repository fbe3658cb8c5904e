"""The schedulers that come with the package."""

from __future__ import annotations

from jaxgrpo.registry import register
from jaxgrpo.rollout.engine import Engine
from jaxgrpo.rollout.episode import EpisodeSpec, append_sampled, begin, finish
from jaxgrpo.rollout.scheduler import Decode, Scheduler, stop_reason
from jaxgrpo.types.rollout import Trajectory


@register("scheduler", "single_turn")
class SingleTurn(Scheduler):
    """One prompt, one completion."""

    async def run(self, spec: EpisodeSpec, engine: Engine, decode: Decode) -> list[Trajectory]:
        """Draws one completion."""
        choice = await engine.generate(spec.prompt_tokens, spec.sampling)
        trajectory = append_sampled(begin(spec), choice, decode(choice.token_ids))
        return [finish(trajectory, stop_reason(choice))]
