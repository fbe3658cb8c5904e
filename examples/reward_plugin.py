"""A reward of your own. In the config:

    plugins: [examples/reward_plugin.py]
    rewards:
      - {name: last_number}
      - {name: brevity, weight: 0.2, options: {max_words: 8}}
      - {name: closeness, weight: 0.1}

A reward gets all completions of a step and returns a number for each, or None to abstain. It names the data columns it
needs (`answer` below: a config whose data lack that column is refused at once); its options are the parameters after
`*`.
"""

from __future__ import annotations

import re
from typing import Any

from jaxgrpo.registry import register


@register("reward", "brevity")
def brevity(completions: list[str], *, max_words: int = 20, **columns: Any) -> list[float]:
    """1 up to `max_words` words, then falling to 0 at twice as many."""
    return [max(0.0, min(1.0, 2 - len(text.split()) / max_words)) for text in completions]


@register("reward", "closeness")
async def closeness(completions: list[str], answer: list[str | None], **columns: Any) -> list[float | None]:
    """1 / (1 + distance between the last whole number and the answer). `async def` suits rewards that ask a server."""

    def one(text: str, gold: str | None) -> float | None:
        if gold is None:
            return None
        numbers = re.findall(r"-?\d+", text)
        return 1 / (1 + abs(int(numbers[-1]) - int(gold))) if numbers else 0.0

    return [one(text, gold) for text, gold in zip(completions, answer, strict=True)]
