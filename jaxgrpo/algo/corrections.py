"""Corrections for the gap between sampler and learner, and diagnostics of that gap.

The sampler drew the tokens with log-probs `roll` that differ from the learner's `old` (another kernel, another
precision, older weights). A correction multiplies the loss by a bounded importance weight pi_old / pi_roll. C is the
threshold; x_t = clip(old_t - roll_t, ±20); g = exp(mean_t x_t), a geometric mean over the sequence's trained tokens.
Truncated importance sampling for this gap: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
training" (2025).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxgrpo.algo.kl import k3
from jaxgrpo.algo.masking import LOG_LIMIT, maximum, minimum, safe_exp, token_mean
from jaxgrpo.algo.view import TokenView, traits
from jaxgrpo.metrics import Mean, Metrics
from jaxgrpo.registry import register

PREFIX = "sampler_correction"


@register("token_weights", "token_truncate")
@traits(needs=("rollout_logprobs",))
def token_truncate(view: TokenView, *, threshold: float = 2.0) -> tuple[Array, Metrics]:
    """min(exp(x_t), C)."""
    ratio = safe_exp(view.old_logprobs - view.rollout_logprobs)
    weights = jnp.minimum(ratio, threshold)
    return weights, _weight_metrics(view, weights, threshold) | _clipped_tokens(view, ratio > threshold)


@register("token_weights", "token_mask")
@traits(needs=("rollout_logprobs",))
def token_mask(view: TokenView, *, threshold: float = 2.0) -> tuple[Array, Metrics]:
    """exp(x_t) if exp(x_t) <= C, else 0."""
    ratio = safe_exp(view.old_logprobs - view.rollout_logprobs)
    weights = jnp.where(ratio <= threshold, ratio, 0.0)
    return weights, _weight_metrics(view, weights, threshold) | _clipped_tokens(view, ratio > threshold)


@register("token_weights", "sequence_truncate")
@traits(needs=("rollout_logprobs",))
def sequence_truncate(view: TokenView, *, threshold: float = 2.0) -> tuple[Array, Metrics]:
    """min(g, C) for every token of the sequence."""
    ratio = _sequence_ratio(view)
    weights = view.sequence_to_tokens(jnp.minimum(ratio, threshold))
    return weights, _weight_metrics(view, weights, threshold) | _clipped_sequences(view, ratio > threshold)


@register("token_weights", "sequence_mask")
@traits(needs=("rollout_logprobs",))
def sequence_mask(view: TokenView, *, threshold: float = 2.0) -> tuple[Array, Metrics]:
    """exp(x_t) if g <= C, else 0: the token's own ratio, in sequences that are close enough."""
    ratio = _sequence_ratio(view)
    kept = view.sequence_to_tokens((ratio <= threshold).astype(jnp.float32))
    weights = safe_exp(view.old_logprobs - view.rollout_logprobs) * kept
    return weights, _weight_metrics(view, weights, threshold) | _clipped_sequences(view, ratio > threshold)


SAMPLER_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""The values of the key `sampler_correction`."""


def diagnostics(view: TokenView) -> Metrics:
    """Thirteen measures of the gap; ppl is exp(-mean_t log-prob) of a sequence, u = old - roll.

    Token means: `kl` = -u, the k1 estimate of KL(sampler || learner); `k3_kl` = exp(u) - u - 1; `chi2_token` =
    exp(2u) - 1. Sequence means: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`; `log_ppl_diff`
    = mean_t(roll - old) with its absolute value and extremes; `ppl_ratio` = exp(log_ppl_diff); `chi2_seq` = exp(2
    mean_t u) - 1.
    """
    present, old, roll = view.present, view.old_logprobs, view.rollout_logprobs
    gap = jnp.clip(old - roll, -LOG_LIMIT, LOG_LIMIT)
    training, rollout = -view.sequence_mean(old), -view.sequence_mean(roll)
    difference = training - rollout
    per_sequence = {
        "training_ppl": safe_exp(training),
        "training_log_ppl": training,
        "rollout_ppl": safe_exp(rollout),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": jnp.abs(difference),
        "ppl_ratio": safe_exp(difference),
        "chi2_seq": jnp.square(safe_exp(-difference)) - 1.0,
    }
    metrics: Metrics = {name: Mean(jnp.sum(v * present), jnp.sum(present)) for name, v in per_sequence.items()}
    metrics |= {
        "kl": token_mean(roll - old, view.mask),
        "k3_kl": token_mean(k3(roll, old), view.mask),
        "chi2_token": token_mean(jnp.square(jnp.exp(gap)) - 1.0, view.mask),
        "log_ppl_diff_max": maximum(difference, present),
        "log_ppl_diff_min": minimum(difference, present),
    }
    return {f"{PREFIX}/{name}": metric for name, metric in metrics.items()}


def _sequence_ratio(view: TokenView) -> Array:
    gap = jnp.clip(view.old_logprobs - view.rollout_logprobs, -LOG_LIMIT, LOG_LIMIT)
    return jnp.exp(view.sequence_mean(gap))


def _weight_metrics(view: TokenView, weights: Array, threshold: float) -> Metrics:
    """Mean weight, and the effective sample size (mean w)^2 / mean w^2 in (0, 1] of weights clipped to [1/C, C].

    The effective sample size is not a mean: it is taken within the micro-batch, and micro-batches average by tokens.
    """
    tokens = jnp.sum(view.mask)
    bounded = jnp.clip(weights, 1.0 / threshold, threshold)
    mean = jnp.sum(bounded * view.mask) / jnp.maximum(tokens, 1.0)
    square = jnp.sum(jnp.square(bounded) * view.mask) / jnp.maximum(tokens, 1.0)
    ess = jnp.square(mean) / jnp.maximum(square, 1e-10)
    return {
        f"{PREFIX}/is_weight_mean": token_mean(weights, view.mask),
        f"{PREFIX}/ess": Mean(ess * tokens, tokens),
    }


def _clipped_tokens(view: TokenView, clipped: Array) -> Metrics:
    return {f"{PREFIX}/clipped_frac": token_mean(clipped, view.mask)}


def _clipped_sequences(view: TokenView, clipped: Array) -> Metrics:
    return {f"{PREFIX}/clipped_frac": Mean(jnp.sum(clipped * view.present), jnp.sum(view.present))}
