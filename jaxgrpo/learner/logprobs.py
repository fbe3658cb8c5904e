"""Log-probabilities of given tokens, blockwise over the vocabulary: no array of tokens × vocabulary is ever made.

With logits `z = hidden · headᵀ / temperature` of one position, `lse = log Σ_v exp z_v` and `p = exp(z − lse)`:

    log π(t)      = z_t − lse                          ∂ log π(t) / ∂z_v = [v = t] − p_v
    H             = lse − Σ_v p_v z_v                  ∂ H / ∂z_v        = −p_v (log p_v + H)

Forward, the blocks feed a running maximum and running sums (Milakov & Gimelshein 2018, "Online normalizer calculation for
softmax"); backward, each block's logits are computed again, its slice of the head's gradient is written once, and only
the gradient of `hidden` [N, D] accumulates.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

DEFAULT_BLOCK = 2048
"""Vocabulary entries at once: [N, 2048] float32 logits of a few thousand tokens stay near the cache on a CPU."""


def token_logprobs(
    hidden: Array,
    head: Array,
    tokens: Array,
    temperature: float = 1.0,
    *,
    block: int = DEFAULT_BLOCK,
    with_entropy: bool = False,
) -> tuple[Array, Array | None]:
    """Log-probability of each token under `softmax(hidden · headᵀ / temperature)`, and the entropy when asked for.

    Differentiable in `hidden` and `head`. Products run in the type of `hidden` and accumulate in float32.

    Args:
        hidden: [N, D], the hidden states that predict.
        head: [V, D], the unembedding matrix; cast to the type of `hidden`, block by block.
        tokens: int32 [N] in [0, V), the tokens predicted.
        temperature: divides the logits; greater than 0.
        block: the most vocabulary entries handled at once; the number used divides V when a divisor lies near it.
        with_entropy: also compute the entropy of the whole distribution.

    Returns:
        log-probabilities float32 [N] in nats; entropies float32 [N] in nats, or None.
    """
    settings = _Settings(float(temperature), num_blocks(head.shape[0], block), head.shape[0], with_entropy)
    logprobs, entropy = _blockwise(settings, hidden, head, tokens)
    return logprobs, entropy if with_entropy else None


def num_blocks(vocabulary: int, block: int) -> int:
    """Number of vocabulary blocks of at most `block` entries; a divisor of `vocabulary` if one is at most twice the least."""
    least = -(-vocabulary // block)
    return next((count for count in range(least, 2 * least + 1) if vocabulary % count == 0), least)


class _Settings(NamedTuple):
    """What is known when the function is traced."""

    temperature: float
    blocks: int
    vocabulary: int
    with_entropy: bool


def _strided(settings: _Settings, head: Array) -> Array:
    """Views the head as [V / blocks, blocks, D]: block i holds the entries v with v mod blocks = i.

    Strided rather than contiguous blocks, because a head that is sharded over the vocabulary then gives every device an
    equal share of every block.
    """
    padding = -head.shape[0] % settings.blocks
    if padding:
        head = jnp.pad(head, ((0, padding), (0, 0)))
    return head.reshape(-1, settings.blocks, head.shape[1])


def _logits(settings: _Settings, hidden: Array, view: Array, index: Array) -> tuple[Array, Array]:
    """One block's weights [Vb, D] in the compute type and its logits float32 [N, Vb]; −inf where V was padded."""
    weights = lax.dynamic_index_in_dim(view, index, axis=1, keepdims=False).astype(hidden.dtype)
    logits = jnp.dot(hidden, weights.T, preferred_element_type=jnp.float32) / settings.temperature
    if view.shape[0] * settings.blocks > settings.vocabulary:
        entries = jnp.arange(view.shape[0]) * settings.blocks + index
        logits = jnp.where(entries < settings.vocabulary, logits, -jnp.inf)
    return weights, logits


def _forward(settings: _Settings, hidden: Array, head: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Log-probabilities, entropies (zeros unless asked for) and log-sum-exps, all float32 [N]."""
    view = _strided(settings, head)

    def step(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        maximum, total, weighted, target = carry
        _, logits = _logits(settings, hidden, view, index)
        local = tokens // settings.blocks
        found = jnp.take_along_axis(logits, local[:, None], axis=1)[:, 0]
        target = jnp.where(tokens % settings.blocks == index, found, target)
        new = jnp.maximum(maximum, logits.max(axis=1))
        scale = jnp.exp(maximum - new)
        unnormalised = jnp.exp(logits - new[:, None])
        total = total * scale + unnormalised.sum(axis=1)
        if settings.with_entropy:
            finite = jnp.where(logits == -jnp.inf, 0.0, logits)
            weighted = weighted * scale + (unnormalised * finite).sum(axis=1)
        return new, total, weighted, target

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    start = (jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros)
    maximum, total, weighted, target = lax.fori_loop(0, settings.blocks, step, start)
    logsumexp = maximum + jnp.log(total)
    entropy = logsumexp - weighted / total if settings.with_entropy else zeros
    return target - logsumexp, entropy, logsumexp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(settings: _Settings, hidden: Array, head: Array, tokens: Array) -> tuple[Array, Array]:
    logprobs, entropy, _ = _forward(settings, hidden, head, tokens)
    return logprobs, entropy


def _blockwise_forward(settings: _Settings, hidden: Array, head: Array, tokens: Array) -> tuple[Any, Any]:
    logprobs, entropy, logsumexp = _forward(settings, hidden, head, tokens)
    return (logprobs, entropy), (hidden, head, tokens, logsumexp, entropy)


def _blockwise_backward(settings: _Settings, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    hidden, head, tokens, logsumexp, entropy = saved
    d_logprobs, d_entropy = cotangents
    view = _strided(settings, head)

    def step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_view = carry
        weights, logits = _logits(settings, hidden, view, index)
        logp = logits - logsumexp[:, None]
        d_logits = jnp.exp(logp) * -d_logprobs[:, None]
        if settings.with_entropy:
            finite = jnp.where(logp == -jnp.inf, 0.0, logp)
            d_logits -= jnp.exp(logp) * (finite + entropy[:, None]) * d_entropy[:, None]
        entries = jnp.arange(view.shape[0]) * settings.blocks + index
        d_logits = jnp.where(entries == tokens[:, None], d_logits + d_logprobs[:, None], d_logits)
        d_logits = (d_logits / settings.temperature).astype(hidden.dtype)
        d_hidden += jnp.dot(d_logits, weights, preferred_element_type=jnp.float32)
        d_weights = jnp.dot(d_logits.T, hidden, preferred_element_type=jnp.float32).astype(head.dtype)
        return d_hidden, lax.dynamic_update_index_in_dim(d_view, d_weights, index, axis=1)

    start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(view))
    d_hidden, d_view = lax.fori_loop(0, settings.blocks, step, start)
    d_head = d_view.reshape(-1, head.shape[1])[: settings.vocabulary]
    return d_hidden.astype(hidden.dtype), d_head, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
