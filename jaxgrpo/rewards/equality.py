"""Whether two mathematical expressions are the same. Slow and unbounded by nature: runs only in killable processes.

math-verify's parser and comparison do the work, behind guards: the whole text must parse; collections are compared
element by element, ordered and unordered ones apart; expressions are compared exactly first, then by their values to 40
digits at random points; a tolerance is relative, and only where a decimal stands for something else.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from jaxgrpo.rewards.answers import parse_number, same_number

_DIGITS = 40
_POINTS = 6
_RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|in|neq?|leqslant|geqslant)(?![A-Za-z])")
_VARIABLE = re.compile(r"\s*(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?|[A-Za-z]\([A-Za-z]\))\s*")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")


class Unparsable(Exception):
    """The text is no expression, or only a part of it is."""


@dataclass(frozen=True)
class _Collection:
    """A text split at its top-level commas; `brackets` is empty for a bare list or a single element."""

    brackets: str
    parts: list[str]


def parsable(text: str) -> bool:
    """Whether every element of `text` parses as a whole."""
    try:
        for part in _collection(_prepared(text)).parts:
            if not parse_number(part):
                _parse(part)
    except Unparsable:
        return False
    return True


def equivalent(gold: str, answer: str, tolerance: float) -> bool:
    """Whether `answer` states `gold`; both bare, without delimiters.

    Raises:
        Unparsable: the gold or the answer is no expression.
    """
    gold, answer = _without_variable(_prepared(gold), _prepared(answer))
    left, right = _collection(gold), _collection(answer)
    if bool(_RELATION.search(gold)) != bool(_RELATION.search(answer)):
        return _library_equal(_parse(gold), _parse(answer))
    if left.brackets and right.brackets and left.brackets != right.brackets:
        return False
    if len(left.parts) != len(right.parts):
        return False
    if left.brackets in ("", "{}") and right.brackets in ("", "{}"):
        return _same_elements(left.parts, right.parts, tolerance)
    return all(_same(g, a, tolerance) for g, a in zip(left.parts, right.parts, strict=True))


def _prepared(text: str) -> str:
    text = re.sub(r"\\text\s*\{\s*(?:or|and)\s*\}|(?<=\s)(?:or|and)(?=\s)", ",", text)
    text = re.sub(r"\\(?:text|mathrm|textrm|mathit|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z]))|~", " ", text)
    text = re.sub(r"(\d)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"\\frac\s*(\d)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d|[A-Za-z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])(pi|infty|sqrt|sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text).replace("**", "^")
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    return text.strip().rstrip(".").strip()


def _without_variable(gold: str, answer: str) -> tuple[str, str]:
    """Drops `x =` where it says nothing: on one side only, or the same on both. A chain's last term is the answer."""
    gold_left, gold_equals, gold_right = gold.partition("=")
    if gold_equals and "=" not in gold_right and _VARIABLE.fullmatch(gold_left):
        left, equals, right = answer.partition("=")
        if not equals or (left.replace(" ", "") == gold_left.replace(" ", "") and "=" not in right):
            return gold_right.strip(), right.strip() if equals else answer
    if not gold_equals and "=" in answer and "," not in answer:
        return gold, answer.rpartition("=")[2].strip()
    if not gold_equals and "=" in answer and _VARIABLE.fullmatch(answer.partition("=")[0]):
        return gold, ",".join(part.partition("=")[2] or part for part in answer.split(","))
    return gold, answer


def _collection(text: str) -> _Collection:
    brackets, inner = "", text
    opened = re.match(r"\\\{|[(\[{]", text)
    closed = re.search(r"(?:\\\}|[)\]}])$", text)
    if opened and closed and len(text) > 2 and _encloses(text):
        brackets = opened.group()[-1] + closed.group()[-1]
        inner = text[opened.end() : closed.start()]
    parts = [part.strip() for part in _split(inner)]
    if brackets and brackets != "{}" and len(parts) == 1:  # plain parentheses
        return _Collection("", [text])
    return _Collection(brackets, [element for part in parts for element in _plus_minus(part)])


def _encloses(text: str) -> bool:
    """Whether the first bracket closes at the end, and not before. A `[` may close with `)`: intervals do."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and char in ")]}":
            return index == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    return [*parts, text[begin:]]


def _plus_minus(part: str) -> list[str]:
    return [part.replace(r"\pm", sign, 1) for sign in "+-"] if part.count(r"\pm") == 1 else [part]


def _same_elements(gold: list[str], answer: list[str], tolerance: float) -> bool:
    rest = list(answer)
    for element in gold:
        match = next((other for other in rest if _same(element, other, tolerance)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _same(gold: str, answer: str, tolerance: float) -> bool:
    if gold.replace(" ", "") == answer.replace(" ", ""):
        return True
    gold_number, answer_number = parse_number(gold), parse_number(answer)
    if gold_number and answer_number:
        return same_number(gold_number, answer_number, tolerance)
    left, right = _parse(gold), _parse(answer)
    if _is_scalar(left) and _is_scalar(right):
        verdict = _same_value(left, right, tolerance)
        if verdict is not None:
            return verdict
    return _library_equal(left, right)


def _parse(text: str) -> Any:
    """A SymPy object out of all of `text`. Capital and small letters are different symbols; i and e are constants."""
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if not text.strip() or re.search(r"\\[lcdv]?dots|\.\.\.|…", text):
        raise Unparsable(text)
    number = parse_number(text)
    if number:
        return (
            sympy.Rational(number.value)
            if number.decimals is None
            else sympy.Float(str(sympy.Rational(number.value).evalf(_DIGITS)), _DIGITS)
        )
    try:
        parsed = latex2sympy(
            text, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
    except Exception as error:  # the parser raises bare Exceptions; a memory error is the bound's business
        if isinstance(error, MemoryError):
            raise
        raise Unparsable(text) from error
    if parsed is None:
        raise Unparsable(text)
    constants = {sympy.Symbol("i"): sympy.I, sympy.Symbol("e"): sympy.E}
    return parsed.xreplace(constants) if isinstance(parsed, sympy.Basic) else parsed


def _is_scalar(value: Any) -> bool:
    import sympy
    from sympy.core.function import AppliedUndef

    return isinstance(value, sympy.Expr) and not value.has(AppliedUndef, sympy.oo, sympy.zoo, sympy.nan)


def _same_value(gold: Any, answer: Any, tolerance: float) -> bool | None:
    """Compares values: exactly, or to `tolerance` where decimals are involved and the gold is not whole.

    None when no value can be had.
    """
    import sympy

    inexact = gold.has(sympy.Float) or answer.has(sympy.Float)
    allowed = sympy.Float(tolerance) if inexact and not gold.is_integer else sympy.Float(10) ** (10 - _DIGITS)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    generator = random.Random(0)
    seen = 0
    for _ in range(_POINTS if symbols else 1):
        point = {s: sympy.Rational(generator.randint(-3000, 3000), 997) for s in symbols}
        left, right = (value.evalf(_DIGITS, subs=point) for value in (gold, answer))
        if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
            continue
        seen += 1
        if left != right and not abs(left - right) <= allowed * max(abs(left), abs(right)):
            return False
    return True if seen >= min(3, _POINTS if symbols else 1) else None


def _library_equal(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    # Gold first: the comparison is not symmetric. Its own timers are off: the process we run in is the bound.
    return bool(verify(gold, answer, timeout_seconds=None))
