#!/usr/bin/env python
"""One GRPO iteration against TRL's, on the same prompts, alternating in one run.

    pip install trl==1.16.0      # not a dependency of jaxgrpo; torch comes with the extra `test`
    python scripts/bench_trl.py [--scenario a b] [--rounds 5] [--reward digits] [--malloc]

8 prompts × 8 completions of SmolLM2-135M-Instruct, float32, no KL, lengths as the model ends them. Scenario a: prompts of
about 45 tokens, completions of at most 24. Scenario b: few-shot prompts of about 200 tokens, completions of at most 64.
Each library runs in a process of its own; while one works on a step the other waits for its turn. Two rounds warm up
(compilation, allocators). The reward `last_number` is what a run would use: many groups have equal rewards at first, and
jaxgrpo leaves them out of the update. `digits` (the share of digits in the reply) gives every sample an advantage, so that
nothing is left out: the worst case. `--malloc` gives TRL's process the glibc settings that spare torch its page faults.
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


def digits(completions: list, **_: object) -> list[float]:
    """The share of digits in the completion: hardly ever the same twice."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(letter.isdigit() for letter in text) / (len(text) + 1) + 1e-4 * len(text) for text in texts]


REWARDS = {"last_number": last_number, "digits": digits}


def trl_worker(scenario: dict, steps: int, reward: str) -> None:
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
        def on_step_begin(self, args, state, control, **kwargs):
            wait_for_turn()
            seconds.update(sampling=0.0, scoring=0.0)
            counts.update(tokens=0)
            self.begun = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            total = time.perf_counter() - self.begun
            update = total - seconds["sampling"] - seconds["scoring"]
            reply(
                {
                    "total": total,
                    "sampling": seconds["sampling"],
                    "scoring": seconds["scoring"],
                    "update": update,
                    **counts,
                }
            )

    class Timed(GRPOTrainer):
        def _generate(self, *args, **kwargs):
            begun = time.perf_counter()
            result = super()._generate(*args, **kwargs)
            seconds["sampling"] += time.perf_counter() - begun
            counts["tokens"] += sum(len(ids) for ids in result[1])
            return result

        def _calculate_rewards(self, *args, **kwargs):
            begun = time.perf_counter()
            result = super()._calculate_rewards(*args, **kwargs)
            seconds["scoring"] += time.perf_counter() - begun
            return result

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = Timed(
        model=str(MODEL),
        reward_funcs=REWARDS[reward],
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Turn()],
    )
    trainer.train()


def jaxgrpo_worker(scenario: dict, steps: int, reward: str) -> None:
    """The pieces of a run, built from a config as the door builds them, stepped by hand."""
    import asyncio

    from jaxgrpo.config.load import load_config
    from jaxgrpo.trainer.build import build
    from jaxgrpo.trainer.prepare import prepare

    directory = Path(tempfile.mkdtemp())
    rows = make_rows(scenario["shots"], PROMPTS_PER_STEP * steps)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "output_dir": str(directory / "run"),
        "steps": steps,
        "model": {"path": str(MODEL)},
        "data": {"train": str(directory / "train.jsonl"), "shuffle": False, "max_prompt_tokens": 320},
        "plugins": [str(directory / "plugin.py")],
        "rewards": [{"name": f"bench_{reward}"}],
        "rollout": {
            "prompts_per_step": PROMPTS_PER_STEP,
            "num_generations": NUM_GENERATIONS,
            "max_completion_tokens": scenario["max_completion_tokens"],
        },
        "objective": {"preset": "grpo", "kl_coef": 0.0},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "logging": {"progress": "none", "tensorboard": False},
    }
    (directory / "plugin.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\nimport bench_trl\n"
        "from jaxgrpo.registry import register\n"
        "for name, function in bench_trl.REWARDS.items():\n    register('reward', f'bench_{name}')(function)\n"
    )
    (directory / "run.yaml").write_text(json.dumps(config))
    prepared = prepare(load_config(directory / "run.yaml"), directory, resume=False)
    run, state, _ = build(prepared, resume=False)
    run.sampler.load(state.params, version=0)
    with asyncio.Runner() as events:
        for step in range(1, steps + 1):
            wait_for_turn()
            begun = time.perf_counter()
            prompts = run.prompts.next_batch(run.prompts_per_step)
            collected = events.run(run.collector.collect(prompts, step))
            advantages, _ = run.improver.advantages(state, collected)
            state, metrics = run.improver.improve(state, collected, advantages)
            run.sampler.load(state.params, version=step)
            total = time.perf_counter() - begun
            tokens = sum(trajectory.num_sampled for trajectory in collected.trajectories)
            trained = metrics["update/sequences_share"]
            reply(
                {
                    "total": total,
                    **collected.seconds,
                    "update": metrics["time/update"],
                    "tokens": tokens,
                    "trained": trained,
                }
            )


WORKERS = {"trl": trl_worker, "jaxgrpo": jaxgrpo_worker}


class Worker:
    """A library in a process of its own, which works only when asked."""

    def __init__(self, name: str, scenario: str, steps: int, reward: str, environment: dict[str, str]):
        reading, writing = os.pipe()
        command = [sys.executable, __file__, "--worker", name, "--scenario", scenario, "--rounds", str(steps)]
        command += ["--reward", reward]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writing,),
            env={**os.environ, "PYTHONPATH": str(ROOT), "BENCH_PIPE": str(writing), **environment},
            text=True,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def step(self) -> dict:
        """One iteration; its seconds and counts."""
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"the worker ended with code {self._process.wait()}; run it with --worker to see why")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def row(name: str, results: list[dict]) -> str:
    """Medians of one library, with the spread of the total."""

    def median(key: str) -> float:
        return statistics.median(result[key] for result in results)

    totals = [result["total"] for result in results]
    trained = f", {median('trained'):.0%} of the sequences in the update" if "trained" in results[0] else ""
    return (
        f"  {name:8} {median('total'):6.2f} s [{min(totals):.2f}–{max(totals):.2f}] = sampling {median('sampling'):.2f} "
        f"+ scoring {median('scoring'):.2f} + update {median('update'):.2f}; {median('tokens'):.0f} tokens sampled{trained}"
    )


def compare(scenario: str, rounds: int, warmup: int, reward: str, environment: dict[str, str]) -> None:
    """Runs one scenario and prints both rows and the ratio, round by round."""
    steps = rounds + warmup
    workers = {name: Worker(name, scenario, steps, reward, environment if name == "trl" else {}) for name in WORKERS}
    try:
        results = {name: [] for name in workers}
        for index in range(steps):
            for name, worker in workers.items():
                result = worker.step()
                if index >= warmup:
                    results[name].append(result)
    finally:
        for worker in workers.values():
            worker.close()
    ratios = [a["total"] / b["total"] for a, b in zip(results["trl"], results["jaxgrpo"], strict=True)]
    print(f"scenario {scenario}: {SCENARIOS[scenario]}, reward {reward}, {rounds} rounds after {warmup} of warm-up")
    for name in WORKERS:
        print(row(name, results[name]))
    print(f"  TRL / jaxgrpo: median {statistics.median(ratios):.1f} [{min(ratios):.1f}–{max(ratios):.1f}]", flush=True)


def main() -> None:
    """Compares, or (--worker) is one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", nargs="*", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--reward", choices=list(REWARDS), default="last_number")
    parser.add_argument("--malloc", action="store_true", help="spare torch page faults by glibc's settings")
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        os.environ.setdefault("BENCH_PIPE", "1")
        WORKERS[arguments.worker](SCENARIOS[arguments.scenario[0]], arguments.rounds, arguments.reward)
        return
    environment = MALLOC if arguments.malloc else {}
    print(f"TRL {'with glibc settings ' + str(MALLOC) if arguments.malloc else 'as installed'}")
    for scenario in arguments.scenario:
        compare(scenario, arguments.rounds, arguments.warmup, arguments.reward, environment)


if __name__ == "__main__":
    main()
