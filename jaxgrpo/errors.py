"""The errors a user can cause, and how a door turns them into one message.

A mistake in a config, a data set, a model directory or a plug-in is a `Problem`: where it is, what was found, what was
expected and how to mend it. Problems are collected and raised together as a `UserError`, which a door prints without a
traceback before it exits with code 2. Everything else that is raised is our own fault and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        path: where it is: a config key (`objective.kl_coef`), `file:line`, or a directory.
        found: the offending value, as the user wrote it; empty when something is missing.
        expected: what would have been accepted.
        fix: what to do about it, in the imperative; may be empty when `expected` says it all.
    """

    path: str
    found: str
    expected: str
    fix: str = ""

    def __str__(self) -> str:
        found = f"found {self.found}; " if self.found else ""
        fix = f"\n    fix: {self.fix}" if self.fix else ""
        return f"{self.path}: {found}expected {self.expected}{fix}"


class UserError(Exception):
    """One or more problems that the user can mend; printed without a traceback."""

    def __init__(self, problems: Problem | Sequence[Problem]):
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RunError(Exception):
    """A run that had to stop for a reason outside the program (a full disk, a dead server, rewards that raise).

    The message says what happened, what was saved and how to go on. A door prints it without a traceback, exit code 1.
    """


def door(main: Callable[..., int]) -> Callable[..., int]:
    """Wraps a door's `main` so that it ends in an exit code: 0, 1 (`RunError`), 2 (`UserError`) or 130 (interrupted)."""

    @wraps(main)
    def run(*arguments: Any) -> int:
        try:
            return main(*arguments)
        except UserError as error:
            count = len(error.problems)
            print(f"{count} problem{'s' if count > 1 else ''} found, nothing was started:", file=sys.stderr)
            for problem in error.problems:
                print(f"  {problem}", file=sys.stderr)
            return 2
        except RunError as error:
            print(f"the run stopped: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return run
