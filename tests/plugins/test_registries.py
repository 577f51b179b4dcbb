"""The library in real plugin registries: TensorRT 11's (the lean runtime) and TensorRT for RTX's.

Each case is a process of its own: the two TensorRTs do not share one, and registration happens once per process.
"""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.harness.recorded_run import ROOT
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE, PLUGIN_VERSION, PLUGINS
from trtllm_replayssm.plugins import kernel_image
from trtllm_replayssm.plugins.library import plugin_library

BINDINGS = {"lean": "tensorrt_lean_bindings", "rtx": "tensorrt_rtx_bindings"}
LIBRARIES = {
    "lean": ("tensorrt_lean_libs", "libnvinfer_lean.so.*"),
    "rtx": ("tensorrt_rtx_libs", "libtensorrt_rtx.so.*"),
}

PROLOGUE = """
import ctypes, json, sys
from pathlib import Path
kind, library, module = sys.argv[1:4]
results = {}

def import_tensorrt():
    import importlib
    return importlib.import_module(f"{module}.tensorrt_{kind}")

def found(registry):
    return [
        [creator.name, creator.plugin_version, creator.plugin_namespace, type(creator).__name__,
         [[field.name, field.type.name] for field in creator.field_names]]
        for creator in registry.all_creators if creator.plugin_namespace == "trtllm_replayssm"
    ]
"""

every_kind = pytest.mark.parametrize("kind", BINDINGS)


def expected() -> list[list[Any]]:
    return [
        [io.op_type, PLUGIN_VERSION, PLUGIN_NAMESPACE, "IPluginCreatorV3One"]
        + [[*([name, "INT32"] for name in io.int_fields), ["kernels", "INT8"]]]
        for io in PLUGINS
    ]


def perform(kind: str, script: str) -> dict[str, Any]:
    """Run a script in a fresh process; it fills ``results``."""
    module = BINDINGS[kind]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{PROLOGUE}\n{script}\nprint(json.dumps(results))",
            kind,
            str(plugin_library()),
            module,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stdout}{done.stderr}"
    results = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(results, dict)
    return results


@every_kind
def test_load_library_registers_the_creators_with_their_fields(kind: str) -> None:
    results = perform(
        kind,
        """
trt = import_tensorrt()
registry = trt.get_plugin_registry()
handle = registry.load_library(library)
results["handle"] = handle is not None
results["creators"] = found(registry)
registry.deregister_library(handle)
results["after"] = found(registry)
results["again"] = registry.load_library(library) is not None
results["creators_again"] = found(registry)
""",
    )
    assert results == {
        "handle": True,
        "creators": expected(),
        "after": [],
        "again": True,
        "creators_again": expected(),
    }


@every_kind
def test_a_host_that_only_opens_the_library_gets_the_creators(kind: str) -> None:
    # Python's import keeps TensorRT's symbols local, as Triton does with its backends.
    results = perform(
        kind,
        """
trt = import_tensorrt()
results["before"] = found(trt.get_plugin_registry())
ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL)
ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL)
results["creators"] = found(trt.get_plugin_registry())
""",
    )
    assert results == {"before": [], "creators": expected()}


@every_kind
def test_a_host_with_tensorrt_in_the_global_scope_gets_the_creators(kind: str) -> None:
    package, pattern = LIBRARIES[kind]
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is not installed"
    results = perform(
        kind,
        f"""
real = next(Path({str(spec.submodule_search_locations[0])!r}).glob({pattern!r}))
ctypes.CDLL(str(real), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(library)
results["creators"] = found(import_tensorrt().get_plugin_registry())
""",
    )
    assert results == {"creators": expected()}


@every_kind
def test_load_library_after_a_plain_open_leaves_the_creators_usable(kind: str) -> None:
    results = perform(
        kind,
        """
trt = import_tensorrt()
ctypes.CDLL(library)
registry = trt.get_plugin_registry()
registry.load_library(library)
results["creators"] = found(registry)
""",
    )
    assert results == {"creators": expected()}


def test_without_tensorrt_the_library_opens_and_tells_its_version() -> None:
    results = perform(
        "lean",
        """
plugins = ctypes.CDLL(library)
plugins.trtllm_replayssm_plugin_version.restype = ctypes.c_char_p
results["version"] = plugins.trtllm_replayssm_plugin_version().decode()
""",
    )
    version = results["version"]
    assert version.startswith(f"plugins {PLUGIN_VERSION}, kernel image {kernel_image.VERSION}, TensorRT headers 1")


@every_kind
def test_refusals_reach_the_logger_of_the_host(kind: str) -> None:
    results = perform(
        kind,
        """
trt = import_tensorrt()
lines = []

class Logger(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
    def log(self, severity, message):
        lines.append([severity.name, message])

logger = Logger()
# The first object with a logger makes it the process's; TensorRT's lean runtime cannot be made without a driver.
if kind == "rtx":
    builder = trt.Builder(logger)
registry = trt.get_plugin_registry()
registry.load_library(library)
creator = registry.get_creator("ReplayMamba2", "1", "trtllm_replayssm")
try:
    made = creator.create_plugin("third", trt.PluginFieldCollection([]), trt.TensorRTPhase.RUNTIME)
except Exception as error:
    made = None
results["made"] = made is not None
results["lines"] = [line for line in lines if "trtllm_replayssm] " in line[1]]
""",
    )
    assert not results["made"]
    if kind == "rtx":
        message = 'ReplayMamba2 "third": field history: missing; needed history, max_draft_len, kernels'
        assert results["lines"] == [["ERROR", f"[trtllm_replayssm] {message}"]]
