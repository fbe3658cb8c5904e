"""Measures one real update: useful FLOPs a second against the float32 matmul peak of the same minutes.

    python scripts/bench_update.py --model models/smollm2-135m-instruct

Useful FLOPs are what the mathematics needs, forward and backward, for every token once: 6 a matmul parameter and token,
12·H·Dh a layer and visible (query, key) pair, 6·V·D a predicted token. Recomputation, repeated prompts and padding count
as nothing.
The peak is a [2048, 2048] product, measured before and after every update, so that a busy machine slows both; on a very
busy one the second ratio is the steadier one: the same per second of processor time (user and system, all threads).

Page faults of large temporaries cost up to a fifth; glibc can avoid most of them: GLIBC_TUNABLES=glibc.malloc.hugetlb=1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.algo.objective import from_preset
from jaxgrpo.config.schema import OptimizerSection
from jaxgrpo.learner.layout import choose_layout
from jaxgrpo.learner.optimizer import make_optimizer
from jaxgrpo.learner.packing import Sample, pack
from jaxgrpo.learner.state import create, init_params
from jaxgrpo.learner.step import Learner
from jaxgrpo.models.config import ModelConfig, from_hf
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.sharding import make_mesh
from jaxgrpo.types.rollout import Trajectory


def main() -> None:
    """Runs the updates and prints one JSON object."""
    options = _options()
    config = from_hf(json.loads((options.model / "config.json").read_text()), str(options.model))
    decoder = Decoder(config, jnp.float32, scan_layers=options.scan, remat=options.remat)
    optimizer = make_optimizer(OptimizerSection(weight_decay=0.01), 1000, decoder.axes)
    learner = Learner(
        decoder, from_preset("grpo"), optimizer, make_mesh({"data": 1, "fsdp": 1, "tensor": 1}), block=options.block
    )
    packed = pack(
        _samples(config, options),
        choose_layout(
            options.prompt_tokens,
            options.completion_tokens,
            options.generations,
            options.micro_batch_tokens,
            options.row_tokens,
        ),
    )
    state = create(init_params(decoder, jax.random.key(0), learner.mesh), optimizer)
    begun = time.perf_counter()
    state, _ = learner.update(state, packed.batches)
    first = time.perf_counter() - begun
    square = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    flops, seconds, processor = useful_flops(config, packed.samples), [], []
    peaks = [_peak(product, square)]
    for _ in range(options.updates):
        begun, busy = time.perf_counter(), time.process_time()
        state, _ = learner.update(state, packed.batches)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - busy)
        peaks.append(_peak(product, square))
    # The better of the two around an update: per second, and per second of processor time.
    peak = [tuple(map(max, before, after)) for before, after in itertools.pairwise(peaks)]
    report = {
        "shapes": [batch.shapes for batch in packed.batches],
        "padding_share": round(packed.padding_share, 3),
        "tokens": sum(int((batch.segment >= 0).sum()) for batch in packed.batches),
        "targets": sum(int(batch.loss_mask.sum()) for batch in packed.batches),
        "useful_gflop": round(flops / 1e9, 1),
        "first_update_s": round(first, 1),
        "update_s": [round(s, 2) for s in seconds],
        "peak_gflops": [round(p / 1e9) for p, _ in peak],
        "share_of_peak": round(statistics.median(flops / s / p for s, (p, _) in zip(seconds, peak, strict=True)), 3),
        "share_of_peak_by_processor_time": round(
            statistics.median(flops / s / p for s, (_, p) in zip(processor, peak, strict=True)), 3
        ),
    }
    print(json.dumps(report))


def useful_flops(config: ModelConfig, samples: Sequence[Sample]) -> float:
    """FLOPs that one update needs, each prompt once, without recomputation, repeated prompts and padding."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    prompts = {sample.trajectory.prompt_id: sample.trajectory.prompt_length for sample in samples}
    # The last token is only predicted; a token sees those before it and itself.
    spans = [(0, length) for length in prompts.values()]
    spans += [(s.trajectory.prompt_length, len(s.trajectory.tokens) - 1) for s in samples]
    tokens = sum(end - start for start, end in spans)
    pairs = sum((end * (end + 1) - start * (start + 1)) / 2 for start, end in spans)
    targets = sum(int(sample.trajectory.loss_mask.sum()) for sample in samples)
    layers = 6 * config.num_layers * (layer * tokens + 2 * heads * pairs)
    return layers + 6 * config.vocab_size * config.hidden_size * targets


def _samples(config: ModelConfig, options: argparse.Namespace) -> list[Sample]:
    """Random prompts at full length and completions of half to full length, advantages ±1."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(options.prompts):
        prompt = rng.integers(3, config.vocab_size, options.prompt_tokens)
        for member in range(options.generations):
            length = int(rng.integers(options.completion_tokens // 2, options.completion_tokens + 1))
            tokens = np.concatenate([prompt, rng.integers(3, config.vocab_size, length)]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(prompt)
            trajectory = Trajectory(
                str(group),
                f"{group}/{member}",
                tokens,
                sampled,
                sampled,
                np.zeros(len(tokens), np.float32),
                np.where(sampled, 0, -1),
                len(prompt),
                (),
            )
            samples.append(Sample(trajectory, (-1.0) ** member))
    return samples


def _peak(product: Callable[[Any, Any], Any], square: jax.Array) -> tuple[float, float]:
    """FLOPs a second and FLOPs a second of processor time, each of the best of a few products."""
    wall, busy = [], []
    for _ in range(8):
        begun, before = time.perf_counter(), time.process_time()
        product(square, square).block_until_ready()
        wall.append(time.perf_counter() - begun)
        busy.append(time.process_time() - before)
    flops = 2 * square.shape[0] ** 3
    return flops / min(wall), flops / min(busy)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a directory with config.json; weights are drawn")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--row-tokens", type=int)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--scan", action="store_true", help="run the layers in one compiled loop")
    parser.add_argument("--remat", default="dots", choices=("none", "dots", "full"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
