"""P01–P06, P09, P66 and the answer table (appendix A): every row at its wanted value, at any place it is asked from."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import psutil
import pytest

from jaxgrpo.rewards.math import accuracy, audit_golds
from jaxgrpo.rewards.verifier import Verifier, shared_verifier

TABLE = [
    # a bare gold is taken whole
    (r"10^{6}", r"\boxed{10}", 0),
    (r"2\sqrt{3}", r"\boxed{2}", 0),
    (r"3\pi", r"\boxed{3}", 0),
    ("14 - i", r"\boxed{14}", 0),
    ("14 - i", r"\boxed{14 - i}", 1),
    ("x^2+1", r"\boxed{x^2+1}", 1),
    ("B", r"\boxed{B}", 1),
    ("3*x-1*y+13=0", "3x + 4y + 14=0", 0),
    ("3*x-1*y+13=0", "3x - y + 13=0", 1),
    (r"\frac{1}{3}", r"\boxed{1}", 0),
    ("2:30", r"\boxed{2}", 0),
    ("2:30", r"\boxed{2:30}", 1),
    ("(1,2)", r"\boxed{(1, 2)}", 1),
    ("{1,2}", r"\boxed{2, 1}", 1),
    (r"\dfrac{\pi}{2}", r"\boxed{\frac{\pi}2}", 1),
    # a boxed gold
    (r"\boxed{3\pi}", r"\boxed{3}", 0),
    (r"\boxed{\text{Monday}}", r"\boxed{\text{Tuesday}}", 0),
    (r"\boxed{(1,2)}", r"\boxed{(2,1)}", 0),
    # decided: A to J are choice labels, so their case does not matter; other letters are symbols, so it does
    (r"\boxed{B}", r"\boxed{b}", 1),
    ("B", r"\boxed{(B)}", 1),
    ("B", r"\boxed{\text{(b) Paris}}", 1),
    ("x", r"\boxed{X}", 0),
    # false positives of the bare library
    (r"$\frac{1}{2^{99}}$", r"$\frac{1}{2^{98}}$", 0),
    (r"$\frac{1}{2004!}$", r"$\frac{1}{2006!}$", 0),
    (r"$\frac{2^{2005}+1}{3 \cdot 2^{2006}}$", r"$\frac{1}{3 \cdot 2^{2006}}$", 0),
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$", 0),
    (r"$1, 2, \ldots, n$", r"$1, 3, 5, \ldots, 2n-1$", 0),
    ("$4$", r"$4\sqrt(2)$", 0),
    ("$(1,2)$", r"$\{1,2\}$", 0),
    # tolerance: relative, never for a whole gold
    (r"$\frac{1}{3}$", "$0.333333$", 1),
    (r"$\frac{100}{3}$", "$33.3$", 0),
    ("10000", r"\boxed{10001}", 0),
    ("10000", r"\boxed{10000.5}", 0),
    ("12345.67", r"\boxed{12345.68}", 0),
    (r"\sqrt{2}", r"\boxed{1.4142}", 1),
    (r"$\sqrt{17}$", "$4.123105625617661$", 1),
    # fixed since the thread
    (r"$\pm 2021$", "$2021$", 0),
    (r"\pm 3", r"\boxed{3, -3}", 1),
    ("$n=2, 3, 4$", "$n=1, 2, 3$", 0),
    (r"$\text{13}$", "$13$", 1),
    ("73", "Final Answer: **73**", 1),
    ("840", r"\boxed{840}, \boxed{840}", 1),
    # the comparison has a direction: a gold inequality accepts the interval, a gold interval wants an interval
    ("$x<3$", r"$(-\infty, 3)$", 1),
    (r"$(-\infty, 3)$", "$x<3$", 0),
    # false negatives of the bare library
    ("$14-i$", r"\boxed{14.0 - 1.0i}", 1),
    ("$10^{6}$", r"\boxed{1e6}", 1),
    ("1000000", r"\boxed{1 000 000}", 1),
    ("42", "\\boxed{\uff14\uff12}", 1),
    ("42", "\u7b54\u6848\u662f\uff1a42\u3002", 1),
    ("\u00bd", r"\boxed{\frac{1}{2}}", 1),
    ("4", r"\boxed{\sqrt{16}}", 1),
    ("(x+1)^2", r"\boxed{x^2+2x+1}", 1),
    ("1 1/2", r"\boxed{1.5}", 1),
    (r"2\frac{1}{2}", r"\boxed{2.5}", 1),
    # percent: 7.41 % is 0.0741, so the bare 7.41 is another number
    (r"$7.41\%$", "$0.0741$", 1),
    (r"$7.41\%$", "$7.41$", 0),
    ("1,234", r"\boxed{1234}", 1),
    ("12", r"\boxed{12 \text{ apples}}", 1),
    ("12 cm", r"\boxed{12 m}", 0),
    ("12 cm", r"\boxed{12\text{ cm}}", 1),
    ("5", r"\boxed{5 x}", 0),
    # where the answer stands
    ("42", r"<think>the answer is \boxed{42}</think> I give up", 0),
    ("42", r"<think>\boxed{41}</think> \boxed{42}", 1),
    ("42", r"<think>\boxed{42}", 0),
    ("42", r"\boxed{42", 0),
    ("42", "", 0),
    ("12", "7 + 5 = 12.", 1),
    ("12", "The answer is 7 + 5 = 12.", 1),
    ("5", "The answer is x = 5.", 1),
    ("x=5", r"\boxed{5}", 1),
    ("Paris", "The answer is Paris.", 1),
    ("5", r"\boxed{3}, \boxed{5}", 0),
    ("12", "<answer>12</answer>", 1),
    ("72", "#### 72 #### 72", 1),
    ("so 3*4 = 12\n#### 12", r"\boxed{12}", 1),
    # sets, intervals, matrices
    (r"\{1,2,3\}", r"\boxed{3,2,1}", 1),
    ("[1,2)", r"\boxed{[1,2)}", 1),
    ("[1,2)", r"\boxed{(1,2)}", 0),
    (r"x \le 3", r"\boxed{x < 3}", 0),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}", 0),
    # unscorable golds
    ("", r"\boxed{42}", None),
    ("???", r"\boxed{???}", None),
    (None, r"\boxed{42}", None),
    (float("nan"), r"\boxed{42}", None),
    ([], "1", None),
    (r"\frac{1}{", r"\boxed{1}", None),
    ("word " * 200 + "+", "1", None),
    # golds that are not text
    (180, r"\boxed{180}", 1),
    (180.0, r"\boxed{180}", 1),
    (["7", "8"], r"\boxed{8}", 1),
    (True, r"\boxed{True}", 1),
    # bounded
    ("1", r"\boxed{9^{9^{9}}}", 0),
    ("1", r"\boxed{1000000!}", 0),
    ("1", r"\boxed{10^{10^{10}}}", 0),
    ("1", r"\boxed{2^{2^{30}}}", 0),
]

HARD = r"\boxed{" + "+".join(f"(x+{i})^{{{i}}}" for i in range(2, 400)) + "}"
"""Takes the parser tens of seconds."""


def hard(index: int) -> str:
    return HARD.replace("(x+2)", f"(x+{index + 1000})")


@pytest.fixture(scope="module")
def table_scores() -> list[float | None]:
    return accuracy([completion for _, completion, _ in TABLE], answer=[gold for gold, _, _ in TABLE])


@pytest.mark.parametrize(
    "index", range(len(TABLE)), ids=[f"{gold!r} <- {completion!r}"[:70] for gold, completion, _ in TABLE]
)
def test_answer_table(table_scores: list[float | None], index: int) -> None:
    assert table_scores[index] == TABLE[index][2]


def test_counters_add_up_and_unscorable_golds_abstain() -> None:
    counters: Counter[str] = Counter()
    scores = accuracy(
        [r"\boxed{4}", r"\boxed{5}", "no idea at all", r"\boxed{4}"], answer=["4", "4", "4", "???"], counters=counters
    )
    assert scores == [1, 0, 0, None]
    assert {k: counters[k] for k in ("correct", "wrong", "unparsed", "unscorable")} == dict(
        correct=1, wrong=1, unparsed=1, unscorable=1
    )


GOLDS = [
    *range(-40, 40),
    *(f"{n},{n:03}" for n in range(1, 40)),
    *(n / 8 for n in range(1, 40)),
    *(f"{n}e{n % 7}" for n in range(1, 20)),
    *(rf"\frac{{{n}}}{{{n + 1}}}" for n in range(1, 20)),
    *(rf"{n}\sqrt{{{n + 1}}}" for n in (2, 5, 6)),
    *(rf"{n}\pi" for n in (2, 3)),
    *(f"({n}, {n + 1})" for n in range(1, 4)),
    *(f"x^{n}+{n}x" for n in range(2, 5)),
    "Monday",
    "a blue whale",
    "C",
    "y=2x+1",
    r"x \le 7",
]


def perturbed(gold: object) -> str:
    text = str(gold)
    if text in ("Monday", "a blue whale", "C"):
        return {"Monday": "Friday", "a blue whale": "a blue wall", "C": "D"}[text]
    if text.endswith(")"):
        return text[:-1] + "+1)"
    if isinstance(gold, float):
        return str(gold + 0.01)
    return text + ("+1" if re.search(r"[a-z\\]", text) else "1")


def test_every_gold_accepts_itself_and_refuses_a_neighbour() -> None:
    own = accuracy([f"So it is \\boxed{{{gold}}}." for gold in GOLDS], answer=GOLDS)
    other = accuracy([f"So it is \\boxed{{{perturbed(gold)}}}." for gold in GOLDS], answer=GOLDS)
    assert [gold for gold, right in zip(GOLDS, own, strict=True) if right != 1] == []
    assert [(gold, perturbed(gold)) for gold, right in zip(GOLDS, other, strict=True) if right != 0] == []


def one_third(_: int = 0) -> list[float | None]:
    return accuracy([r"\boxed{\frac{2}{6} \cdot x}"], answer=[r"\frac{1}{3} x"])


def test_scores_are_the_same_from_threads_asyncio_and_processes() -> None:
    async def gathered() -> list[list[float | None]]:
        return await asyncio.gather(*(asyncio.to_thread(one_third) for _ in range(3)))

    assert one_third() == [1]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(one_third, range(3))) == [[1]] * 3
    assert asyncio.run(gathered()) == [[1]] * 3
    for method in ("fork", "spawn"):
        with ProcessPoolExecutor(1, mp_context=get_context(method)) as processes:
            assert processes.submit(one_third).result(timeout=60) == [1]


def test_hard_answers_are_bounded_counted_and_leave_nothing_behind() -> None:
    one_third()
    counters: Counter[str] = Counter()
    easy = [rf"\boxed{{{n} + x}}" for n in range(6)]
    begun = time.monotonic()
    scores = accuracy(
        [hard(i) for i in range(4)] + easy, answer=["1 + x"] * 10, counters=counters, seconds=0.5, workers=4
    )
    assert time.monotonic() - begun < 20  # 4 × 0.5 s of CPU time, on a machine that may be busy
    assert counters["timeouts"] == 4
    assert scores == [0] * 4 + [0, 1, 0, 0, 0, 0]
    server = psutil.Process(shared_verifier()._process.pid)
    assert server.children() == []
    assert one_third() == [1]


def test_memory_is_bounded() -> None:
    bound = {"workers": 1, "seconds": 5.0}
    # At the limit a child may be unable even to say so: then the clock ends it.
    assert shared_verifier().run([("parsable", HARD[7:-1])], **bound, megabytes=2) in (["memory"], ["timeout"])
    assert shared_verifier().run([("parsable", "x+1")], **bound, megabytes=64) == [True]


def test_a_dead_server_is_replaced_and_a_closed_one_is_gone() -> None:
    verifier = Verifier()
    bound = {"workers": 1, "seconds": 2.0, "megabytes": 512}
    assert verifier.run([("parsable", "x+1")], **bound) == [True]
    first = psutil.Process(verifier._process.pid)
    first.kill()
    assert verifier.run([("parsable", "x+")], **bound) == [False]
    second = psutil.Process(verifier._process.pid)
    verifier.close()
    assert not first.is_running() and not second.is_running()


def test_plain_numbers_do_not_wait_for_the_library() -> None:
    completions, golds = [f"The answer is {n}." for n in range(64)], list(range(64))
    best = min(_timed(lambda: accuracy(completions, answer=golds)) for _ in range(5))
    assert accuracy(completions, answer=golds) == [1] * 64
    assert best < 0.02  # 4 ms alone; two cores that others use as well


def _timed(work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def test_audit_finds_golds_that_cannot_be_scored() -> None:
    audit = audit_golds(["6", 7, "x^2", "Monday", "???", None, r"\frac{1}{", "step by step " * 20 + r"\boxed{5}"])
    assert audit.counts == {"number": 3, "words": 1, "expression": 1, "unscorable": 3}
    assert [index for index, _ in audit.examples] == [4, 5, 6] and audit.long == 1


def test_imports_are_light() -> None:
    code = "import sys, jaxgrpo.rewards.math; print([m for m in ('sympy', 'math_verify', 'jax') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
