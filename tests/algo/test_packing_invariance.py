"""The same sequences in any rows and micro-batches: equal loss, gradients and metrics, for every preset."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracle import random_arrays

from jaxgrpo.algo.objective import PRESETS, from_preset
from jaxgrpo.metrics import Metrics, finalize, merge
from jaxgrpo.types.batch import TokenBatch

COUNT, WIDTH = 6, 6
Rows = list[list[int]]
# Micro-batches of rows of sequences; groups (0, 1), (2, 3), (4, 5) stay whole in the first three.
LAYOUTS: dict[str, list[Rows]] = {
    "two rows": [[[0, 1, 2, 3], [4, 5], []]],
    "two micro-batches, another order": [[[5, 4], [], []], [[], [3, 0, 2, 1], []]],
    "a sequence a row": [[[0], [3], [1]], [[5], [2], [4]]],
}
OBJECTIVES: dict[str, dict[str, Any]] = {name: {"name": name, "max_completion_tokens": 6} for name in PRESETS}
OBJECTIVES["corrected"] = {
    "name": "gspo",
    "kl_coef": 0.1,
    "entropy_coef": 0.1,
    "sampler_correction": "sequence_truncate",
    "off_policy_mask_delta": 0.0,
}


def batch_of(rows: Rows, arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray, TokenBatch]:
    """Rows of K = 4 WIDTH + 3 targets with room for 5 sequences; padding full of garbage; where each target came
    from."""
    K, S = 4 * WIDTH + 3, 5
    source = np.full((len(rows), K), -1)
    sequence, group = np.full((len(rows), K), -1, np.int32), np.full((len(rows), S), -1, np.int32)
    for r, members in enumerate(rows):
        ids = {name: index for index, name in enumerate(dict.fromkeys(int(arrays["group"][m]) for m in members))}
        for s, member in enumerate(members):
            start = s * WIDTH + min(s, 2)  # gaps of padding between sequences
            source[r, start : start + WIDTH] = member * WIDTH + np.arange(WIDTH)
            sequence[r, start : start + WIDTH] = s
            group[r, s] = ids[int(arrays["group"][member])]
    garbage = np.random.default_rng(0).choice(np.array([np.nan, 1e4, -1e4, np.inf], np.float32), source.shape)

    def lay(values: np.ndarray, padding: Any = None) -> np.ndarray:
        flat = np.broadcast_to(values[:, None] if values.ndim == 1 else values, (COUNT, WIDTH)).ravel()
        return np.where(source >= 0, flat[source], garbage if padding is None else padding).astype(np.float32)

    fields = {name: lay(arrays[name]) for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")}
    mask = arrays["loss_mask"]
    # As with shared prompts, the token that predicts a target may stand anywhere in the row; its position counts.
    hidden_index = np.random.default_rng(1).permuted(np.tile(np.arange(K, dtype=np.int32), (len(rows), 1)), axis=1)
    positions = np.zeros_like(hidden_index)
    np.put_along_axis(positions, hidden_index, np.where(source >= 0, source % WIDTH, 0).astype(np.int32), axis=1)
    scalars = dict(num_tokens=mask.sum(), num_sequences=float(COUNT), num_groups=3.0, on_policy=0.0)
    batch = TokenBatch(
        tokens=positions,
        positions=positions,
        segment=positions,
        parent=positions,
        token=positions,
        hidden_index=hidden_index,
        sequence=sequence,
        group=group,
        loss_mask=lay(mask, 0.0),
        **fields,
        **{name: np.float32(value) for name, value in scalars.items()},
    )
    return {name: lay(arrays[name]) for name in ("logprobs", "entropy")}, source, batch


@cache
def run(objective: str, layout: str) -> tuple[float, np.ndarray, dict[str, float]]:
    built, arrays = from_preset(**OBJECTIVES[objective]), random_arrays(1, rows=COUNT, width=WIDTH)
    total, grad, metrics = 0.0, np.zeros(COUNT * WIDTH), Metrics()
    for rows in LAYOUTS[layout]:
        tokens, source, batch = batch_of(rows, arrays)
        entropy = jnp.asarray(tokens["entropy"]) if built.needs_entropy else None
        step = jax.value_and_grad(lambda x, e=entropy, b=batch: built(x, e, b), has_aux=True)
        (loss, found), cotangent = step(jnp.asarray(tokens["logprobs"]))
        total += float(loss)
        grad[source[source >= 0]] += np.asarray(cotangent)[source >= 0]
        assert not np.any(np.asarray(cotangent)[source < 0])
        metrics = merge(metrics, found)
    return total, grad, finalize(metrics)


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_layouts_agree(objective: str, layout: str) -> None:
    if layout == "a sequence a row" and from_preset(**OBJECTIVES[objective]).needs_whole_groups:
        layout = "two micro-batches, another order"
    expected, actual = run(objective, "two rows"), run(objective, layout)
    assert expected[0] != 0 and np.any(expected[1])
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-6)
    averaged = {"sampler_correction/ess"}  # not a mean of sums: documented as averaged over micro-batches
    for name in expected[2].keys() - averaged:
        np.testing.assert_allclose(actual[2][name], expected[2][name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_token_weights_under_accumulation() -> None:
    """P15: 10, 10, 10 and 70 tokens in four micro-batches: every token weighs 1/100."""
    built = from_preset("dapo")
    grads = []
    for tokens in (10, 10, 10, 70):
        shape = (1, 70)
        row = np.zeros(shape, np.float32)
        mask = (np.arange(70)[None] < tokens).astype(np.float32)
        ids = np.zeros(shape, np.int32)
        one = np.float32(1)
        batch = TokenBatch(
            tokens=ids,
            positions=ids,
            segment=ids,
            parent=ids,
            hidden_index=ids,
            token=ids,
            sequence=ids,
            loss_mask=mask,
            advantages=row + 1,
            old_logprobs=row,
            ref_logprobs=row,
            rollout_logprobs=row,
            group=np.zeros((1, 1), np.int32),
            on_policy=one,
            num_tokens=np.float32(100),
            num_sequences=one * 4,
            num_groups=one,
        )
        grads.append(jax.grad(lambda x, b=batch: built(x, None, b)[0])(jnp.asarray(row)))
    trained = np.concatenate([np.asarray(g)[np.asarray(g) != 0] for g in grads])
    assert len(trained) == 100
    np.testing.assert_allclose(trained, -0.01, rtol=1e-6)
