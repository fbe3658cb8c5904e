"""The end of a run: the exported model and a summary that says what happened, where things are and what to try next."""

from __future__ import annotations

import json
from pathlib import Path

from jaxgrpo.learner.state import TrainState
from jaxgrpo.trainer.loop import Run
from jaxgrpo.trainer.prepare import Prepared
from jaxgrpo.weights.checkpoint_files import export_pretrained


def finish(run: Run, prepared: Prepared, state: TrainState, step: int) -> None:
    """Exports (when the run is complete and the config asks for it) and prints the summary."""
    output = Path(prepared.config.output_dir)
    exported = None
    if step == run.total_steps and prepared.config.checkpoint.export:
        run.reporter.note("writing the trained model in Hugging Face format")
        config = prepared.config
        target = str(output / "export")
        exported = export_pretrained(
            state.params, prepared.model, config.model.path, target, config.checkpoint.export_dtype
        )
    run.metrics.lines.flush()
    for line in summary(output, exported):
        run.reporter.note(line)


def summary(output: Path, exported: Path | None) -> list[str]:
    """The summary of the run recorded in `output/metrics.jsonl`, as lines of text."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    lines = [""]
    evaluated = [record for record in records if record.get("eval/accuracy") is not None]
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        after = f" → {last['eval/accuracy']:.1%} after step {last['step']}" if last["step"] else ""
        lines.append(f"held-out accuracy  {first['eval/accuracy']:.1%} before{after}")
    rewards = [record["reward"] for record in records if record.get("reward") is not None]
    if len(rewards) > 1:
        tenth = max(1, len(rewards) // 10)
        start, end = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
        lines.append(f"training reward    {start:.3f} → {end:.3f} (mean of {tenth} steps at each end)")
    lines += [
        f"metrics            {output / 'metrics.jsonl'}   (curves: tensorboard --logdir {output / 'tensorboard'})"
    ]
    if (output / "completions.jsonl").exists():
        lines.append(f"every completion   {output / 'completions.jsonl'}")
    if exported:
        lines.append(f"trained model      {exported}   (loads in transformers and vLLM)")
    lines += [f"next               {hint}" for hint in _hints(records)]
    return lines


def _hints(records: list[dict]) -> list[str]:
    """What to try next, from what the last steps looked like."""
    last = [record for record in records if "reward" in record][-10:]

    def mean(name: str) -> float:
        values = [record[name] for record in last if record.get(name) is not None]
        return sum(values) / len(values) if values else 0.0

    hints = []
    if mean("completions/clipped_ratio") > 0.2:
        hints.append(
            f"{mean('completions/clipped_ratio'):.0%} of completions hit the limit: raise rollout.max_completion_tokens"
        )
    if mean("frac_reward_zero_std") > 0.5:
        hints.append(
            f"{mean('frac_reward_zero_std'):.0%} of groups had equal rewards and taught nothing: "
            "take harder (or easier) prompts, or raise rollout.num_generations"
        )
    if mean("update/padding_share") > 0.6:
        hints.append(
            f"{mean('update/padding_share'):.0%} of the update's tokens were padding: "
            "set data.max_prompt_tokens and rollout.max_completion_tokens closer to what occurs"
        )
    if mean("update_skipped") > 0:
        hints.append("updates were skipped for non-finite gradients: lower optimizer.learning_rate")
    return hints or ["more steps (steps=…), another seed (seed=1), or another objective (objective.preset=dapo)"]
