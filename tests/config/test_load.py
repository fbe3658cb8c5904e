"""Typed configs out of YAML, and every problem at once in our words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxgrpo.config.fields import field_at, sections
from jaxgrpo.config.foreign import EXPLAINED, RENAMED
from jaxgrpo.config.load import dump_config, load_config
from jaxgrpo.config.schema import Config, RewardSection, RolloutSection
from jaxgrpo.errors import UserError

GOOD = "output_dir: out\nsteps: 5\nmodel: {path: m}\ndata: {train: t.jsonl}\nrewards: [{name: accuracy}]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def load(file: Path, text: str, *overrides: str) -> Config:
    file.write_text(text, encoding="utf-8")
    return load_config(file, list(overrides))


def problems(file: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load(file, text, *overrides)
    return [str(problem) for problem in error.value.problems]


def test_a_small_config_gets_every_default(file: Path) -> None:
    config = load(file, GOOD)
    assert config.rollout.num_generations == RolloutSection().num_generations
    assert config.data.train == "t.jsonl" and config.rewards[0].weight == 1.0 and config.epochs is None


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("optimizer.learning_rate=1e-6", 1e-6),
        ("optimizer.learning_rate='1e-6'", 1e-6),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.max_grad_norm=' 2 '", 2.0),
        ("optimizer.max_grad_norm=null", None),
        ("steps=1e3", 1000),
        ("steps='7'", 7),
        ("rollout.sampling.top_k=5.0", 5),
        ("model.scan_layers=true", True),
        ("model.path='5'", "5"),
        ("data.system_prompt=Answer: yes", "Answer: yes"),
        ("data.train=[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("rewards.0.weight='2e-1'", 0.2),
        ("rewards.0.options={scale: '2'}", {"scale": "2"}),
    ],
)
def test_unambiguous_numbers_are_converted_and_nothing_else(file: Path, assignment: str, value: object) -> None:
    config: object = load(file, GOOD, assignment)
    for part in assignment.split("=")[0].split("."):
        config = config[int(part)] if isinstance(config, list) else getattr(config, part)
    assert config == value and type(config) is type(value)


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("steps=1.5", ["steps (command line)", "1.5", "a whole number > 0"]),
        ("steps=true", ["true", "a whole number > 0"]),
        ("steps=ten", ["'ten'", "a whole number > 0, or null"]),
        ("optimizer.learning_rate=-1", ["-1", "a number > 0"]),
        ("optimizer.learning_rate=.nan", ["nan", "a number > 0"]),
        ("rewards.0.weight=.inf", ["rewards.0.weight", "inf", "a number"]),
        ("optimizer.learning_rate=null", ["null", "leave the key out for its default, 1e-06"]),
        ("optimizer.name=adam", ["'adam'", "one of adamw, sgd, lion, adafactor", "did you mean adamw?"]),
        ("data.shuffle=no", ["'no'", "true or false", "YAML 1.2 reads no as text; write false"]),
        ("model.scan_layers=on", ["one of auto, true, false", "write true"]),
        ("data.eval=None", ["the text None", "write null"]),
        ("data.train=5", ["5", "text, or a list of texts", "quotes"]),
        ("data.train=[a, 5]", ["data.train.1", "5", "text", "quotes"]),
        ("model=m", ["'m'", "a section with keys such as path", "write `model: {path: m}`"]),
        ("rewards=[accuracy]", ["rewards.0", "'accuracy'", "write `- {name: accuracy}`"]),
        ("plugins=a.py", ["'a.py'", "a list of texts", "write `plugins: [a.py]`"]),
        ("rollout.sampling=[1]", ["rollout.sampling", "[1]", "a section with keys such as temperature"]),
        ("model={}", ["model.path (command line)", "no default", "add `model: {path:"]),
        ("rewards=[{weight: 1}]", ["rewards.0.name", "no default", "{name: last_number}"]),
        ("objective.token_weights={top_entropy: 0.2}", ["objective.token_weights.top_entropy", "0.2", "a mapping"]),
        ("learner.mesh.fsdp=-2", ["-2", "a whole number ≥ -1"]),
    ],
)
def test_wrong_values(file: Path, assignment: str, parts: list[str]) -> None:
    (message,) = problems(file, GOOD, assignment)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("objective.beta", "unknown key 'beta': here it is `objective.kl_coef`"),
        ("beta", "unknown key 'beta': here it is `objective.kl_coef`"),
        ("learning_rate", "here it is `optimizer.learning_rate`"),
        ("optimizer.lr", "here it is `optimizer.learning_rate`"),
        ("max_completion_length", "here it is `rollout.max_completion_tokens`"),
        ("rollout.temperature", "here it is `rollout.sampling.temperature` or `eval.temperature`"),
        ("weight", "here it is `rewards[i].weight`"),
        ("optimizer.learnig_rate", "did you mean `optimizer.learning_rate`?"),
        ("learnig_rate", "did you mean `optimizer.learning_rate`?"),
        ("rewards.0.wieght", "did you mean `rewards.0.weight`?"),
        ("max_completion_lenght", "did you mean `rollout.max_completion_tokens`?"),
        ("per_device_train_batch_size", "`rollout.prompts_per_step`"),
        ("objective.epsilon", "`objective.eps_low`"),
        ("use_vllm", "`rollout.engine`"),
        ("model.zzz", "one of path, compute_dtype"),
    ],
)
def test_unknown_keys_name_the_key_that_was_meant(file: Path, key: str, answer: str) -> None:
    (message,) = problems(file, GOOD, f"{key}=1")
    assert message.startswith(f"{key} (command line)") and f"unknown key '{key.split('.')[-1]}'" in message
    assert answer in message


def test_answers_for_foreign_keys_name_keys_that_exist_and_are_needed() -> None:
    ours = {f"{path}.{key}".lstrip(".") for path, section in sections() for key in section.model_fields}
    named = set(RENAMED.values()) | {
        key for text in EXPLAINED.values() for key in re.findall(r"`([a-z_]+\.[a-z_0-9.]+)`", text)
    }
    assert named and named <= ours, sorted(named - ours)
    assert not set(RENAMED) & set(EXPLAINED)
    assert not (set(RENAMED) | set(EXPLAINED)) & set(Config.model_fields), "a key of ours would never be answered"


def test_every_problem_is_reported_at_once_with_its_line(file: Path) -> None:
    text = "steps: 0\nmodel: {path: m, dtype: x}\ndata:\n  train: t\n  train: u\noptimizer:\n  name: adm\n  lr: 1\n"
    messages = problems(file, text, "seed=-1", "nonsense")
    starts = [
        message.split(":")[0] if message.startswith("command") else message.split(")")[0] + ")" for message in messages
    ]
    assert sorted(starts) == sorted([
        f"data.train ({file}:5)", "command line", f"output_dir ({file})", f"steps ({file}:1)", "seed (command line)",
        f"model.dtype ({file}:2)", f"optimizer.name ({file}:7)", f"optimizer.lr ({file}:8)",
    ])  # fmt: skip
    jargon = ("pydantic", "Input should", "Extra inputs", "type=", "validation error", "https://")
    assert not [word for word in jargon if word in "\n".join(messages)]


KEYS = [(path, key) for path, section in sections() for key in section.model_fields if "[i]" not in path]
JUNK = st.sampled_from(
    ["no", "-1", "1.5", "[1, [2]]", "{a: {b: 1}}", "null", "x", "''", ".inf", "true", "None", "[{}]", "99999"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(KEYS), JUNK), min_size=1, max_size=4), st.sampled_from(["", "x", ".y", ".0"]))
def test_no_config_whatsoever_ends_in_another_error(
    file: Path, assignments: list[tuple[tuple[str, str], str]], suffix: str
) -> None:
    overrides = [f"{path}.{key}{suffix}={value}".lstrip(".") for (path, key), value in assignments]
    try:
        config = load(file, GOOD, *overrides)
    except UserError as error:
        assert all(problem.path and problem.expected for problem in error.problems)
    else:
        assert isinstance(config, Config)


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    st.sampled_from(
        [
            "1e-6",
            "no",
            "null",
            "~",
            "1",
            "0x1",
            ".inf",
            "true",
            "2024-01-01",
            "a: b",
            "- x",
            "#",
            "",
            " x ",
            "a\nb\n",
            "'",
            "é",
            "*x",
        ]
    ),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    TEXT.filter(lambda text: text != "None"),
    st.floats(1e-300, 1e300),
    st.dictionaries(TEXT, st.one_of(TEXT, st.booleans(), st.integers(), st.none())),
)
def test_a_dumped_config_reads_back_equal(file: Path, text: str, number: float, options: dict[str, object]) -> None:
    values = {
        "output_dir": text,
        "steps": 3,
        "model": {"path": text},
        "data": {"train": [text, "b"], "chat_template_options": options},
        "optimizer": {"learning_rate": number},
        "rewards": [{"name": "a"}],
    }
    config = Config.model_validate(values)
    assert load(file, dump_config(config)) == config


def test_import_is_light() -> None:
    heavy = ("jax", "torch", "transformers", "numpy")
    code = f"import jaxgrpo.config.load, jaxgrpo.config.plan, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (("steps",), (int, NoneType)),
        (("rewards", 3, "weight"), (float,)),
        (("optimizer", "frozen", 0), (str,)),
        (("data", "train", 0), (str,)),
        (("objective", "token_weights", "x"), (dict[str, Any],)),
        (("rewards", 0), (RewardSection,)),
        (("rewards", 3, "wight"), None),
        (("model", "path", "x"), None),
    ],
)
def test_types_accepted_at_a_path(path: tuple[str | int, ...], options: tuple[object, ...] | None) -> None:
    field = field_at(path)
    assert (field and field[1]) == options
