"""Rows become prompts: checked, identified, and with every other column kept for the rewards."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxgrpo.config.schema import DataSection
from jaxgrpo.data.readers import Row, read_rows
from jaxgrpo.errors import Problem, UserError
from jaxgrpo.types.rollout import Message, Prompt

MAX_SHOWN = 20
"""So many bad rows are shown one by one; the rest is counted."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one split.

    Attributes:
        prompts: in the order of the files.
        columns: names of the columns that rewards get; a row without one has None there.
        counts: rows `read`, `kept`, `invalid` and `overlong`; read = kept + invalid + overlong.
        problems: the first rows that were left out, with file, line and reason.
    """

    prompts: tuple[Prompt, ...]
    columns: tuple[str, ...]
    counts: dict[str, int]
    problems: tuple[Problem, ...] = ()


@dataclass
class _Report:
    """Counts rows and keeps the first problems."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[Problem]] = field(default_factory=lambda: {"invalid": [], "overlong": []})

    def leave_out(self, problem: Problem, kind: str) -> None:
        self.counts[kind] += 1
        if len(self.problems[kind]) < MAX_SHOWN:
            self.problems[kind].append(problem)


def load_prompts(
    section: DataSection, split: Literal["train", "eval"], encode: Callable[[Prompt], Sequence[int]] | None = None
) -> PromptSet:
    """Reads a split.

    Args:
        encode: a prompt's ids (`ChatTokenizer.encode_prompt`), to apply `max_prompt_tokens`; None: no check.

    Raises:
        UserError: bad rows (unless `skip_invalid`), overlong prompts (unless they are to be skipped), or nothing left.
    """
    paths = section.train if split == "train" else section.eval
    if paths is None:
        raise UserError(Problem("data.eval", "", "a path to held-out prompts"))
    report = _Report()
    rows = list(_valid_rows(section, f"data.{split}", paths, split, report))
    columns = tuple(dict.fromkeys(name for row in rows for name in row.values if name != section.prompt_column))
    _stop_on(report, "invalid", section.skip_invalid, f"data.{split}", "mend the rows, or set data.skip_invalid: true")
    prompts = tuple(_fitting(section, rows, _prompts(section, rows, columns), encode, report))
    _stop_on(
        report,
        "overlong",
        section.overlong_prompts == "skip",
        f"data.{split}",
        "raise data.max_prompt_tokens, or set data.overlong_prompts: skip",
    )
    shown = (*report.problems["invalid"], *report.problems["overlong"])
    if not prompts:
        raise UserError(
            [
                *shown,
                Problem(
                    f"data.{split}",
                    f"{report.counts['read']} rows in {paths!r}",
                    "at least one row with a usable prompt",
                ),
            ]
        )
    counts = {kind: report.counts[kind] for kind in ("read", "invalid", "overlong")}
    return PromptSet(prompts, columns, counts | {"kept": len(prompts)}, shown)


def _valid_rows(section: DataSection, key: str, paths: str | list[str], split: str, report: _Report) -> Iterator[Row]:
    seen: dict[str, None] = {}
    has_prompt = False
    for row in read_rows(paths, key, split):
        report.counts["read"] += 1
        if isinstance(row, Row):
            seen.update(dict.fromkeys(row.values))
            has_prompt = has_prompt or section.prompt_column in row.values
        problem = row if isinstance(row, Problem) else _check_prompt(row, section)
        if problem:
            report.leave_out(problem, "invalid")
        else:
            yield row
    if seen and not has_prompt:
        raise UserError(
            Problem(
                "data.prompt_column",
                repr(section.prompt_column),
                f"a column of {key}: {', '.join(seen)}",
                "name the column that holds the prompt",
            )
        )


def _stop_on(report: _Report, kind: str, allowed: bool, key: str, fix: str) -> None:
    count = report.counts[kind]
    if count and not allowed:
        more = f", of which {MAX_SHOWN} are shown" if count > MAX_SHOWN else ""
        raise UserError(
            [*report.problems[kind], Problem(key, f"{count} {kind} of {report.counts['read']} rows{more}", "none", fix)]
        )


def _check_prompt(row: Row, section: DataSection) -> Problem | None:
    name = section.prompt_column
    value = row.values.get(name)
    expected = "a string" if section.prompt_format == "text" else "a string or a list of messages"
    if value is None:
        return Problem(
            row.place, "no prompt" if name not in row.values else "null", f"{expected} in the column {name!r}"
        )
    if isinstance(value, str):
        return None if value.strip() else Problem(row.place, "an empty prompt", f"some text in the column {name!r}")
    if section.prompt_format == "text" or not isinstance(value, list):
        return Problem(row.place, f"a {type(value).__name__} in the column {name!r}", expected)
    if not value:
        return Problem(row.place, "an empty list of messages", "at least one message")
    return next(
        (p for i, message in enumerate(value) if (p := _check_message(message, f"{row.place} {name}[{i}]"))), None
    ) or (
        Problem(
            row.place,
            "a conversation that ends with an assistant message",
            "one that ends where the model is to speak",
            "move the reference answer to another column",
        )
        if value[-1]["role"] == "assistant"
        else None
    )


def _check_message(message: Any, place: str) -> Problem | None:
    if not isinstance(message, dict):
        return Problem(place, f"a {type(message).__name__}", "a message: an object with role and content")
    if message.get("role") not in ROLES:
        return Problem(place, f"role {message.get('role')!r}", f"a role out of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str | list | None) or (
        message.get("content") is None and message["role"] != "assistant"
    ):
        return Problem(
            place,
            f"content of type {type(message.get('content')).__name__}",
            "content that is a string or a list of parts",
        )
    return None


def _prompts(section: DataSection, rows: Sequence[Row], columns: Sequence[str]) -> Iterator[Prompt]:
    seen: Counter[str] = Counter()
    for row in rows:
        value = row.values[section.prompt_column]
        digest = row_id(row.values)
        seen[digest] += 1
        # A row that stands twice is two groups: the second one's id says so.
        prompt_id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        extra = {name: row.values.get(name) for name in columns}
        if section.prompt_format == "text":
            yield Prompt(prompt_id, (), value, extra)
        else:
            yield Prompt(prompt_id, to_messages(value, section.system_prompt), None, extra)


def row_id(values: dict[str, Any]) -> str:
    """16 hexadecimal digits out of a row's content (prompt and columns, nulls aside), the same in every run."""
    present = {name: value for name, value in values.items() if value is not None}
    text = json.dumps(present, sort_keys=True, ensure_ascii=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def to_messages(value: str | list[Message], system_prompt: str | None) -> tuple[Message, ...]:
    """A conversation from a prompt column; the system prompt goes first unless the row brings its own.

    Nulls inside messages are dropped: tables fill them in where one message has a key and another has not.
    """
    if isinstance(value, str):
        messages: list[Message] = [{"role": "user", "content": value}]
    else:
        messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]
    if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return tuple(messages)


def _fitting(
    section: DataSection,
    rows: Sequence[Row],
    prompts: Iterator[Prompt],
    encode: Callable[[Prompt], Sequence[int]] | None,
    report: _Report,
) -> Iterator[Prompt]:
    for row, prompt in zip(rows, prompts, strict=True):
        length = len(encode(prompt)) if encode else 0
        if length > section.max_prompt_tokens:
            report.leave_out(
                Problem(
                    row.place,
                    f"a prompt of {length} tokens",
                    f"at most data.max_prompt_tokens = {section.max_prompt_tokens}",
                ),
                "overlong",
            )
        else:
            yield prompt
