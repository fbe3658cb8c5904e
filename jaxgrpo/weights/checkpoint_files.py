"""Hugging Face model directories: found, checked, loaded and written.

JAX is imported only to put loaded parameters on devices.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import ml_dtypes  # also teaches NumPy the name bfloat16, which safetensors looks up
import numpy as np
import safetensors
from safetensors.numpy import save_file

from jaxgrpo.errors import Problem, UserError
from jaxgrpo.models.config import ModelConfig, eos_token_ids, from_hf
from jaxgrpo.weights import mapping
from jaxgrpo.weights.families import tensors

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
EXPORT_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MAX_SHARD_BYTES = 5 * 10**9
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: shape and type are known, values are read by `np.asarray`."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: Any

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the values."""
        array = self.file.get_tensor(self.name)
        return array if dtype is None else array.astype(dtype)


def load_pretrained(path: str, dtype: Any = np.float32, shardings: Any = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Loads a model from a local Hugging Face directory, or by name from the hub.

    Args:
        path: the directory (config.json, safetensors in one file or sharded with an index) or the hub name.
        dtype: the type of the parameters; files may hold float32, bfloat16 or float16.
        shardings: a tree like the parameters with a `jax.sharding.Sharding` for each, or None: the default device. One
            stacked parameter at a time is in host memory.

    Returns:
        The config, its end tokens joined with those of generation_config.json, and the parameters as JAX arrays.

    Raises:
        UserError: the directory, the config or the tensors are not what they should be.
    """
    directory = resolve(path)
    config = read_config(directory)
    source = read_headers(directory)
    return config, mapping.from_hf(source, config, str(directory), dtype, _placer(shardings))


def validate_pretrained(path: str) -> ModelConfig:
    """Checks a model in well under a second, without reading a tensor: config, files, names, shapes, types.

    Of a model on the hub only the config is checked, which needs the network once.

    Raises:
        UserError: as `load_pretrained`, but for the values of a head that ought to be tied.
    """
    if not Path(path).is_dir():
        return read_config(resolve(path, ["*.json"]))
    config = read_config(Path(path))
    headers = {name: (tensor.shape, str(tensor.dtype)) for name, tensor in read_headers(Path(path)).items()}
    mapping.check_tensors(headers, config, path)
    return config


def export_pretrained(
    params: Mapping[str, Any],
    config: ModelConfig,
    source_dir: str,
    out_dir: str,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes config.json, safetensors and the tokenizer's files; `out_dir` appears, or is replaced, at the end.

    Args:
        params: the parameters, on any devices.
        config: the model.
        source_dir: the model the training started from (directory or hub name): its config and tokenizer are copied.
        out_dir: the directory to write.
        dtype: float32, bfloat16 or float16, the type of the tensors.
        max_shard_bytes: above this the tensors go to several files with an index; one file at a time is in memory.

    Raises:
        UserError: an unknown dtype, or an `out_dir` that holds something else than a model.
    """
    out, source = Path(out_dir), resolve(source_dir)
    if dtype not in EXPORT_DTYPES:
        raise UserError(Problem(str(out), f"dtype {dtype!r}", f"one of {', '.join(EXPORT_DTYPES)}"))
    is_model = (out / "config.json").is_file() and out.resolve() != source.resolve()
    if out.exists() and not (is_model or (out.is_dir() and not any(out.iterdir()))):
        expected = "a new or empty directory, or an earlier export to replace, other than the source"
        raise UserError(Problem(str(out), "a path that is in use", expected))
    config_json = read_json(source / "config.json")
    config_json["torch_dtype" if "torch_dtype" in config_json else "dtype"] = dtype
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_tensors(params, config, partial, np.dtype(EXPORT_DTYPES[dtype]), max_shard_bytes)
        (partial / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        for file in (partial, *partial.iterdir()):
            file.chmod(0o755 if file.is_dir() else 0o644)  # made private by their libraries; a model is for sharing
        replaced = partial.with_name(partial.name + ".replaced")
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def resolve(path: str, patterns: list[str] | None = None) -> Path:
    """The local directory of a model, downloaded (only files that match `patterns`) if `path` is a name on the hub.

    Raises:
        UserError: there is no such directory, and the hub has no such model or cannot be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    expected = "a model directory, or the name of a model on the Hugging Face hub"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path) or Path(path).exists():
        raise UserError(Problem(path, "no directory", expected))
    patterns = patterns or ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=patterns))
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        found = f"no such directory; the hub: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise UserError(Problem(path, found, expected, "correct the path, or log in and connect to the hub")) from error


def read_config(directory: Path) -> ModelConfig:
    """Reads config.json, and generation_config.json for more end tokens if there is one.

    Raises:
        UserError: a file is missing, is not JSON, or asks for something that is not supported.
    """
    config_json = read_json(directory / "config.json")
    config = from_hf(config_json, str(directory / "config.json"))
    generation = directory / "generation_config.json"
    if generation.exists():
        ends = eos_token_ids({"eos_token_id": list(config.eos_token_ids)}, read_json(generation))
        config = replace(config, eos_token_ids=ends)
    return config


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Name -> tensor for all the safetensors of a model; reads headers only.

    Raises:
        UserError: no safetensors, a shard that is missing, cut short or not what the index says, a tensor that
            stands twice.
    """
    weight_map = None
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(Problem(str(directory / INDEX), "no weight_map", "a map from tensor names to files"))
    names = sorted(set(weight_map.values())) if weight_map else ["model.safetensors"]
    problems: list[Problem] = []
    found: dict[str, StoredTensor] = {}
    files: dict[str, str] = {}
    for file in names:
        for tensor in _open(directory / file, problems):
            if tensor.name in found:
                problems.append(
                    Problem(f"{directory / file}: {tensor.name}", f"also in {files[tensor.name]}", "each tensor once")
                )
            found[tensor.name], files[tensor.name] = tensor, file
    for name, file in (weight_map or {}).items():
        if files.get(name) != file and not any(problem.path == str(directory / file) for problem in problems):
            problems.append(
                Problem(f"{directory / INDEX}: {name}", f"{file}, which lacks it", "the file that holds the tensor")
            )
    if problems:
        raise UserError(problems)
    return found


def _open(file: Path, problems: list[Problem]) -> list[StoredTensor]:
    if not file.exists():
        present = ", ".join(sorted(other.name for other in file.parent.iterdir())) or "nothing"
        fix = "convert the weights to safetensors" if "pytorch_model" in present else "download the model again"
        problems.append(Problem(str(file), "", f"a safetensors file; the directory holds {present}", fix))
        return []
    try:
        handle = safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
        problems.append(
            Problem(str(file), f"a damaged file ({error})", "a complete safetensors file", "download it again")
        )
        return []
    stored, names = [], handle.keys()
    for name in names:
        header = handle.get_slice(name)
        dtype = _DTYPES.get(header.get_dtype(), header.get_dtype())
        stored.append(StoredTensor(handle, name, tuple(header.get_shape()), dtype))
    return stored


def read_json(file: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        UserError: it is missing or holds something else.
    """
    if not file.is_file():
        raise UserError(
            Problem(str(file), "", "this file: a model directory has one", "is it a Hugging Face model directory?")
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(Problem(str(file), f"not JSON: {error}", "a JSON object")) from error
    if not isinstance(content, dict):
        raise UserError(Problem(str(file), type(content).__name__, "a JSON object"))
    return content


def _placer(shardings: Any) -> Callable[[str, np.ndarray], Any]:
    import jax  # here, so that a check of a config does not wait for it

    def place(path: str, array: np.ndarray) -> Any:
        if shardings is None:
            return jax.device_put(array)
        sharding = shardings
        for key in path.split("/"):
            sharding = sharding[key]
        # By callback, so that a process of a multi-host mesh cuts out what its own devices hold.
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return place


def _write_tensors(
    params: Mapping[str, Any], config: ModelConfig, directory: Path, dtype: np.dtype, max_shard_bytes: int
) -> None:
    shards = _plan(config, dtype, max_shard_bytes)
    stream = mapping.to_hf(params, config)
    files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        held = {}
        for expected in names:
            name, array = next(stream)
            assert name == expected, f"the plan says {expected}, the stream {name}"
            held[name] = array.astype(dtype, copy=False)
        save_file(held, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": _bytes(config, dtype)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan(config: ModelConfig, dtype: np.dtype, max_shard_bytes: int) -> list[list[str]]:
    """Tensor names by file: as many in a row as fit; a tensor larger than a file has one for itself."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for tensor in tensors(config):
        size = math.prod(tensor.shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor.name)
        room -= size
    return shards


def _bytes(config: ModelConfig, dtype: np.dtype) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors(config)) * dtype.itemsize
