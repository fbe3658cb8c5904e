#!/usr/bin/env python
"""One GRPO iteration against TRL's, on the same prompts, alternating in one run.

    pip install trl==1.16.0      # not a dependency of jaxgrpo; torch comes with the extra `test`
    python scripts/bench_trl.py [--scenario a b] [--rounds 5] [--malloc]

8 prompts × 8 completions of SmolLM2-135M-Instruct, float32, no KL, lengths as the model ends them. Scenario a: prompts of
about 45 tokens, completions of at most 24. Scenario b: few-shot prompts of about 200 tokens, completions of at most 64.
Each library runs in a process of its own; while one works on a step the other waits for its turn. Two rounds warm up
(compilation, allocators). `--malloc` gives TRL's process the glibc settings that spare torch its page faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "smollm2-135m-instruct"
PROMPTS_PER_STEP, NUM_GENERATIONS, LEARNING_RATE = 8, 8, 1e-6
SCENARIOS = {"a": {"shots": 0, "max_completion_tokens": 24}, "b": {"shots": 8, "max_completion_tokens": 64}}
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "999999999999", "MALLOC_TOP_PAD_": "268435456"}


def make_rows(shots: int, count: int) -> list[dict]:
    """Sums; with `shots` solved examples before the question."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        lines = []
        for _ in range(shots):
            x, y = draw.randint(1, 99), draw.randint(1, 99)
            lines.append(f"Question: what is {x} plus {y}? Answer: {x + y}.")
        x, y = draw.randint(1, 99), draw.randint(1, 99)
        question = f"What is {x}+{y}? Answer with just a number."
        rows.append({"prompt": "\n".join([*lines, question]), "answer": str(x + y)})
    return rows


def reply(record: dict) -> None:
    """Answers the parent on the pipe that is kept free of everybody's prints."""
    os.write(int(os.environ["BENCH_PIPE"]), (json.dumps(record) + "\n").encode())


def wait_for_turn() -> None:
    """Blocks until the parent asks for a step; leaves when it asks for no more."""
    if sys.stdin.readline().strip() != "step":
        os._exit(0)


def last_number(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 if the last number of the completion is the answer."""
    import re

    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    found = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(numbers) and numbers[-1] == gold) for numbers, gold in zip(found, answer, strict=True)]


def trl_worker(scenario: dict, steps: int) -> None:
    """TRL's trainer as installed; a callback waits for its turn before each step and reports after it."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = make_rows(scenario["shots"], PROMPTS_PER_STEP * steps)
    data = Dataset.from_list([{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    # Long rows do not fit in memory at once in torch; accumulation does the same work in four pieces.
    pieces = 1 if scenario["shots"] == 0 else 4
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS_PER_STEP * NUM_GENERATIONS // pieces,
        gradient_accumulation_steps=pieces,
        num_generations=NUM_GENERATIONS,
        max_completion_length=scenario["max_completion_tokens"],
        learning_rate=LEARNING_RATE,
        beta=0.0,
        temperature=1.0,
        max_steps=steps,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        shuffle_dataset=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float32},
    )
    seconds = {"sampling": 0.0, "scoring": 0.0}
    counts = {"tokens": 0}

    class Turn(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            wait_for_turn()
            seconds.update(sampling=0.0, scoring=0.0)
            counts.update(tokens=0)
            self.begun = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            total = time.perf_counter() - self.begun
            update = total - seconds["sampling"] - seconds["scoring"]
            reply({"total": total, "sampling": seconds["sampling"], "scoring": seconds["scoring"], "update": update, **counts})

    class Timed(GRPOTrainer):
        def _generate(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            begun = time.perf_counter()
            result = super()._generate(*args, **kwargs)
            seconds["sampling"] += time.perf_counter() - begun
            counts["tokens"] += sum(len(ids) for ids in result[1])
            return result

        def _calculate_rewards(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            begun = time.perf_counter()
            result = super()._calculate_rewards(*args, **kwargs)
            seconds["scoring"] += time.perf_counter() - begun
            return result

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = Timed(
        model=str(MODEL), reward_funcs=last_number, args=config, train_dataset=data, processing_class=tokenizer,
        callbacks=[Turn()],
    )
    trainer.train()
