"""Imports point one way, and nothing of one machine is in the repository.

Protocol <- runtime <- integrations <- pretrain_gpt.py; megatron.training knows only its hooks.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PURE = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "itertools", "math", "operator", "re", "struct", "types", "typing",
}  # fmt: skip
"""What the protocol may import: no I/O, clock, random numbers, threads or log."""

HEAVY = {"matplotlib", "megatron", "mpi4py", "numpy", "torch"}
"""What a guardian, which owns the memory and must outlive its trainer, runs without."""

GUARDIAN = (
    "deadpool",
    "deadpool.__main__",
    "deadpool.guardian",
    "deadpool.join",
    "deadpool.launcher",
    "deadpool.run",
)


def modules_below(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder} holds no module: the test looks in the wrong place"
    return found


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, *, lazy: bool) -> Iterator[str]:
    """Full dotted names; those inside functions only if `lazy`. Imports for type checkers, that
    never run, are left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    package = name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]
    yield from _imports_in(tree, package, lazy)


def _imports_in(node: ast.AST, package: str, lazy: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: -(child.level - 1) or None] if child.level else []
            base = ".".join([*above, *([child.module] if child.module else [])])
            yield from (f"{base}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for rest in child.orelse:
                yield from _imports_in(rest, package, lazy)
        else:
            yield from _imports_in(child, package, lazy)


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("file", modules_below("deadpool/protocol"), ids=name_of)
def test_protocol_imports_only_pure_standard_library(file: Path) -> None:
    outside = {name for name in imports(file, lazy=True) if not is_below(name, "deadpool.protocol")}
    assert {name.partition(".")[0] for name in outside} <= PURE


@pytest.mark.parametrize("file", modules_below("megatron/training"), ids=name_of)
def test_training_driver_never_imports_deadpool(file: Path) -> None:
    assert not [name for name in imports(file, lazy=True) if is_below(name, "deadpool")]


@pytest.mark.parametrize("file", modules_below("deadpool"), ids=name_of)
def test_runtime_reaches_integrations_only_lazily_from_the_trainers_entry(file: Path) -> None:
    if is_below(name_of(file), "deadpool.integrations"):
        return
    lazy = name_of(file) != "deadpool.run"
    up = [name for name in imports(file, lazy=lazy) if is_below(name, "deadpool.integrations")]
    assert not up


@pytest.mark.parametrize("file", modules_below("deadpool"), ids=name_of)
def test_only_integrations_know_the_training_driver(file: Path) -> None:
    if not is_below(name_of(file), "deadpool.integrations"):
        up = [name for name in imports(file, lazy=True) if is_below(name, "megatron.training")]
        assert not up


@pytest.mark.parametrize("start", GUARDIAN)
def test_guardian_and_launcher_run_without_torch(start: str) -> None:
    """Follows module-level imports through the package, so that the chain can be named."""
    files = {name_of(file): file for file in modules_below("deadpool")}
    chains = {start: [start]}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        for name in imports(files[module], lazy=False):
            assert name.partition(".")[0] not in HEAVY, [*chains[module], name]
            inner = name if name in files else name.rpartition(".")[0]
            if inner in files and inner not in chains:
                chains[inner] = [*chains[module], inner]
                waiting.append(inner)


def test_megatron_stays_a_namespace_package() -> None:
    """With an __init__.py, it would hide megatron-core's megatron.core or be hidden by it."""
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_tracked_files_name_no_machine_path_and_no_registry_host() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    words = ["/work" + "/", "/root" + "/", "/opt" + "/wheels", "/opt" + "/pypi", "/tmp/v" + "/"]
    words += ["python" + "hosted.org", "pypi" + ".org", "download.py" + "torch.org"]
    words += ["registry.npm" + "js.org", "hugging" + "face.co"]
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        if not file.is_file() or b"\0" in (content := file.read_bytes()):
            continue
        found += [f"{name}: {word}" for word in words if word.encode() in content]
    assert not found
