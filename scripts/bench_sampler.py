"""Measures the embedded sampler against transformers' generate (torch) on the same prompts, in turns, in one run.

    python scripts/bench_sampler.py --model models/smollm2-135m-instruct

Every sequence is drawn to its full length by both (no end token), float32, temperature 1. A round runs the sampler,
then transformers, between two measurements of the float32 matmul peak, so that a busy machine slows all alike. Each
round takes new prompts. The first round of each compiles and warms up, and is left out. Prints one JSON object: medians
and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.engines.jax_engine import JaxEngine
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.rollout.engine import SamplingParams
from jaxgrpo.weights.checkpoint_files import load_pretrained

Prompts = list[list[int]]


def main() -> None:
    """Runs the rounds and prints the result."""
    options = _options()
    config, params = load_pretrained(options.model)
    params = jax.tree.map(jnp.asarray, params)
    rng = np.random.default_rng(0)
    sampler = JaxEngine(
        Decoder(config, scan_layers=options.scan),
        slots=options.slots,
        max_context=options.prompt_tokens + options.new_tokens,
        steps=options.steps,
    )
    sampler.load(params, 0)
    ours = _measured(lambda prompts: _sample(sampler, prompts, options))
    theirs = None if options.without_transformers else _measured(_transformers(options))
    peak = _matmul_peak()
    results: dict[str, list[float]] = {"sampler": [], "transformers": [], "peak": [], "step": [], "prefill": []}
    tokens = options.prompts * options.samples * options.new_tokens
    for number in range(options.rounds + 1):
        prompts = rng.integers(5, config.vocab_size, (options.prompts, options.prompt_tokens)).tolist()
        before, peaks = sampler.stats(), [peak()]
        seconds = ours(prompts)
        done = {name: value - before[name] for name, value in sampler.stats().items()}
        peaks.append(peak())
        other = theirs(prompts) if theirs else float("nan")
        if number:
            results["sampler"].append(tokens / seconds)
            results["transformers"].append(tokens / other)
            results["peak"].append(statistics.mean(peaks))
            results["step"].append(1e3 * done["decode_seconds"] / done["decode_steps"])
            results["prefill"].append(done["prefill_seconds"])
    medians = {name: statistics.median(values) for name, values in results.items()}
    # Two operations a parameter and token: what the matrix products of a step take at the measured peak.
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    bound = 2e3 * parameters * min(options.slots, options.prompts * options.samples) / (medians["peak"] * 1e9)
    report = {
        "sampler_tokens_per_second": round(medians["sampler"], 1),
        "transformers_tokens_per_second": round(medians["transformers"], 1) if theirs else None,
        "ratio": round(medians["sampler"] / medians["transformers"], 2) if theirs else None,
        "decode_step_ms": round(medians["step"], 1),
        "decode_step_bound_ms": round(bound, 1),
        "prefill_seconds": round(medians["prefill"], 2),
        "matmul_peak_gflops": round(medians["peak"]),
        "rounds": {name: [round(value, 1) for value in values] for name, values in results.items()},
        "workload": vars(options),
    }
    print(
        json.dumps(report if theirs else {k: v for k, v in report.items() if v is not None}, allow_nan=theirs is None)
    )


def _sample(sampler: JaxEngine, prompts: Prompts, options: argparse.Namespace) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(
            *(
                sampler.generate(prompt, SamplingParams(max_tokens=options.new_tokens, seed=seed))
                for prompt in prompts
                for seed in range(options.samples)
            )
        )

    asyncio.run(all_of_them())


def _transformers(options: argparse.Namespace) -> Callable[[Prompts], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    def generate(prompts: Prompts) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=options.samples,
                min_new_tokens=options.new_tokens,
                max_new_tokens=options.new_tokens,
                pad_token_id=0,
            )

    return generate


def _measured(work: Callable[[Prompts], None]) -> Callable[[Prompts], float]:
    def run(prompts: Prompts) -> float:
        started = time.perf_counter()
        work(prompts)
        return time.perf_counter() - started

    return run


def _matmul_peak() -> Callable[[], float]:
    """GFLOP/s of a [2048, 2048] float32 product, when called."""
    matrix = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()

    def measure() -> float:
        started = time.perf_counter()
        for _ in range(3):
            product(matrix, matrix).block_until_ready()
        return 3 * 2 * 2048**3 / (time.perf_counter() - started) / 1e9

    return measure


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct", help="a Hugging Face directory")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--steps", type=int, default=None, help="tokens drawn in one call of the device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scan", action="store_true", help="run the layers in a loop instead of unrolled")
    parser.add_argument("--without-transformers", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
