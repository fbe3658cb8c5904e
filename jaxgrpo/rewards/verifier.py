"""The client of `fork_server`: symbolic comparisons in bounded time, from any thread or process."""

from __future__ import annotations

import atexit
import json
import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxgrpo
from jaxgrpo.errors import RunError

WALL_FACTOR = 5.0
"""A comparison that does not use its CPU seconds is killed after this many times as long on the clock."""

START_SECONDS = 60.0
"""The server may take this long to import SymPy on a busy machine."""

Task = tuple[Any, ...]
Verdict = bool | str


class Verifier:
    """One server process, started when it is first needed and again whenever it is gone.

    Calls from several threads take turns; the tasks of one call run side by side.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, tasks: Sequence[Task], *, workers: int, seconds: float, megabytes: int) -> list[Verdict]:
        """Answers `tasks` (see `fork_server`), each within `seconds` of CPU time.

        Raises:
            RunError: the server could not be started, or died twice on the same tasks.
        """
        if not tasks:
            return []
        request = {
            "tasks": [list(task) for task in tasks],
            "workers": workers,
            "seconds": seconds,
            "wall_seconds": WALL_FACTOR * seconds,
            "megabytes": megabytes,
        }
        patience = START_SECONDS + 2 * WALL_FACTOR * seconds * math.ceil(len(tasks) / workers)
        with self._lock:
            for _ in range(2):
                process = self._running()
                answer = _ask(process, request, patience)
                if answer is not None:
                    return answer
                self._stop()
        raise RunError("the process that compares math answers (jaxgrpo.rewards.fork_server) died or hung twice")

    def warm_up(self) -> None:
        """Starts the server without waiting for it, so that the first scoring need not."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Ends the server."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            root = str(Path(jaxgrpo.__file__).resolve().parent.parent)
            path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxgrpo.rewards.fork_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the run, which then closes the server
            )
        return self._process

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()
        self._process = None


def _ask(process: subprocess.Popen[bytes], request: dict[str, Any], patience: float) -> list[Verdict] | None:
    """One request and its answer; None when the server died or does not answer."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    while select.select([process.stdout], [], [], patience)[0]:
        line = process.stdout.readline()
        if not line:
            return None
        answer = json.loads(line)
        if isinstance(answer, list):  # the other kind of line says that the server is ready
            return answer
    return None


_verifier = Verifier()


def shared_verifier() -> Verifier:
    """The verifier of this process."""
    return _verifier


def _renew() -> None:
    global _verifier
    _verifier = Verifier()


# A forked child must not talk through its parent's pipes.
os.register_at_fork(after_in_child=_renew)
atexit.register(lambda: _verifier.close())
