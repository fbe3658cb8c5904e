"""The embedded sampler end to end, on decoders so small that every number can be computed again without a cache."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.engines.jax_cache import Capacity
from jaxgrpo.engines.jax_engine import JaxEngine
from jaxgrpo.engines.jax_generate import Programs
from jaxgrpo.engines.jax_sampling import Features
from jaxgrpo.models.attention import causal_attention
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.decoder import Decoder, Params
from jaxgrpo.rollout.engine import Choice, SamplingParams

V = 64
CONFIG = ModelConfig(
    family="llama",
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    windows=(None, None),
    initializer_range=0.4,
)
DECODER = Decoder(CONFIG, scan_layers=False)
PARAMS = DECODER.init(jax.random.key(1))
RNG = np.random.default_rng(0)
PROMPTS = [tuple(RNG.integers(0, V, length).tolist()) for length in (5, 37, 9)]
PLAIN = SamplingParams(max_tokens=12)


def text(token_ids: tuple[int, ...]) -> str:
    return "".join(chr(ord("0") + token) for token in token_ids)


def engine(decoder: Decoder = DECODER, params: Params = PARAMS, **options: object) -> JaxEngine:
    made = JaxEngine(decoder, **{"slots": 8, "max_context": 100, "stop_text": text, **options})
    made.load(params, 7)
    return made


@pytest.fixture(scope="module")
def shared() -> JaxEngine:
    return engine()


def run(sampler: JaxEngine, work: list[tuple[tuple[int, ...], SamplingParams]]) -> list[Choice]:
    async def gather() -> list[Choice]:
        return await asyncio.gather(*(sampler.generate(prompt, sampling) for prompt, sampling in work))

    return asyncio.run(gather())


def logits(decoder: Decoder, params: Params, token_ids: tuple[int, ...]) -> np.ndarray:
    """[T, V], without any cache. Padded to one length: one compilation."""
    padded = jnp.asarray([token_ids + (0,) * (100 - len(token_ids))])
    return np.asarray(_forward(decoder, params, padded))[: len(token_ids)]


@jax.jit(static_argnums=0)
def _forward(decoder: Decoder, params: Params, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    return decoder.unembed(params, decoder.apply(params, tokens, positions, causal_attention(positions))[0])[0]


def check(decoder: Decoder, params: Params, prompt: tuple[int, ...], sampling: SamplingParams, choice: Choice) -> None:
    """Log-probs equal those of a full forward pass; greedy tokens are its most likely ones."""
    rows = logits(decoder, params, prompt + choice.token_ids)[len(prompt) - 1 : -1].astype(np.float64)
    if sampling.temperature == 0:
        np.testing.assert_array_equal(rows.argmax(axis=1), choice.token_ids)
    rows /= sampling.temperature or 1.0
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(choice.logprobs, rows[np.arange(len(rows)), choice.token_ids], atol=2e-5)


WINDOWED = replace(CONFIG, windows=(6, None))


@pytest.mark.parametrize(
    ("decoder", "steps"),
    [
        (DECODER, 1),
        (Decoder(CONFIG, scan_layers=True), 4),
        (Decoder(WINDOWED, scan_layers=True), 1),
        (Decoder(WINDOWED, scan_layers=False), 4),
    ],
    ids=["unrolled", "scanned, 4 steps", "window, scanned", "window, unrolled, 4 steps"],
)
def test_equals_recomputation_without_a_cache(decoder: Decoder, steps: int) -> None:
    sampler = engine(decoder, slots=6, steps=steps)  # more requests than slots, mixed lengths, groups of 3
    work = [
        (prompt, SamplingParams(max_tokens=10 + 3 * i, temperature=(0.0, 0.7, 1.0)[i], seed=i))
        for prompt in PROMPTS
        for i in range(3)
    ]
    for (prompt, sampling), choice in zip(work, run(sampler, work), strict=True):
        assert len(choice.token_ids) == sampling.max_tokens
        assert choice.finish_reason == "length"
        assert set(choice.versions) == {7}
        check(decoder, PARAMS, prompt, sampling, choice)


def test_completions_may_outgrow_their_first_room(shared: JaxEngine) -> None:
    sampling = replace(PLAIN, max_tokens=90, temperature=0.0)
    (choice,) = run(shared, [(PROMPTS[0], sampling)])
    assert len(choice.token_ids) == 90
    check(DECODER, PARAMS, PROMPTS[0], sampling, choice)


def test_draws_do_not_depend_on_slots_or_neighbours(shared: JaxEngine) -> None:
    work = [(prompt, replace(PLAIN, seed=100 * p + i)) for p, prompt in enumerate(PROMPTS) for i in range(3)]
    together = run(shared, work)
    assert [c.token_ids for c in run(shared, work)] == [c.token_ids for c in together]
    assert [c.token_ids for c in run(shared, work[::-1])][::-1] == [c.token_ids for c in together]
    assert run(shared, work[:1])[0].token_ids == together[0].token_ids
    assert [c.token_ids for c in run(engine(slots=6), work)] == [c.token_ids for c in together]
    assert len({c.token_ids for c in together[:3]}) == 3


def test_a_group_computes_its_prompt_once_and_repeats_compile_nothing() -> None:
    sampler = engine()
    work = [(prompt, replace(PLAIN, seed=i)) for prompt in PROMPTS[:2] for i in range(4)]
    run(sampler, work)
    first = sampler.stats()
    assert first["prompts"] == 2
    assert first["prompt_tokens"] == len(PROMPTS[0]) + len(PROMPTS[1])
    assert first["sampled_tokens"] == 8 * 12
    changed = [((*prompt[:-1], 0), sampling) for prompt, sampling in work]
    run(sampler, changed)
    assert sampler.stats()["prompts"] == 4
    assert sampler.stats()["compilations"] == first["compilations"]
    assert sampler.stats()["active_slot_steps"] == sampler.stats()["slot_steps"]


def test_a_group_larger_than_the_batch_computes_its_prompt_once() -> None:
    sampler = engine(slots=4)
    choices = run(sampler, [(PROMPTS[0], replace(PLAIN, seed=i, max_tokens=3 + i)) for i in range(10)])
    assert [len(c.token_ids) for c in choices] == [3 + i for i in range(10)]
    assert sampler.stats()["prompts"] == 1


def test_end_tokens(shared: JaxEngine) -> None:
    free = run(shared, [(PROMPTS[0], replace(PLAIN, seed=i)) for i in range(8)])
    ends = (free[0].token_ids[3], 0)  # 0 is what prompts are padded with, too
    cut = run(shared, [(PROMPTS[0], replace(PLAIN, seed=i, stop_token_ids=ends)) for i in range(8)])
    for before, after in zip(free, cut, strict=True):
        at = next((n for n, token in enumerate(before.token_ids) if token in ends), None)
        expected = before.token_ids if at is None else before.token_ids[: at + 1]
        assert after.token_ids == expected
        assert after.finish_reason == ("length" if at is None else "stop")
    assert cut[0].finish_reason == "stop"


@pytest.mark.parametrize("steps", [1, 4])
def test_stop_strings_cut_after_the_token_that_completes_one(steps: int) -> None:
    sampler = engine(steps=steps)
    (free,) = run(sampler, [(PROMPTS[2], replace(PLAIN, max_tokens=40, seed=5))])
    stop = text(free.token_ids[20:23])
    cut, beside = run(
        sampler,
        [
            (PROMPTS[2], replace(PLAIN, max_tokens=40, seed=5, stop=("never", stop))),
            (PROMPTS[2], replace(PLAIN, max_tokens=40, seed=5)),
        ],
    )
    first = text(free.token_ids).index(stop) + 3
    assert cut.token_ids == free.token_ids[:first]
    assert cut.logprobs == pytest.approx(free.logprobs[:first], abs=1e-5)
    assert cut.finish_reason == "stop"
    assert beside.token_ids == free.token_ids


def test_penalties_see_prompt_and_completion() -> None:
    sampler = engine(slots=4)
    prompt = tuple(range(0, V, 2))
    loud = replace(PLAIN, temperature=0.0, max_tokens=20, repetition_penalty=1e9)
    # Twice as many requests as slots, half without penalties: counts are kept apart and start anew in a used slot.
    work = [
        (prompt, loud),
        (prompt, replace(loud, repetition_penalty=1.0)),
        (PROMPTS[0], loud),
        (PROMPTS[0], replace(PLAIN, presence_penalty=1e6)),
    ] * 2
    choices = run(sampler, work)
    positive = logits(DECODER, PARAMS, prompt + choices[0].token_ids)[len(prompt) - 1 : -1].max(axis=1) > 0
    assert positive.any()
    assert len(set(choices[3].token_ids)) == len(choices[3].token_ids)
    check(DECODER, PARAMS, prompt, work[1][1], choices[1])
    assert [c.token_ids for c in choices[:4]] == [c.token_ids for c in choices[4:]]
    for token, row in zip(choices[0].token_ids, _penalised(prompt, choices[0].token_ids, 1e9), strict=True):
        assert token == row.argmax()


def _penalised(prompt: tuple[int, ...], completion: tuple[int, ...], penalty: float) -> list[np.ndarray]:
    rows = []
    for n in range(len(completion)):
        row = logits(DECODER, PARAMS, prompt + completion[:n])[-1].astype(np.float64)
        seen = list(set(prompt + completion[:n]))
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        rows.append(row)
    return rows


def test_limits(shared: JaxEngine) -> None:
    one, end = run(shared, [(PROMPTS[0], replace(PLAIN, max_tokens=1)), (PROMPTS[1], replace(PLAIN, max_tokens=500))])
    assert (len(one.token_ids), one.finish_reason) == (1, "length")
    assert (len(PROMPTS[1]) + len(end.token_ids), end.finish_reason) == (100, "length")
    for prompt, sampling, message in [
        ((1,) * 100, PLAIN, "100 tokens"),
        ((), PLAIN, "empty"),
        ((1,), replace(PLAIN, max_tokens=0), "max_tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(shared, [(prompt, sampling)])


def test_requests_that_arrive_later_join_and_cancelled_ones_leave(shared: JaxEngine) -> None:
    async def play() -> list[Choice]:
        long = [
            asyncio.create_task(shared.generate(PROMPTS[0], replace(PLAIN, max_tokens=60, seed=i))) for i in range(8)
        ]
        first = await shared.generate(PROMPTS[1], replace(PLAIN, max_tokens=2))  # waits: the batch is full
        return [first, *await asyncio.gather(*long)]

    async def cancel() -> Choice:
        tasks = [
            asyncio.create_task(shared.generate(PROMPTS[0], replace(PLAIN, max_tokens=60, seed=i))) for i in range(8)
        ]
        late = asyncio.create_task(shared.generate(PROMPTS[1], replace(PLAIN, max_tokens=2)))
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        return await late

    before = asyncio.run(play())
    drawn = shared.stats()["sampled_tokens"]
    assert asyncio.run(cancel()).token_ids == before[0].token_ids
    assert shared.stats()["sampled_tokens"] - drawn < 8 * 60
    assert asyncio.run(play()) == before


def test_new_weights_serve_new_prompts_and_are_recorded() -> None:
    other = DECODER.init(jax.random.key(2))
    sampler = engine()
    sampling = replace(PLAIN, temperature=0.0)
    run(sampler, [(PROMPTS[0], sampling)])
    sampler.load(other, 8)
    (choice,) = run(sampler, [(PROMPTS[0], sampling)])
    check(DECODER, other, PROMPTS[0], sampling, choice)
    assert set(choice.versions) == {8}


def test_failures_reach_everyone_and_the_engine_recovers() -> None:
    sampler = JaxEngine(DECODER, slots=4, max_context=100)
    with pytest.raises(RuntimeError, match="no weights"):
        run(sampler, [(PROMPTS[0], PLAIN)])
    sampler.load(jax.tree.map(lambda leaf: leaf * jnp.nan, PARAMS), 0)
    with pytest.raises(FloatingPointError, match="not finite"):
        run(sampler, [(PROMPTS[0], PLAIN), (PROMPTS[1], PLAIN)])
    sampler.load(PARAMS, 1)
    assert run(sampler, [(PROMPTS[0], PLAIN)])[0].finish_reason == "length"


def test_no_stored_key_or_weight_is_copied_for_a_token() -> None:
    """The compiled step writes keys and values in place, and reads the weights of a layer where they are."""
    config = replace(CONFIG, vocab_size=512, intermediate_size=2048)
    compiled = Programs(replace(DECODER, config=config))
    params = compiled.prepare(compiled.decoder.init(jax.random.key(0)))
    state = compiled.empty(Capacity(rows=3, width=5, prompt=96, completion=384, stops=4))
    kernel = params["layers"][0]["mlp"]["gate"]["kernel"].size
    assert min(array.size for pair in state.own for array in pair) > kernel
    for steps in (1, 4):
        lowered = compiled.decode.lower(params, state, np.ones((3, 5), bool), steps=steps, features=Features(draw=True))
        hlo = lowered.compile({"xla_backend_optimization_level": 3, "xla_disable_all_hlo_passes": False}).as_text()
        moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose|concatenate|slice)\(", hlo)
        assert moved
        assert max(np.prod([int(n) for n in shape.split(",")]) for shape in moved) < kernel


@pytest.mark.slow
def test_sharded_parameters_draw_the_same_tokens(shared: JaxEngine) -> None:
    """Eight devices (data 2, fsdp 2, tensor 2) in a process of their own."""
    code = """
import jax, json
from tests.engines.test_jax_engine import DECODER, PARAMS, PROMPTS, PLAIN, engine, replace, run
from jaxgrpo.sharding import make_mesh, param_shardings
mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
params = jax.device_put(PARAMS, param_shardings(DECODER.axes, PARAMS, mesh, DECODER.axis_units))
choices = run(engine(params=params, mesh=mesh), [(p, replace(PLAIN, seed=i)) for p in PROMPTS[:2] for i in range(4)])
print(json.dumps([choice.token_ids for choice in choices]))
"""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    root = Path(__file__).resolve().parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root, check=False
    )
    assert out.returncode == 0, out.stderr
    expected = run(shared, [(prompt, replace(PLAIN, seed=i)) for prompt in PROMPTS[:2] for i in range(4)])
    assert json.loads(out.stdout.splitlines()[-1]) == [list(choice.token_ids) for choice in expected]
