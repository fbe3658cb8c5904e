"""Everything a user can get wrong, checked in one pass: config, plug-ins, rewards, model directory, data, output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import jax

from jaxgrpo.algo.objective import Objective, from_preset
from jaxgrpo.config.check import check, check_context, check_output_dir
from jaxgrpo.config.plan import Plan, plan
from jaxgrpo.config.schema import Config
from jaxgrpo.data.chat import ChatTokenizer
from jaxgrpo.data.prompts import PromptSet, load_prompts
from jaxgrpo.errors import Problem, UserError
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.registry import check_options, load_plugins, lookup
from jaxgrpo.rewards import math, text
from jaxgrpo.rewards.convention import Reward, build_rewards, check_columns
from jaxgrpo.rollout import schedulers
from jaxgrpo.rollout.scheduler import Scheduler
from jaxgrpo.weights.checkpoint_files import validate_pretrained

T = TypeVar("T")

BUILT_INS = (math, text, schedulers)
"""The modules whose import registers the built-in rewards and schedulers."""


@dataclass(frozen=True)
class Prepared:
    """What is known of a run once it is known to be sound. No weight has been read."""

    config: Config
    directory: Path
    plan: Plan
    model: ModelConfig
    chat: ChatTokenizer
    train_prompts: PromptSet
    eval_prompts: PromptSet | None
    rewards: list[Reward]
    scheduler: Scheduler
    objective: Objective

    @property
    def portable_config(self) -> Config:
        """The config with plug-in files under absolute names, so that it can be read from anywhere."""
        plugins = [_absolute(plugin, self.directory) for plugin in self.config.plugins]
        return self.config.model_copy(update={"plugins": plugins})

    @property
    def device(self) -> str:
        """What the run will compute on, in words."""
        device = jax.devices()[0]
        return f"{jax.device_count()} × {device.platform} ({device.device_kind})"


class _Checks:
    """Runs checks one after the other and keeps the problems of all."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def run(self, what: Callable[..., T], *arguments: object) -> T | None:
        """The result, or None after noting the problems."""
        try:
            return what(*arguments)
        except UserError as error:
            self.problems += error.problems
            return None

    def stop(self) -> None:
        """Raises what was found so far."""
        if self.problems:
            raise UserError(self.problems)


def prepare(config: Config, directory: Path, *, resume: bool) -> Prepared:
    """Validates what a config names.

    Args:
        config: typed and complete; the rules that join its keys are checked here.
        directory: where the config file lies: plug-in files are named relative to it.
        resume: whether `output_dir` may hold an earlier run.

    Raises:
        UserError: with every problem that could be found; later checks that need an earlier one's result wait for it.
    """
    checks = _Checks()
    checks.problems += check(config)
    checks.problems += check_output_dir(config, resume)
    checks.run(load_plugins, config.plugins, directory)
    rewards = checks.run(build_rewards, config.rewards)
    scheduler = checks.run(_build_scheduler, config)
    objective = checks.run(build_objective, config)
    model = checks.run(validate_pretrained, config.model.path)
    chat = checks.run(ChatTokenizer, config.model.path, config.data.chat_template_options) if model else None
    if model:
        checks.problems += check_context(config, model.max_positions)
    encode = chat.encode_prompt if chat else None
    train_prompts = checks.run(load_prompts, config.data, "train", encode)
    eval_prompts = checks.run(load_prompts, config.data, "eval", encode) if config.data.eval else None
    for key, prompts in (("data.train", train_prompts), ("data.eval", eval_prompts)):
        if prompts and rewards:
            checks.problems += check_columns(rewards, prompts.columns, key)
    checks.stop()
    num_eval = len(eval_prompts.prompts) if eval_prompts else 0
    planned = plan(config, len(train_prompts.prompts), num_eval, jax.device_count())
    skipped = [
        f"data.{split}: {prompts.counts['read']:,} rows read, {prompts.counts['kept']:,} kept, "
        f"{prompts.counts['invalid']:,} malformed, {prompts.counts['overlong']:,} longer than data.max_prompt_tokens"
        for split, prompts in (("train", train_prompts), ("eval", eval_prompts))
        if prompts and prompts.counts["kept"] < prompts.counts["read"]
    ]
    audited = _audit_golds(rewards, train_prompts)
    planned = replace(planned, warnings=(*planned.warnings, *skipped, *audited))
    return Prepared(config, directory, planned, model, chat, train_prompts, eval_prompts, rewards, scheduler, objective)


def _audit_golds(rewards: list[Reward], prompts: PromptSet) -> list[str]:
    """What the accuracy reward will not be able to score: rows that never enter the loss."""
    warnings = []
    for reward in rewards:
        if reward.function is math.accuracy:
            column = reward.options.get("column", "answer")
            audit = math.audit_golds(prompt.columns[column] for prompt in prompts.prompts)
            if audit.counts["unscorable"]:
                examples = ", ".join(gold for _, gold in audit.examples[:3])
                found = f"{audit.counts['unscorable']:,} of {len(prompts.prompts):,} golds cannot be parsed"
                warnings.append(f"data.train: {found} and are left out of the loss, such as {examples}")
            if audit.long:
                warnings.append(f"data.train: {audit.long:,} golds look like worked solutions, not like answers")
    return warnings


def _build_scheduler(config: Config) -> Scheduler:
    entry = lookup("scheduler", config.rollout.scheduler, "rollout.scheduler")
    problems = check_options(entry, config.rollout.scheduler_options, "rollout.scheduler_options")
    if problems:
        raise UserError(problems)
    return entry(**config.rollout.scheduler_options)


def build_objective(config: Config) -> Objective:
    """The objective that the config describes.

    Raises:
        UserError: a name or an option that does not exist, or a combination without meaning.
    """
    section = config.objective.model_dump()
    # The constant that some objectives divide by is the run's own limit unless another is asked for.
    if section.get("max_completion_tokens") is None:
        section["max_completion_tokens"] = config.rollout.max_completion_tokens
    try:
        return from_preset(section.pop("preset"), **section)
    except UserError as error:
        raise UserError([replace(p, path=_in_section(p.path)) for p in error.problems]) from error


def _absolute(plugin: str, directory: Path) -> str:
    if not plugin.endswith(".py"):
        return plugin  # a module
    return str(((directory / plugin) if (directory / plugin).is_file() else Path(plugin)).absolute())


def _in_section(path: str) -> str:
    return path if path.startswith("objective") else f"objective.{path}"
