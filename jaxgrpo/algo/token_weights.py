"""Weights on tokens: which tokens count, and by how much. Sampler corrections are in `corrections.py`.

A token weight is `fn(view: TokenView, *, options) -> (weights [R, K], metrics)`, registered under kind `token_weights`.
Weights are constants (no gradient passes) and leave the denominators alone.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxgrpo.algo.masking import masked_quantile, token_mean
from jaxgrpo.algo.view import TokenView, traits
from jaxgrpo.metrics import Mean, Metrics
from jaxgrpo.registry import register


@register("token_weights", "top_entropy")
@traits(needs=("entropy",), policy_only=True)
def top_entropy(view: TokenView, *, quantile: float = 0.2) -> tuple[Array, Metrics]:
    """1 where the entropy reaches the (1 - quantile)-quantile of the micro-batch's trained tokens, else 0.

    Only the most uncertain `quantile` of the tokens carry the policy gradient ("Beyond the 80/20 rule",
    arXiv:2506.01939).
    """
    entropy = lax.stop_gradient(view.entropy)
    threshold = masked_quantile(entropy, view.mask, 1.0 - quantile)
    kept = entropy >= threshold
    tokens = jnp.sum(view.mask)
    return kept.astype(jnp.float32), {
        "entropy/threshold": Mean(threshold * tokens, tokens),
        "entropy/kept": token_mean(kept, view.mask),
    }


@register("token_weights", "off_policy_sequence_mask")
@traits(needs=("rollout_logprobs",))
def off_policy_sequence_mask(view: TokenView, *, delta: float) -> tuple[Array, Metrics]:
    """0 for a sequence with mean A < 0 and mean_t (log pi_rollout - log pi) > delta, else 1.

    A failed sample that the policy has since moved away from teaches little and destabilises (DeepSeek-V3.2,
    arXiv:2512.02556).
    """
    gap = view.sequence_mean(view.rollout_logprobs - lax.stop_gradient(view.logprobs))
    dropped = view.present * ((gap > delta) & (view.sequence_mean(view.advantages) < 0))
    metrics: Metrics = {"off_policy_sequence_mask/dropped": Mean(jnp.sum(dropped), jnp.sum(view.present))}
    return view.sequence_to_tokens(1.0 - dropped), metrics


def drop_truncated(loss_mask: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """The overlong filter: masks whole trajectories that a token limit cut, before anything is counted.

    It acts where batches are built, so that denominators count only what is trained on (DAPO, arXiv:2503.14476).

    Args:
        loss_mask: [N, T].
        truncated: bool [N].

    Returns:
        The mask with the rows of truncated trajectories set to 0.
    """
    return np.where(np.asarray(truncated, bool)[:, None], 0, np.asarray(loss_mask))
