"""The export door: `python -m jaxgrpo.export RUN_DIR [--step N] [--out DIR] [--dtype T]` writes a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxgrpo.errors import Problem, UserError, door


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxgrpo.export",
        description="Write the policy of a checkpoint as a Hugging Face directory that transformers and vLLM load.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="the output_dir of a run")
    parser.add_argument("--step", type=int, help="the checkpoint's step; default: the newest")
    parser.add_argument("--out", metavar="DIR", help="where to write; default: RUN_DIR/export-STEP")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as the run's config says")
    return parser.parse_args(arguments)


@door
def main(arguments: Sequence[str] | None = None) -> int:
    """Exports one checkpoint; returns the exit code."""
    options = parse(arguments)
    directory = Path(options.run)
    if not (directory / "config.yaml").is_file() or not (directory / "checkpoints").is_dir():
        expected = "the output_dir of a run: it holds config.yaml and checkpoints/"
        raise UserError(Problem("RUN_DIR", repr(options.run), expected, "give the directory that the run printed"))
    from jaxgrpo.trainer.export import export

    written = export(directory, options.step, Path(options.out) if options.out else None, options.dtype)
    print(f"written to {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
