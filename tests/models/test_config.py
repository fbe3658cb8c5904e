"""Every key of a config.json is read, known to be harmless, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import transformers

from jaxgrpo.errors import UserError
from jaxgrpo.models.config import eos_token_ids, from_hf
from jaxgrpo.models.rope import Rope, rope_frequencies

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def base(family: str = "llama", **keys: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **keys}


def refusal(config_json: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        from_hf(config_json, "model/config.json")
    return str(error.value)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_what_transformers_writes_is_read(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES)
    found = from_hf(config.to_dict(), "config.json")
    assert (found.num_heads, found.num_kv_heads, found.num_layers) == (6, 2, 4)
    assert found.head_dim == getattr(config, "head_dim", 48 // 6)
    assert found.rms_norm_eps == config.rms_norm_eps and found.max_positions == config.max_position_embeddings


@pytest.mark.parametrize("family, name", [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")])
def test_absent_keys_mean_what_transformers_means(family: str, name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES)
    assert from_hf(base(family), "config.json") == from_hf(config.to_dict(), "config.json")


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("pretraining_tp", 2),
        ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5),
        ("auto_map", {"AutoModel": "modeling.Other"}),
        ("logit_scale", 0.0625),
        ("sliding_window", 128),
        ("num_experts", 8),
        ("hidden_size", "wide"),
        ("num_hidden_layers", 0),
        ("tie_word_embeddings", "yes"),
        ("num_key_value_heads", 4),
        ("head_dim", 7),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(key: str, value: Any) -> None:
    message = refusal(base(**{key: value}))
    assert f"model/config.json: {key}" in message and repr(value) in message


@pytest.mark.parametrize(
    "options, named",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling.rope_type"),
        ({"type": "longrope"}, "rope_scaling.rope_type"),
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "linear", "factor": -1}, "rope_scaling.factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "rope_scaling.mrope_section"),
        ({"rope_type": "yarn", "factor": 2.0, "beta": 3}, "rope_scaling.beta"),
    ],
)
def test_rope_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    assert named in refusal(base(rope_scaling=options))


def test_all_problems_come_at_once() -> None:
    message = refusal(base(hidden_act="gelu", pretraining_tp=2, logit_scale=3))
    assert all(key in message for key in ("hidden_act", "pretraining_tp", "logit_scale"))
    assert "delete it from config.json" in message


def test_missing_sizes_are_named() -> None:
    message = refusal({"model_type": "llama"})
    assert all(key in message for key in SIZES if key != "num_key_value_heads")


def test_unknown_architectures_get_the_list() -> None:
    assert "llama (LlamaForCausalLM), qwen2" in refusal(base("mamba"))
    assert "LlamaForCausalLM" in refusal(base(architectures=["LlamaForSequenceClassification"]))


def test_harmless_keys_pass() -> None:
    harmless = {
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "_name_or_path": "x",
        "attention_dropout": 0.0,
        "do_sample": True,
    }
    assert from_hf(base(**harmless, sliding_window=None, pretraining_tp=1), "c") == from_hf(base(), "c")


def test_windows_follow_transformers() -> None:
    window = {"sliding_window": 8, "max_window_layers": 3}
    assert from_hf(base("qwen2", **window), "c").windows == (None,) * 4
    assert from_hf(base("qwen2", **window, use_sliding_window=True), "c").windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert from_hf(base("qwen3", **window, use_sliding_window=True, layer_types=types), "c").windows == (
        8,
        None,
        8,
        None,
    )
    assert "layer_types" in refusal(base("qwen3", **window, layer_types=types))
    assert "layer_types" in refusal(base("qwen3", layer_types=["full_attention"]))


def test_end_tokens_are_joined() -> None:
    assert eos_token_ids({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, {}, {"eos_token_id": None}) == (2, 7)
    assert from_hf(base(eos_token_id=[5, 6]), "c").eos_token_ids == (5, 6)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    plain = rope_frequencies(Rope(500_000.0), 128)
    scaled = rope_frequencies(Rope(500_000.0, "llama3", 8.0, 8192), 128)
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.sum() > 10 and long.sum() > 10
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)


def test_reading_a_config_loads_no_jax() -> None:
    code = "import sys, jaxgrpo.models.config; print('jax' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
