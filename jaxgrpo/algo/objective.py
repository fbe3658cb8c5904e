"""The objective: ratio × policy loss × token weights × aggregation, plus KL, entropy bonus and a distillation term.

    objective = Objective.from_preset("dapo", eps_high=0.3)
    loss, metrics = objective(logprobs, entropy, batch)

An `Objective` is a frozen, hashable value: static under `jax.jit`. Its loss is divided by the denominators of the whole
update, so the losses and gradients of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxgrpo.algo import corrections, distillation, token_weights
from jaxgrpo.algo.aggregation import AGGREGATIONS
from jaxgrpo.algo.kl import ESTIMATORS
from jaxgrpo.algo.masking import LOG_LIMIT, maximum, minimum, token_mean
from jaxgrpo.algo.presets import PRESETS
from jaxgrpo.algo.ratios import RATIOS
from jaxgrpo.algo.resolve import Options, resolve
from jaxgrpo.algo.view import TokenView, make_view, needs_of
from jaxgrpo.metrics import Metrics, finalize
from jaxgrpo.registry import lookup
from jaxgrpo.types.batch import TokenBatch

__all__ = ["PRESETS", "Objective", "evaluate_padded", "from_preset"]


@dataclass(frozen=True)
class Objective:
    """One objective; build it with `from_preset`, which checks every name and option.

    Attributes:
        ratio: level of the importance ratio, a name in `ratios.RATIOS`.
        policy_loss, policy_loss_options: a registered policy loss and its keyword options, as sorted pairs.
        token_weights: registered token weights, each with its options; their product multiplies the token losses.
        aggregation: how token losses become one number, a name in `aggregation.AGGREGATIONS`.
        max_completion_tokens: the constant of aggregation `constant`, tokens.
        kl_coef, kl_estimator: weight and estimator of the KL to the reference (`kl.py`); 0 turns it off.
        kl_in_reward: subtract the KL from the reward instead (`kl.sequence_penalty`); the loss then has no KL term.
        kl_aggregation: aggregation of the KL term where it differs from the policy term's.
        entropy_coef: weight of the entropy bonus.
        drop_truncated: whoever builds the batch masks trajectories that a token limit cut, before counting.
        sampler_diagnostics: measure the gap between sampler and learner even without a correction.
        advantage, advantage_options: a registered advantage estimator and its options, for whoever scores the batch.
        sdar_coef, sdar_beta: weight and gate slope of the SDAR term (`distillation.sdar`); 0 turns it off.
    """

    ratio: str = "token"
    policy_loss: str = "clip"
    policy_loss_options: Options = ()
    token_weights: tuple[tuple[str, Options], ...] = ()
    aggregation: str = "sequence_mean"
    max_completion_tokens: int | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    kl_aggregation: str | None = None
    entropy_coef: float = 0.0
    drop_truncated: bool = False
    sampler_diagnostics: bool = False
    advantage: str = "grpo"
    advantage_options: Options = ()
    sdar_coef: float = 0.0
    sdar_beta: float = 5.0

    @staticmethod
    def from_preset(name: str, **overrides: Any) -> Objective:
        """An objective from a preset and what departs from it; see the module function `from_preset`."""
        return from_preset(name, **overrides)

    @property
    def needs_entropy(self) -> bool:
        """The caller must pass `entropy`."""
        return self.entropy_coef != 0 or "entropy" in self._needs

    @property
    def needs_reference(self) -> bool:
        """The loss reads `batch.ref_logprobs`."""
        return self.kl_coef != 0 and not self.kl_in_reward

    @property
    def needs_reference_for_reward(self) -> bool:
        """The reward is reduced by `kl_coef` × `kl.sequence_penalty(old, ref, mask, estimator=kl_estimator)`."""
        return self.kl_coef != 0 and self.kl_in_reward

    @property
    def needs_rollout_logprobs(self) -> bool:
        """The loss or its metrics read `batch.rollout_logprobs`."""
        return self.sampler_diagnostics or "rollout_logprobs" in self._needs

    @property
    def needs_whole_groups(self) -> bool:
        """All sequences of a group must stand in one row."""
        return "whole_groups" in self._needs or "group_mean" in (self.aggregation, self.kl_aggregation)

    @property
    def needs_zero_advantages(self) -> bool:
        """Samples whose advantages are all 0 change the loss all the same, so they must be in the batch."""
        terms = self.entropy_coef != 0 or self.sdar_coef != 0 or self.needs_reference
        return terms or "entropy" in self._needs  # an entropy quantile is one of all trained tokens

    @property
    def needs_teacher(self) -> bool:
        """The caller must pass `teacher_logprobs`."""
        return self.sdar_coef != 0

    def __call__(
        self, logprobs: Array, entropy: Array | None, batch: TokenBatch, teacher_logprobs: Array | None = None
    ) -> tuple[Array, Metrics]:
        """The loss of a micro-batch, to be minimised, and its metrics.

        Args:
            logprobs: [R, K], the policy's log-probabilities of the targets, nats; float32 or lower.
            entropy: [R, K], nats, or None if `needs_entropy` is false; differentiable where there is a bonus.
            batch: the micro-batch.
            teacher_logprobs: [R, K], or None if `needs_teacher` is false.

        Returns:
            A scalar that adds up over micro-batches, and metrics that merge.
        """
        terms, metrics = self.terms(logprobs, entropy, batch, teacher_logprobs)
        return sum(terms.values(), jnp.zeros((), jnp.float32)), metrics

    def terms(
        self, logprobs: Array, entropy: Array | None, batch: TokenBatch, teacher_logprobs: Array | None = None
    ) -> tuple[dict[str, Array], Metrics]:
        """The addends of the loss by name (`policy`, and `kl`, `entropy`, `sdar` where present), and the metrics."""
        view = make_view(logprobs, entropy, batch, RATIOS[self.ratio])
        loss_function = lookup("policy_loss", self.policy_loss, "objective.policy_loss")
        losses, metrics = loss_function(view, **dict(self.policy_loss_options))
        weights, policy_weights, weight_metrics = self._weights(view)
        metrics = metrics | weight_metrics | _ratio_metrics(view)

        def total(values: Array, aggregation: str | None = None) -> Array:
            values = jnp.where(view.mask > 0, values, 0.0)
            return AGGREGATIONS[aggregation or self.aggregation](values, view, batch, self.max_completion_tokens)

        terms = {"policy": total(losses * policy_weights * weights)}
        if self.needs_reference:
            kl = ESTIMATORS[self.kl_estimator](view.logprobs, view.ref_logprobs)
            terms["kl"] = self.kl_coef * total(kl * weights, self.kl_aggregation)
            metrics["kl"] = token_mean(lax.stop_gradient(kl), view.mask)
        if view.entropy is not None:
            metrics["entropy"] = token_mean(lax.stop_gradient(view.entropy), view.mask)
        if self.entropy_coef:
            terms["entropy"] = -self.entropy_coef * total(view.entropy * weights)
        if self.needs_teacher:
            sdar, sdar_metrics = distillation.sdar(view.logprobs, teacher_logprobs, view.mask, beta=self.sdar_beta)
            terms["sdar"] = self.sdar_coef * total(sdar, "token_mean")
            metrics |= sdar_metrics
        if self.needs_rollout_logprobs:
            metrics |= corrections.diagnostics(view)
        return terms, jax.tree.map(lax.stop_gradient, metrics)

    @property
    def _needs(self) -> frozenset[str]:
        functions = [lookup("policy_loss", self.policy_loss, "objective.policy_loss")]
        functions += [lookup("token_weights", name, "objective.token_weights") for name, _ in self.token_weights]
        return frozenset().union(*map(needs_of, functions))

    def _weights(self, view: TokenView) -> tuple[Array, Array, Metrics]:
        """The weights of every term, those of the policy term alone, and their metrics."""
        every, policy, metrics = jnp.ones_like(view.mask), jnp.ones_like(view.mask), {}
        for name, options in self.token_weights:
            function = lookup("token_weights", name, "objective.token_weights")
            weights, found = function(view, **dict(options))
            weights = lax.stop_gradient(weights)
            metrics |= found
            if getattr(function, "policy_only", False):
                policy = policy * weights
            else:
                every = every * weights
        return every, policy, metrics


def from_preset(name: str, **overrides: Any) -> Objective:
    """An objective from a row of `PRESETS` and what departs from it.

    Besides the fields of `Objective` it takes these short forms: `eps_low`, `eps_high`, `eps_dual` (options of the
    policy loss), `scale` (option of the advantage), `sampler_correction` with `sampler_correction_threshold`,
    `top_entropy_quantile` and `off_policy_mask_delta` (token weights). Options are mappings. An override of
    `policy_loss` or `advantage` drops the preset's options for it. None means "as the preset says".

    Raises:
        UserError: an unknown name, an option that nobody reads, or a combination that has no meaning.
    """
    return Objective(**resolve(name, overrides))


def evaluate_padded(objective: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluates an objective on plain padded arrays: how to compare with another library.

    Args:
        objective: `preset` (default grpo) and overrides, as in the config section `objective`.
        arrays: `logprobs` and `loss_mask` [B, T], `advantages` [B] or [B, T]; if used, `old_logprobs` (absent:
            on-policy), `ref_logprobs`, `rollout_logprobs`, `teacher_logprobs`, `entropy` [B, T], `truncated` bool
            [B], `group` [B] (any ids; absent: every row its own group). Rows are sequences; the denominators count
            what is trained on.

    Returns:
        `loss` (float), `grad` (float32 [B, T], with respect to `logprobs`), `terms` and `metrics` (dictionaries of
        floats).

    Raises:
        UserError: the objective is wrong. KeyError: an array that it needs is missing.
    """
    options = dict(objective)
    built = from_preset(options.pop("preset", "grpo"), **options)
    rows, batch = _pack(built, arrays)
    entropy = rows["entropy"] if "entropy" in arrays or built.needs_entropy else None
    teacher = rows["teacher_logprobs"] if built.needs_teacher else None

    def loss(logprobs: Array) -> tuple[Array, tuple[dict[str, Array], Metrics]]:
        terms, metrics = built.terms(logprobs, entropy, batch, teacher)
        return sum(terms.values(), jnp.zeros(())), (terms, metrics)

    (value, (terms, metrics)), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(rows["logprobs"]))
    return {
        "loss": float(value),
        "grad": np.asarray(grad).reshape(np.shape(arrays["logprobs"])),
        "terms": {name: float(term) for name, term in terms.items()},
        "metrics": finalize(metrics),
    }


class _Rows(dict[str, np.ndarray]):
    """Padded arrays laid end to end in one row, [1, B T]; a missing one raises with a name that helps."""

    def __missing__(self, name: str) -> np.ndarray:
        raise KeyError(f"the objective needs arrays[{name!r}]")


def _pack(objective: Objective, arrays: Mapping[str, Any]) -> tuple[_Rows, TokenBatch]:
    """Lays B padded rows end to end in one packed row."""
    shape = np.shape(arrays["logprobs"])
    mask = np.broadcast_to(np.asarray(arrays["loss_mask"]) > 0, shape)
    if objective.drop_truncated:
        mask = token_weights.drop_truncated(mask, arrays["truncated"]) > 0
    advantages = np.asarray(arrays["advantages"], np.float32)
    advantages = np.broadcast_to(advantages[:, None] if advantages.ndim == 1 else advantages, shape)
    present = mask.any(axis=1)
    group = np.unique(np.asarray(arrays.get("group", np.arange(shape[0]))), return_inverse=True)[1]
    rows = _Rows(
        {
            name: np.asarray(value, np.float32).reshape(1, -1)
            for name, value in arrays.items()
            if np.shape(value) == shape
        }
    )
    unused = np.zeros((1, mask.size), np.float32)
    needed = {
        "ref_logprobs": objective.needs_reference,
        "rollout_logprobs": objective.needs_rollout_logprobs,
        "old_logprobs": "old_logprobs" in arrays,
    }
    fields = {name: rows[name] if wanted else unused for name, wanted in needed.items()}
    ids = np.zeros((1, mask.size), np.int32)
    return rows, TokenBatch(
        tokens=ids,
        segment=ids,
        parent=ids,
        token=ids,
        positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).reshape(1, -1),
        hidden_index=np.arange(mask.size, dtype=np.int32)[None],
        sequence=np.repeat(np.arange(shape[0], dtype=np.int32), shape[1])[None],
        group=group.astype(np.int32)[None],
        loss_mask=mask.astype(np.float32).reshape(1, -1),
        advantages=advantages.reshape(1, -1),
        on_policy=np.float32("old_logprobs" not in arrays),
        num_tokens=np.float32(mask.sum()),
        num_sequences=np.float32(present.sum()),
        num_groups=np.float32(len(np.unique(group[present]))),
        **fields,
    )


def _ratio_metrics(view: TokenView) -> Metrics:
    ratio, mask = view.ratio, view.mask
    return {
        "ratio/mean": token_mean(ratio, mask),
        "ratio/max": maximum(ratio, mask),
        "ratio/min": minimum(ratio, mask),
        "ratio/clamped_frac": token_mean(jnp.abs(view.log_ratio) >= LOG_LIMIT, mask),
    }
