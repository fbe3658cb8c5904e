"""Per-token policy losses. Each states its equation; A is the advantage, w the importance ratio, sg stop_gradient.

A policy loss is `fn(view: TokenView, *, options) -> (loss [R, K], metrics)`, registered under kind `policy_loss`. It is
minimised. Weights, aggregation and KL are other slots' business.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.algo.masking import LOG_LIMIT, clean, maximum, minimum, safe_exp, token_mean
from jaxgrpo.algo.view import TokenView, traits
from jaxgrpo.metrics import Metrics
from jaxgrpo.registry import register


@register("policy_loss", "reinforce")
def reinforce(view: TokenView) -> tuple[Array, Metrics]:
    """-A log pi: the score-function gradient, without a ratio (Williams, 1992). For on-policy updates."""
    return -view.advantages * view.logprobs, {}


@register("policy_loss", "clip")
def clip(
    view: TokenView, *, eps_low: float = 0.2, eps_high: float = 0.2, eps_dual: float | None = None
) -> tuple[Array, Metrics]:
    """-min(min(w, eps_dual) A, clip(w, 1 - eps_low, 1 + eps_high) A).

    PPO's clipped surrogate (arXiv:1707.06347); separate bounds after DAPO (arXiv:2503.14476); the cap on the unclipped
    branch, which bounds the loss of a token with A < 0, after INTELLECT-2 (arXiv:2505.07291).
    """
    ratio, advantages = view.ratio, view.advantages
    capped = ratio if eps_dual is None else jnp.minimum(ratio, eps_dual)
    clipped = jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high)
    loss = -jnp.minimum(capped * advantages, clipped * advantages)
    low = (capped < 1.0 - eps_low) & (advantages < 0)
    high = (capped > 1.0 + eps_high) & (advantages > 0)
    return loss, _clip_metrics(view, low, high)


@register("policy_loss", "cispo")
def cispo(view: TokenView, *, eps_high: float = 5.0) -> tuple[Array, Metrics]:
    """-sg(min(w, eps_high)) A log pi: the ratio is capped, the token keeps its gradient.

    MiniMax-M1 (arXiv:2506.13585). `eps_high` is the cap itself, as in TRL and ms-swift, not its distance from 1.
    """
    ratio = lax.stop_gradient(view.ratio)
    loss = -jnp.minimum(ratio, eps_high) * view.advantages * view.logprobs
    return loss, {"cispo_clip_ratio": token_mean((ratio > eps_high) & (view.advantages > 0), view.mask)}


@register("policy_loss", "sapo")
def sapo(view: TokenView, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Array, Metrics]:
    """-(4 / tau) sigmoid(tau (w - 1)) A, tau = tau_pos where A > 0, else tau_neg.

    A soft gate in place of the clip; its slope at w = 1 is 1 (SAPO, arXiv:2511.20347).
    """
    tau = jnp.where(view.advantages > 0, tau_pos, tau_neg)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (view.ratio - 1.0))
    return -gate * view.advantages, {}


@register("policy_loss", "fipo")
def fipo(
    view: TokenView,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    eps_dual: float | None = None,
    half_life: float = 32.0,
    weight_range: float | None = 0.2,
    high_only: bool = True,
    safety_threshold: float | None = 4.0,
) -> tuple[Array, Metrics]:
    """f_t × clip, f_t = sg(clip(exp(F_t), lo, 1 + c)), F_t = sum_{k >= t} 2^(-(k - t) / half_life) x_k.

    x = log pi - log pi_old per token, 0 where w > eps_dual; c is `weight_range` (None: no bounds), lo is 1 if
    `high_only` else 1 - c. Where A < 0 and w > `safety_threshold`, f is held in [0.8, 1]. FIPO (arXiv:2603.19835).
    """
    loss, metrics = clip(view, eps_low=eps_low, eps_high=eps_high, eps_dual=eps_dual)
    ratio, mask = lax.stop_gradient(view.ratio), view.mask
    shift = lax.stop_gradient(view.logprobs) - view.old_logprobs
    if eps_dual is not None:
        shift = jnp.where(ratio > eps_dual, 0.0, shift)
    future = future_kl(shift, view.position, view.sequence, half_life)
    weight = safe_exp(future)
    if weight_range is not None:
        weight = jnp.clip(weight, 1.0 if high_only else 1.0 - weight_range, 1.0 + weight_range)
    risky = jnp.zeros_like(mask, bool)
    if safety_threshold is not None:
        risky = (view.advantages < 0) & (ratio > safety_threshold)
        weight = jnp.where(risky, jnp.clip(weight, 0.8, 1.0), weight)
    metrics = metrics | {
        "fipo/future_kl_mean": token_mean(future, mask),
        "fipo/influence_weight_mean": token_mean(weight, mask),
        "fipo/safety_keep_ratio": token_mean(~risky, mask),
    }
    return weight * loss, metrics


@partial(jax.jit, static_argnames="half_life")
def future_kl(shift: Array, position: Array, sequence: Array, half_life: float) -> Array:
    """F_t = shift_t + 2^(-gap / half_life) F_next within a sequence; [R, K].

    `gap` is the distance in positions to the sequence's next target, so tokens that are not trained on count as
    distance. A sequence's targets stand side by side and in order.
    """
    gap = jnp.maximum(position[:, 1:] - position[:, :-1], 0)
    decay = jnp.where(sequence[:, 1:] == sequence[:, :-1], jnp.exp2(-gap / half_life), 0.0)
    decay = jnp.pad(decay, ((0, 0), (0, 1)))

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

    return lax.associative_scan(join, (decay, shift), reverse=True, axis=1)[1]


@register("policy_loss", "real")
@traits(needs=("whole_groups",))
def real(view: TokenView, *, tau: float = 0.5) -> tuple[Array, Metrics]:
    """log(1 + sum_neg exp(s / tau)) + log(1 + sum_pos exp(-s / tau)) for each group, s = mean_t (log pi - log pi_old).

    The sequences with a mean advantage above 0 are the positives, the others the negatives; a group without both
    gives 0. Every token carries its group's loss: aggregate with `group_mean`. REAL, rewards as labels
    (arXiv:2602.05630).
    """
    score = jnp.clip(view.sequence_mean(view.logprobs - view.old_logprobs) / tau, -LOG_LIMIT, LOG_LIMIT)
    positive = view.present * (view.sequence_mean(view.advantages) > 0)
    negative = view.present - positive
    losses = jnp.log1p(view.group_sum(jnp.exp(score) * negative)) + jnp.log1p(
        view.group_sum(jnp.exp(-score) * positive)
    )
    mixed = (view.group_sum(positive) > 0) & (view.group_sum(negative) > 0)
    return view.group_to_tokens(clean(losses, mixed)), {}


def _clip_metrics(view: TokenView, low: Array, high: Array) -> Metrics:
    """The shares of clipped tokens: over all tokens, and the extremes over sequences."""
    present, mask = view.present, view.mask
    return {
        "clip_ratio/low_mean": token_mean(low, mask),
        "clip_ratio/low_min": minimum(view.sequence_mean(low), present),
        "clip_ratio/high_mean": token_mean(high, mask),
        "clip_ratio/high_max": maximum(view.sequence_mean(high), present),
        "clip_ratio/region_mean": token_mean(low | high, mask),
    }
