"""Makes the quickstart's data: questions such as "What is 12+7? Answer with just a number." with their answers.

    python scripts/make_sums.py --seed 0 --out data/sums --min 0 --max 20 --train 320 --eval 80

writes train.jsonl and eval.jsonl. The same arguments write the same bytes; no question stands in both files, nor twice.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def make_rows(low: int, high: int, operations: str, seed: int) -> list[dict[str, str]]:
    """Every question with operands in [low, high], in an order that the seed decides."""
    rows = [
        {"prompt": f"What is {a}{sign}{b}? Answer with just a number.", "answer": str(OPERATIONS[sign](a, b))}
        for sign in operations
        for a, b in product(range(low, high + 1), repeat=2)
    ]
    random.Random(seed).shuffle(rows)
    return rows


def write_jsonl(file: Path, rows: list[dict[str, str]]) -> None:
    """Writes one row a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Reads the arguments and writes the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides which questions go where, and their order")
    parser.add_argument("--out", type=Path, default=Path("data/sums"), help="directory for train.jsonl and eval.jsonl")
    parser.add_argument("--min", type=int, default=0, help="smallest operand")
    parser.add_argument("--max", type=int, default=20, help="largest operand")
    parser.add_argument("--operations", default="+", help="any of + - *, such as '+-'")
    parser.add_argument("--train", type=int, default=320, help="training questions")
    parser.add_argument("--eval", type=int, default=80, help="held-out questions")
    options = parser.parse_args()
    if not options.operations or set(options.operations) - set(OPERATIONS) or options.min > options.max:
        parser.error(f"--operations takes {' '.join(OPERATIONS)}, and --min must not exceed --max")
    rows = make_rows(options.min, options.max, "".join(dict.fromkeys(options.operations)), options.seed)
    if options.train < 1 or options.eval < 0 or options.train + options.eval > len(rows):
        parser.error(
            f"--train {options.train} + --eval {options.eval} must fit into the {len(rows)} questions there are "
            f"with operands from {options.min} to {options.max}: widen the range or ask for fewer"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.out / "train.jsonl", rows[: options.train])
    write_jsonl(options.out / "eval.jsonl", rows[options.train : options.train + options.eval])
    print(f"{options.out}: train.jsonl with {options.train} questions, eval.jsonl with {options.eval}")


if __name__ == "__main__":
    main()
