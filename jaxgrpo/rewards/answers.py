"""Answers as text: how they are normalised, and what plain numbers are in them. Pure and fast."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_EXPONENT = 400
"""A power of ten beyond this is left to the bounded symbolic comparison."""

_SIMPLE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "√": r"\sqrt ",
        "±": r"\pm ",
        "。": ".",
        "，": ",",
        "、": ",",
        "：": ":",
        "⁄": "/",
        "°": r"^\circ",
    }
)
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!|\\;|\\ |[ ])\d{3})+|\d+)"
_LITERAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:\\\$|\$)?\s*(?:"
    rf"\\[dtc]?frac\s*\{{\s*(?P<sign2>[-+]?)\s*(?P<top>{_LITERAL})\s*\}}\s*\{{\s*(?P<bottom>{_LITERAL})\s*\}}"
    rf"|(?P<a>{_LITERAL})\s*/\s*(?P<b>{_LITERAL})"
    rf"|(?P<literal>{_LITERAL})\.?"
    r"(?:[eE](?P<e>[-+]?\d{1,4})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*(?P<power>[-+]?\d{1,4})\s*\}?)?"
    rf")"
)
_TEN = re.compile(r"10\s*\^\s*\{?\s*([-+]?\d{1,4})\s*\}?")
_UNIT = re.compile(
    r"\s*(?:\\(?:text|textrm|mbox)\s*\{(?P<wrapped>[^{}]*)\}"
    r"|\\(?:mathrm|operatorname)\s*\{(?P<roman>[A-Za-z]{2,}[^{}]*)\}"
    r"|(?<!\S)(?P<bare>(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp|inf|and|or)\b)[A-Za-z]{2,}[A-Za-z .]*)"
    r"|(?P<degree>\^\s*\{?\s*\\circ\s*\}?))(?P<power>\s*\^\s*\{?\s*[-\d]+\s*\}?)?\s*\.?"
)
_IN_TEXT = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?"
    r"|(?<=\w)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+"
)


@dataclass(frozen=True)
class Number:
    """A plain number.

    Attributes:
        value: exact.
        decimals: digits after the point of a decimal literal; None for whole numbers and fractions.
        unit: the words after it; empty when there are none.
        text: how it was written, without separators; only from `numbers_in`.
    """

    value: Fraction
    decimals: int | None
    unit: str = ""
    text: str = ""


def normalize(text: str) -> str:
    """One spelling for what looks the same: NFKC, mathematical signs as LaTeX, no markdown bold, no sizing commands."""
    # A vulgar fraction after a digit is a mixed number: NFKC alone would make 1½ into 11/2.
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = re.sub(r"[¼-¾⅐-⅞]", _fraction, text)
    text = re.sub(r"[⁰¹²³⁴-⁹]+", lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = unicodedata.normalize("NFKC", text).translate(_SIMPLE)
    text = re.sub(r"\*\*(.+?)\*\*|__(.+?)__", lambda m: m[1] or m[2], text, flags=re.DOTALL)
    text = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits)(?![A-Za-z])\s*", "", text)
    return re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)


def _fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def strip_math(text: str) -> str:
    """An answer without its delimiters (`$…$`, `\\(…\\)`, `\\[…\\]`), outer spaces and the full stop of a sentence."""
    text = text.strip()
    for opening, closing in (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ("$", "$")):
        inner = text.rstrip(" .")
        if len(inner) > len(opening + closing) and inner.startswith(opening) and inner.endswith(closing):
            body = inner[len(opening) : len(inner) - len(closing)]
            if opening not in body:
                return body.strip()
    return re.sub(r"(?<=[\w})\]$%!])\s*\.$", "", text).strip()


def parse_number(text: str) -> Number | None:
    """A plain number out of all of `text`, or None.

    1,234 · 1 000 000 · 1e6 · 3 \\times 10^{8} · 10^6 · 3/4 · \\frac{3}{4} · 7.41\\% · \\$5 · 12 apples · 45^\\circ
    """
    text = strip_math(normalize(text))
    if ten := _TEN.fullmatch(text):
        return Number(Fraction(10) ** int(ten[1]), None) if abs(int(ten[1])) <= MAX_EXPONENT else None
    found = _NUMBER.match(text)
    if found is None or len(text) > 1000:
        return None
    rest = text[found.end() :]
    percent = re.match(r"\s*\\?%", rest)
    unit = "" if percent else _unit(rest)
    if unit is None or (percent and rest[percent.end() :].strip()):
        return None
    number = _value(found)
    if number is None:
        return None
    if percent:
        return Number(number.value / 100, None if number.decimals is None else number.decimals + 2)
    return Number(number.value, number.decimals, unit)


def _unit(rest: str) -> str | None:
    """The unit that `rest` is, folded; None when it is something else."""
    if not rest.strip(" ."):
        return ""
    found = _UNIT.fullmatch(rest) if rest[0] in " \t\n\\^" else None
    if found is None:
        return None
    words = (found["wrapped"] or found["roman"] or found["bare"] or "") + (found["power"] or "")
    return re.sub(r"\W+", "", words).casefold()


def _value(found: re.Match[str]) -> Number | None:
    def plain(literal: str) -> Fraction:
        return Fraction(re.sub(r"\{,\}|\\[,!; ]|[, ]", "", literal))

    sign = -1 if (found["sign"] == "-") != ((found["sign2"] or "") == "-") else 1
    if found["literal"]:
        exponent = int(found["e"] or found["power"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        decimals = len(found["literal"].partition(".")[2])
        value = sign * plain(found["literal"]) * Fraction(10) ** exponent
        return Number(value, decimals if decimals and value.denominator != 1 else None)
    top, bottom = (found["top"], found["bottom"]) if found["top"] else (found["a"], found["b"])
    return Number(sign * plain(top) / plain(bottom), None) if plain(bottom) else None


def numbers_in(text: str) -> list[Number]:
    """Every number in running text, in order: with signs, separators and exponents, without a sentence's full stop.

    A minus between two operands ("7-5") is a subtraction, not a sign.
    """
    found = []
    for match in _IN_TEXT.finditer(unicodedata.normalize("NFKC", text).replace("−", "-")):
        literal = match.group().replace(",", "")
        if len(literal) <= 1000:
            found.append(Number(Fraction(literal), len(literal.partition(".")[2]) or None, text=literal))
    return found


def same_number(gold: Number, answer: Number, tolerance: float) -> bool:
    """Whether `answer` states `gold`.

    Equal values always do. Units must agree where both have one. A whole gold number admits nothing else. A decimal
    gold admits a decimal with more digits, a fraction admits a decimal, within `tolerance` · |gold|.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.value == answer.value:
        return True
    if gold.value.denominator == 1 or (gold.decimals is None and answer.decimals is None):
        return False
    if gold.decimals is not None and answer.decimals is not None and answer.decimals <= gold.decimals:
        return False
    return abs(gold.value - answer.value) <= Fraction(tolerance) * abs(gold.value)


def gold_texts(gold: Any) -> list[str]:
    """A gold value as the texts that are right answers: several for a list, none for null, NaN or what is no text.

    Whole floats lose their `.0` (180.0 is "180"); true and false are words.
    """
    if isinstance(gold, list | tuple):
        return [text for item in gold for text in gold_texts(item)]
    if isinstance(gold, bool):
        return [str(gold)]
    if isinstance(gold, int):
        return [str(gold)]
    if isinstance(gold, float):
        return [] if not math.isfinite(gold) else [str(int(gold)) if gold.is_integer() else repr(gold)]
    return [gold] if isinstance(gold, str) and gold.strip() else []
