"""Model directories: loaded, checked without reading, refused with the file's name, exported for transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxgrpo.errors import UserError
from jaxgrpo.weights.checkpoint_files import export_pretrained, load_pretrained, validate_pretrained
from jaxgrpo.weights.mapping import to_hf

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)).save_pretrained(
        tmp_path / "m"
    )
    (tmp_path / "m/tokenizer.json").write_text("{}")
    (tmp_path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": [4, 9]}))
    return tmp_path / "m"


def refusal(path: Path | str, check: Any = validate_pretrained) -> str:
    with pytest.raises(UserError) as error:
        check(str(path))
    return str(error.value)


def test_loads_and_joins_end_tokens(model: Path) -> None:
    config, params = load_pretrained(str(model))
    assert config.eos_token_ids == (4, 9) and config.tied_head
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    stored = load_file(model / "model.safetensors")
    assert all(np.array_equal(array, stored[name]) for name, array in to_hf(params, config))
    assert validate_pretrained(str(model)) == config


def test_a_check_reads_no_tensor_and_loads_no_jax(model: Path) -> None:
    code = f"""
import sys
from jaxgrpo.weights import checkpoint_files
checkpoint_files.StoredTensor.__array__ = None
checkpoint_files.validate_pretrained({str(model)!r})
print([name for name in ("jax", "flax", "torch", "transformers") if name in sys.modules])"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_shards_load_like_one_file(model: Path, tmp_path: Path) -> None:
    config, params = load_pretrained(str(model))
    out = export_pretrained(params, config, str(model), str(tmp_path / "sharded"), max_shard_bytes=40_000)
    assert len(list(out.glob("model-*.safetensors"))) > 2 and not (out / "model.safetensors").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    _, again = load_pretrained(str(out))
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_an_export_and_says_the_same(model: Path, tmp_path: Path, dtype: str) -> None:
    config, params = load_pretrained(str(model))
    params = jax.tree.map(lambda leaf: leaf * 1.25, params)
    out = export_pretrained(params, config, str(model), str(tmp_path / "out"), dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert (out / "tokenizer.json").read_text() == "{}" and (out / "generation_config.json").exists()
    ours, source = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (out, model))
    assert ours.dtype == getattr(torch, dtype)
    for name, parameter in source.named_parameters():
        expected = (parameter * 1.25).to(ours.dtype)
        assert torch.equal(ours.get_parameter(name), expected), name
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.25)
    if dtype == "float32":
        prompt = torch.tensor([[5, 17, 60, 3]])
        greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert ours.generate(prompt, **greedy).tolist() == source.generate(prompt, **greedy).tolist()


def test_an_export_appears_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    config, params = load_pretrained(str(model))
    broken = {**params, "final_norm": {}}
    with pytest.raises(KeyError):
        export_pretrained(broken, config, str(model), str(tmp_path / "new/out"))
    assert list((tmp_path / "new").iterdir()) == []
    out = export_pretrained(params, config, str(model), str(tmp_path / "new/out"))
    with pytest.raises(KeyError):
        export_pretrained(broken, config, str(model), str(out))
    assert [path.name for path in out.parent.iterdir()] == ["out"] and validate_pretrained(str(out)) == config
    export_pretrained(params, config, str(model), str(out), "bfloat16")
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype.name == "bfloat16"


def test_an_export_overwrites_no_other_directory(model: Path, tmp_path: Path) -> None:
    config, params = load_pretrained(str(model))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.txt").write_text("mine")
    for taken in (tmp_path / "work", model):
        with pytest.raises(UserError, match="in use"):
            export_pretrained(params, config, str(model), str(taken))
    assert (tmp_path / "work/thesis.txt").exists() and (model / "model.safetensors").exists()
    with pytest.raises(UserError, match="int4"):
        export_pretrained(params, config, str(model), str(tmp_path / "x"), "int4")


def test_missing_and_damaged_files_are_named(model: Path, tmp_path: Path) -> None:
    assert "no directory" in refusal(tmp_path / "nowhere")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors: found a damaged file" in refusal(model)
    weights.unlink()
    (model / "pytorch_model.bin").touch()
    assert "convert the weights to safetensors" in refusal(model)
    (model / "config.json").write_text("{")
    assert "config.json: found not JSON" in refusal(model)
    (model / "config.json").unlink()
    assert "config.json" in refusal(model)


def test_what_an_index_gets_wrong_is_named(model: Path, tmp_path: Path) -> None:
    config, params = load_pretrained(str(model))
    out = export_pretrained(params, config, str(model), str(tmp_path / "sharded"), max_shard_bytes=40_000)
    index_file = out / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    name = next(name for name, file in index["weight_map"].items() if file == first)
    save_file({**load_file(out / second), name: load_file(out / first)[name]}, out / second)
    message = refusal(out)
    assert f"{second}: {name}: found also in {first}" in message
    index["weight_map"]["model.layers.0.mlp.extra"] = first
    index_file.write_text(json.dumps(index))
    assert "model.layers.0.mlp.extra" in refusal(out)
    (out / first).unlink()
    assert f"{out / first}: expected a safetensors file" in refusal(out)


def test_wrong_shapes_are_found_without_reading(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    stored["model.norm.weight"] = np.ones(47, np.float32)
    save_file(stored, model / "model.safetensors")
    for check in (validate_pretrained, load_pretrained):
        assert "model.norm.weight: found shape [47]; expected shape [48]" in refusal(model, check)


def test_a_name_goes_to_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config, _ = load_pretrained("some-lab/some-model")
    assert validate_pretrained("some-lab/some-model") == config
    assert [name for name, _ in asked] == ["some-lab/some-model"] * 2 and asked[1][1] == ("*.json",)


def test_an_unreachable_hub_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    message = refusal("some-lab/some-model", load_pretrained)
    assert "no such directory; the hub: ConnectionError: no route to host" in message
