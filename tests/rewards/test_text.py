"""P07, P10, P11: format with prefilled tags, numbers in running text, lengths in tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgrpo.errors import UserError
from jaxgrpo.rewards.answers import numbers_in, parse_number
from jaxgrpo.rewards.text import (
    contains,
    exact_match,
    format_reward,
    last_number,
    regex,
    repetition,
    soft_overlong,
)
from tests.rewards.test_scoring import trajectory


@pytest.mark.parametrize(
    ("prefill", "completion", "wanted"),
    [
        ("<think>\n", "First, 2 plus 2.\n</think>\n4", 1),
        ("", "First, 2 plus 2.\n</think>\n4", 0),
        ("", "<think>First,\n\n2 plus 2.</think>\n4", 1),
        ("", "<think><think>a</think></think>4", 0),
        ("<think>\n", "<think>a</think>4", 0),
        ("", "4", 0),
        ("", "sure: <think>a</think>4", 0),
        ("", "<think>a</think>", 0),
        ("<think>\n\n</think>\n\n", "4", 1),
    ],
)
def test_format(prefill: str, completion: str, wanted: float) -> None:
    assert format_reward([completion], [prefill]) == [wanted]


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        ("<think>a\nb</think> <answer>4</answer>\n", 1),
        ("<think>a</think><answer>4</answer> and more", 0),
        ("<think>a</think>x<answer>4</answer>", 0),
        ("<think>a</think><answer></answer>", 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
    ],
)
def test_format_with_answer_tag(completion: str, wanted: float) -> None:
    assert format_reward([completion], answer_tag="answer") == [wanted]


@pytest.mark.parametrize(
    ("text", "gold", "wanted"),
    [
        ("7 + 5 = 12.", "12", 1),
        ("7 + 5 = 12.", 12, 1),
        ("7 + 5 = 12.", 12.0, 1),
        ("12 is 7+5", "12", 0),
        ("it is 1,234,567.", "1234567", 1),
        ("1234567", "1,234,567", 1),
        ("-3", "-3", 1),
        ("\u22123", "-3", 1),
        ("7-5", "5", 1),
        ("7-5", "-5", 0),
        ("x=-5!", "-5", 1),
        ("12.50", "12.5", 1),
        ("12.51", "12.5", 0),
        ("**42**", "42", 1),
        ("$42$", "42", 1),
        ("$12.50", "12.5", 1),
        ("1e3", "1000", 1),
        ("a12b", "12", 1),
        ("\uff14\uff12", "42", 1),
        ("no number", "42", 0),
        ("", "42", 0),
        ("5 apples", None, None),
        ("5", "five", None),
        ("5", [], None),
        ("5", ["4", "5"], 1),
        ("1, 2, 3", "3", 1),
        ("1.2.", "1.2", 1),
        (".5", "0.5", 1),
        ("3/4", "4", 1),
    ],
)
def test_last_number(text: str, gold: object, wanted: float | None) -> None:
    assert last_number([text], answer=[gold]) == [wanted]


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "so {}.", "is **{}**", "= {:,}, yes", "({})"]))
def test_any_integer_is_read_back(value: int, shape: str) -> None:
    assert numbers_in("7 " + shape.format(value))[-1].value == value


@given(st.text(max_size=60))
def test_no_text_breaks_the_number_readers(text: str) -> None:
    numbers_in(text)
    parse_number(text)


def test_soft_overlong_in_tokens() -> None:
    lengths = [80, 81, 90, 100, 101]
    rewards = soft_overlong([trajectory("x", n) for n in lengths], max_tokens=100, buffer_tokens=20)
    np.testing.assert_allclose(rewards, [0, -0.05, -0.5, -1, -1])
    with pytest.raises(UserError, match="buffer_tokens"):
        soft_overlong([], max_tokens=10, buffer_tokens=20)


def test_matches() -> None:
    assert exact_match([" Paris\n", "paris", "x"], answer=["Paris", "Paris", None]) == [1, 0, None]
    assert exact_match(["paris"], answer=["Paris"], ignore_case=True) == [1]
    assert exact_match(["180"], gold=[180.0], column="gold") == [1]
    assert contains(["it is 12.", "it is 112", "C++!", "x"], answer=["12", "12", "C++", None]) == [1, 0, 1, None]
    assert regex(["a\nb", "b"], pattern="a.b") == [1, 0]
    assert regex(["ab", "xab"], pattern="ab", full=True) == [1, 0]
    with pytest.raises(UserError, match="regular expression"):
        regex(["a"], pattern="(")


def test_repetition() -> None:
    assert repetition(["a b c d e", "too short", "a a a a a"], max_penalty=3.0) == pytest.approx([0, 0, -2])
