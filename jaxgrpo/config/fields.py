"""What the schema says of a key, in words: used by the messages of `load.py` and by the generated `docs/config.md`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jaxgrpo.config.schema import Config, Section
from jaxgrpo.config.source import KeyPath

_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Any: ("any value", "values"),
}
_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; the annotation itself when it is none."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def section_type(annotation: Any) -> type[Section] | None:
    """The section class an annotation holds, alone or as the items of a list."""
    for member in members(annotation):
        for candidate in (member, *get_args(member)):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                return candidate
    return None


def section_at(path: KeyPath) -> type[Section] | None:
    """The section class at a path (`()` is the root, `("rewards", 0)` a reward); None where there is no section."""
    section: type[Section] | None = Config
    for part in path:
        if isinstance(part, int):
            continue
        if section is None or part not in section.model_fields:
            return None
        section = section_type(section.model_fields[part].annotation)
    return section


def field_at(path: KeyPath) -> tuple[FieldInfo, tuple[Any, ...]] | None:
    """The field that a path names or leads into, and the types accepted at the path itself.

    `("rewards", 0, "weight")` is a field; `("optimizer", "frozen", 0)` leads into one, and text is accepted there.
    """
    section, info, options = Config, None, ()
    for part in path:
        if section is not None and not isinstance(part, int):
            info = section.model_fields.get(part)
            options = members(info.annotation) if info else ()
        else:
            items = [get_args(option)[-1] for option in options if get_origin(option) in (list, dict)]
            options = tuple(member for item in items for member in members(item))
        section = next((option for option in options if isinstance(option, type) and issubclass(option, Section)), None)
        if not options:
            return None
    return (info, options) if info else None


def sections(section: type[Section] = Config, path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section with its dotted path, depth first; the items of a list as `rewards[i]`."""
    yield path, section
    for name, info in section.model_fields.items():
        inner = section_type(info.annotation)
        if inner:
            index = "[i]" if get_origin(info.annotation) is list else ""
            yield from sections(inner, f"{path}.{name}{index}".lstrip("."))


def describe(info: FieldInfo) -> str:
    """What a field accepts: `a whole number > 0, or null`, `one of auto, float32`."""
    bounds = " and ".join(
        f"{sign} {getattr(item, name):g}" if isinstance(getattr(item, name), float) else f"{sign} {getattr(item, name)}"
        for item in info.metadata
        for name, sign in _BOUNDS
        if hasattr(item, name)
    )
    words = [describe_type(member, bounds) for member in members(info.annotation)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"


def describe_type(annotation: Any, bounds: str = "") -> str:
    """What a type accepts, in words; `bounds` is put after a number."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None)):
        return "null"
    if annotation in (int, float):
        return f"{_WORDS[annotation][0]} {bounds}".rstrip()
    if annotation in _WORDS:
        return _WORDS[annotation][0]
    if origin is Literal:
        return (
            f"one of {', '.join(str(value).lower() if isinstance(value, bool) else str(value) for value in arguments)}"
        )
    if origin is list:
        inner = arguments[0]
        return (
            "a list of sections"
            if section_type(inner)
            else f"a list of {_WORDS[inner][1] if inner in _WORDS else 'values'}"
        )
    if origin is dict:
        return "a mapping of names to " + (_WORDS[arguments[1]][1] if arguments[1] in _WORDS else "values")
    return f"a section with keys such as {', '.join(list(annotation.model_fields)[:3])}"
