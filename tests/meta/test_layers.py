"""The import arrows point one way; files stay short; documents name files that exist."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "trtllm_replayssm"

# Floors, lowest first. A file may import its own floor and those below.
FLOORS = {
    "errors": 0,
    "config": 0,
    "contract": 0,
    "backend": 1,
    "plugins": 1,
    "ops": 2,
    "builders": 3,
    "runtime": 4,
    "serving": 5,
    "cli": 6,
}

# The runtime meets the builders in two places only, so that a serving image with an engine needs neither
# transformers nor onnx.
DOORS_TO_BUILDERS = {"runtime/llm.py", "runtime/executors/torch_executor.py"}

MAX_LINES = 400


def product_files() -> Iterator[tuple[str, Path]]:
    for folder in (PACKAGE, "plugins", "builders"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder) if folder == PACKAGE else path.relative_to(ROOT)
            if not (folder == PACKAGE and relative.parts[0] in ("plugins", "builders")):
                yield str(relative), path


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def floor_of(module: str) -> int | None:
    parts = module.split(".")
    return FLOORS.get(parts[1]) if parts[0] == PACKAGE and len(parts) > 1 else None


def test_imports_point_downwards_only() -> None:
    forbidden = []
    for relative, path in product_files():
        own = FLOORS.get(Path(relative).parts[0].removesuffix(".py"))
        if own is None:  # the package's __init__ is its face: it may name anything
            continue
        for line, module in imported_modules(path):
            floor = floor_of(module)
            if floor is not None and floor > own:
                forbidden.append(f"{relative}:{line} (floor {own}) imports {module} (floor {floor})")
    assert not forbidden, "\n".join(forbidden)


def test_runtime_meets_the_builders_at_two_doors_only() -> None:
    doors = {
        relative
        for relative, path in product_files()
        if relative.startswith("runtime/")
        and any(module.startswith(f"{PACKAGE}.builders") for _, module in imported_modules(path))
    }
    assert doors <= DOORS_TO_BUILDERS, f"more doors to the builders: {doors - DOORS_TO_BUILDERS}"


def test_one_module_imports_tensorrt() -> None:
    importers = {
        relative
        for relative, path in product_files()
        if re.search(r"^\s*(import|from) tensorrt", path.read_text(), re.MULTILINE)
    }
    assert importers <= {"backend.py"}


@pytest.mark.parametrize("forbidden", ["torch", "tensorrt", "transformers", "onnx"])
def test_the_contract_floor_stands_alone(forbidden: str) -> None:
    for relative, path in product_files():
        if relative.startswith(("contract/", "errors", "config")):
            for line, module in imported_modules(path):
                assert module.split(".")[0] != forbidden, f"{relative}:{line} imports {module}"


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in names]


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in tracked("*.py", "*.cu", "*.cuh", "*.cpp", "*.h")
        if path.exists() and (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_documents_name_files_that_exist() -> None:
    missing = []
    for document in tracked("*.md"):
        for name in re.findall(
            r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|cu|cuh|h|cpp|toml|json|yaml))`", document.read_text()
        ):
            bases = (ROOT, document.parent, ROOT / PACKAGE)
            if not any((base / name).exists() for base in bases):
                missing.append(f"{document.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)
