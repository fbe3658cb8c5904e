"""Logit processing and the draw, against plain NumPy written sequence by sequence."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.engines.jax_sampling import Features, Settings, sample
from jaxgrpo.rollout.engine import SamplingParams

BASE = SamplingParams(max_tokens=1)
CASES = {
    "plain": BASE,
    "temperature": replace(BASE, temperature=0.6),
    "top_k": replace(BASE, top_k=7),
    "top_p": replace(BASE, top_p=0.7, temperature=1.3),
    "min_p": replace(BASE, min_p=0.1),
    "penalties": replace(BASE, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "all": replace(
        BASE, temperature=0.9, top_k=20, top_p=0.8, min_p=0.02, repetition_penalty=1.1, frequency_penalty=-0.3
    ),
    "greedy": replace(BASE, temperature=0.0, top_k=3, repetition_penalty=1.5),
}


def reference(logits: np.ndarray, sampling: SamplingParams, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Probabilities in float64, by sorting."""
    x = logits.astype(np.float64)
    for token in set(prompt) | set(completion):
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(completion):
        x[token] -= sampling.presence_penalty + sampling.frequency_penalty * completion.count(token)
    if sampling.temperature == 0:
        return softmax(x)
    p = softmax(x / sampling.temperature)
    p = np.where(p < sampling.min_p * p.max(), 0, p)
    if sampling.top_k:
        p = np.where(p >= np.sort(p)[-sampling.top_k], p, 0)
    p /= p.sum()
    if sampling.top_p < 1:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def draw(
    logits: np.ndarray, batch: list[SamplingParams], index: int, prompt: list[int], completion: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    settings = Settings.neutral(len(batch))
    for i, sampling in enumerate(batch):
        settings.put((i,), sampling)
    vocabulary = logits.shape[1]
    seen = np.zeros((len(batch), vocabulary), bool)
    seen[:, prompt] = True
    counts = np.tile(np.bincount(completion, minlength=vocabulary), (len(batch), 1)).astype(np.int32)
    features = Features.of(batch)
    run = jax.jit(sample, static_argnames="features")
    token, logprob = run(
        jnp.asarray(logits), Settings(*map(jnp.asarray, settings)), jnp.full(len(batch), index), features, counts, seen
    )
    return np.asarray(token), np.asarray(logprob)


@pytest.mark.parametrize("case", CASES)
def test_logprob_and_distribution_match_numpy(case: str) -> None:
    sampling, vocabulary = CASES[case], 300
    logits = np.random.default_rng(3).normal(0, 2, vocabulary).astype(np.float32)
    prompt, completion = [1, 5, 9, 9], [5, 20, 20, 33]
    expected = reference(logits, sampling, prompt, completion)
    draws = 2000
    batch = [replace(sampling, seed=seed) for seed in range(draws)]
    token, logprob = draw(np.tile(logits, (draws, 1)), batch, 2, prompt, completion)
    np.testing.assert_allclose(logprob, np.log(expected[token]), atol=1e-5)
    if sampling.temperature == 0:
        assert set(token) == {int(expected.argmax())}
        return
    likely = expected * draws >= 5
    seen = np.bincount(token, minlength=vocabulary)
    observed = np.append(seen[likely], seen[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = max(len(wanted) - 1, 1)
    assert ((observed - wanted) ** 2 / wanted).sum() < degrees + 4 * np.sqrt(2 * degrees)


def test_mixed_requests_draw_as_they_would_alone() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (len(CASES), 300)).astype(np.float32)
    batch = [replace(sampling, seed=2**62 + i) for i, sampling in enumerate(CASES.values())]
    token, logprob = draw(logits, batch, 4, [3], [7, 7])
    for i, sampling in enumerate(batch):
        alone = draw(logits[i : i + 1], [sampling], 4, [3], [7, 7])
        assert token[i] == alone[0][0]
        np.testing.assert_allclose(logprob[i], alone[1][0], atol=1e-6)


def test_ties_are_kept() -> None:
    logits = np.zeros((400, 64), np.float32)
    logits[:, 10:14] = 3
    batch = [replace(BASE, top_k=2, seed=i) for i in range(400)]
    token, logprob = draw(logits, batch, 0, [0], [])
    assert set(token) == {10, 11, 12, 13}
    np.testing.assert_allclose(logprob, np.log(0.25), atol=1e-6)


def test_token_of_tiny_probability_is_never_confused_with_a_dropped_one() -> None:
    logits = np.full((2000, 600), -60, np.float32)
    logits[:, 17], logits[:, 599] = 0, -1
    batch = [replace(BASE, top_k=2, seed=i) for i in range(2000)]
    token, _ = draw(logits, batch, 0, [0], [])
    assert set(token) == {17, 599}


def test_seed_and_index_decide_the_draw() -> None:
    logits = np.zeros((64, 512), np.float32)
    batch = [replace(BASE, seed=i) for i in range(64)]
    first, again, later = (draw(logits, batch, index, [0], [])[0] for index in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != later).mean() > 0.9
    assert len(set(first)) > 48
    high = [replace(BASE, seed=i << 32) for i in range(64)]  # the upper half of the seed counts too
    assert (draw(logits, high, 0, [0], [])[0][1:] != first[1:]).mean() > 0.9
