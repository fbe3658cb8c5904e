"""A small decoder, random samples, and the same loss computed the plain way: one trajectory a row, dense logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.algo.objective import Objective
from jaxgrpo.config.schema import OptimizerSection
from jaxgrpo.learner.layout import Extent, Layout
from jaxgrpo.learner.optimizer import make_optimizer
from jaxgrpo.learner.packing import Denominators, Sample
from jaxgrpo.learner.step import Learner
from jaxgrpo.models.attention import causal_attention
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.sharding import make_mesh
from jaxgrpo.types.batch import TokenBatch
from jaxgrpo.types.rollout import Trajectory

CONFIG = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=256,
    tied_head=True,
    initializer_range=0.3,
)
DECODER = Decoder(CONFIG, jnp.float32, scan_layers=True)
LAYOUT = Layout((Extent(48, 48, 16),), micro_batch_tokens=192)


def trajectory(
    group: str, member: int, prompt: np.ndarray, completion: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
) -> Trajectory:
    """A trajectory; `mask` and `logprobs` are the completion's."""
    before = np.zeros(len(prompt))
    sampled = np.concatenate([before, mask]).astype(bool)
    return Trajectory(
        group,
        f"{group}/{member}",
        np.concatenate([prompt, completion]).astype(np.int32),
        sampled,
        sampled,
        np.concatenate([before, logprobs]).astype(np.float32),
        np.where(sampled, 0, -1),
        len(prompt),
        (),
    )


def random_samples(seed: int, groups: int = 3, generations: int = 4, multi_turn: bool = True) -> list[Sample]:
    """Groups with shared prompts of 1 to 8 tokens, completions of 1 to 12, some with untrained tokens in between."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = rng.integers(0, CONFIG.vocab_size, rng.integers(1, 9))
        for member in range(generations):
            length = int(rng.integers(1, 13))
            mask = rng.random(length) < 0.7 if multi_turn else np.ones(length, bool)
            mask[rng.integers(length)] = True
            completion = rng.integers(0, CONFIG.vocab_size, length)
            one = trajectory(str(group), member, prompt, completion, mask, rng.normal(-3, 0.3, length))
            total = len(one.tokens)
            old, ref = rng.normal(-4, 0.5, (2, total)).astype(np.float32)
            samples.append(Sample(one, np.full(total, rng.normal(), np.float32), old, ref))
    return samples


def make_learner(objective: Objective, mesh: Any = None, temperature: float = 0.7, **section: Any) -> Learner:
    """A learner of the small decoder, AdamW at 1e-2."""
    section = {"learning_rate": 1e-2, "weight_decay": 0.1} | section
    optimizer = make_optimizer(OptimizerSection(**section), 10, DECODER.axes)
    return Learner(DECODER, objective, optimizer, mesh or make_mesh({"data": 1}), temperature, block=16)


def make_params(seed: int = 0) -> Any:
    """Parameters of the small decoder."""
    return DECODER.init(jax.random.key(seed))


def plain_batch(samples: Sequence[Sample]) -> tuple[TokenBatch, np.ndarray]:
    """One trajectory a row, all its tokens, targets at every position but the first; and the tokens [N, T]."""
    longest = max(len(sample.trajectory.tokens) for sample in samples)

    def padded(values: Any, dtype: Any = np.float32) -> np.ndarray:
        rows = [np.broadcast_to(v, s.trajectory.tokens.shape) for v, s in zip(values, samples, strict=True)]
        return np.stack([np.pad(row, (0, longest - len(row))) for row in rows]).astype(dtype)

    trajectories = [sample.trajectory for sample in samples]
    tokens = padded([t.tokens for t in trajectories], np.int32)
    mask = padded([t.loss_mask for t in trajectories])[:, 1:]
    count = len(samples)
    scalars = {name: np.float32(value) for name, value in Denominators.of(samples)._asdict().items()}
    batch = TokenBatch(
        tokens=tokens,
        positions=tokens,
        segment=tokens,
        parent=tokens,
        hidden_index=np.broadcast_to(np.arange(longest - 1, dtype=np.int32), mask.shape),
        token=tokens[:, 1:],
        sequence=np.where(mask > 0, 0, -1).astype(np.int32),
        loss_mask=mask,
        advantages=padded([s.advantages for s in samples])[:, 1:],
        old_logprobs=padded([s.old_logprobs for s in samples])[:, 1:],
        ref_logprobs=padded([s.ref_logprobs for s in samples])[:, 1:],
        rollout_logprobs=padded([t.logprobs for t in trajectories])[:, 1:],
        group=np.zeros((count, 1), np.int32),
        on_policy=np.float32(0),
        **scalars,
    )
    return batch, tokens


def plain_logprobs(params: Any, tokens: np.ndarray, temperature: float) -> jax.Array:
    """float32 [N, T - 1], from dense logits."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = DECODER.apply(params, jnp.asarray(tokens), positions, causal_attention(positions))
    logprobs = jax.nn.log_softmax(DECODER.unembed(params, hidden[:, :-1]) / temperature)
    return jnp.take_along_axis(logprobs, jnp.asarray(tokens)[:, 1:, None], axis=2)[..., 0]


def plain_gradient(
    objective: Objective, params: Any, samples: Sequence[Sample], temperature: float = 0.7
) -> tuple[Any, Any]:
    """(loss, gradient) without packing, sharing, blocks, micro-batches or a mesh."""
    batch, tokens = plain_batch(samples)

    def loss(params: Any) -> jax.Array:
        return objective(plain_logprobs(params, tokens, temperature), None, batch)[0]

    return jax.value_and_grad(loss)(params)


def assert_close(left: Any, right: Any, tolerance: float = 2e-5) -> None:
    """Leaf by leaf, relative to the largest entry of each leaf."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        scale = max(float(np.max(np.abs(b))), 1e-6)
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance, err_msg=str(path))
