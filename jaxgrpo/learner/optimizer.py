"""The optimizer: one optax chain made from the config.

gradients ──▶ clip by global norm ──▶ extra transforms ──▶ update rule ──▶ decoupled weight decay ──▶ × −learning rate
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgrpo.config.schema import OptimizerSection
from jaxgrpo.errors import Problem, UserError

Tree = Any
"""A pytree of parameters or of something for each of them."""


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation and what it applies to.

    Attributes:
        transform: sees only trainable leaves: frozen ones are None, so they have neither gradients nor state.
        learning_rate: number of updates made so far -> the learning rate of the next one.
        trainable: bool for each parameter.
    """

    transform: optax.GradientTransformation
    learning_rate: Callable[[Any], Any]
    trainable: Tree

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """(trainable, frozen): the tree twice, each with None where the other has the leaf."""
        train = jax.tree.map(lambda leaf, trains: leaf if trains else None, params, self.trainable)
        frozen = jax.tree.map(lambda leaf, trains: None if trains else leaf, params, self.trainable)
        return train, frozen

    def join(self, trainable: Tree, frozen: Tree) -> Tree:
        """The inverse of `split`."""
        return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda leaf: leaf is None)


def make_optimizer(
    section: OptimizerSection,
    total_updates: int,
    axes: Tree,
    extra: Sequence[optax.GradientTransformation] = (),
) -> Optimizer:
    """Builds the chain above.

    Args:
        section: the config.
        total_updates: the run's length, where linear and cosine schedules end.
        axes: the parameters' tree with each leaf's logical axis names (`Decoder.axes`).
        extra: gradient transforms applied after clipping.

    Raises:
        UserError: a pattern in `section.frozen` is no regular expression or matches nothing, or they freeze everything.
    """
    schedule = make_schedule(section, total_updates)
    trainable = _trainable(section.frozen, axes)
    matrices = jax.tree.map(lambda trains, names: _is_matrix(names) if trains else None, trainable, axes)
    clip = [] if section.max_grad_norm is None else [optax.clip_by_global_norm(section.max_grad_norm)]
    decay = [optax.add_decayed_weights(section.weight_decay, matrices)] if section.weight_decay else []
    chain = [*clip, *extra, _update_rule(section), *decay, optax.scale_by_learning_rate(schedule)]
    return Optimizer(optax.chain(*chain), schedule, trainable)


def make_schedule(section: OptimizerSection, total_updates: int) -> Callable[[Any], Any]:
    """The learning rate of update n = 0, 1, …: `peak · (n + 1) / warmup_steps` in the warm-up, then the schedule.

    After the warm-up, with progress p from 0 to 1 at `total_updates`, peak a and final value b:
    constant: `a`;  linear: `a + (b − a) p`;  cosine: `b + (a − b) (1 + cos π p) / 2`.
    """
    peak, final, warmup = section.learning_rate, section.final_learning_rate, section.warmup_steps
    span = max(1, total_updates - warmup)

    def schedule(count: Any) -> Any:
        progress = jnp.clip((count - warmup) / span, 0.0, 1.0)
        if section.schedule == "linear":
            rate = peak + (final - peak) * progress
        elif section.schedule == "cosine":
            rate = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        else:
            rate = jnp.full_like(progress, peak)
        return jnp.where(count < warmup, peak * (count + 1) / max(1, warmup), rate)

    return schedule


def paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """The tree with each leaf replaced by its path, such as `layers/attention/query/kernel`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), tree, is_leaf=is_leaf
    )


def _update_rule(section: OptimizerSection) -> optax.GradientTransformation:
    if section.name == "adamw":
        return optax.scale_by_adam(section.beta1, section.beta2, section.epsilon)
    if section.name == "lion":
        return optax.scale_by_lion(section.beta1, section.beta2)
    if section.name == "adafactor":
        # No first moment and no scaling by the parameter's size: the learning rate means what it means elsewhere.
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    return optax.trace(section.beta1) if section.beta1 else optax.identity()


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def _is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether one layer's leaf is a matrix: the axis that stacks layers does not count."""
    return len([name for name in axes if name != "layers"]) >= 2


def _trainable(patterns: Sequence[str], axes: Tree) -> Tree:
    names = paths(axes, is_leaf=_is_axes)
    every = jax.tree.leaves(names)
    problems, frozen = [], set()
    for index, pattern in enumerate(patterns):
        key = f"optimizer.frozen[{index}]"
        try:
            matched = {name for name in every if re.search(pattern, name)}
        except re.error as error:
            problems.append(Problem(key, repr(pattern), "a regular expression", str(error)))
            continue
        if not matched:
            some = ", ".join(every)
            problems.append(Problem(key, repr(pattern), f"a pattern found in one of the parameters {some}"))
        frozen |= matched
    if not problems and frozen.issuperset(every):
        problems.append(Problem("optimizer.frozen", repr(list(patterns)), "a parameter left to train"))
    if problems:
        raise UserError(problems)
    return jax.tree.map(lambda name: name not in frozen, names)
