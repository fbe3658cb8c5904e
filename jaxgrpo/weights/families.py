"""One table a model family: our parameter, its Hugging Face name and shape. Read in both directions; no arrays here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxgrpo.models.config import ModelConfig


@dataclass(frozen=True)
class Entry:
    """One row of a table.

    Attributes:
        path: our parameter's path; those under `layers/` are stacked over layers.
        name: the Hugging Face tensor, `{layer}` standing for the layer's number.
        shape: the Hugging Face shape, as letters: V, D vocabulary and width; Q, K all query and key heads; h one head;
            F the MLP's width.
        when: the `ModelConfig` field that must be true for the parameter to exist; empty: it always does.
        unless: the field that must be false.
    """

    path: str
    name: str
    shape: str
    when: str = ""
    unless: str = ""

    @property
    def transposed(self) -> bool:
        """Whether ours is the transpose: projections are [in, out] here and [out, in] there."""
        return self.path.endswith("kernel") and not self.path.startswith("head/")

    @property
    def per_layer(self) -> bool:
        """Whether there is one tensor a layer."""
        return self.path.startswith("layers/")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: its name and shape, and the entry and layer (0 outside layers) it belongs to."""

    name: str
    shape: tuple[int, ...]
    entry: Entry
    layer: int


_LAYER, _ATTENTION, _MLP = "model.layers.{layer}.", "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
_LLAMA = (
    Entry("embed/embedding", "model.embed_tokens.weight", "VD"),
    Entry("layers/attention_norm/scale", _LAYER + "input_layernorm.weight", "D"),
    Entry("layers/attention/query/kernel", _ATTENTION + "q_proj.weight", "QD"),
    Entry("layers/attention/query/bias", _ATTENTION + "q_proj.bias", "Q", when="qkv_bias"),
    Entry("layers/attention/query_norm/scale", _ATTENTION + "q_norm.weight", "h", when="qk_norm"),
    Entry("layers/attention/key/kernel", _ATTENTION + "k_proj.weight", "KD"),
    Entry("layers/attention/key/bias", _ATTENTION + "k_proj.bias", "K", when="qkv_bias"),
    Entry("layers/attention/key_norm/scale", _ATTENTION + "k_norm.weight", "h", when="qk_norm"),
    Entry("layers/attention/value/kernel", _ATTENTION + "v_proj.weight", "KD"),
    Entry("layers/attention/value/bias", _ATTENTION + "v_proj.bias", "K", when="qkv_bias"),
    Entry("layers/attention/output/kernel", _ATTENTION + "o_proj.weight", "DQ"),
    Entry("layers/attention/output/bias", _ATTENTION + "o_proj.bias", "D", when="output_bias"),
    Entry("layers/mlp_norm/scale", _LAYER + "post_attention_layernorm.weight", "D"),
    Entry("layers/mlp/gate/kernel", _MLP + "gate_proj.weight", "FD"),
    Entry("layers/mlp/gate/bias", _MLP + "gate_proj.bias", "F", when="mlp_bias"),
    Entry("layers/mlp/up/kernel", _MLP + "up_proj.weight", "FD"),
    Entry("layers/mlp/up/bias", _MLP + "up_proj.bias", "F", when="mlp_bias"),
    Entry("layers/mlp/down/kernel", _MLP + "down_proj.weight", "DF"),
    Entry("layers/mlp/down/bias", _MLP + "down_proj.bias", "D", when="mlp_bias"),
    Entry("final_norm/scale", "model.norm.weight", "D"),
    Entry("head/kernel", "lm_head.weight", "VD", unless="tied_head"),
)
TABLES = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA}
"""`ModelConfig.family` -> its table. The families so far share their names and differ in which parameters exist."""

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors of old checkpoints that hold no parameter: the rotation's frequencies follow from the config."""


def entries(config: ModelConfig) -> tuple[Entry, ...]:
    """The rows that exist in this model."""
    return tuple(
        entry
        for entry in TABLES[config.family]
        if (not entry.when or getattr(config, entry.when)) and not (entry.unless and getattr(config, entry.unless))
    )


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the model's checkpoint, in the order of the table, layer by layer."""
    rows = entries(config)
    first_layer_row = next(index for index, entry in enumerate(rows) if entry.per_layer)
    for entry in rows[:first_layer_row]:
        yield _tensor(entry, 0, config)
    for layer in range(config.num_layers):
        for entry in rows:
            if entry.per_layer:
                yield _tensor(entry, layer, config)
    for entry in rows[first_layer_row:]:
        if not entry.per_layer:
            yield _tensor(entry, 0, config)


def _tensor(entry: Entry, layer: int, config: ModelConfig) -> Tensor:
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "Q": config.num_heads * config.head_dim,
        "K": config.num_kv_heads * config.head_dim,
        "h": config.head_dim,
        "F": config.intermediate_size,
    }
    return Tensor(entry.name.format(layer=layer), tuple(sizes[letter] for letter in entry.shape), entry, layer)
