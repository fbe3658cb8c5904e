"""A trajectory's arrays grow together; what was sampled is what is recorded (pain points P24, P31)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgrpo.rollout.engine import Choice, SamplingParams
from jaxgrpo.rollout.episode import EpisodeSpec, append_observation, append_sampled, begin, finish
from jaxgrpo.rollout.schedulers import SingleTurn
from jaxgrpo.types.rollout import Prompt

PROMPT = Prompt("p", ({"role": "user", "content": "1+1?"},), None, {"answer": "2"})


def spec(tokens: Sequence[int] = (5, 6, 7), max_tokens: int = 8) -> EpisodeSpec:
    return EpisodeSpec(PROMPT, tuple(tokens), "1.0.0", SamplingParams(max_tokens=max_tokens, seed=3))


def choice(ids: Sequence[int], finish_reason: str = "stop", version: int = 4) -> Choice:
    return Choice(tuple(ids), tuple(-0.1 * (i + 1) for i in ids), finish_reason, (version,) * len(ids))


TURNS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=6), st.booleans(), st.booleans()), max_size=6)


@given(TURNS)
def test_arrays_agree_and_sampled_logprobs_stay_in_order(turns: list[tuple[list[int], bool, bool]]) -> None:
    trajectory = begin(spec())
    logprobs: list[float] = []
    tokens = [5, 6, 7]
    for ids, sampled, train in turns:
        tokens += ids
        if sampled:
            drawn = choice(ids)
            logprobs += drawn.logprobs
            trajectory = append_sampled(trajectory, drawn, "text", train=train)
        else:
            trajectory = append_observation(trajectory, ids, [{"role": "tool", "content": "r"}])
    arrays = [getattr(trajectory, name) for name in ("tokens", "sampled", "loss_mask", "logprobs", "versions")]
    assert {len(array) for array in arrays} == {len(tokens)}
    assert trajectory.tokens.tolist() == tokens
    assert not np.any(trajectory.loss_mask & ~trajectory.sampled)
    np.testing.assert_allclose(trajectory.logprobs[trajectory.sampled], np.asarray(logprobs, np.float32))
    assert (trajectory.logprobs[~trajectory.sampled] == 0).all() and (
        trajectory.versions[~trajectory.sampled] == -1
    ).all()
    assert trajectory.turns == sum(sampled for _, sampled, _ in turns)


def test_an_engine_that_returns_one_logprob_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, 3 log-probs and 2 versions"):
        Choice((1, 2), (-0.1, -0.2, -0.3), "stop", (0, 0))


def test_finish_merges_infos() -> None:
    trajectory = finish(finish(begin(spec()), "abort", {"a": 1}), "stop", {"b": 2})
    assert trajectory.stop == "stop" and trajectory.infos == {"a": 1, "b": 2}


class OneReply:
    max_context = 64

    def __init__(self, reply: Choice):
        self.reply = reply
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Choice:
        self.requests.append((tuple(token_ids), sampling))
        return self.reply


@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort"])
def test_single_turn_records_what_the_engine_drew_and_why_it_ended(finish_reason: str) -> None:
    engine = OneReply(choice([8, 9, 2], finish_reason))
    [trajectory] = asyncio.run(SingleTurn().run(spec(), engine, lambda ids: "".join(map(str, ids))))
    assert engine.requests == [((5, 6, 7), spec().sampling)]
    assert (
        trajectory.tokens.tolist() == [5, 6, 7, 8, 9, 2] and trajectory.loss_mask.tolist() == [False] * 3 + [True] * 3
    )
    assert trajectory.stop == finish_reason and trajectory.completion == "892" and trajectory.turns == 1
