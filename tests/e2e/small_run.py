"""A small sound run: config, data and a random model with its tokenizer, made without torch in milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class SmallRun:
    """The files of a run in `root`, which is also the working directory of the commands that use it."""

    root: Path
    config: dict[str, Any] = field(default_factory=dict)

    def write_config(self, text: str | bytes | None = None) -> Path:
        """Writes run.yaml, the config (JSON is YAML) or another text, and returns its path."""
        file = self.root / "run.yaml"
        content = json.dumps(self.config, indent=1) if text is None else text
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def set(self, key: str, value: Any) -> None:
        """Sets a key of the config: `rollout.num_generations`."""
        *sections, last = key.split(".")
        holder = self.config
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[last] = value

    def write_rows(self, name: str, rows: list[Any]) -> None:
        """Writes a JSONL file; a row that is text is written as it is."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def edit_model(self, **changes: Any) -> None:
        """Changes keys of the model's config.json."""
        file = self.root / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def tensors() -> dict[str, np.ndarray]:
    """The tensors of the model in `MODEL`, drawn with a fixed seed."""
    width, inner, values = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["hidden_size"] // 2
    shapes = {"model.embed_tokens.weight": (MODEL["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(MODEL["num_hidden_layers"]):
        block = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (values, width),
            "self_attn.v_proj": (values, width), "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    rng = np.random.default_rng(0)
    return {
        name: (np.ones(shape) if len(shape) == 1 else 0.05 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_model(directory: Path) -> None:
    """Writes a Hugging Face directory: config, weights, tokenizer, chat template."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    save_file(tensors(), directory / "model.safetensors")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
