"""From a sound config to the objects of a run, new or resumed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgrpo.config.load import dump_config
from jaxgrpo.config.schema import Config
from jaxgrpo.data.stream import PromptStream
from jaxgrpo.engines.jax_engine import JaxEngine
from jaxgrpo.errors import Problem, RunError, UserError
from jaxgrpo.learner.checkpoint import Checkpoints
from jaxgrpo.learner.layout import choose_layout
from jaxgrpo.learner.optimizer import make_optimizer
from jaxgrpo.learner.state import TrainState, abstract_state, create, decoder_shardings
from jaxgrpo.learner.step import Learner
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.rewards.scoring import Scorer
from jaxgrpo.rollout.engine import SamplingParams
from jaxgrpo.sharding import make_mesh
from jaxgrpo.sinks import JsonLines, MetricsSink, TensorBoard, Tracker, WandB
from jaxgrpo.trainer.collect import Collector
from jaxgrpo.trainer.evaluate import Evaluation
from jaxgrpo.trainer.improve import Improver
from jaxgrpo.trainer.loop import Run
from jaxgrpo.trainer.prepare import Prepared
from jaxgrpo.trainer.progress import make_reporter
from jaxgrpo.weights.checkpoint_files import load_pretrained


def build(prepared: Prepared, *, resume: bool) -> tuple[Run, TrainState, int]:
    """Builds a run, its state, and the step that state stands at (0 for a new run).

    Raises:
        RunError: there is a checkpoint but it, or the files beside it, cannot be resumed from.
    """
    config, output = prepared.config, Path(prepared.config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    keep_compilations()
    mesh = make_mesh(prepared.plan.mesh)
    jax.set_mesh(mesh)
    decoder = make_decoder(config, prepared.model)
    learner = make_learner(prepared, decoder, mesh)
    checkpoints = Checkpoints(output / "checkpoints", config.checkpoint.keep)
    step = checkpoints.latest() if resume else None
    if step is not None and step > prepared.plan.steps:
        found = f"{prepared.plan.steps} steps, but the newest checkpoint in {output} is of step {step}"
        raise UserError(Problem("steps", found, f"at least {step} steps", "raise steps, or start another output_dir"))
    state, progress = _state(prepared, learner, checkpoints, step)
    step = step or 0
    run = _run(prepared, learner, checkpoints, progress, step)
    (output / "config.yaml").write_text(dump_config(prepared.portable_config))
    if resume:
        run.reporter.note(f"going on from step {step}" if step else "no checkpoint yet: starting from the beginning")
    return run, state, step


def make_decoder(config: Config, model: ModelConfig) -> Decoder:
    """The policy as the config wants it computed; `auto` looks at the backend."""
    on_cpu = jax.default_backend() == "cpu"
    section = config.model
    dtype = section.compute_dtype if section.compute_dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    remat = section.remat if section.remat != "auto" else ("none" if on_cpu else "full")
    return Decoder(model, jnp.dtype(dtype), scan_layers=section.scan_layers is not False, remat=remat)


def sampling_decoder(config: Config, decoder: Decoder) -> Decoder:
    """The same policy as the sampler runs it: a CPU decodes a token faster through unrolled layers."""
    unrolled = config.model.scan_layers == "auto" and jax.default_backend() == "cpu"
    return replace(decoder, scan_layers=False) if unrolled else decoder


def make_learner(prepared: Prepared, decoder: Decoder, mesh: Mesh) -> Learner:
    """The learner of a run."""
    config = prepared.config
    optimizer = make_optimizer(config.optimizer, prepared.plan.total_updates, decoder.axes)
    return Learner(decoder, prepared.objective, optimizer, mesh, temperature=config.rollout.sampling.temperature)


def needs_reference(prepared: Prepared) -> bool:
    """Whether the run keeps a reference policy at all."""
    return prepared.objective.needs_reference or prepared.objective.needs_reference_for_reward


def keep_compilations() -> None:
    """Keeps compiled programs on disk, so that a second run, or a resumed one, starts at once."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxgrpo" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def _state(
    prepared: Prepared, learner: Learner, checkpoints: Checkpoints, step: int | None
) -> tuple[TrainState, dict[str, Any]]:
    decoder, mesh, optimizer = learner.decoder, learner.mesh, learner.optimizer
    with_reference = needs_reference(prepared)
    if step is not None:
        like = abstract_state(decoder, optimizer, mesh, with_reference=with_reference)
        return checkpoints.restore(step, like), checkpoints.progress(step)
    _, params = load_pretrained(prepared.config.model.path, shardings=decoder_shardings(decoder, mesh))
    return create(params, optimizer, with_reference=with_reference), {}


def _run(prepared: Prepared, learner: Learner, checkpoints: Checkpoints, progress: dict[str, Any], step: int) -> Run:
    config, plan, output = prepared.config, prepared.plan, Path(prepared.config.output_dir)
    prompts = PromptStream(prepared.train_prompts, config.seed, config.data.shuffle)
    if progress:
        prompts.restore(progress["prompts"])
    engine = JaxEngine(
        sampling_decoder(config, learner.decoder),
        slots=config.rollout.slots,
        max_context=config.model.max_context or prepared.model.max_positions,
        stop_text=prepared.chat.decode,
        mesh=learner.mesh,
    )
    collector = _collector(prepared, engine)
    try:
        metrics = JsonLines(output / "metrics.jsonl", progress.get("metrics_bytes", 0))
        completions = None
        if config.logging.completions:
            size = progress.get("completions_bytes", 0)
            file = output / "completions.jsonl"
            completions = JsonLines(file, size if size is not None else file.stat().st_size if file.exists() else 0)
    except ValueError as error:
        raise RunError(f"cannot resume: {error}") from error
    return Run(
        total_steps=plan.steps,
        prompts_per_step=config.rollout.prompts_per_step,
        prompts=prompts,
        sampler=engine,
        collector=collector,
        improver=_improver(prepared, learner),
        evaluation=_evaluation(prepared, collector),
        eval_every=config.eval.every_steps,
        checkpoints=checkpoints,
        checkpoint_every=config.checkpoint.every_steps,
        metrics=MetricsSink(metrics, _trackers(config, output, step)),
        completions=completions,
        reporter=make_reporter(config.logging.progress, step, plan.steps),
    )


def _collector(prepared: Prepared, engine: JaxEngine) -> Collector:
    rollout = prepared.config.rollout
    sampling = SamplingParams(
        max_tokens=rollout.max_completion_tokens,
        stop_token_ids=prepared.chat.eos_ids,
        **{**rollout.sampling.model_dump(), "stop": tuple(rollout.sampling.stop)},
    )
    return Collector(
        engine=engine,
        scheduler=prepared.scheduler,
        chat=prepared.chat,
        scorer=Scorer(prepared.rewards, prepared.chat.prefill),
        sampling=sampling,
        num_generations=rollout.num_generations,
        seed=prepared.config.seed,
    )


def _evaluation(prepared: Prepared, training: Collector) -> Evaluation | None:
    if prepared.eval_prompts is None:
        return None
    section = prepared.config.eval
    # Neutral sampling: an evaluation measures the policy, not the exploration settings of the training run.
    sampling = SamplingParams(
        max_tokens=training.sampling.max_tokens,
        temperature=section.temperature,
        stop_token_ids=training.sampling.stop_token_ids,
        stop=training.sampling.stop,
    )
    collector = replace(
        training,
        sampling=sampling,
        num_generations=section.num_generations,
        scorer=Scorer(prepared.rewards, prepared.chat.prefill),
    )
    prompts = prepared.eval_prompts.prompts[: section.num_prompts]
    return Evaluation(collector, prompts, section.accuracy_reward or prepared.rewards[0].name)


def _improver(prepared: Prepared, learner: Learner) -> Improver:
    config, section = prepared.config, prepared.config.learner
    # A row that is drawn more than once in a step (there are too few) makes one group of all its samples.
    draws = -(-config.rollout.prompts_per_step // len(prepared.train_prompts.prompts))
    layout = choose_layout(
        config.data.max_prompt_tokens,
        config.rollout.max_completion_tokens,
        config.rollout.num_generations * draws,
        section.micro_batch_tokens,
        section.row_tokens,
        prepared.plan.mesh["data"] * prepared.plan.mesh["fsdp"],
        share=section.share_prompts,
        keep_groups_whole=prepared.objective.needs_whole_groups,
    )
    return Improver(
        learner=learner,
        objective=prepared.objective,
        layout=layout,
        updates_per_step=section.updates_per_step,
        num_iterations=section.num_iterations,
        share_prompts=section.share_prompts,
        max_skipped_updates=config.optimizer.max_skipped_updates,
    )


def _trackers(config: Config, output: Path, step: int) -> list[Tracker]:
    trackers: list[Tracker] = []
    if config.logging.tensorboard:
        trackers.append(TensorBoard(output / "tensorboard", first_step=step + 1 if step else 0))
    if config.logging.wandb_project:
        trackers.append(WandB(config.logging.wandb_project, output, config.model_dump()))
    return trackers
