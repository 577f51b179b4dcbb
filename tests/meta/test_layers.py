"""The import arrows point one way, and what is imported is declared; files stay short."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.repository import ROOT, tracked
from trtllm_replayssm import backend
from trtllm_replayssm.bench import plot
from trtllm_replayssm.cli import serve
from trtllm_replayssm.plugins.build import INSTALL
from trtllm_replayssm.runtime import guided

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
    "bench": 5,
    "serving": 5,
    "cli": 6,
}

# The runtime meets the builders in two places only, so that running an engine needs no exporter.
DOORS_TO_BUILDERS = {"runtime/opening.py", "runtime/executors/torch_executor.py"}

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
    def imports_it(path: Path) -> bool:
        names = {module for _, module in imported_modules(path)}
        if names & {"importlib", "importlib.import_module"}:  # a name in a string may be imported, too
            names |= {
                str(node.value) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
            }
        return any(re.fullmatch(r"tensorrt(_\w+)?(\.\w+)*", name) for name in names)

    assert {relative for relative, path in product_files() if imports_it(path)} == {"backend.py"}


def test_plugins_and_builders_are_imported_as_parts_of_the_package() -> None:
    for path in tracked("*.py"):
        for line, module in imported_modules(path):
            top = module.split(".")[0]
            assert top not in ("plugins", "builders"), f"{path}:{line} imports {module}; needed {PACKAGE}.{module}"


# Import name -> what brings it.
BROUGHT_BY = {"cuda": "cuda-core", "prometheus_client": "prometheus-client", "pydantic_core": "pydantic"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    declared, extra = (
        {re.split(r"[<>=]", requirement)[0] for requirement in requirements}
        for requirements in (project["dependencies"], [*optional["cuda13"], *optional["guided"], *optional["serve"]])
    )
    roots = {module.split(".")[0] for _, path in product_files() for _, module in imported_modules(path)}
    imported = {BROUGHT_BY.get(root, root) for root in roots - {*sys.stdlib_module_names, PACKAGE}}
    assert imported <= declared | extra
    assert declared - imported == {"onnxscript"}  # torch's ONNX exporter imports it


def test_the_ranges_of_tensorrt_are_those_that_the_backend_accepts() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, name in (("tensorrt", "tensorrt"), ("rtx", "tensorrt_rtx")):
        oldest = ".".join(map(str, backend._OLDEST[name]))
        assert all(requirement.endswith(f">={oldest},<{backend._BELOW[name]}") for requirement in extras[extra]), (
            extras[extra]
        )


def test_messages_name_the_packages_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    shown = {"tensorrt": backend._INSTALL["tensorrt"], "rtx": backend._INSTALL["tensorrt_rtx"], "cuda13": INSTALL}
    shown |= {"bench": plot.INSTALL, "serve": serve.INSTALL, "guided": guided.INSTALL}
    for extra, command in shown.items():
        assert command == "pip install " + " ".join(f"'{requirement}'" for requirement in extras[extra])


@pytest.mark.parametrize("forbidden", ["torch", "tensorrt", "transformers", "onnx"])
def test_the_contract_floor_stands_alone(forbidden: str) -> None:
    for relative, path in product_files():
        if relative.startswith(("contract/", "errors", "config")):
            for line, module in imported_modules(path):
                assert module.split(".")[0] != forbidden, f"{relative}:{line} imports {module}"


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in tracked("*.py", "*.cu", "*.cuh", "*.cpp", "*.h")
        if path.exists() and (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: {long}"
