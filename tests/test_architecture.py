"""The structure of the package, enforced: layers, cycles, sizes, docstrings, import worlds (DESIGN: layout)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "jaxgrpo"
LAYERS = [
    {"errors", "metrics", "types"},
    {"registry"},
    {"config", "models"},
    {"weights", "rewards", "data", "algo", "sharding", "sinks"},
    {"learner", "rollout"},
    {"engines", "service"},
    {"trainer"},
    {"train", "serve", "plan", "export"},
]
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Room (or module) -> packages that must not be loaded when it is imported.
WORLDS = {
    "jaxgrpo.rollout": {"jax", "torch", "vllm"},
    "jaxgrpo.rewards": {"jax", "torch", "vllm"},
    "jaxgrpo.data": {"jax", "torch", "vllm"},
    "jaxgrpo.service": {"jax", "torch"},
    "jaxgrpo.engines.vllm_engine": {"jax"},
    "jaxgrpo.learner": {"torch", "vllm"},
    "jaxgrpo.algo": {"flax", "torch", "vllm", "pydantic"},
    "jaxgrpo.config": {"jax", "torch", "vllm", "transformers"},
}

FILES = sorted(ROOT.rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[1]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> set[str]:
    """Modules of this package that a file imports, at any depth of its code."""
    known = {module_of(other) for other in FILES}
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name in known and name != "jaxgrpo"}


def test_layers_point_down() -> None:
    wrong = []
    for file in FILES:
        module = module_of(file)
        if module == "jaxgrpo":
            continue
        room = room_of(module)
        assert room in RANK, f"{file}: the room {room!r} stands in no layer"
        for target in imports_of(file):
            other = room_of(target)
            if other != room and RANK[other] >= RANK[room]:
                wrong.append(f"{module} imports {target}")
    assert not wrong, wrong


def test_only_the_builder_of_a_run_knows_an_engine() -> None:
    users = {module_of(f) for f in FILES if any(room_of(m) in ("engines", "service") for m in imports_of(f))}
    assert {user for user in users if room_of(user) == "trainer"} <= {"jaxgrpo.trainer.build"}


def test_no_import_cycles() -> None:
    graph = {module_of(file): imports_of(file) - {module_of(file)} for file in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in graph[module]:
                # A package's __init__ is its own file: importing a sibling module through it is not a cycle.
                if not module.startswith(target + "."):
                    visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_sizes(file: Path) -> None:
    source = file.read_text()
    assert source.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} at line {node.lineno} has {length} lines"


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_public_symbols_have_docstrings(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"

    def check(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                assert ast.get_docstring(node), f"{owner}{node.name} has no docstring"
                if isinstance(node, ast.ClassDef):
                    check(node.body, f"{node.name}.")

    check(tree.body, "")


def test_no_junk_drawers() -> None:
    assert not [file for file in FILES if file.stem in {"utils", "util", "common", "helpers", "misc"}]


def test_only_models_imports_flax() -> None:
    users = {
        file
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            name.split(".")[0] == "flax"
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        )
    }
    assert {room_of(module_of(file)) for file in users} <= {"models"}


@pytest.mark.parametrize("room", WORLDS)
def test_import_worlds(room: str) -> None:
    base = ROOT.parent / room.replace(".", "/")
    modules = [module_of(f) for f in FILES if f == base.with_suffix(".py") or base in f.parents]
    if not modules:
        pytest.skip(f"{room} is not built yet")
    code = "import sys\n" + "\n".join(f"import {m}" for m in modules)
    code += f"\nprint([p for p in {sorted(WORLDS[room])!r} if p in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip().splitlines()[-1] == "[]", f"{room} loads {out.stdout.strip()}"
