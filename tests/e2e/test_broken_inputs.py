"""Everything a user can get wrong, one mistake at a time, through `python -m jaxgrpo.train --config FILE --check`.

Every case must exit with 2, name the place, what was found and what was expected, without a traceback, in less than two
seconds of validation, and before a model is loaded.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_run import SmallRun, tensors

ROOT = Path(__file__).resolve().parents[2]
VALIDATION_SECONDS = 2.0
GOOD_ROW = {"prompt": "What is 1+1?", "answer": "2"}

Break = Callable[[SmallRun], Any]


def text(content: str | bytes) -> Break:
    """Another text in place of the config."""
    return lambda run: run.write_config(content)


def key(name: str, value: Any) -> Break:
    """One key of the config changed."""

    def change(run: SmallRun) -> None:
        run.set(name, value)
        run.write_config()

    return change


def rows(*content: Any) -> Break:
    """Other training rows."""
    return lambda run: (run.write_rows("train.jsonl", list(content)), run.write_config())


def model(**changes: Any) -> Break:
    """Keys of the model's config.json changed."""
    return lambda run: (run.edit_model(**changes), run.write_config())


def weights(change: Callable[[dict[str, np.ndarray]], Any]) -> Break:
    """The model's tensors changed in place."""

    def write(run: SmallRun) -> None:
        changed = tensors()
        change(changed)
        save_file(changed, run.root / "model" / "model.safetensors")
        run.write_config()

    return write


def without(*files: str) -> Break:
    """Files deleted."""
    return lambda run: ([(run.root / file).unlink() for file in files], run.write_config())


def cut_weights(run: SmallRun) -> None:
    file = run.root / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    run.write_config()


def plugin(code: str, reward: dict[str, Any]) -> Break:
    """A plug-in file `mine.py`, and a reward that is to come from it."""

    def write(run: SmallRun) -> None:
        (run.root / "mine.py").write_text(code)
        run.set("plugins", ["mine.py"])
        run.set("rewards", [reward])
        run.write_config()

    return write


def used_output(run: SmallRun) -> None:
    (run.root / "out").mkdir()
    (run.root / "out" / "metrics.jsonl").touch()
    run.write_config()


CONFIGS: dict[str, tuple[Break, list[str]]] = {
    "empty": (text(""), ["run.yaml", "an empty file", "a mapping of keys and values"]),
    "a list": (text("[]"), ["run.yaml", "a list", "a mapping of keys and values"]),
    "a number": (text("42"), ["run.yaml", "the single value '42'", "a mapping"]),
    "not yaml": (text("steps: 5\nmodel: [a\n"), ["run.yaml:3", "flow sequence", "YAML 1.2"]),
    "a tab": (text("model:\n\tpath: m\n"), ["run.yaml:2", "'\\t'"]),
    "latin-1": (text("output_dir: é".encode("latin-1")), ["run.yaml", "not UTF-8"]),
    "repeated key": (text("steps: 1\nsteps: 2\n"), ["steps (", "run.yaml:2)", "after line 1", "every key once"]),
    "misspelt key": (
        key("optimizer.learnig_rate", 1e-5),
        ["optimizer.learnig_rate", "did you mean `optimizer.learning_rate`?"],
    ),
    "misplaced key": (
        key("learning_rate", 1e-5),
        ["unknown key 'learning_rate': here it is `optimizer.learning_rate`"],
    ),
    "foreign key": (key("objective.beta", 0.04), ["unknown key 'beta': here it is `objective.kl_coef`"]),
    "foreign batch": (
        key("per_device_train_batch_size", 8),
        ["per_device_train_batch_size", "`rollout.prompts_per_step`"],
    ),
    "wrong type": (key("steps", "many"), ["steps (", "'many'", "a whole number > 0"]),
    "out of range": (key("rollout.sampling.top_p", 1.5), ["rollout.sampling.top_p", "1.5", "a number > 0 and ≤ 1"]),
    "unknown choice": (key("optimizer.name", "adam"), ["'adam'", "adamw", "did you mean adamw?"]),
    "missing keys": (text("steps: 1\n"), ["output_dir", "model", "data", "no default", "add `"]),
    "text for a section": (key("model", "model"), ["model (", "'model'", "write `model: {path: model}`"]),
    "no duration": (key("steps", None), ["neither `steps` nor `epochs`", "steps: 100", "epochs: 1"]),
    "both durations": (key("epochs", 1), ["steps: 2 and epochs: 1", "delete"]),
    "batch arithmetic": (
        key("learner.updates_per_step", 3),
        ["3 with rollout.prompts_per_step: 4", "one of 1, 2, 4", "such as 6"],
    ),
    "group of one": (key("rollout.num_generations", 1), ["rollout.num_generations", "2 or more"]),
    "no whole step": (
        lambda run: (run.set("steps", None), run.set("epochs", 0.1), run.write_config()),
        ["epochs", "0.1 epochs of 12 prompts, 4 a step: 0 whole steps", "raise epochs", "prompts_per_step"],
    ),
    "long warm-up": (key("optimizer.warmup_steps", 50), ["optimizer.warmup_steps", "50 with 2 updates"]),
    "too many devices": (key("learner.mesh.fsdp", 512), ["learner.mesh", "fsdp 512", "devices"]),
    "beyond the context": (
        key("rollout.max_completion_tokens", 200),
        ["200 + data.max_prompt_tokens: 128 = 328", "256", "max_completion_tokens to 128"],
    ),
    "no rewards": (key("rewards", []), ["rewards", "no reward function"]),
    "unknown preset": (key("objective.preset", "gpso"), ["objective.preset", "'gpso'", "gspo"]),
    "unknown scheduler": (
        key("rollout.scheduler", "single_trun"),
        ["rollout.scheduler", "'single_trun'", "single_turn"],
    ),
    "output of another run": (
        used_output,
        ["output_dir", "holds a run already (metrics.jsonl)", "--resume", "another output_dir"],
    ),
}

DATA: dict[str, tuple[Break, list[str]]] = {
    "no file": (key("data.train", "trian.jsonl"), ["data.train", "'trian.jsonl'", "exists"]),
    "unknown format": (key("data.train", "run.yaml"), ["data.train", ".jsonl or .parquet"]),
    "not parquet": (
        lambda run: (
            (run.root / "x.parquet").write_bytes(b"PAR1 no"),
            run.set("data.train", "x.parquet"),
            run.write_config(),
        ),
        ["data.train", "x.parquet", "a Parquet file"],
    ),
    "broken json": (rows(GOOD_ROW, '{"prompt": "x"'), ["train.jsonl:2", "a JSON object"]),
    "not an object": (rows(GOOD_ROW, GOOD_ROW, "[1, 2]"), ["train.jsonl:3", "a JSON object"]),
    "no prompt": (rows(GOOD_ROW, {"answer": "2"}), ["train.jsonl:2", "no prompt", "'prompt'"]),
    "wrong column": (key("data.prompt_column", "question"), ["data.prompt_column", "'question'", "prompt, answer"]),
    "empty prompt": (rows({"prompt": " ", "answer": "1"}), ["train.jsonl:1", "an empty prompt"]),
    "unknown role": (
        rows({"prompt": [{"role": "usr", "content": "x"}], "answer": "1"}),
        ["train.jsonl:1", "role 'usr'", "user"],
    ),
    "too long a prompt": (
        rows(GOOD_ROW, {"prompt": "long " * 50, "answer": "1"}),
        ["train.jsonl:2", "tokens", "data.max_prompt_tokens", "overlong_prompts: skip"],
    ),
    "missing column": (rows({"prompt": "What is 1+1?", "gold": "2"}), ["last_number", "'answer'", "gold"]),
    "no rows": (rows(), ["data.train", "at least one"]),
}

MODELS: dict[str, tuple[Break, list[str]]] = {
    "no directory": (key("model.path", "./modle"), ["./modle", "directory"]),
    "no config": (without("model/config.json"), ["model/config.json"]),
    "no weights": (without("model/model.safetensors"), ["model/model.safetensors", "safetensors file"]),
    "no tokenizer": (without("model/tokenizer.json", "model/tokenizer_config.json"), ["model", "tokenizer"]),
    "unsupported family": (
        model(model_type="mamba", architectures=["MambaForCausalLM"]),
        ["config.json: model_type", "'mamba'", "llama"],
    ),
    "unsupported option": (model(rope_scaling={"rope_type": "longrope", "factor": 2.0}), ["config.json", "longrope"]),
    "unsupported activation": (model(hidden_act="gelu"), ["config.json: hidden_act", "'gelu'", "'silu'"]),
    "cut short": (cut_weights, ["model.safetensors", "damaged"]),
    "missing tensor": (
        weights(lambda all: all.pop("model.layers.1.mlp.up_proj.weight")),
        ["model.layers.1.mlp.up_proj.weight"],
    ),
    "extra tensor": (
        weights(lambda all: all.update({"model.layers.0.router.weight": np.zeros((2, 2), np.float32)})),
        ["model.layers.0.router.weight"],
    ),
    "wrong shape": (
        weights(lambda all: all.update({"model.norm.weight": np.ones(16, np.float32)})),
        ["model.norm.weight", "16", "32"],
    ),
    "wrong type": (
        weights(lambda all: all.update({"model.norm.weight": np.ones(32, np.int32)})),
        ["model.norm.weight", "32"],
    ),
}

PLUGINS: dict[str, tuple[Break, list[str]]] = {
    "no file": (key("plugins", ["mine.py"]), ["plugins", "'mine.py'", "looked for"]),
    "no module": (key("plugins", ["no_such_module_here"]), ["plugins", "'no_such_module_here'"]),
    "syntax error": (plugin("def mine(:\n", {"name": "mine"}), ["mine.py:1", "SyntaxError"]),
    "raises": (plugin("\nimport no_such_package\n", {"name": "mine"}), ["mine.py:2", "no_such_package"]),
    "not registered": (
        plugin("def mine_unregistered(completions, **columns): return []\n", {"name": "mine_unregistered"}),
        ["rewards", "'mine_unregistered'", "last_number", "mine.py"],
    ),
    "unknown reward": (
        key("rewards", [{"name": "last_numbr"}]),
        ["rewards", "'last_numbr'", "did you mean 'last_number'?"],
    ),
    "unknown option": (
        key("rewards", [{"name": "last_number", "options": {"colunm": "answer"}}]),
        ["rewards", "colunm", "did you mean 'column'?"],
    ),
    "missing option": (key("rewards", [{"name": "regex"}]), ["rewards", "pattern", "no default"]),
    "unknown kind": (
        plugin(
            "from jaxgrpo.registry import register\n\n@register('rewrad', 'kind')\ndef kind(completions): ...\n",
            {"name": "kind"},
        ),
        ["mine.py:3", "rewrad", "reward"],
    ),
}

TABLE = {
    f"{room}: {name}": row
    for room, cases in (("config", CONFIGS), ("data", DATA), ("model", MODELS), ("plug-in", PLUGINS))
    for name, row in cases.items()
}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""
    from jaxgrpo.weights import checkpoint_files

    def load(*arguments: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(checkpoint_files, "load_pretrained", load)


def test_the_unbroken_run_is_sound(small_run: SmallRun, no_weights: None, capsys: pytest.CaptureFixture[str]) -> None:
    from jaxgrpo.train import main

    assert main(["--config", str(small_run.write_config()), "--check"]) == 0, capsys.readouterr().err
    assert "2 steps" in capsys.readouterr().out
    assert not (small_run.root / "out").exists(), "a check leaves nothing behind"


@pytest.fixture(scope="module")
def imported() -> None:
    """The libraries that validation uses are in memory, so that what is timed is validation."""
    from transformers import AutoTokenizer

    import jaxgrpo.trainer.prepare

    assert AutoTokenizer and jaxgrpo.trainer.prepare


@pytest.mark.parametrize("name", TABLE)
def test_broken_inputs(
    name: str, small_run: SmallRun, imported: None, no_weights: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxgrpo.train import main

    break_it, parts = TABLE[name]
    break_it(small_run)
    start = time.perf_counter()
    code = main(["--config", str(small_run.root / "run.yaml"), "--check"])
    seconds = time.perf_counter() - start
    output = capsys.readouterr()
    message = output.err
    assert code == 2, f"exit code {code}\n{output.out}{message}"
    for part in parts:
        assert part in message, f"{part!r} is not in\n{message}"
    assert "expected" in message and "Traceback" not in message and "pydantic" not in message
    assert seconds < VALIDATION_SECONDS, f"{seconds:.2f} s"


def processor_seconds(*arguments: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Runs Python; processor time, which other processes on the machine hardly change, and the finished process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "imports"),
    [
        ("config: misspelt key", "pass"),  # an error in the config itself does not even wait for the imports
        ("data: broken json", "import jaxgrpo.trainer.prepare; from transformers import AutoTokenizer"),
        ("model: missing tensor", "import jaxgrpo.trainer.prepare; from transformers import AutoTokenizer"),
        ("plug-in: raises", "import jaxgrpo.trainer.prepare; from transformers import AutoTokenizer"),
    ],
)
def test_broken_inputs_from_the_command_line(name: str, imports: str, small_run: SmallRun) -> None:
    break_it, parts = TABLE[name]
    break_it(small_run)
    imported, _ = processor_seconds("-c", imports)
    total, done = processor_seconds("-m", "jaxgrpo.train", "--config", "run.yaml", "--check")
    assert done.returncode == 2, done.stdout + done.stderr
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert total - imported < VALIDATION_SECONDS, f"{total:.1f} s, of which {imported:.1f} s are imports"


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 25 and all(parts for _, parts in TABLE.values())
