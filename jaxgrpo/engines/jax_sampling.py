"""From logits to a token and its log-probability: penalties, temperature, truncation, one draw. Pure functions.

N sequences, V tokens. Order of processing: penalties, temperature, min-p, top-k, top-p (each truncation renormalises
before the next); the log-probability is that of the distribution the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.rollout.engine import SamplingParams

Array = jax.Array
_BLOCK = 256  # tokens a block of the two-level draw
_DROPPED = -jnp.inf


class Settings(NamedTuple):
    """`SamplingParams` as arrays [...], one entry a sequence; `key` is uint32 [..., 2], the two halves of the seed."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition: Array
    presence: Array
    frequency: Array
    key: Array

    @staticmethod
    def neutral(*shape: int) -> Settings:
        """NumPy arrays of `shape` that change nothing."""
        zero, one = np.zeros(shape, np.float32), np.ones(shape, np.float32)
        key = np.zeros((*shape, 2), np.uint32)
        return Settings(one, np.zeros(shape, np.int32), one.copy(), zero, one.copy(), zero.copy(), zero.copy(), key)

    def put(self, index: tuple[int, ...], sampling: SamplingParams) -> None:
        """Writes one request's parameters into NumPy arrays. Greedy requests are not truncated."""
        greedy = sampling.temperature == 0
        self.temperature[index] = sampling.temperature
        self.top_k[index] = 0 if greedy else sampling.top_k
        self.top_p[index] = 1 if greedy else sampling.top_p
        self.min_p[index] = 0 if greedy else sampling.min_p
        self.repetition[index] = sampling.repetition_penalty
        self.presence[index] = sampling.presence_penalty
        self.frequency[index] = sampling.frequency_penalty
        seed = sampling.seed & (2**64 - 1)
        self.key[index] = (seed >> 32, seed & (2**32 - 1))


class Features(NamedTuple):
    """What some sequence of a batch uses. Static: what is off is not compiled, and so costs nothing."""

    draw: bool = False
    greedy: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False

    @staticmethod
    def of(batch: Iterable[SamplingParams]) -> Features:
        """The union of what the requests use."""
        used = [
            Features(
                draw=s.temperature > 0,
                greedy=s.temperature == 0,
                top_k=s.temperature > 0 and s.top_k > 0,
                top_p=s.temperature > 0 and s.top_p < 1,
                min_p=s.temperature > 0 and s.min_p > 0,
                penalties=s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0,
            )
            for s in batch
        ]
        return Features(*(any(flags) for flags in zip(*used, strict=True))) if used else Features()


def sample(
    logits: Array,
    settings: Settings,
    index: Array,
    features: Features,
    counts: Array | None = None,
    prompt_seen: Array | None = None,
) -> tuple[Array, Array]:
    """Draws one token a sequence.

    Args:
        logits: float32 [N, V].
        settings: entries [N].
        index: int32 [N], how many tokens the sequence has drawn before: with the seed it fixes the random number, so a
            draw depends on neither slot nor neighbours.
        features: what to compile; must cover what `settings` use.
        counts, prompt_seen: int32 [N, V] occurrences in the completion, bool [N, V] occurrence in the prompt; needed
            where `features.penalties`.

    Returns:
        token int32 [N] and its log-probability float32 [N], nats.
    """
    if features.penalties:
        assert counts is not None and prompt_seen is not None
        logits = penalise(logits, settings, counts, prompt_seen)
    temperature = settings.temperature
    if features.greedy:
        temperature = jnp.where(temperature == 0, 1.0, temperature)
    scaled = logits / temperature[:, None]
    scaled = truncate(scaled, settings, features)
    vocabulary = scaled.shape[1]
    blocks = jnp.pad(scaled, ((0, 0), (0, -vocabulary % _BLOCK)), constant_values=_DROPPED)
    blocks = blocks.reshape(blocks.shape[0], -1, _BLOCK)
    block_max = jnp.max(blocks, axis=2)
    top = jnp.max(block_max, axis=1)
    mass = jnp.sum(jnp.exp(blocks - top[:, None, None]), axis=2)
    if features.draw:
        uniform = _uniforms(settings.key, index)
        block = _inverse_cdf(mass, uniform[:, 0])
        inside = _pick(blocks, block)
        offset = _inverse_cdf(jnp.exp(inside - top[:, None]), uniform[:, 1])
    if features.greedy:
        best_block = jnp.argmax(block_max, axis=1)
        best_inside = _pick(blocks, best_block)
        best_offset = jnp.argmax(best_inside, axis=1)
        if features.draw:
            greedy = settings.temperature == 0
            block, offset = jnp.where(greedy, best_block, block), jnp.where(greedy, best_offset, offset)
            inside = jnp.where(greedy[:, None], best_inside, inside)
        else:
            block, inside, offset = best_block, best_inside, best_offset
    logprob = _pick(inside, offset) - top - jnp.log(jnp.sum(mass, axis=1))
    return (block * _BLOCK + offset).astype(jnp.int32), logprob


def penalise(logits: Array, settings: Settings, counts: Array, prompt_seen: Array) -> Array:
    """Repetition, frequency and presence penalties, [N, V] -> [N, V], as vLLM defines them.

    x <- x / r where x > 0, else x * r, for tokens in prompt or completion; then x <- x - f * count - p * (count > 0).
    """
    repetition = jnp.where(prompt_seen | (counts > 0), settings.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    return logits - settings.frequency[:, None] * counts - settings.presence[:, None] * (counts > 0)


def truncate(scaled: Array, settings: Settings, features: Features) -> Array:
    """Min-p, top-k and top-p, [N, V] -> [N, V], with -inf for what is dropped.

    Thresholds are found bit by bit, exactly and without a sort; tokens tied with the last one kept are all kept, so
    top-k may keep more than k and top-p more than the smallest set.
    """
    if features.min_p:
        top = jnp.max(scaled, axis=1, keepdims=True)
        scaled = jnp.where(jnp.exp(scaled - top) < settings.min_p[:, None], _DROPPED, scaled)
    if features.top_k:
        ordered = _ordered_bits(scaled)
        kept = _largest_threshold(ordered, lambda mask: jnp.sum(mask, axis=1) >= settings.top_k)
        scaled = jnp.where((ordered >= kept[:, None]) | (settings.top_k <= 0)[:, None], scaled, _DROPPED)
    if features.top_p:
        weight = jnp.exp(scaled - jnp.max(scaled, axis=1, keepdims=True))
        enough = settings.top_p * jnp.sum(weight, axis=1)
        ordered = _ordered_bits(weight)
        kept = _largest_threshold(ordered, lambda mask: jnp.sum(jnp.where(mask, weight, 0.0), axis=1) >= enough)
        scaled = jnp.where((ordered >= kept[:, None]) | (settings.top_p >= 1)[:, None], scaled, _DROPPED)
    return scaled


def _ordered_bits(x: Array) -> Array:
    """float32 -> uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(ordered: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest t, uint32 [N], for which `enough(ordered >= t)` holds, one bit after the other; 0 if none does."""

    def bit(step: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(enough(ordered >= candidate[:, None]), candidate, threshold)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(ordered.shape[0], jnp.uint32))


def _uniforms(key: Array, index: Array) -> Array:
    """float32 [N, 2] in [0, 1), 24 random bits each, from the seed and the number of the draw."""

    def one(key: Array, index: Array) -> Array:
        stream = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), index)
        return (jax.random.bits(stream, (2,)) >> 8).astype(jnp.float32) * 2.0**-24

    return jax.vmap(one)(key, index)


def _inverse_cdf(mass: Array, uniform: Array) -> Array:
    """The index whose share of the cumulated `mass` [N, K] holds `uniform` [N]; never one of mass 0."""
    cumulated = jnp.cumsum(mass, axis=1)
    possible = mass > 0
    hit = possible & (cumulated > (uniform * cumulated[:, -1])[:, None])
    # Rounding can leave no hit for a uniform next to 1: the last possible index then.
    last = mass.shape[1] - 1 - jnp.argmax(possible[:, ::-1], axis=1)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), last)


def _pick(values: Array, index: Array) -> Array:
    """values [N, K, ...] at index [N] -> [N, ...]."""
    return jax.vmap(lambda row, i: row[i])(values, index)
