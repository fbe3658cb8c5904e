"""From a preset's name and a user's overrides to the fields of an `Objective`, with every mistake named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxgrpo.algo import advantages, corrections, policy_losses, token_weights
from jaxgrpo.algo.aggregation import AGGREGATIONS
from jaxgrpo.algo.corrections import SAMPLER_CORRECTIONS
from jaxgrpo.algo.kl import ESTIMATORS
from jaxgrpo.algo.presets import PRESETS
from jaxgrpo.algo.ratios import RATIOS
from jaxgrpo.algo.view import needs_of
from jaxgrpo.errors import Problem, UserError
from jaxgrpo.registry import check_options, lookup

Options = tuple[tuple[str, Any], ...]
"""Keyword options as sorted pairs: hashable."""

BUILT_INS = (advantages, corrections, policy_losses, token_weights)
"""The modules whose import registers the built-in names that `resolve` looks up."""

CLIP_KEYS = ("eps_low", "eps_high", "eps_dual")
FIELDS = (
    "ratio",
    "policy_loss",
    "policy_loss_options",
    "token_weights",
    "aggregation",
    "max_completion_tokens",
    "kl_coef",
    "kl_estimator",
    "kl_in_reward",
    "kl_aggregation",
    "entropy_coef",
    "drop_truncated",
    "sampler_diagnostics",
    "advantage",
    "advantage_options",
    "sdar_coef",
    "sdar_beta",
)
SHORT_FORMS = (
    *CLIP_KEYS,
    "scale",
    "sampler_correction",
    "sampler_correction_threshold",
    "top_entropy_quantile",
    "off_policy_mask_delta",
)


def resolve(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the objective that `name` and `overrides` describe; see `objective.from_preset`.

    Raises:
        UserError: with every problem found.
    """
    _one_of("preset", name, PRESETS)
    given = {key: value for key, value in overrides.items() if value is not None}
    for key in given:
        _one_of(key, key, (*FIELDS, *SHORT_FORMS))
    row = dict(PRESETS[name])
    if given.get("policy_loss", row["policy_loss"]) != row["policy_loss"]:
        row = {key: value for key, value in row.items() if key not in (*CLIP_KEYS, "policy_loss_options")}
    if given.get("advantage", row["advantage"]) != row["advantage"]:
        row = {key: value for key, value in row.items() if key not in ("scale", "advantage_options")}
    loss_options = {**row.pop("policy_loss_options", {}), **given.pop("policy_loss_options", {})}
    advantage_options = {**row.pop("advantage_options", {}), **given.pop("advantage_options", {})}
    merged = row | given
    loss_options |= {key: merged.pop(key) for key in CLIP_KEYS if key in merged}
    if "scale" in merged:
        advantage_options["scale"] = merged.pop("scale")
    weights = _token_weights(merged)
    if "kl_estimator" not in merged:
        merged["kl_estimator"] = "k1" if merged.get("kl_in_reward") else "k3"
    _check(merged, loss_options, advantage_options, weights)
    return merged | {
        "policy_loss_options": _freeze(loss_options),
        "advantage_options": _freeze(advantage_options),
        "token_weights": tuple((weight, _freeze(options)) for weight, options in weights.items()),
    }


def _token_weights(merged: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Takes the token weights and their short forms out of `merged`."""
    weights = {name: dict(options or {}) for name, options in dict(merged.pop("token_weights", {})).items()}
    correction = merged.pop("sampler_correction", None)
    threshold = merged.pop("sampler_correction_threshold", None)
    if correction is not None:
        _one_of("sampler_correction", correction, SAMPLER_CORRECTIONS)
        weights[correction] = {} if threshold is None else {"threshold": threshold}
    elif threshold is not None:
        raise _wrong(
            "sampler_correction_threshold",
            threshold,
            "a sampler_correction to apply it to",
            "set objective.sampler_correction",
        )
    if "top_entropy_quantile" in merged:
        quantile = merged.pop("top_entropy_quantile")
        if not 0 < quantile <= 1:
            raise _wrong("top_entropy_quantile", quantile, "a share of the tokens, in (0, 1]")
        if quantile < 1:
            weights["top_entropy"] = {"quantile": quantile}
    if "off_policy_mask_delta" in merged:
        weights["off_policy_sequence_mask"] = {"delta": merged.pop("off_policy_mask_delta")}
    return weights


def _check(
    merged: dict[str, Any],
    loss_options: dict[str, Any],
    advantage_options: dict[str, Any],
    weights: dict[str, dict[str, Any]],
) -> None:
    """Names and options one by one, then the combinations that have no meaning."""
    _one_of("ratio", merged["ratio"], RATIOS)
    _one_of("aggregation", merged["aggregation"], AGGREGATIONS)
    _one_of("kl_aggregation", merged.get("kl_aggregation", "token_mean"), AGGREGATIONS)
    _one_of("kl_estimator", merged["kl_estimator"], ESTIMATORS)
    loss = lookup("policy_loss", merged["policy_loss"], "objective.policy_loss")
    problems = check_options(loss, loss_options, "objective.policy_loss_options")
    advantage = lookup("advantage", merged["advantage"], "objective.advantage")
    problems += check_options(advantage, advantage_options, "objective.advantage_options")
    for name, options in weights.items():
        function = lookup("token_weights", name, "objective.token_weights")
        problems += check_options(function, options, f"objective.token_weights.{name}")
    in_loss = merged.get("kl_coef", 0) and not merged.get("kl_in_reward")
    if in_loss and merged["kl_estimator"] == "k1":
        problems.append(
            Problem(
                "objective.kl_estimator",
                "'k1'",
                "k2 or k3: as a loss k1 has the gradient of log pi, zero in expectation",
                "use k2 (the exact gradient of KL) or k3, or set objective.kl_in_reward: true",
            )
        )
    if merged["aggregation"] == "constant" and not merged.get("max_completion_tokens"):
        problems.append(
            Problem("objective.max_completion_tokens", "", "the constant that aggregation `constant` divides by")
        )
    if "whole_groups" in needs_of(loss):
        if merged["aggregation"] != "group_mean":
            problems.append(
                Problem(
                    "objective.aggregation",
                    repr(merged["aggregation"]),
                    f"group_mean, with policy loss {merged['policy_loss']}, whose losses are per group",
                )
            )
        if weights:
            problems.append(
                Problem(
                    "objective.token_weights",
                    ", ".join(weights),
                    f"none, with policy loss {merged['policy_loss']}, whose losses are per group",
                )
            )
    if merged["advantage"] == "gdpo" and merged.get("kl_in_reward"):
        problems.append(
            Problem("objective.kl_in_reward", "True", "false with gdpo, which scales each reward by itself")
        )
    if problems:
        raise UserError(problems)


def _one_of(key: str, value: str, names: Iterable[str]) -> None:
    names = list(names)
    if value not in names:
        near = difflib.get_close_matches(str(value), names, n=1)
        raise _wrong(key, value, f"one of {', '.join(names)}", f"did you mean {near[0]!r}?" if near else "")


def _wrong(key: str, value: Any, expected: str, fix: str = "") -> UserError:
    return UserError(Problem(f"objective.{key}", repr(value), expected, fix))


def _freeze(options: Mapping[str, Any]) -> Options:
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(options.items()))
