"""A checkpoint of a run → a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxgrpo.config.load import load_config
from jaxgrpo.errors import Problem, UserError
from jaxgrpo.learner.checkpoint import Checkpoints
from jaxgrpo.learner.optimizer import make_optimizer
from jaxgrpo.learner.state import abstract_state
from jaxgrpo.registry import load_plugins
from jaxgrpo.sharding import make_mesh
from jaxgrpo.trainer.build import make_decoder
from jaxgrpo.trainer.prepare import build_objective
from jaxgrpo.weights.checkpoint_files import export_pretrained, validate_pretrained


def export(directory: Path, step: int | None, out: Path | None, dtype: str | None) -> Path:
    """Writes the policy of one checkpoint.

    Args:
        directory: the run's output_dir.
        step: the checkpoint's step; None: the newest.
        out: where to; None: `export-<step>` in the run's directory.
        dtype: type of the tensors; None: as the run's config says.

    Returns:
        The directory written.

    Raises:
        UserError: there is no such checkpoint, or the model the run started from is gone.
    """
    config = load_config(directory / "config.yaml")
    load_plugins(config.plugins, directory)
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
    steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        expected = (
            f"one of the checkpoints {', '.join(map(str, steps))}" if steps else "a run with a complete checkpoint"
        )
        raise UserError(Problem("--step", str(step), expected, "leave --step out for the newest"))
    step = steps[-1] if step is None else step
    model = validate_pretrained(config.model.path)
    mesh = make_mesh({"fsdp": -1})  # of this machine: the run's may have had more devices
    jax.set_mesh(mesh)
    decoder = make_decoder(config, model)
    objective = build_objective(config)
    optimizer = make_optimizer(config.optimizer, 1, decoder.axes)
    with_reference = objective.needs_reference or objective.needs_reference_for_reward
    state = checkpoints.restore(step, abstract_state(decoder, optimizer, mesh, with_reference=with_reference))
    checkpoints.close()
    target = str(out or directory / f"export-{step}")
    return export_pretrained(state.params, model, config.model.path, target, dtype or config.checkpoint.export_dtype)
