"""The decoder against transformers, float32: every family and option, random weights, exact files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxgrpo.models.attention import causal_attention
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.weights.checkpoint_files import load_pretrained
from jaxgrpo.weights.mapping import to_hf

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rope_theta": 500.0}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-llama3": (
        "Llama",
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.4, "beta_fast": 4}}),
    "llama-yarn-untruncated": ("Llama", {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.1}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-window-off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def make(directory: Path, case: str) -> transformers.PreTrainedModel:
    """Saves a random model of a case; all its parameters are drawn, biases and norms too, so that each one counts."""
    family, options = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(directory)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(tmp_path, case)
    config, params = load_pretrained(str(tmp_path))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 70), dtype=np.int32)
    positions = np.broadcast_to(np.arange(70, dtype=np.int32), tokens.shape)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    decoder = Decoder(config)

    @jax.jit
    def logits(params: Any) -> jax.Array:
        return decoder.unembed(params, decoder.apply(params, tokens, positions, causal_attention(positions))[0])

    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(params), expected, atol=1e-4, rtol=0)


def test_gradients_equal_torch(tmp_path: Path) -> None:
    """The gradient of every parameter, under its Hugging Face name."""
    model = make(tmp_path, "qwen3-biases")
    config, params = load_pretrained(str(tmp_path))
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 66), dtype=np.int32)
    positions = np.broadcast_to(np.arange(66, dtype=np.int32), tokens.shape)
    ids = torch.tensor(tokens, dtype=torch.long)
    torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    decoder = Decoder(config, scan_layers=False, remat="dots")

    def loss(params: Any) -> jax.Array:
        hidden, _ = decoder.apply(params, tokens, positions, causal_attention(positions))
        logprobs = jax.nn.log_softmax(decoder.unembed(params, hidden)[:, :-1])
        return -jax.numpy.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    found = dict(to_hf(jax.jit(jax.grad(loss))(params), config))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(
            found[name], gradient, atol=2e-5 * max(1, np.abs(gradient).max()), rtol=0, err_msg=name
        )
