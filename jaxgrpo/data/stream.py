"""The order of training prompts: shuffled anew each epoch, endless, with a cursor that a checkpoint can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from jaxgrpo.data.prompts import PromptSet
from jaxgrpo.errors import Problem, UserError
from jaxgrpo.types.rollout import Prompt


class PromptStream:
    """Draws prompts without end; each row once an epoch.

    Order comes from grain: a seeded permutation of the rows, another one each epoch, addressed by position, so the
    cursor is one number and a restored stream goes on exactly where an uninterrupted one would be.

    A batch may straddle two epochs, so no row is ever dropped. A row that would come twice into one batch (late in one
    epoch, early in the next) waits for the next batch: a step's groups are different rows as long as there are enough.
    """

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool = True):
        import grain  # imports jax, which data/ must not do when it is imported: docs/decisions/001

        self._prompts = prompts.prompts
        self._digest = hashlib.blake2b(
            "\n".join(p.prompt_id for p in self._prompts).encode(), digest_size=8
        ).hexdigest()
        self._seed = seed
        self._shuffle = shuffle
        order = grain.MapDataset.range(len(self._prompts))
        self._order = (order.seed(seed).shuffle() if shuffle else order).repeat()
        self._position = 0
        self._waiting: list[int] = []

    @property
    def epoch(self) -> float:
        """Passes over the rows so far."""
        return (self._position - len(self._waiting)) / len(self._prompts)

    def next_batch(self, size: int) -> list[Prompt]:
        """The next `size` prompts: different rows if the data set has that many, else each as often as it must be."""
        batch: list[int] = []
        round_rows: set[int] = set()
        waiting, self._waiting = self._waiting, []
        while len(batch) < size:
            row = waiting.pop(0) if waiting else self._draw()
            if row in round_rows:
                self._waiting.append(row)
                continue
            batch.append(row)
            round_rows.add(row)
            if len(round_rows) == len(self._prompts):  # every row is in: only now may they come again
                round_rows = set()
                waiting, self._waiting = self._waiting + waiting, []
        self._waiting += waiting
        return [self._prompts[row] for row in batch]

    def state(self) -> dict[str, Any]:
        """The cursor, JSON-able: what `next_batch` has handed out and nothing more."""
        return {
            "position": self._position,
            "waiting": list(self._waiting),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._prompts),
            "digest": self._digest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a cursor.

        Raises:
            UserError: the cursor belongs to other data, another seed or another order.
        """
        mine = self.state()
        changed = [name for name in ("rows", "digest", "seed", "shuffle") if state[name] != mine[name]]
        if changed:
            raise UserError(
                Problem(
                    "data.train",
                    ", ".join(f"{name} {mine[name]}" for name in changed),
                    "the data the checkpoint was made with: " + ", ".join(f"{name} {state[name]}" for name in changed),
                    "restore the data files, data.shuffle and seed of the first run, or start a new run",
                )
            )
        self._position = int(state["position"])
        self._waiting = [int(row) for row in state["waiting"]]

    def _draw(self) -> int:
        row = int(self._order[self._position])
        self._position += 1
        return row
