"""The plan of a run: what a config amounts to in steps, samples, updates and tokens on a given data set and machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxgrpo.config.check import longest_sequence
from jaxgrpo.config.schema import Config, MeshSection
from jaxgrpo.errors import Problem, UserError


@dataclass(frozen=True)
class Plan:
    """What a config amounts to on a given data set and mesh; every count is of the whole run unless it says "a step".

    Attributes:
        prompts: prompts drawn a step.
        samples: completions drawn a step.
        updates: optimizer updates a step, all passes together.
        steps, total_updates: how long the run is.
        train_prompts: rows of the training data.
        epochs: passes over them.
        step_tokens: the most tokens that can be sampled in a step.
        longest: the longest sequence, in tokens.
        evaluations, eval_prompts, eval_samples: how often, on how many prompts, with how many completions each time.
        mesh: devices by axis.
        warnings: what is allowed and rarely meant.
    """

    prompts: int
    samples: int
    updates: int
    steps: int
    total_updates: int
    train_prompts: int
    epochs: float
    step_tokens: int
    longest: int
    evaluations: int
    eval_prompts: int
    eval_samples: int
    mesh: dict[str, int]
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The plan as plain text, one statement a line, warnings last."""
        per_prompt = _count(self.samples // self.prompts, "completion")
        total_samples = _count(self.samples * self.steps, "sample")
        evaluation = (
            f"{_count(self.evaluations, 'time')} on {_count(self.eval_prompts, 'held-out prompt')} "
            f"({_count(self.eval_samples, 'sample')} each time)"
            if self.eval_prompts
            else "none (no data.eval)"
        )
        return [
            f"a step      {_count(self.prompts, 'prompt')} × {per_prompt} = {_count(self.samples, 'sample')}, "
            f"{_count(self.updates, 'update')}",
            f"the run     {_count(self.steps, 'step')}, {_count(self.total_updates, 'update')}, {total_samples}",
            f"data        {_count(self.train_prompts, 'training prompt')}, seen {self.epochs:.3g} times",
            f"tokens      at most {self.step_tokens:,} sampled a step, {self.step_tokens * self.steps:,} in all; "
            f"longest sequence {self.longest:,}",
            f"evaluation  {evaluation}",
            f"mesh        {' × '.join(f'{axis} {size}' for axis, size in self.mesh.items())}",
            *(f"warning     {warning}" for warning in self.warnings),
        ]


def plan(config: Config, num_train_prompts: int, num_eval_prompts: int, num_devices: int) -> Plan:
    """The arithmetic of a run, in one place.

    Steps are `steps`, or the whole steps in `epochs` passes: floor(epochs × num_train_prompts / prompts_per_step). The
    stream of prompts runs on from one epoch into the next, so a data set may be smaller than a step.

    Raises:
        UserError: the run would have no step, its warm-up outlasts it, or the mesh does not fit the devices.
    """
    rollout, learner = config.rollout, config.learner
    samples = rollout.prompts_per_step * rollout.num_generations
    updates = learner.updates_per_step * learner.num_iterations
    # The nudge keeps 0.3 epochs of 10 prompts from falling short of 3 by a rounding error.
    steps = config.steps or math.floor((config.epochs or 0) * num_train_prompts / rollout.prompts_per_step + 1e-9)
    mesh, problems = _resolve_mesh(learner.mesh, num_devices)
    problems += _check_duration(config, num_train_prompts, steps, steps * updates)
    if problems:
        raise UserError(problems)
    eval_prompts = min(num_eval_prompts, config.eval.num_prompts or num_eval_prompts)
    every = config.eval.every_steps
    return Plan(
        prompts=rollout.prompts_per_step,
        samples=samples,
        updates=updates,
        steps=steps,
        total_updates=steps * updates,
        train_prompts=num_train_prompts,
        epochs=steps * rollout.prompts_per_step / num_train_prompts,
        step_tokens=samples * rollout.max_completion_tokens,
        longest=longest_sequence(config),
        evaluations=(1 + math.ceil(steps / every) if every else 2) if eval_prompts else 0,
        eval_prompts=eval_prompts,
        eval_samples=eval_prompts * config.eval.num_generations,
        mesh=mesh,
        warnings=tuple(_warnings(config, num_train_prompts)),
    )


def _check_duration(config: Config, num_train_prompts: int, steps: int, total_updates: int) -> list[Problem]:
    if num_train_prompts == 0:
        return [
            Problem(
                "data.train",
                "no prompts",
                "at least one",
                "check the file; or data.max_prompt_tokens, if rows are skipped",
            )
        ]
    if steps == 0:
        prompts = config.rollout.prompts_per_step
        found = f"{config.epochs or 0:g} epochs of {num_train_prompts} prompts, {prompts} a step: 0 whole steps"
        return [
            Problem(
                "epochs",
                found,
                "at least one step",
                f"raise epochs to {math.ceil(100 * prompts / num_train_prompts) / 100:g} or more; "
                f"or lower rollout.prompts_per_step to {max(1, math.floor((config.epochs or 0) * num_train_prompts))}",
            )
        ]
    warmup = config.optimizer.warmup_steps
    if warmup > total_updates:
        return [
            Problem(
                "optimizer.warmup_steps",
                f"{warmup} with {total_updates} updates in the run",
                "at most the run's updates",
                f"lower warmup_steps, to {total_updates // 10} say; or train longer (steps or epochs)",
            )
        ]
    return []


def _resolve_mesh(mesh: MeshSection, num_devices: int) -> tuple[dict[str, int], list[Problem]]:
    """Sizes by axis with -1 filled in, and what does not fit."""
    axes = mesh.model_dump()
    fixed = math.prod(size for size in axes.values() if size > 0)
    rest = [axis for axis, size in axes.items() if size == -1]
    found = f"{' × '.join(f'{axis} {size}' for axis, size in axes.items())} on {_count(num_devices, 'device')}"
    if rest and num_devices % fixed:
        fix = f"choose sizes whose product divides {num_devices}; or start with a multiple of {fixed} devices"
        return axes, [
            Problem("learner.mesh", found, "a product of the fixed axes that divides the number of devices", fix)
        ]
    if not rest and fixed != num_devices:
        fix = f"set one axis to -1, which takes the rest; or start with {_count(fixed, 'device')}"
        return axes, [Problem("learner.mesh", found, "a product of all axes equal to the number of devices", fix)]
    return axes | {axis: num_devices // fixed for axis in rest}, []


def _warnings(config: Config, num_train_prompts: int) -> Iterator[str]:
    prompts = config.rollout.prompts_per_step
    if num_train_prompts < prompts:
        found = _count(num_train_prompts, "prompt")
        yield f"data.train: {found} for {prompts} a step, so a step draws some of them more than once"
    sampling, default = config.rollout.sampling, type(config.rollout.sampling)()
    cut = [
        key
        for key in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        if getattr(sampling, key) != getattr(default, key)
    ]
    if cut:
        yield (
            f"{', '.join(f'rollout.sampling.{key}' for key in cut)}: the sampler draws from a changed distribution "
            "that the learner does not reproduce, so log-probs differ before the first update already"
        )
    shared = set(_files(config.data.train)) & set(_files(config.data.eval))
    if shared:
        yield f"data.eval: {', '.join(sorted(shared))} is also training data, so the evaluation is not held out"


def _files(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
