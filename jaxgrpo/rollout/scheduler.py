"""Who plays an episode: a scheduler talks to an engine, turn by turn, and leaves trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxgrpo.rollout.engine import Choice, Engine
from jaxgrpo.rollout.episode import EpisodeSpec
from jaxgrpo.types.rollout import StopReason, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Completion ids to text, special tokens removed."""

STOP_OF_FINISH: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""How an episode ended, when the engine's last word ended it."""


class Scheduler:
    """Plays episodes. Subclasses override `run`; one scheduler object serves all episodes, also at the same time."""

    async def run(self, spec: EpisodeSpec, engine: Engine, decode: Decode) -> list[Trajectory]:
        """Plays one episode and returns its trajectories: more than one when the history was rewritten on the way."""
        raise NotImplementedError(f"{type(self).__name__} has to override run")


def stop_reason(choice: Choice) -> StopReason:
    """The stop reason of an episode that ended with `choice`."""
    return STOP_OF_FINISH[choice.finish_reason]
