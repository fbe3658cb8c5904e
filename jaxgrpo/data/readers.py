"""Rows out of files: JSONL, Parquet, `datasets` directories. A bad row is a problem with file, line and reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgrpo.errors import Problem, UserError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
EVAL_SPLITS = ("test", "validation", "eval", "dev")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 80


@dataclass(frozen=True)
class Row:
    """One row and where it stands (`file:line`, or `file:row N`)."""

    values: dict[str, Any]
    place: str


def read_rows(paths: str | Sequence[str], key: str, split: str) -> Iterator[Row | Problem]:
    """Reads files, directories and hub data sets, one after the other.

    Args:
        paths: a `.jsonl` or `.parquet` file, a directory (written by `datasets.save_to_disk`, or holding such files), a
            hub name `org/name`, or a list of these.
        key: the config key, for messages.
        split: `train` or `eval`: which split to take where a data set has several.

    Yields:
        A `Row`, or a `Problem` in place of a row that cannot be read.

    Raises:
        UserError: a path does not exist or is of no known kind.
    """
    for path in [paths] if isinstance(paths, str) else paths:
        yield from _read_one(path, key, split)


def _read_one(path: str, key: str, split: str) -> Iterator[Row | Problem]:
    place = Path(path)
    if place.is_file():
        yield from _read_file(place, key)
    elif (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        yield from _read_saved_dataset(place, key, split)
    elif place.is_dir():
        files = sorted(f for f in place.iterdir() if f.suffix in (*JSONL_SUFFIXES, ".parquet"))
        if not files:
            raise UserError(
                Problem(key, repr(path), "a directory with .jsonl or .parquet files, or one written by save_to_disk")
            )
        for file in files:
            yield from _read_file(file, key)
    elif _HUB_NAME.fullmatch(path) and place.suffix not in (*JSONL_SUFFIXES, ".parquet"):
        yield from _read_hub(path, key, split)
    else:
        raise UserError(
            Problem(
                key,
                repr(path),
                f"a file or directory that exists ({place.absolute()} does not)",
                "paths are relative to the working directory",
            )
        )


def _read_file(file: Path, key: str) -> Iterator[Row | Problem]:
    if file.suffix in JSONL_SUFFIXES:
        yield from read_jsonl(file)
    elif file.suffix == ".parquet":
        yield from _read_parquet(file, key)
    else:
        raise UserError(Problem(key, repr(str(file)), "a file that ends in .jsonl or .parquet", "convert the file"))


def read_jsonl(file: Path) -> Iterator[Row | Problem]:
    """Reads one JSON object a line.

    Lines end at newlines only, so a string may hold U+2028; a byte-order mark at the start is accepted; lines without
    any text are no rows. Refused: bytes that are not UTF-8, what is not a JSON object, NaN and Infinity, and a key that
    stands twice in one object.
    """
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                value = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
            except UnicodeDecodeError as error:
                yield Problem(place, f"byte 0x{line[error.start]:02x} at column {error.start + 1}", "UTF-8 text")
                continue
            except json.JSONDecodeError as error:
                hint = "a JSON array in a file: write one object a line" if line.strip() in (b"[", b"{") else ""
                yield Problem(place, _shown(line), f"a JSON object ({error.msg} at column {error.colno})", hint)
                continue
            except (ValueError, RecursionError) as error:
                yield Problem(place, _shown(line), f"a JSON object ({error})")
                continue
            if isinstance(value, dict):
                yield Row(value, place)
            else:
                yield Problem(
                    place, f"{_shown(line)}, a {type(value).__name__}", "a JSON object with a key for each column"
                )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; use null")


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _read_parquet(file: Path, key: str) -> Iterator[Row | Problem]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(Problem(key, repr(str(file)), "a Parquet file", str(error))) from error
    number = 0
    for batch in table.iter_batches():
        for values in batch.to_pylist():
            number += 1
            yield Row(values, f"{file}:row {number}")


def _read_saved_dataset(directory: Path, key: str, split: str) -> Iterator[Row | Problem]:
    import datasets

    loaded = datasets.load_from_disk(str(directory))
    yield from _dataset_rows(_pick_split(loaded, str(directory), key, split), str(directory))


def _read_hub(name: str, key: str, split: str) -> Iterator[Row | Problem]:
    import datasets

    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # the hub client raises many kinds; each means the same to the user
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            Problem(
                key,
                repr(name),
                f"a path that exists, or a hub data set that can be reached ({reason})",
                "check the spelling, or download the data set and give its directory",
            )
        ) from error
    yield from _dataset_rows(_pick_split(loaded, name, key, split), name)


def _pick_split(loaded: Any, source: str, key: str, split: str) -> Any:
    """The split for training or evaluation of a `DatasetDict`; a plain data set is its own split."""
    if not isinstance(loaded, Mapping):
        return loaded
    wanted = ("train",) if split == "train" else EVAL_SPLITS
    name = next((name for name in wanted if name in loaded), None)
    if name is None:
        raise UserError(
            Problem(
                key,
                f"{source!r} with the splits {', '.join(loaded)}",
                f"a split called {' or '.join(wanted)}",
                f"give the directory of one split, such as {source}/{next(iter(loaded), 'train')}",
            )
        )
    return loaded[name]


def _dataset_rows(dataset: Any, source: str) -> Iterator[Row]:
    for number, values in enumerate(dataset, start=1):
        yield Row(dict(values), f"{source}:row {number}")
