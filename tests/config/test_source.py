"""YAML 1.2 text and overrides to plain values with places."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jaxgrpo.config.source import Source, read, scalar
from jaxgrpo.errors import UserError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("1.0e-6", 1e-6), ("-.5", -0.5), ("3.", 3.0), ("+7", 7),
        ("017", 17), ("0o17", 15), ("0x1F", 31),
        (".inf", math.inf), ("-.INF", -math.inf),
        ("null", None), ("~", None), ("", None), ("True", True), ("false", False),
        ("no", "no"), ("off", "off"), ("Yes", "Yes"), ("None", "None"), ("1_000", "1_000"), ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"), ("1e", "1e"), (".", "."), ("1.2.3", "1.2.3"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_the_core_schema(text: str, value: object) -> None:
    assert scalar(text) == value and type(scalar(text)) is type(value)


def test_nan() -> None:
    number = scalar(".nan")
    assert isinstance(number, float) and math.isnan(number)


def test_quoted_scalars_are_text_and_places_are_known(tmp_path: Path) -> None:
    file = write(tmp_path, "a: 1e-6\nb:\n  c: '1e-6'\n  d:\n  - x\n  - {e: no}\n")
    source = read(file)
    assert source.values == {"a": 1e-6, "b": {"c": "1e-6", "d": ["x", {"e": "no"}]}}
    assert source.where(("b", "d", 1, "e")) == f"b.d.1.e ({file}:6)"
    assert source.where(("b", "missing")) == f"b.missing ({file}:2)"
    assert source.where(("missing",)) == f"missing ({file})"


def test_aliases_are_independent_copies(tmp_path: Path) -> None:
    source = read(write(tmp_path, "a: &x {n: 1}\nb: *x\n"))
    source.override("b.n=2")
    assert source.values == {"a": {"n": 1}, "b": {"n": 2}}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["an empty file", "a mapping"]),
        ("# nothing\n", ["an empty file"]),
        ("[]", ["a list", "a mapping"]),
        ("42", ["the single value '42'", "a mapping"]),
        ("a: b: c", [":1:", "mapping values are not allowed"]),
        ("a: 1\nb: [1, 2\n", [":3:", "flow sequence"]),
        ("a:\n\tb: 1", [":2:", "'\\t'"]),
        ("a: *unknown", [":1:", "undefined alias"]),
        ("a: 1\n---\nb: 2\n", ["another document"]),
        ("a: \x01", ["unacceptable character #x0001"]),
        ("[" * 5000, ["nested too deeply"]),
    ],
)
def test_text_that_is_no_config_is_one_problem(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read(file)
    assert len(error.value.problems) == 1
    for part in [str(file), *parts]:
        assert part in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    for name, part in (("none.yaml", "no such file"), ("latin.yaml", "not UTF-8"), (".", "directory")):
        with pytest.raises(UserError, match=part):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "b.c (FILE:4)", "after line 3"),
        ("a: !secret x\n", "a (FILE:1)", "the tag !secret"),
        ("a: &x [*x]\n", "a.0 (FILE:1)", "an alias of the value it stands in"),
        ("a: 1\n[b]: 1\n", "FILE:2", "a list or mapping as a key"),
    ],
)
def test_smaller_mistakes_are_collected(tmp_path: Path, text: str, where: str, part: str) -> None:
    file = write(tmp_path, text)
    (problem,) = read(file).problems
    assert problem.path == where.replace("FILE", str(file)) and part in problem.found


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b=2", {"a": {"b": 2, "c": "x"}, "l": [{"w": 1}]}),
        ("a.b=1e-6", {"a": {"b": 1e-6, "c": "x"}, "l": [{"w": 1}]}),
        ("a.new.deep=x=y", {"a": {"b": 1, "c": "x", "new": {"deep": "x=y"}}, "l": [{"w": 1}]}),
        ("a.c=Answer: [yes] # now", {"a": {"b": 1, "c": "Answer: [yes] # now"}, "l": [{"w": 1}]}),
        ("a.c='7'", {"a": {"b": 1, "c": "7"}, "l": [{"w": 1}]}),
        ("a.c=", {"a": {"b": 1, "c": None}, "l": [{"w": 1}]}),
        ("a.c=[p.py, {q: 1e3}]", {"a": {"b": 1, "c": ["p.py", {"q": 1000.0}]}, "l": [{"w": 1}]}),
        ("a={b: 5}", {"a": {"b": 5}, "l": [{"w": 1}]}),
        ("l.0.w=2", {"a": {"b": 1, "c": "x"}, "l": [{"w": 2}]}),
        ("l.1.w=2", {"a": {"b": 1, "c": "x"}, "l": [{"w": 1}, {"w": 2}]}),
    ],
)
def test_overrides(assignment: str, expected: dict[str, object]) -> None:
    source = Source("run.yaml", {"a": {"b": 1, "c": "x"}, "l": [{"w": 1}]})
    source.override(assignment)
    assert source.values == expected and not source.problems
    path = assignment.split("=")[0]
    assert source.where(tuple(int(p) if p.isdecimal() else p for p in path.split("."))) == f"{path} (command line)"


def test_an_override_forgets_the_places_it_replaced(tmp_path: Path) -> None:
    source = read(write(tmp_path, "a:\n  b: 1\n"))
    source.override("a={}")
    assert source.where(("a", "b")) == "a.b (command line)"


@pytest.mark.parametrize(
    "assignment",
    ["a", "=1", "a..b=1", "l.7=1", "l.x=1", "a.b.c=1", "a.b=[1", "a.b='x", "a.b=[]: 1", "a.b={c: 1, c: 2}", "l.²=1"],
)
def test_wrong_overrides_change_nothing_and_say_why(assignment: str) -> None:
    source = Source("run.yaml", {"a": {"b": 1}, "l": [1]})
    source.override(assignment)
    assert source.values == {"a": {"b": 1}, "l": [1]}
    (problem,) = source.problems
    assert "command line" in problem.path and problem.expected
