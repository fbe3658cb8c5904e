"""Rules that join several keys of a config, each a pure function in `RULES`.

A problem states the rule, the values and two ways out. What needs facts that a config does not hold stands elsewhere:
`check_context` is told the model's context, `plan.plan` the sizes of data and machine; `check_output_dir` looks at the
disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxgrpo.config.schema import Config
from jaxgrpo.errors import Problem

Rule = Callable[[Config], Iterator[Problem]]

# The built-in estimators; each subtracts a mean over the group.
_GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo")


def check(config: Config) -> list[Problem]:
    """Applies every rule that needs nothing but the config."""
    return [problem for rule in RULES for problem in rule(config)]


def reward_names(config: Config) -> list[str]:
    """What metrics call the rewards, in order: the second one of a name is `name_2`, and so on."""
    names = [reward.name for reward in config.rewards]
    earlier = [names[:index].count(name) for index, name in enumerate(names)]
    return [name if count == 0 else f"{name}_{count + 1}" for name, count in zip(names, earlier, strict=True)]


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt and completion that the limits allow."""
    return config.data.max_prompt_tokens + config.rollout.max_completion_tokens


def _duration(config: Config) -> Iterator[Problem]:
    if config.steps is None and config.epochs is None:
        yield Problem(
            "steps",
            "neither `steps` nor `epochs`",
            "one of them: how long to train",
            "add `steps: 100`, or `epochs: 1`",
        )
    if config.steps is not None and config.epochs is not None:
        found = f"steps: {config.steps} and epochs: {config.epochs:g}"
        yield Problem("steps", found, "one of them: both say how long to train", "delete `epochs`, or delete `steps`")


def _updates_divide(config: Config) -> Iterator[Problem]:
    prompts, updates = config.rollout.prompts_per_step, config.learner.updates_per_step
    if prompts % updates:
        valid = [n for n in range(1, prompts + 1) if prompts % n == 0]
        yield Problem(
            "learner.updates_per_step",
            f"{updates} with rollout.prompts_per_step: {prompts}",
            "a divisor of prompts_per_step, because every update takes the same number of whole groups",
            f"set learner.updates_per_step to one of {', '.join(map(str, valid))}; "
            f"or rollout.prompts_per_step to a multiple of {updates}, such as {math.ceil(prompts / updates) * updates}",
        )


def _group_size(config: Config) -> Iterator[Problem]:
    estimator = config.objective.advantage
    if config.rollout.num_generations == 1 and estimator in (None, *_GROUP_ADVANTAGES):
        yield Problem(
            "rollout.num_generations",
            f"1 with objective.advantage: {estimator or 'that of the preset'}",
            "2 or more, because the advantage of a completion is its lead over the others of its prompt",
            "raise rollout.num_generations, to 8 say; or name an advantage plug-in that needs no group",
        )


def _turns(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > rollout.max_completion_tokens:
        yield Problem(
            "rollout.max_turn_tokens",
            f"{rollout.max_turn_tokens} with max_completion_tokens: {rollout.max_completion_tokens}",
            "at most max_completion_tokens, which limits all turns together",
            f"raise rollout.max_completion_tokens to {rollout.max_turn_tokens} or more; or leave max_turn_tokens out",
        )
    if rollout.scheduler == "single_turn" and (rollout.max_turns or 1) > 1:
        yield Problem(
            "rollout.max_turns",
            f"{rollout.max_turns} with scheduler: single_turn",
            "1: this scheduler plays one turn",
            "leave max_turns out; or name a multi-turn scheduler in rollout.scheduler",
        )


def _lengths(config: Config) -> Iterator[Problem]:
    longest = longest_sequence(config)
    if config.model.max_context is not None:
        yield from _fits(config, config.model.max_context)
    if config.learner.row_tokens is not None and config.learner.row_tokens < longest:
        yield Problem(
            "learner.row_tokens",
            f"{config.learner.row_tokens} with max_prompt_tokens + max_completion_tokens = {longest}",
            "room for the longest sequence, because a sequence is never split over rows",
            f"set learner.row_tokens to {longest} or more; or leave it out",
        )


def _learning_rate(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    peak, final = optimizer.learning_rate, optimizer.final_learning_rate
    if final and optimizer.schedule == "constant":
        yield Problem(
            "optimizer.final_learning_rate",
            f"{final:g} with schedule: constant",
            "0, because a constant schedule does not fall",
            "set optimizer.schedule to linear or cosine; or leave final_learning_rate out",
        )
    elif final > peak:
        yield Problem(
            "optimizer.final_learning_rate",
            f"{final:g} with learning_rate: {peak:g}",
            "at most learning_rate, the peak",
            f"lower final_learning_rate, to {peak / 10:g} say; or raise learning_rate above {final:g}",
        )


def _frozen_patterns(config: Config) -> Iterator[Problem]:
    for index, pattern in enumerate(config.optimizer.frozen):
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(
                f"optimizer.frozen.{index}",
                repr(pattern),
                f"a regular expression ({error})",
                r"escape special characters with \; or use the plain text of the path, such as `embed/`",
            )


def _mesh(config: Config) -> Iterator[Problem]:
    axes = config.learner.mesh.model_dump()
    for axis, size in axes.items():
        if size == 0:
            yield Problem(
                f"learner.mesh.{axis}",
                "0",
                "a number of devices ≥ 1, or -1 for the rest",
                "write 1 to not split; or -1",
            )
    rest = [axis for axis, size in axes.items() if size == -1]
    if len(rest) > 1:
        yield Problem(
            "learner.mesh",
            f"-1 for {' and '.join(rest)}",
            "at most one -1, the axis that takes the rest",
            " or ".join(f"set {axis} to 1" for axis in rest),
        )


def _rewards(config: Config) -> Iterator[Problem]:
    rewards = config.rewards
    if not rewards:
        yield Problem(
            "rewards",
            "no reward function",
            "at least one: without rewards there is nothing to learn",
            "add `rewards: [{name: last_number}]`; or write one in a plug-in file (examples/reward_plugin.py)",
        )
    if rewards and all(reward.weight == 0 for reward in rewards):
        yield Problem(
            "rewards",
            "a weight of 0 for every reward",
            "a weight other than 0, because 0 only measures",
            "give one reward `weight: 1.0`; or leave the weights out, 1 is the default",
        )


def _evaluation(config: Config) -> Iterator[Problem]:
    section, default = config.eval, type(config.eval)()
    changed = [key for key in type(section).model_fields if getattr(section, key) != getattr(default, key)]
    if config.data.eval is None and changed:
        yield Problem(
            f"eval.{changed[0]}",
            f"{', '.join(f'eval.{key}' for key in changed)} but no data.eval",
            "held-out prompts to evaluate on",
            "add `eval: FILE` to the section data; or delete the section eval",
        )
    if section.temperature == 0 and section.num_generations > 1:
        yield Problem(
            "eval.num_generations",
            f"{section.num_generations} with temperature: 0",
            "1, because greedy completions are all the same",
            "set eval.temperature to 1.0; or eval.num_generations to 1",
        )
    names = reward_names(config)
    if section.accuracy_reward is not None and section.accuracy_reward not in names:
        yield Problem(
            "eval.accuracy_reward",
            repr(section.accuracy_reward),
            f"one of this run's rewards: {', '.join(names) or 'none'}",
            f"add it to rewards (`weight: 0` only measures it); or use {', '.join(names[:1]) or 'one'} instead",
        )


def _stop_strings(config: Config) -> Iterator[Problem]:
    for index, text in enumerate(config.rollout.sampling.stop):
        if not text:
            yield Problem(
                f"rollout.sampling.stop.{index}",
                "an empty text",
                "text that ends a completion",
                "delete it: the model's end tokens always stop; or write the text",
            )


RULES: tuple[Rule, ...] = (
    _duration,
    _updates_divide,
    _group_size,
    _turns,
    _lengths,
    _learning_rate,
    _frozen_patterns,
    _mesh,
    _rewards,
    _evaluation,
    _stop_strings,
)


def check_context(config: Config, limit: int) -> list[Problem]:
    """Whether the run's sequences fit into the model's own limit of `limit` tokens.

    Where `model.max_context` is set, `check` has compared the lengths with it, and only it is compared with the limit.
    """
    context = config.model.max_context
    if context is None:
        return list(_fits(config, limit))
    if context > limit:
        return [
            Problem(
                "model.max_context",
                str(context),
                f"at most {limit}, the model's own limit",
                f"lower it to {limit}; or leave it out",
            )
        ]
    return []


def _fits(config: Config, limit: int) -> Iterator[Problem]:
    prompt, completion = config.data.max_prompt_tokens, config.rollout.max_completion_tokens
    if prompt + completion > limit:
        room = [
            f"{key} to {limit - other} or less"
            for key, other in (("rollout.max_completion_tokens", prompt), ("data.max_prompt_tokens", completion))
            if other < limit
        ]
        yield Problem(
            "rollout.max_completion_tokens",
            f"{completion} + data.max_prompt_tokens: {prompt} = {prompt + completion}",
            f"together at most {limit}, the context of the model",
            f"lower {'; or '.join(room) if room else 'both'}",
        )


def check_output_dir(config: Config, resume: bool) -> list[Problem]:
    """Whether the output directory suits the way the run was started: a new run needs one without a run in it."""
    directory = Path(config.output_dir)
    if directory.exists() and not directory.is_dir():
        return [
            Problem(
                "output_dir",
                f"{directory}, which is a file",
                "a directory, or a path that does not exist yet",
                "choose another output_dir; or move the file away",
            )
        ]
    traces = [name for name in ("metrics.jsonl", "checkpoints") if (directory / name).exists()]
    if traces and not resume:
        return [
            Problem(
                "output_dir",
                f"{directory}, which holds a run already ({', '.join(traces)})",
                "a directory without a run",
                "add --resume to go on with that run; or choose another output_dir",
            )
        ]
    if resume and not directory.exists():
        return [
            Problem(
                "output_dir",
                f"{directory}, which does not exist",
                "the directory of the run to resume",
                "leave --resume out to start from the beginning; or correct output_dir",
            )
        ]
    return []
