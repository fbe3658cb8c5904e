"""Runs `equality` under a hard bound: a process that forks one child a question, and kills those that take too long.

`python -m jaxgrpo.rewards.fork_server` reads one JSON line a batch from stdin and answers with one JSON line:

    {"workers": 4, "seconds": 2.0, "wall_seconds": 10.0, "megabytes": 512,
     "tasks": [["equivalent", gold, answer, 1e-4], ["parsable", gold]]}
    [true, "timeout", …]        a verdict each: true, false, or one of the other VERDICTS

It has imported SymPy before it forks, has no threads and no JAX, so a fork takes milliseconds and is safe. `seconds`
are CPU seconds, enforced by the kernel, so that a verdict does not depend on what else the machine does; a child that
sleeps or starves is killed after `wall_seconds` on the clock. RLIMIT_AS caps its memory. The server ends when its stdin
closes or its parent is gone.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from jaxgrpo.rewards.equality import Unparsable, equivalent, parsable

VERDICTS = ("timeout", "memory", "unparsable", "error")
"""What a verdict can be besides true and false. error: the comparison itself raised or its process died."""

WARM_UP = (
    ("x^2+1", "(x-1)^2+2x"),
    (r"\frac{\pi}{2}", r"\frac{3\pi}{6}"),
    (r"\frac{\sqrt{3}}{2x}", r"\frac{3}{2\sqrt{3} \cdot x}"),
    (r"14-3i", r"14.0 - 3.0 i"),
    (r"(1, \frac{x}{2})", r"(1, 0.5 \times x)"),
    ("y=2x+1", "2x-y+1=0"),
    ("x<3", r"(-\infty, 3)"),
    (r"[1,2) \cup (3,4]", r"(3, 4] \cup [1, 2)"),
    (r"x \leq 3", r"3 \geq x"),
    (r"\log_{2} 8 + \ln e", r"\sin(x)"),
    (r"e^{-x} + 5! + |x|", r"-\cos x + a_1"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 5 \end{bmatrix}"),
)
"""Compared before the first fork: imports the libraries and fills the parser's caches, which every child inherits."""


@dataclass
class _Child:
    index: int
    pid: int
    pipe: int
    deadline: float


def main() -> None:
    """Serves batches until stdin closes."""
    parent = os.getppid()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timers are off: ours are on
    for gold, answer in WARM_UP:
        equivalent(gold, answer, 1e-4)
    gc.freeze()  # a collection in a child would touch, and so copy, every page it shares with us
    print(json.dumps({"ready": True}), flush=True)
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 1.0)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            request = json.loads(line)
            print(json.dumps(run_batch(**request)), flush=True)


def run_batch(
    tasks: list[list[Any]], workers: int, seconds: float, wall_seconds: float, megabytes: int
) -> list[bool | str]:
    """Answers the tasks, `workers` at a time, each within its bounds; `megabytes` are those beyond the server's own."""
    verdicts: list[bool | str] = ["error"] * len(tasks)
    running: dict[int, _Child] = {}
    waiting = list(reversed(range(len(tasks))))
    while waiting or running:
        while waiting and len(running) < workers:
            index = waiting.pop()
            child = _fork(index, tasks[index], time.monotonic() + wall_seconds, seconds, megabytes)
            running[child.pipe] = child
        wait = max(0.0, min(child.deadline for child in running.values()) - time.monotonic())
        for pipe in select.select(list(running), [], [], wait)[0]:
            child = running.pop(pipe)
            verdicts[child.index] = _finish(child)
        now = time.monotonic()
        for child in [child for child in running.values() if child.deadline <= now]:
            os.kill(child.pid, signal.SIGKILL)
            verdicts[child.index] = _finish(running.pop(child.pipe))
    return verdicts


def _fork(index: int, task: list[Any], deadline: float, seconds: float, megabytes: int) -> _Child:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(task, write, seconds, megabytes)
    os.close(write)
    return _Child(index, pid, read, deadline)


def _child(task: list[Any], write: int, seconds: float, megabytes: int) -> None:
    """Never returns."""
    verdict: bool | str = "error"
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends a process that does not handle it
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + megabytes * 2**20,) * 2)
        name, *arguments = task
        verdict = {"equivalent": equivalent, "parsable": parsable}[name](*arguments)
    except Unparsable:
        verdict = "unparsable"
    except MemoryError:
        verdict = "memory"
    except RecursionError:
        verdict = "unparsable"
    finally:
        # Whatever else was raised leaves "error": the client counts it. os._exit: no clean-up of inherited state.
        os.write(write, json.dumps(verdict).encode())
        os._exit(0)


def _finish(child: _Child) -> bool | str:
    answer = os.read(child.pipe, 64)
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    if answer:
        return json.loads(answer)
    stopped = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL)
    return "timeout" if stopped else "error"


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not tell, which leaves the limit a little lower."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    main()
