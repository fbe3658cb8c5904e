"""Measures one real update: useful FLOPs a second against the float32 matmul peak of the same minutes.

    python scripts/bench_update.py --model models/smollm2-135m-instruct

Useful FLOPs are what the mathematics needs, forward and backward, for tokens that are not padding: 6 a matmul parameter and
token, 12·H·Dh a layer and visible (query, key) pair, 6·V·D a predicted token. Recomputation and padding count as nothing.
The peak is a [2048, 2048] product, measured before and after every update, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.config.schema import OptimizerSection
from jaxgrpo.learner.layout import choose_layout
from jaxgrpo.learner.optimizer import make_optimizer
from jaxgrpo.learner.packing import Packed, Sample, pack
from jaxgrpo.learner.state import create, init_params
from jaxgrpo.learner.step import Learner
from jaxgrpo.metrics import Mean, Metrics
from jaxgrpo.models.config import ModelConfig, from_hf
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.sharding import make_mesh
from jaxgrpo.types.batch import TokenBatch
from jaxgrpo.types.rollout import Trajectory


class ClipObjective:
    """Token-mean clipped policy gradient: -mean min(r A, clip(r, 0.8, 1.2) A), with r = exp(logp - old)."""

    needs_entropy = False

    def __call__(self, logprobs: jax.Array, entropy: jax.Array | None, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        """Loss and metrics."""
        old = jnp.where(batch.on_policy > 0, jax.lax.stop_gradient(logprobs), batch.old_logprobs)
        ratio = jnp.exp(jnp.where(batch.loss_mask > 0, logprobs - old, 0.0))
        gain = jnp.minimum(ratio * batch.advantages, jnp.clip(ratio, 0.8, 1.2) * batch.advantages)
        return -jnp.sum(gain * batch.loss_mask) / batch.num_tokens, {"ratio": Mean(jnp.sum(ratio), batch.num_tokens)}


def main() -> None:
    """Runs the updates and prints one JSON object."""
    options = _options()
    config = from_hf(json.loads((options.model / "config.json").read_text()), str(options.model))
    decoder = Decoder(config, jnp.float32, scan_layers=options.scan, remat=options.remat)
    optimizer = make_optimizer(OptimizerSection(weight_decay=0.01), 1000, decoder.axes)
    learner = Learner(decoder, ClipObjective(), optimizer, make_mesh({"data": 1, "fsdp": 1, "tensor": 1}), block=options.block)
    packed = pack(
        _samples(config, options),
        choose_layout(
            options.prompt_tokens, options.completion_tokens, options.generations, options.micro_batch_tokens,
            options.row_tokens,
        ),
    )
    state = create(init_params(decoder, jax.random.key(0), learner.mesh), optimizer)
    begun = time.perf_counter()
    state, _ = learner.update(state, packed.batches)
    first = time.perf_counter() - begun
    square = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    flops, shares, rates, seconds, peaks = useful_flops(config, packed), [], [], [], [_peak(product, square)]
    for _ in range(options.updates):
        begun = time.perf_counter()
        state, metrics = learner.update(state, packed.batches)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begun)
        peaks.append(_peak(product, square))
        rates.append(flops / seconds[-1])
        shares.append(rates[-1] / max(peaks[-2:]))
    print(
        json.dumps(
            {
                "shapes": [batch.shapes for batch in packed.batches],
                "padding_share": round(packed.padding_share, 3),
                "tokens": sum(int((batch.segment >= 0).sum()) for batch in packed.batches),
                "targets": sum(int(batch.loss_mask.sum()) for batch in packed.batches),
                "useful_gflop": round(flops / 1e9, 1),
                "first_update_s": round(first, 1),
                "update_s": [round(s, 2) for s in seconds],
                "peak_gflops": [round(p / 1e9) for p in peaks],
                "update_gflops": round(statistics.median(rates) / 1e9, 1),
                "share_of_peak": round(statistics.median(shares), 3),
            }
        )
    )


def useful_flops(config: ModelConfig, packed: Packed) -> float:
    """FLOPs that one update needs, without recomputation and padding."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    total = 0.0
    for batch in packed.batches:
        tokens = float((batch.segment >= 0).sum())
        targets = float(batch.loss_mask.sum())
        total += 6 * config.num_layers * (layer * tokens + 2 * heads * _visible_pairs(batch))
        total += 6 * config.vocab_size * config.hidden_size * targets
    return total


def _visible_pairs(batch: TokenBatch) -> float:
    """Pairs (query, key) that attention must look at: a token sees as many tokens as its position says, and itself."""
    return float(((batch.positions + 1) * (batch.segment >= 0)).sum())


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
                str(group), f"{group}/{member}", tokens, sampled, sampled, np.zeros(len(tokens), np.float32),
                np.where(sampled, 0, -1), len(prompt), (),
            )
            samples.append(Sample(trajectory, (-1.0) ** member))
    return samples


def _peak(product: Callable[[Any, Any], Any], square: jax.Array) -> float:
    """FLOPs a second of the best of a few products."""
    best = float("inf")
    for _ in range(8):
        begun = time.perf_counter()
        product(square, square).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return 2 * square.shape[0] ** 3 / best


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a directory with config.json; weights are drawn")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--row-tokens", type=int)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--scan", action="store_true", help="run the layers in one compiled loop")
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
