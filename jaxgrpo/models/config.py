"""What a decoder computes, read from a Hugging Face config.json. No JAX here: it is read before anything is loaded.

Every key of the file is accounted for: it is read, it is known to change nothing, or it is refused by name. A model is
never approximated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxgrpo.errors import Problem, UserError
from jaxgrpo.models.rope import Rope, read_rope

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Supported `model_type` -> its architecture."""

# What transformers' config classes assume when a key is absent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "eos_token_id": 2},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768, "eos_token_id": None},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "eos_token_id": None},
}

# Read elsewhere than by `_Keys`, or of no consequence for the logits of a token sequence.
_HARMLESS_NAMES = """
    model_type architectures rope_parameters rope_scaling rope_theta partial_rotary_factor layer_types eos_token_id
    _name_or_path name_or_path _commit_hash transformers_version transformers.js_config torch_dtype dtype use_cache
    bos_token_id pad_token_id unk_token_id sep_token_id cls_token_id tokenizer_class initializer_factor
    return_dict use_return_dict output_attentions output_hidden_states torchscript problem_type num_labels id2label
    label2id finetuning_task task_specific_params prefix decoder_start_token_id is_decoder is_llama_config
    attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled use_flash_attn
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    unsloth_fixed unsloth_version
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
# Would change the computation at any other value than these.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (None, 0, 0.0),
    "hidden_dropout": (None, 0, 0.0),
    "resid_pdrop": (None, 0, 0.0),
    "pretraining_tp": (None, 1),
    "is_encoder_decoder": (None, False),
    "tie_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (None, 0),
    "pruned_heads": (None, {}),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "tf_legacy_loss": (None, False),
    "use_bfloat16": (None, False),
    "quantization_config": (None,),
    "auto_map": (None, {}),
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: pre-norm attention and gated MLP blocks, rotary positions, RMS norms.

    Attributes:
        family: the `model_type` of the Hugging Face config; names the weight table.
        vocab_size, hidden_size, intermediate_size: V, D and the width of the MLP.
        num_layers, num_heads, num_kv_heads, head_dim: L, H, Hk and Dh; H is a multiple of Hk.
        max_positions: the longest context, tokens.
        rms_norm_eps: added to the mean square in every norm.
        tied_head: the unembedding is the embedding.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        qk_norm: RMS norms over each head's query and key, before rotation.
        rope: how positions become angles.
        windows: for each layer, how many last positions a token sees, itself included; None: all.
        initializer_range: standard deviation of freshly drawn matrices.
        eos_token_ids: tokens that end a completion.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-6
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: Rope = field(default_factory=Rope)
    windows: tuple[int | None, ...] = ()
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)


def from_hf(config_json: Mapping[str, Any], path: str) -> ModelConfig:
    """Reads a parsed config.json; `path` is where it came from, for messages.

    Raises:
        UserError: every key that is missing, malformed, unsupported or unknown, at once.
    """
    family = _family(config_json, path)
    keys = _Keys(config_json, path)
    defaults = _DEFAULTS[family]
    heads = keys.size("num_attention_heads")
    hidden = keys.size("hidden_size")
    layers = keys.size("num_hidden_layers")
    max_positions = keys.size("max_position_embeddings", defaults["max_position_embeddings"])
    # Qwen2 has biases on q, k and v whatever its config says; the other two have them on o as well, or nowhere.
    bias = family != "qwen2" and keys.flag("attention_bias", False)
    rope, problems = read_rope(config_json, max_positions, path)
    keys.problems += problems
    config = ModelConfig(
        family=family,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.size("num_key_value_heads", defaults["num_key_value_heads"] or heads),
        head_dim=keys.size("head_dim", defaults["head_dim"] or max(hidden // heads, 1)),
        max_positions=max_positions,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        tied_head=keys.flag("tie_word_embeddings", False),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=family == "llama" and keys.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        rope=rope,
        windows=_windows(keys, layers) if family != "llama" else (),
        initializer_range=keys.number("initializer_range", 0.02),
        eos_token_ids=eos_token_ids({"eos_token_id": config_json.get("eos_token_id", defaults["eos_token_id"])}),
    )
    keys.expect(
        "hidden_act", config_json.get("hidden_act", "silu") == "silu", "'silu', the gate's only activation here"
    )
    keys.expect("num_key_value_heads", heads % config.num_kv_heads == 0, f"a divisor of num_attention_heads = {heads}")
    keys.expect("head_dim", config.head_dim % 2 == 0, f"an even head size, got {config.head_dim}: rotation takes pairs")
    keys.finish()
    return config


def eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens that any of these (config.json, generation_config.json) names, each once, in order."""
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        found += [] if value is None else list(value) if isinstance(value, Iterable) else [value]
    return tuple(dict.fromkeys(found))


def _family(config_json: Mapping[str, Any], path: str) -> str:
    family, architectures = config_json.get("model_type"), config_json.get("architectures")
    supported = ", ".join(f"{name} ({architecture})" for name, architecture in FAMILIES.items())
    if family not in FAMILIES:
        raise UserError(Problem(f"{path}: model_type", repr(family), f"a supported family: {supported}"))
    if architectures and FAMILIES[family] not in architectures:
        expected = f"{FAMILIES[family]!r}, the causal language model of {family!r}"
        raise UserError(Problem(f"{path}: architectures", repr(architectures), expected))
    return family


def _windows(keys: _Keys, layers: int) -> tuple[int | None, ...]:
    # transformers: `sliding_window` counts only with `use_sliding_window`; `layer_types` outranks `max_window_layers`.
    used = keys.flag("use_sliding_window", False)
    window = keys.size("sliding_window", 4096)
    first = keys.size("max_window_layers", 28, least=0)
    types = keys.source.get("layer_types")
    if types is None:
        return tuple(window if used and layer >= first else None for layer in range(layers))
    full, sliding = "full_attention", "sliding_attention"
    right = isinstance(types, list) and len(types) == layers and set(types) <= {full, sliding}
    keys.expect("layer_types", right, f"{layers} times {full!r} or {sliding!r}")
    keys.expect(
        "layer_types", used or not right or sliding not in types, f"no {sliding!r} while use_sliding_window is off"
    )
    return tuple(window if kind == sliding else None for kind in types) if right else ()


class _Keys:
    """Reads a config key by key, gathers problems, and knows at the end which keys nobody asked for."""

    def __init__(self, source: Mapping[str, Any], path: str):
        self.source, self.path = source, path
        self.problems: list[Problem] = []
        self.asked: set[str] = set()

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return value if self.expect(key, good, f"an integer of at least {least}") else max(least, 1)

    def number(self, key: str, default: float) -> float:
        value = self._value(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        return float(value) if self.expect(key, good, "a number of at least 0") else default

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        return value if self.expect(key, isinstance(value, bool), "true or false") else default

    def _value(self, key: str, default: Any) -> Any:
        value = self.source.get(key)
        return default if value is None else value

    def expect(self, key: str, condition: bool, expected: str) -> bool:
        self.asked.add(key)
        if not condition:
            found = repr(self.source[key]) if key in self.source else ""
            self.problems.append(Problem(f"{self.path}: {key}", found, expected))
        return condition

    def finish(self) -> None:
        for key, value in self.source.items():
            if key in self.asked or key in _HARMLESS:
                continue
            if key in _NEUTRAL:
                self.expect(key, value in _NEUTRAL[key], f"{_NEUTRAL[key][-1]!r}: anything else is not supported")
            elif value is not None and value is not False:
                fix = "if the model computes the same without it, delete it from config.json; else it is not supported"
                self.problems.append(Problem(f"{self.path}: {key}", repr(value), "only keys this library knows", fix))
        if self.problems:
            raise UserError(self.problems)
