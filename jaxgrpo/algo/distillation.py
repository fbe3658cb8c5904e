"""Signals from a teacher that scores the policy's own samples: OPD, RLSD and SDAR.

`teacher_logprobs` is the teacher's log-probability of each sampled token, at the policy's temperature. All arrays
have the shape of `mask` ([N, T] or [R, K]); `advantages` may also be [N, 1].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.algo.masking import LOG_LIMIT, clean, token_mean
from jaxgrpo.metrics import Metrics


def teacher_advantages(
    advantages: Array, teacher_logprobs: Array, old_logprobs: Array, mask: Array, *, coef: float = 1.0
) -> Array:
    """On-policy distillation: A_t + coef (log pi_teacher - log pi_old) on trained tokens; A_t elsewhere.

    The added term is the negative k1 estimate of KL(policy || teacher), used as a dense reward (GKD, arXiv:2306.13649).
    """
    gap = clean(teacher_logprobs, mask) - clean(old_logprobs, mask)
    return advantages + coef * gap


def rlsd_advantages(
    advantages: Array,
    teacher_logprobs: Array,
    old_logprobs: Array,
    mask: Array,
    *,
    strength: float = 0.5,
    weight_range: float = 0.2,
    negative_only: bool = False,
) -> Array:
    """RLSD: A_t = A [(1 - lambda) + lambda clip(w_t, 1 ± c)], w_t = exp(sign(A)(log pi_teacher - log pi_old)).

    0 where masked; lambda is `strength`, c is `weight_range` (Self-distilled RLVR, arXiv:2604.03128). The teacher decides how much of
    the outcome each token gets, never its sign. With `negative_only`, tokens with A >= 0 keep A.
    """
    gap = clean(teacher_logprobs, mask) - clean(old_logprobs, mask)
    exponent = jnp.clip(jnp.sign(advantages) * gap, -LOG_LIMIT, LOG_LIMIT)
    weight = jnp.clip(jnp.exp(exponent), 1.0 - weight_range, 1.0 + weight_range)
    factor = (1.0 - strength) + strength * weight
    if negative_only:
        factor = jnp.where(advantages < 0, factor, 1.0)
    return clean(advantages * factor, mask)


def rlsd_strength(step: Array, *, strength: float = 0.5, warmup_steps: int = 0, decay_steps: int = 0) -> Array:
    """RLSD's lambda at an update: linear warm-up to `strength`, then linear decay to 0 over `decay_steps` (0: none)."""
    rising = step / warmup_steps if warmup_steps else 1.0
    falling = 1.0 - (step - warmup_steps) / decay_steps if decay_steps else 1.0
    return strength * jnp.clip(jnp.where(step < warmup_steps, rising, falling), 0.0, 1.0)


def sdar(logprobs: Array, teacher_logprobs: Array, mask: Array, *, beta: float = 5.0) -> tuple[Array, Metrics]:
    """SDAR's token loss: sg(sigmoid(beta d)) d, d = log pi_teacher - log pi; averaged over tokens by the caller.

    Minimising it raises log pi, most where the teacher is more confident than the policy.

    Returns:
        The loss per token, 0 where masked, and metrics of gate and gap.
    """
    gap = clean(teacher_logprobs, mask) - clean(logprobs, mask)
    gate = jax.nn.sigmoid(beta * lax.stop_gradient(gap))
    metrics: Metrics = {
        "sdar/gate_mean": token_mean(gate, mask),
        "sdar/gate_active_ratio": token_mean(gate > 0.5, mask),
        "sdar/teacher_gap_mean": token_mean(lax.stop_gradient(gap), mask),
    }
    return clean(gate * gap, mask), metrics
