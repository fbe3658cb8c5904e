"""The weight tables: one to one with the decoder's tree, exact both ways, and loud about tensors that do not fit."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxgrpo.errors import UserError
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.weights.families import entries, tensors
from jaxgrpo.weights.mapping import from_hf, to_hf

SIZES = (31, 24, 40, 3, 4, 2, 8, 128)
CONFIGS = {
    "llama": ModelConfig("llama", *SIZES),
    "llama-all-biases": ModelConfig("llama", *SIZES, qkv_bias=True, output_bias=True, mlp_bias=True, tied_head=True),
    "qwen2": ModelConfig("qwen2", *SIZES, qkv_bias=True),
    "qwen3": ModelConfig("qwen3", *SIZES, qk_norm=True, tied_head=True),
}


def draw(config: ModelConfig) -> dict[str, Any]:
    """Parameters that are all different numbers."""
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)


def refusal(source: dict[str, Any], config: ModelConfig) -> str:
    with pytest.raises(UserError) as error:
        from_hf(source, config, "model")
    return str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_exactly_the_decoder_s_parameters(name: str) -> None:
    config = CONFIGS[name]
    paths = ["/".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(draw(config))]
    assert sorted(entry.path for entry in entries(config)) == sorted(paths)


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_bit_identical_and_of_the_shapes_in_the_table(name: str) -> None:
    config = CONFIGS[name]
    params = draw(config)
    flat = list(to_hf(params, config))
    assert [(name, array.shape) for name, array in flat] == [(t.name, t.shape) for t in tensors(config)]
    assert all(array.flags.c_contiguous and array.dtype == np.float32 for _, array in flat)
    back = from_hf(dict(flat), config, "model")
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_jax_arrays_convert_like_numpy_arrays() -> None:
    config = CONFIGS["qwen2"]
    params = draw(config)
    for (name, ours), (_, expected) in zip(to_hf(jax.device_put(params), config), to_hf(params, config), strict=True):
        np.testing.assert_array_equal(ours, expected, err_msg=name)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_loads_into_float32(dtype: Any) -> None:
    config = CONFIGS["llama"]
    source = {name: array.astype(dtype) for name, array in to_hf(draw(config), config)}
    params = from_hf(source, config, "model")
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    name = "model.layers.2.mlp.down_proj.weight"
    np.testing.assert_array_equal(params["layers"]["mlp"]["down"]["kernel"][2].T, source[name].astype(np.float32))


def test_every_parameter_is_placed_once_when_it_is_complete() -> None:
    config = CONFIGS["qwen3"]
    placed = {}
    from_hf(
        dict(to_hf(draw(config), config)),
        config,
        "model",
        place=lambda path, array: placed.setdefault(path, array.shape),
    )
    assert placed["layers/attention/query_norm/scale"] == (3, 8)
    assert sorted(placed) == sorted(entry.path for entry in entries(config))


def test_tensors_that_do_not_fit_are_named_together() -> None:
    config = CONFIGS["llama"]
    source = dict(to_hf(draw(config), config))
    del source["model.layers.1.self_attn.k_proj.weight"]
    source["model.layers.3.mlp.up_proj.weight"] = np.zeros((40, 24), np.float32)
    source["model.norm.weight"] = np.zeros(25, np.float32)
    source["lm_head.weight"] = np.zeros((31, 24), np.int8)
    source["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    message = refusal(source, config)
    assert "model.layers.1.self_attn.k_proj.weight" in message and "missing" in message
    assert "model.layers.3.mlp.up_proj.weight" in message and "shape [25]" in message and "shape [24]" in message
    assert "lm_head.weight: found type int8" in message
    assert "inv_freq" not in message
    assert message.count("fix") == 0 and len(message.splitlines()) == 4


def test_a_long_list_is_cut() -> None:
    assert "more tensors that do not fit" in refusal({}, CONFIGS["llama"])


def test_a_tied_head_must_be_the_embedding() -> None:
    config = CONFIGS["qwen3"]
    source = dict(to_hf(draw(config), config))
    assert "lm_head.weight" not in source
    from_hf({**source, "lm_head.weight": source["model.embed_tokens.weight"].copy()}, config, "model")
    other = source["model.embed_tokens.weight"].copy()
    other[3, 5] += 1e-3
    message = refusal({**source, "lm_head.weight": other}, config)
    assert "lm_head.weight" in message and "tie_word_embeddings" in message
