"""The reward `accuracy`: is the final answer mathematically the gold answer? math-verify behind guards.

Plain numbers and words are compared here, exactly and at once. Everything else goes to `verifier`: a parser that must
take the whole text, in processes with a hard limit of time and memory. docs/rewards.md tells what counts as right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, get_args

from jaxgrpo.registry import register
from jaxgrpo.rewards.answers import gold_texts, normalize, parse_number, same_number, strip_math
from jaxgrpo.rewards.extraction import extract_answer, final_text, gold_answer
from jaxgrpo.rewards.verifier import Verdict, shared_verifier

LONG_GOLD = 100
"""A gold with more characters is probably a worked solution, not an answer."""

_SHORT_WORDS = {"yes", "no", "true", "none", "odd", "even", "all", "red"}
_AS_WRITTEN = re.compile(r"\\[lcdv]?dots|\.\.\.|\d:\d")  # no mathematics tells what an ellipsis or 2:30 means
_LABEL = re.compile(r"\(?([A-Ja-j])\)?(?:[.:)]\s.*|\.)?")

Kind = Literal["number", "words", "expression", "unscorable"]
"""words: compared as text, case and spaces aside."""


@register("reward", "accuracy")
def accuracy(
    completions: list[str],
    prefills: list[str] | None = None,
    counters: Counter[str] | None = None,
    *,
    column: str = "answer",
    tolerance: float = 1e-4,
    final_only: bool = True,
    seconds: float = 2.0,
    megabytes: int = 512,
    workers: int = 4,
    **columns: list[Any],
) -> list[float | None]:
    """1 when the final answer equals the gold, 0 when not; abstains (None) where the gold cannot be scored.

    Args:
        column: the data column with the gold: text, a number, or a list of acceptable answers.
        tolerance: relative, for decimals that stand for a gold that is not whole.
        final_only: look for the answer after the thinking only.
        seconds, megabytes, workers: the bound of one symbolic comparison (CPU time), and how many run at once.

    Counters: every completion is one of `correct`, `wrong`, `unparsed` (no answer, or none that parses) and
    `unscorable` (gold); of the first three, `timeouts` hit the bound and `failures` raised inside the comparison, both scored 0.
    """
    counters = counters if counters is not None else Counter()
    prefills = prefills or [""] * len(completions)
    bound = {"workers": workers, "seconds": seconds, "megabytes": megabytes}
    golds = usable_golds(columns[column], bound)
    texts = [final_text(c, p) if final_only else p + c for c, p in zip(completions, prefills, strict=True)]
    answers = [extract_answer(text) if gold else None for text, gold in zip(texts, golds, strict=True)]
    pairs = {
        (gold, answer) for alternatives, answer in zip(golds, answers, strict=True) if answer for gold in alternatives
    }
    verdicts: dict[tuple[str, str], Verdict | None] = {pair: compare_plain(*pair, tolerance) for pair in pairs}
    slow = sorted(pair for pair, verdict in verdicts.items() if verdict is None)
    tasks = [("equivalent", *pair, tolerance) for pair in slow]
    verdicts.update(zip(slow, shared_verifier().run(tasks, **bound), strict=True))
    return [
        _score(alternatives, answer, verdicts, counters) for alternatives, answer in zip(golds, answers, strict=True)
    ]


def _score(
    alternatives: Sequence[str],
    answer: str | None,
    verdicts: Mapping[tuple[str, str], Verdict | None],
    counters: Counter[str],
) -> float | None:
    if not alternatives:
        counters["unscorable"] += 1
        return None
    found = {verdicts[gold, answer] for gold in alternatives} if answer else {"unparsable"}
    counters["timeouts"] += bool(found & {"timeout", "memory"})
    counters["failures"] += "error" in found
    right = True in found
    counters["correct" if right else "unparsed" if found == {"unparsable"} else "wrong"] += 1
    return float(right)


def compare_plain(gold: str, answer: str, tolerance: float) -> bool | None:
    """Compares two bare answers without the library; None when that takes more than looking at numbers and words."""
    gold, answer = (strip_math(normalize(text)) for text in (gold, answer))
    if _squeeze(gold) == _squeeze(answer):
        return True
    left, right = parse_number(gold), parse_number(answer)
    if left and right:
        return same_number(left, right, tolerance)
    if re.fullmatch(r"[A-J]", gold):
        label = _LABEL.fullmatch(_plain_words(answer))
        return bool(label) and label[1].upper() == gold
    gold_words, answer_words = _words(gold), _words(answer)
    if gold_words or answer_words:
        return gold_words is not None and gold_words == answer_words
    return False if _AS_WRITTEN.search(gold) or _AS_WRITTEN.search(answer) else None


def kind_of(gold: str) -> Kind:
    """What a bare gold is, as far as looking at it tells: an `expression` may still turn out unscorable."""
    if parse_number(gold):
        return "number"
    if re.fullmatch(r"[A-J]", gold) or _AS_WRITTEN.search(gold) or _words(gold):
        return "words"
    return "expression" if re.search(r"[A-Za-z0-9]", gold) else "unscorable"


@dataclass(frozen=True)
class GoldAudit:
    """What a column of golds holds.

    Attributes:
        counts: rows whose gold is (first of its alternatives) a `number`, `words`, an `expression` or `unscorable`.
        long: golds of more than `LONG_GOLD` characters.
        examples: the first unscorable golds, with their row index.
    """

    counts: dict[str, int]
    long: int
    examples: tuple[tuple[int, str], ...]


def audit_golds(golds: Iterable[Any], *, seconds: float = 2.0, megabytes: int = 512, workers: int = 4) -> GoldAudit:
    """Looks at every gold before training: which can be scored, and which are suspiciously long."""
    rows = list(golds)
    usable = usable_golds(rows, {"workers": workers, "seconds": seconds, "megabytes": megabytes})
    counts: Counter[str] = Counter(kind_of(texts[0]) if texts else "unscorable" for texts in usable)
    unscorable = [(index, repr(rows[index])[:200]) for index, texts in enumerate(usable) if not texts]
    long = sum(len(text) > LONG_GOLD for gold in rows for text in gold_texts(gold))
    return GoldAudit({kind: counts[kind] for kind in get_args(Kind)}, long, tuple(unscorable[:20]))


_parses: dict[str, bool] = {}
"""Whether a bare expression parses; golds come again every epoch."""


def usable_golds(golds: Iterable[Any], bound: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For each gold value its alternatives as bare expressions, without those that cannot be scored."""
    bare = [[_bare(text) for text in gold_texts(gold)] for gold in golds]
    unknown = [
        text
        for text in dict.fromkeys(chain.from_iterable(bare))
        if text not in _parses and kind_of(text) == "expression"
    ]
    verdicts = shared_verifier().run([("parsable", text) for text in unknown], **bound)
    _parses.update((text, verdict is True) for text, verdict in zip(unknown, verdicts, strict=True))
    return [tuple(text for text in texts if _parses.get(text, kind_of(text) != "unscorable")) for texts in bare]


@lru_cache(maxsize=65536)
def _bare(gold: str) -> str:
    return gold_answer(gold)


def _squeeze(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(?<!\\)\\[,;:! ]|\s", "", text)


def _plain_words(text: str) -> str:
    return re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text).strip()


def _words(text: str) -> str | None:
    """The folded words that `text` is; None if it is something else: `xy` is a product, "Monday" and "yes" are words."""
    plain = _plain_words(text)
    if not re.fullmatch(r"[^\W\d_][^\W\d_' .-]*(?:[ '-]+[^\W\d_]+)*\.?", plain):
        return None
    folded = " ".join(plain.rstrip(".").casefold().split())
    wrapped = plain != text.strip() and not re.search(r"\\mathrm", text)
    return folded if wrapped or folded in _SHORT_WORDS or re.search(r"[^\W\d_]{4,}", folded) else None
