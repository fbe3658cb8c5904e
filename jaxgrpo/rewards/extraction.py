"""Where the final answer stands in a completion, and where the gold stands in a data column. Pure."""

from __future__ import annotations

import re

from jaxgrpo.rewards.answers import normalize, numbers_in, parse_number, strip_math

_THINK = r"(?:think|thinking|thought|reasoning)"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOIN = re.compile(r"[\s$,;]*(?:\band\b|\bor\b|和|或)?[\s$,;]*")
_SPAN = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$([^$]+?)(?<!\\)\$", re.DOTALL)
_PHRASE = re.compile(r"(?:\banswers?\b|答案)\s*(?:is|are|:|=|是|为)+\s*:?\s*(?P<rest>[^\n]+)", re.IGNORECASE)
_LEADING = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "exp",
    "lim",
    "max",
    "min",
    "gcd",
    "lcm",
    "mod",
    "det",
    "sqrt",
}


def final_text(completion: str, prefill: str = "") -> str:
    """What stands after the thinking; empty when the thinking was opened (here or by the prompt) and never closed."""
    text = prefill + completion
    tail = re.split(rf"</{_THINK}>", text)[-1]
    return "" if re.search(rf"<{_THINK}>", tail) else tail


def extract_answer(text: str) -> str | None:
    """The final answer in `text`, without delimiters; None when there is none.

    The first of these that is there: the last `<answer>` block; the last box (boxes joined by commas or "and" are one
    list); what follows GSM8K's `####`; what follows the last "answer is" or "answer:"; the last formula between dollars
    or `\\(…\\)`; all of a short line that is a formula, a number or a few words; the last number. A box that is opened
    and never closed is an unfinished answer: None.
    """
    blocks = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if blocks:
        text = blocks[-1]
    last_box = _boxes(text)
    if last_box is not None:
        return last_box or None
    if not text.strip():
        return None
    if "####" in text:
        return strip_math(normalize(text.rpartition("####")[2])) or None
    return _phrase(text) or _last_span(text) or _whole(text) or _last_number(text)


def gold_answer(text: str) -> str:
    """The gold as a bare expression: out of its last box, after GSM8K's `####`, or without its delimiters."""
    boxed = _boxes(text)
    if boxed:
        return boxed
    if "####" in text:
        text = text.rpartition("####")[2]
    return strip_math(normalize(text))


def _boxes(text: str) -> str | None:
    """The last box's content; empty when the last box is empty or unfinished; None when there is no box."""
    found: list[tuple[int, int, str]] = []
    for match in _BOX.finditer(text):
        end = _closing(text, match.end())
        if end is None:
            return ""
        found.append((match.start(), end + 1, text[match.end() : end]))
    if not found:
        return None
    run = [found[-1]]
    for box in reversed(found[:-1]):
        if box[1] > run[0][0] or not _JOIN.fullmatch(text[box[1] : run[0][0]]):
            break
        run.insert(0, box)
    return ", ".join(dict.fromkeys(strip_math(normalize(content)) for *_, content in run)).strip(", ")


def _closing(text: str, begin: int) -> int | None:
    depth, index = 1, begin
    while index < len(text):
        if text[index] == "\\":
            index += 1
        elif text[index] in "{}":
            depth += 1 if text[index] == "{" else -1
            if not depth:
                return index
        index += 1
    return None


def _phrase(text: str) -> str | None:
    matches = list(_PHRASE.finditer(normalize(text)))
    if not matches:
        return None
    rest = matches[-1]["rest"].strip()
    if span := _SPAN.match(rest):
        return _span_text(span)
    sentence = re.split(r"(?<=\S)\.(?:\s|$)", rest)[0].strip(" *_")
    if parse_number(sentence) or not _is_prose(sentence):
        return strip_math(sentence)
    if leading := _LEADING.match(sentence):
        return leading.group()
    if span := _SPAN.search(rest):
        return _span_text(span)
    return sentence if not re.search(r"\d", sentence) and len(sentence.split()) <= 3 else _last_number(sentence)


def _last_span(text: str) -> str | None:
    spans = list(_SPAN.finditer(text))
    return _span_text(spans[-1]) if spans else None


def _span_text(span: re.Match[str]) -> str:
    return strip_math(normalize(next(group for group in span.groups() if group is not None)))


def _whole(text: str) -> str | None:
    line = strip_math(normalize(text.strip()))
    if "\n" in line or len(line) > 100:
        return None
    few_words = not re.search(r"\d", line) and len(line.split()) <= 3
    return line if parse_number(line) or not _is_prose(line) or few_words else None


def _is_prose(text: str) -> bool:
    bare = re.sub(r"\\[A-Za-z]+(?:\s*\{[A-Za-z\s.]*\})?", " ", text)
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(bare))


def _last_number(text: str) -> str | None:
    found = numbers_in(text)
    return found[-1].text if found else None
