"""Run by test_learner_mesh in a process with 8 CPU devices: prints the largest differences between meshes, as JSON."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from learner_cases import DECODER, LAYOUT, make_learner, make_params, random_samples

from jaxgrpo.algo.objective import Objective
from jaxgrpo.learner.layout import Layout
from jaxgrpo.learner.packing import pack
from jaxgrpo.learner.state import create, decoder_shardings
from jaxgrpo.sharding import MESH_AXES, make_mesh

MESHES = {"data": {"data": 8}, "fsdp": {"fsdp": 8}, "fsdp and tensor": {"fsdp": 4, "tensor": 2}}


def run(mesh: Any, shards: int) -> tuple[Any, Any]:
    """State after two updates; log-probs before. One row a shard and micro-batch: one device needs several micro-batches."""
    learner = make_learner(Objective(kl_coef=0.1, entropy_coef=0.01), mesh)
    state = create(jax.device_put(make_params(), decoder_shardings(DECODER, mesh)), learner.optimizer)
    layout = Layout(LAYOUT.rows, LAYOUT.rows[0].tokens, shards)
    packed = [pack(random_samples(seed, 6), layout, on_policy=False) for seed in (0, 1)]
    scored = learner.logprobs(state.params, packed[0].batches)
    rows = np.concatenate([s[b.loss_mask > 0] for s, b in zip(scored, packed[0].batches, strict=True)])
    norms = []
    for one in packed:
        state, metrics = learner.update(state, one.batches)
        norms.append(float(metrics["grad_norm"].total))
    return state, (rows, norms)


def main() -> None:
    """Compares every mesh with a single device."""
    one = jax.make_mesh((1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])
    state, (rows, norms) = run(one, 1)
    result = {}
    for name, sizes in MESHES.items():
        mesh = make_mesh(sizes)
        other, (other_rows, other_norms) = run(mesh, sizes.get("data", 1) * sizes.get("fsdp", 1))
        pairs = list(zip(jax.tree.leaves(other.params), jax.tree.leaves(state.params), strict=True))
        embedding, query = other.params["embed"]["embedding"], other.params["layers"]["attention"]["query"]["kernel"]
        moment = next(leaf for leaf in jax.tree.leaves(other.opt_state) if leaf.shape == embedding.shape)
        result[name] = {
            "params": max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
            "logprobs": float(np.abs(other_rows - rows).max()),
            "grad_norm": max(abs(a / b - 1) for a, b in zip(other_norms, norms, strict=True)),
            "query_shards": len({str(s.index) for s in query.addressable_shards}),
            "moment_like_param": moment.sharding.is_equivalent_to(embedding.sharding, 2),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
