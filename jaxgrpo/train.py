"""The training door: `python -m jaxgrpo.train --config run.yaml [key.path=value …] [--check] [--resume]`.

`config/load.py` and `trainer/prepare.py` validate everything a user can get wrong before a weight is read;
`trainer/build.py` makes the objects; `trainer/loop.py` is the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxgrpo.config.load import load_config
from jaxgrpo.errors import RunError, door


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxgrpo.train",
        description="Train a language model with group-relative policy optimisation.",
        epilog="docs/config.md lists every key; configs/ holds examples.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file; see configs/")
    parser.add_argument("--check", action="store_true", help="validate everything, print the plan, train nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in output_dir")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override keys of the config")
    return parser.parse_intermixed_args(arguments)


@door
def main(arguments: Sequence[str] | None = None) -> int:
    """Validates, trains, exports; returns the exit code."""
    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    from jaxgrpo.trainer.prepare import prepare  # and with it JAX: a slip in the config need not wait for that

    prepared = prepare(config, Path(options.config).parent, resume=options.resume)
    print("\n".join([*prepared.plan.lines(), f"device      {prepared.device}"]), flush=True)
    if options.check:
        print("the config is sound; nothing was trained (--check)")
        return 0
    from jaxgrpo.trainer.build import build
    from jaxgrpo.trainer.finish import finish
    from jaxgrpo.trainer.loop import train

    run, state, step = build(prepared, resume=options.resume)
    try:
        state, step = train(run, state, step)
        finish(run, prepared, state, step)
    finally:
        run.close()
    if step < run.total_steps:
        raise RunError(f"asked to stop after step {step} of {run.total_steps}; go on with --resume")
    return 0


if __name__ == "__main__":
    sys.exit(main())
