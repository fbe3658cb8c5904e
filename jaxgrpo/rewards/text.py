"""Rewards that look at text and lengths: format, exact match, last number, contains, regex, overlong, repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxgrpo.errors import Problem, UserError
from jaxgrpo.registry import register
from jaxgrpo.rewards.answers import Number, gold_texts, numbers_in, parse_number
from jaxgrpo.types.rollout import Trajectory


@register("reward", "format")
def format_reward(
    completions: list[str],
    prefills: list[str] | None = None,
    *,
    think_tag: str = "think",
    answer_tag: str | None = None,
    require_text: bool = True,
) -> list[float]:
    """1 when a completion is one thinking block and then an answer, else 0.

    What the prompt already opened (`prefills`) counts as part of the completion, so the model need not write it again.
    Each tag must stand exactly once, at the beginning; nothing may follow the answer block but white space.

    Args:
        answer_tag: the answer must be wrapped in this tag; None: it is whatever follows the thinking block.
        require_text: an empty answer is not an answer.
    """
    tags = [think_tag, *([answer_tag] if answer_tag else [])]
    think = rf"\s*<{think_tag}>.*?</{think_tag}>\s*"
    answer = rf"<{answer_tag}>(?P<answer>.*?)</{answer_tag}>\s*" if answer_tag else r"(?P<answer>.*)"
    shape = re.compile(think + answer, re.DOTALL)

    def one(text: str) -> float:
        once = all(text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>") for tag in tags)
        found = shape.fullmatch(text) if once else None
        return float(found is not None and (not require_text or bool(found["answer"].strip())))

    return [one(prefill + text) for prefill, text in zip(prefills or [""] * len(completions), completions, strict=True)]


@register("reward", "exact_match")
def exact_match(
    completions: list[str], *, column: str = "answer", ignore_case: bool = False, **columns: list[Any]
) -> list[float | None]:
    """1 when the completion is the gold answer, white space at the ends aside; abstains where the gold is null."""

    def fold(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return [
        None if not golds else float(any(fold(text) == fold(gold) for gold in golds))
        for text, golds in zip(completions, map(gold_texts, columns[column]), strict=True)
    ]


@register("reward", "last_number")
def last_number(completions: list[str], *, column: str = "answer", **columns: list[Any]) -> list[float | None]:
    """1 when the last number in the completion equals the gold number exactly; abstains where the gold is no number.

    Numbers may have thousands separators, decimals, a sign and an exponent; the full stop of a sentence is not part of
    one: "7 + 5 = 12." ends in 12.
    """

    def one(text: str, golds: Sequence[str]) -> float | None:
        wanted = [number for gold in golds if (number := parse_number(gold))]
        if not wanted:
            return None
        found = numbers_in(text)
        return float(bool(found) and any(_same(found[-1], number) for number in wanted))

    return [one(text, gold_texts(gold)) for text, gold in zip(completions, columns[column], strict=True)]


def _same(left: Number, right: Number) -> bool:
    return left.value == right.value


@register("reward", "contains")
def contains(
    completions: list[str], *, column: str = "answer", ignore_case: bool = False, **columns: list[Any]
) -> list[float | None]:
    """1 when the gold text stands somewhere in the completion as whole words; abstains where the gold is null."""
    flags = re.IGNORECASE if ignore_case else 0

    def has(text: str, gold: str) -> bool:
        # A word boundary only where the gold itself begins or ends with a word character.
        return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text, flags) is not None

    return [
        None if not golds else float(any(has(text, gold) for gold in golds))
        for text, golds in zip(completions, map(gold_texts, columns[column]), strict=True)
    ]


@register("reward", "regex")
def regex(completions: list[str], *, pattern: str, full: bool = False) -> list[float]:
    """1 when `pattern` matches somewhere in the completion (`full`: all of it); `.` also matches newlines."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(
            Problem("rewards.regex.options.pattern", repr(pattern), f"a regular expression ({error})")
        ) from error
    match = compiled.fullmatch if full else compiled.search
    return [float(match(text) is not None) for text in completions]


@register("reward", "soft_overlong")
def soft_overlong(trajectories: list[Trajectory], *, max_tokens: int, buffer_tokens: int) -> list[float]:
    """The soft overlong punishment of DAPO, in sampled tokens of all turns.

    With length l, cap L = `max_tokens` and buffer B = `buffer_tokens`:
    0 for l ≤ L − B; (L − B − l) / B up to L; −1 beyond.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise UserError(
            Problem(
                "rewards.soft_overlong.options.buffer_tokens",
                str(buffer_tokens),
                f"a number of tokens from 1 to max_tokens = {max_tokens}",
            )
        )
    start = max_tokens - buffer_tokens
    return [-min(1.0, max(0.0, (trajectory.num_sampled - start) / buffer_tokens)) for trajectory in trajectories]


@register("reward", "repetition")
def repetition(completions: list[str], *, ngram: int = 3, max_penalty: float = 1.0) -> list[float]:
    """−`max_penalty` · (1 − distinct / all) over the n-grams of words (split at white space); 0 below n words."""

    def one(text: str) -> float:
        words = text.lower().split()
        grams = list(zip(*(words[i:] for i in range(ngram)), strict=False))
        return -max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0

    return [one(text) for text in completions]
