"""P53, P55, P56: the order of prompts is exact, endless, and goes on after a restore as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgrpo.data.prompts import PromptSet
from jaxgrpo.data.stream import PromptStream
from jaxgrpo.errors import UserError
from jaxgrpo.types.rollout import Prompt


def prompts(count: int) -> PromptSet:
    return PromptSet(tuple(Prompt(f"row{i}", (), str(i), {}) for i in range(count)), (), {})


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in batch]


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 12),
    size=st.integers(1, 15),
    before=st.integers(0, 6),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_restored_stream_goes_on_exactly(rows: int, size: int, before: int, seed: int, shuffle: bool) -> None:
    straight = PromptStream(prompts(rows), seed, shuffle)
    for _ in range(before):
        straight.next_batch(size)
    state = json.loads(json.dumps(straight.state()))
    resumed = PromptStream(prompts(rows), seed, shuffle)
    resumed.restore(state)
    assert resumed.epoch == straight.epoch
    for _ in range(4):
        assert ids(resumed.next_batch(size)) == ids(straight.next_batch(size))


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 8), size=st.integers(1, 10), seed=st.integers(0, 3))
def test_rows_come_equally_often_and_not_twice_into_a_batch(rows: int, size: int, seed: int) -> None:
    stream = PromptStream(prompts(rows), seed)
    seen: Counter[str] = Counter()
    for batch in range(1, 3 * rows + 1):
        drawn = Counter(ids(stream.next_batch(size)))
        assert sum(drawn.values()) == size
        assert max(drawn.values()) <= -(-size // rows)
        seen += drawn
        # A row in waiting is one draw behind, never more.
        assert max(seen.values()) - min(seen[f"row{i}"] for i in range(rows)) <= 2
        assert stream.epoch == pytest.approx(batch * size / rows)
    assert set(seen.values()) == {3 * size}


def test_shuffle_differs_by_epoch_and_seed() -> None:
    stream = PromptStream(prompts(20), seed=1)
    first, second = ids(stream.next_batch(20)), ids(stream.next_batch(20))
    assert sorted(first) == sorted(second) and first != second
    assert ids(PromptStream(prompts(20), seed=2).next_batch(20)) != first
    assert ids(PromptStream(prompts(20), seed=1, shuffle=False).next_batch(20)) == [f"row{i}" for i in range(20)]


def test_other_data_is_refused() -> None:
    state = PromptStream(prompts(5), seed=0).state()
    for other in (PromptStream(prompts(6), seed=0), PromptStream(prompts(5), seed=1)):
        with pytest.raises(UserError, match="checkpoint"):
            other.restore(state)


def test_fresh_process_continues() -> None:
    stream = PromptStream(prompts(7), seed=3)
    stream.next_batch(5)
    code = (
        "import json, sys\n"
        "from jaxgrpo.data.prompts import PromptSet\nfrom jaxgrpo.data.stream import PromptStream\n"
        "from jaxgrpo.types.rollout import Prompt\n"
        "s = PromptStream(PromptSet(tuple(Prompt(f'row{i}', (), str(i), {}) for i in range(7)), (), {}), seed=3)\n"
        "s.restore(json.loads(sys.argv[1]))\nprint(json.dumps([p.prompt_id for p in s.next_batch(9)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(stream.state())], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ids(stream.next_batch(9))
