"""A YAML file and command-line overrides to a `Config`, or every problem at once.

The order: text to values (`source.py`), numbers that were written as text, pydantic's validation, and then each of its
complaints in our words: where, what was found, what the schema expects there, and the key that was probably meant.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from jaxgrpo.config.fields import describe, describe_type, field_at, members, section_at, section_type, sections
from jaxgrpo.config.foreign import EXPLAINED, RENAMED
from jaxgrpo.config.schema import Config, Section
from jaxgrpo.config.source import KeyPath, Source, dotted, read, scalar
from jaxgrpo.errors import Problem, UserError

_EXAMPLES = {
    "output_dir": "output_dir: runs/first",
    "model.path": "model: {path: models/smollm2-135m-instruct}",
    "data.train": "data: {train: data/train.jsonl}",
    "rewards.name": "rewards: [{name: last_number}]",
}
_MISSING = object()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads, converts and validates a config.

    Args:
        path: the YAML file.
        overrides: `key.path=value` assignments, applied in order: `rewards.0.weight=2`, `plugins=[a.py]`.

    Returns:
        The typed config. Rules that join several keys are `check.py`'s. Paths in it are as written: relative to the
        working directory, plug-in files relative to the config file (see `registry.load_plugins`).

    Raises:
        UserError: with every problem that was found.
    """
    source = read(path)
    for assignment in overrides:
        source.override(assignment)
    values = _convert_section(source.values, Config)
    problems = list(source.problems)
    problems += _written_none(source, values)
    config = None
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += _translate(error, values, source)
    if problems or config is None:
        raise UserError(problems)
    return config


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back as an equal config; every default is spelled out."""
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.allow_unicode = True
    yaml.width = 4096
    yaml.dump(config.model_dump(), stream)
    return stream.getvalue()


def _convert(value: Any, annotation: Any) -> Any:
    """Numbers written as text, and whole numbers written as floats, where the schema leaves no doubt."""
    options = members(annotation)
    section = section_type(annotation)
    if section and isinstance(value, dict):
        return _convert_section(value, section)
    for option in options:
        if isinstance(value, list) and get_origin(option) is list:
            return [_convert(item, get_args(option)[0]) for item in value]
        if isinstance(value, dict) and get_origin(option) is dict:
            return {key: _convert(item, get_args(option)[1]) for key, item in value.items()}
    number = scalar(value.strip()) if isinstance(value, str) and str not in options else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        return value
    if int in options and isinstance(number, float) and number.is_integer():
        return int(number)
    return number if int in options or float in options else value


def _convert_section(values: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    fields = section.model_fields
    return {key: _convert(value, fields[key].annotation) if key in fields else value for key, value in values.items()}


def _written_none(source: Source, values: dict[str, Any]) -> Iterator[Problem]:
    """`None` is text in YAML; where null is possible, it is a slip and not a file called None."""
    for path in source.places:
        _, options = field_at(path) or (None, ())
        if type(None) in options and _value_at(values, path) == "None":
            yield Problem(source.where(path), "the text None", "null or a value", "write null, or leave the key out")


def _translate(error: ValidationError, values: dict[str, Any], source: Source) -> list[Problem]:
    """One problem for each key that pydantic complains of."""
    details = {_real_path(detail["loc"], values, detail["type"]): detail for detail in error.errors()}
    problems = []
    for path, detail in details.items():
        if any(len(other) > len(path) and other[: len(path)] == path for other in details):
            continue  # one alternative of a union fits but for an item: the item is the mistake
        if detail["type"] == "extra_forbidden":
            problems.append(_unknown_key(path, source))
        elif detail["type"] == "missing":
            problems.append(_missing_key(path, source))
        elif detail["type"] == "value_error":
            problems.append(Problem(source.where(path), "", str(detail["ctx"]["error"])))
        else:
            problems.append(_wrong_value(path, _value_at(values, path), source))
    return problems


def _real_path(location: tuple[int | str, ...], values: Any, kind: str) -> KeyPath:
    """Pydantic's location without the names of union members, which are no keys of ours."""
    path: KeyPath = ()
    for depth, part in enumerate(location):
        if part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int):
            path, values = (*path, part), values[part]
        elif kind == "missing" and depth == len(location) - 1:
            path = (*path, part)
    return path


def _value_at(values: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return values


def _wrong_value(path: KeyPath, value: Any, source: Source) -> Problem:
    field = field_at(path)
    assert field is not None, f"pydantic complains of {path}, which the schema does not have"
    info, options = field
    whole = options == members(info.annotation)
    expected = describe(info) if whole else " or ".join(describe_type(option) for option in options)
    return Problem(source.where(path), _show(value), expected, _fix_value(path, value, info, options))


def _fix_value(path: KeyPath, value: Any, info: FieldInfo, options: tuple[Any, ...]) -> str:
    """What to write instead, where the slip is a known one. `options` are the types the schema accepts there."""
    entry = "- " if isinstance(path[-1], int) else f"{dotted(path)}: "
    choices = [choice for option in options for choice in get_args(option) if isinstance(choice, str)]
    booleans = bool in options or any(True in get_args(option) for option in options)
    section = next((option for option in options if section_type(option) is option), None)
    if section is not None and isinstance(value, str):
        first = next((name for name, inner in section.model_fields.items() if inner.is_required()), None)
        return f"write `{entry}{{{first}: {value}}}`" if first else ""
    if isinstance(value, str) and value.lower() in ("yes", "on", "no", "off") and booleans:
        return f"YAML 1.2 reads {value} as text; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if isinstance(value, str) and choices:
        near = difflib.get_close_matches(value.lower(), choices, n=1)
        return f"did you mean {near[0]}?" if near else ""
    if value is None:
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        return "give a value" if info.is_required() else f"leave the key out for its default, {_show(default)}"
    if str in options and isinstance(value, bool | int | float):
        return "put the value in quotes"
    if any(get_origin(option) is list for option in options) and not isinstance(value, dict | list):
        return f"write `{entry}[{value}]`"
    return ""


def _missing_key(path: KeyPath, source: Source) -> Problem:
    field = field_at(path)
    assert field is not None, f"pydantic misses {path}, which the schema does not have"
    info = field[0]
    named = dotted(part for part in path if isinstance(part, str))
    if section_type(info.annotation):  # the whole section is missing: show the required key in it
        named = next((key for key in _EXAMPLES if key.startswith(f"{named}.")), named)
    return Problem(
        source.where(path),
        "",
        f"this key, which has no default: {info.description or describe(info)}",
        f"add `{_EXAMPLES.get(named, f'{path[-1]}: …')}`",
    )


def _unknown_key(path: KeyPath, source: Source) -> Problem:
    name = str(path[-1])
    section = section_at(path[:-1])
    assert section is not None, f"pydantic complains of {path}, whose section the schema does not have"
    keys = list(section.model_fields)
    expected = f"one of {', '.join(keys)}"
    elsewhere = [f"{prefix}.{name}".lstrip(".") for prefix, other in sections() if name in other.model_fields]
    renamed = RENAMED.get(name)
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.7)
    found, fix = f"unknown key {name!r}", ""
    if name in EXPLAINED:
        fix = EXPLAINED[name]
    elif renamed or elsewhere:
        found += ": here it is " + " or ".join(f"`{key}`" for key in ([renamed] if renamed else elsewhere))
        expected = (
            f"only keys of the section `{dotted(path[:-1])}` here"
            if path[1:]
            else "only keys of a run at the top level"
        )
    elif near:
        fix = f"did you mean `{dotted((*path[:-1], near[0]))}`?"
    else:
        fix = _nearest_anywhere(name)
    return Problem(source.where(path), found, expected, fix)


def _nearest_anywhere(name: str) -> str:
    """The most similar key of any section, or of another library."""
    known = {
        key: f"{prefix}.{key}".lstrip(".")
        for prefix, section in reversed(list(sections()))
        for key in section.model_fields
    }
    near = difflib.get_close_matches(name, [*known, *RENAMED], n=1, cutoff=0.75)
    return f"did you mean `{known.get(near[0]) or RENAMED[near[0]]}`?" if near else "delete it, or see docs/config.md"


def _show(value: Any) -> str:
    """A value in YAML's words, short enough for a message."""
    if isinstance(value, dict):
        return f"a section with the keys {', '.join(map(str, value))}" if value else "an empty section"
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
