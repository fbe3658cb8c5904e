"""Checkpoints of a run: the learner's state and where the run stood, written atomically with Orbax.

One directory a step. Orbax writes into a temporary name and renames it when everything is on disk, so a directory named
after a step is complete; the oldest is deleted only after a newer one is. Saving waits for the write: an error is raised
where it happened and no state that is about to be donated can change under the writer.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxgrpo.errors import RunError

STATE = "state"
PROGRESS = "progress"


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, directory: Path, keep: int):
        """Opens (and makes) `directory`; leftovers of an interrupted write are removed.

        Args:
            keep: how many checkpoints stay.
        """
        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None when there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Writes one checkpoint and waits until it is durable.

        Args:
            state: a pytree of arrays.
            progress: JSON-able: data cursor, counters, sizes of the record files.

        Raises:
            RunError: it could not be written (disk full, no permission); the earlier checkpoints are untouched.
        """
        arguments = ocp.args.Composite(**{STATE: ocp.args.StandardSave(state), PROGRESS: ocp.args.JsonSave(progress)})
        try:
            self._manager.save(step, args=arguments, force=True)
            self._manager.wait_until_finished()
        except Exception as error:
            free = shutil.disk_usage(self.directory).free / 2**30
            raise RunError(
                f"the checkpoint of step {step} could not be written to {self.directory} ({free:.1f} GiB free): "
                f"{type(error).__name__}: {error}\n  the last complete checkpoint is step {self.latest()}; "
                f"make room or fix the permissions and go on with --resume"
            ) from error

    def progress(self, step: int) -> dict[str, Any]:
        """Where the run stood at `step`."""
        return self._manager.restore(step, args=ocp.args.Composite(**{PROGRESS: ocp.args.JsonRestore()}))[PROGRESS]

    def restore(self, step: int, like: Any) -> Any:
        """The state of `step`, placed and sharded as `like` says.

        Args:
            like: a pytree of `jax.ShapeDtypeStruct` with shardings: the mesh may differ from the one that saved.

        Raises:
            RunError: the checkpoint does not fit `like`: another model or another optimizer.
        """
        try:
            arguments = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(like)})
            return self._manager.restore(step, args=arguments)[STATE]
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise RunError(
                f"the checkpoint {self.directory / str(step)} does not fit this run's model and optimizer: {error}\n"
                f"  resume with the config saved beside the run, or begin a new run in another output_dir"
            ) from error

    def close(self) -> None:
        """Waits for Orbax's background work."""
        self._manager.close()
