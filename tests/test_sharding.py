"""The table of logical axes, and a decoder that computes the same on a mesh of eight devices as on one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxgrpo.errors import UserError
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.sharding import MESH_AXES, TABLE, batch_sharding, make_mesh, param_shardings, replicated

SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, tied_head=True)


def mesh(data: int, fsdp: int, tensor: int) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def test_every_axis_of_the_decoder_is_in_the_table() -> None:
    config = ModelConfig(
        "qwen3", 32, 16, 24, 2, 4, 2, 4, 64, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True
    )
    names = {
        name for axes in jax.tree.leaves(Decoder(config).axes, is_leaf=lambda x: isinstance(x, tuple)) for name in axes
    }
    assert names == set(TABLE)


def test_kernels_are_split_by_the_table() -> None:
    decoder = Decoder(SMOLLM2)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    found = param_shardings(decoder.axes, shapes, mesh(1, 4, 3), decoder.axis_units)
    assert found["embed"]["embedding"].spec == PartitionSpec("tensor", "fsdp")
    assert found["layers"]["attention"]["key"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert found["layers"]["attention"]["output"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers"]["mlp"]["down"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert found["final_norm"]["scale"].spec == PartitionSpec(None)


def test_what_does_not_divide_stays_whole() -> None:
    decoder = Decoder(SMOLLM2)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    # 9 and 3 heads on 2: their kernels' 576 and 192 columns would divide, through the middle of a head.
    found = param_shardings(decoder.axes, shapes, mesh(1, 5, 2), decoder.axis_units)
    assert found["layers"]["attention"]["key"]["kernel"].spec == PartitionSpec(None, None, None)
    assert found["layers"]["mlp"]["up"]["kernel"].spec == PartitionSpec(None, None, "tensor")


def test_an_unknown_axis_raises_and_names_the_parameter() -> None:
    shapes = {"a": SimpleNamespace(shape=(4, 4))}
    with pytest.raises(ValueError, match=r"\['a'\].*'embde'"):
        param_shardings({"a": ("embde", "mlp")}, shapes, mesh(1, 1, 1))
    with pytest.raises(ValueError, match=r"\['a'\]"):
        param_shardings({"a": ("embed",)}, shapes, mesh(1, 1, 1))


@pytest.mark.parametrize(
    "sizes, said",
    [
        ({"fsdp": 3}, "number of devices"),
        ({"fsdp": -1, "data": -1}, "at most one"),
        ({"model": 2}, "learner.mesh.model"),
        ({"fsdp": -1, "tensor": 5}, "product divides"),
        ({"fsdp": 0}, "positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_mesh(sizes)


def test_rows_are_split_over_data_and_fsdp() -> None:
    assert batch_sharding(make_mesh({"fsdp": -1})).spec == PartitionSpec(("data", "fsdp"))
    assert replicated(make_mesh({"fsdp": -1})).spec == PartitionSpec()


@pytest.mark.slow
def test_eight_devices_compute_what_one_computes() -> None:
    program = """
        import jax, jax.numpy as jnp, numpy as np
        from jaxgrpo.models.attention import causal_attention
        from jaxgrpo.models.config import ModelConfig
        from jaxgrpo.models.decoder import Decoder
        from jaxgrpo.sharding import batch_sharding, make_mesh, param_shardings

        decoder = Decoder(ModelConfig("qwen3", 64, 16, 24, 2, 6, 3, 4, 64, qk_norm=True, initializer_range=0.3))
        params = jax.device_get(decoder.init(jax.random.key(0)))
        tokens = np.random.default_rng(0).integers(0, 64, (8, 12), dtype=np.int32)
        positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)

        @jax.jit
        def step(params, tokens, positions):
            def loss(params):
                hidden, _ = decoder.apply(params, tokens, positions, causal_attention(positions))
                return jnp.mean(jnp.square(decoder.unembed(params, hidden)))
            return jax.value_and_grad(loss)(params)

        expected = jax.device_get(step(params, tokens, positions))
        mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": -1})
        assert mesh.size == 8 and mesh.axis_types == (jax.sharding.AxisType.Auto,) * 3
        with jax.set_mesh(mesh):
            places = param_shardings(decoder.axes, params, mesh, decoder.axis_units)
            drawn = jax.jit(decoder.init, out_shardings=places)(jax.random.key(0))
            rows = batch_sharding(mesh)
            found = step(drawn, jax.device_put(tokens, rows), jax.device_put(positions, rows))
        up = drawn["layers"]["mlp"]["up"]["kernel"]
        assert {shard.data.shape for shard in up.addressable_shards} == {(2, 8, 12)}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), jax.device_get(found), expected)
        print("same")
    """
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=env, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "same"
