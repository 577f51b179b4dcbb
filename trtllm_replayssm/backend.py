"""TensorRT, whichever of its two kinds is installed: the only module that imports it.

``tensorrt`` (10.14 or newer, below 12) and ``tensorrt_rtx`` (1.7 or newer, below 2) have one API as far as this package
uses it. TensorRT-RTX installs from PyPI and builds engines on machines without a GPU.
"""

import ctypes
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from trtllm_replayssm.contract.manifest import BackendName
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE, PLUGIN_VERSION, PLUGINS
from trtllm_replayssm.errors import BackendError, BuildError
from trtllm_replayssm.plugins import cache as build_cache
from trtllm_replayssm.plugins.library import plugin_library, run_compiler

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

_IMPORT_NAMES = {"tensorrt": ("tensorrt",), "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
_OLDEST = {"tensorrt": (10, 14), "tensorrt_rtx": (1, 7)}
# The next major version: its C++ classes may be laid out differently from those that the plugin library calls.
_BELOW = {"tensorrt": 12, "tensorrt_rtx": 2}
_INSTALL = {
    "tensorrt": "pip install 'tensorrt-cu13>=10.14,<12'",
    "tensorrt_rtx": "pip install 'tensorrt-rtx-cu13-libs>=1.7,<2' 'tensorrt-rtx-cu13-bindings>=1.7,<2'",
}
# How the builder begins its list of layers, a verbose message.
_LAYER_REPORT = "Engine Layer Information:"
# The first error is the cause; what follows are the callers' words on it.
_SHOWN_ERRORS = 4


@dataclass
class LogLines:
    """What TensorRT logged during a ``Backend.recording`` block.

    Attributes:
        problems: errors and warnings, in order.
        failures: the errors among them.
        layer_reports: the builder's lists of the layers of an engine.
    """

    problems: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    layer_reports: list[str] = field(default_factory=list)

    def errors(self) -> str:
        """Return the first errors, or else warnings, as one indented block, to stand in an error message."""
        lines = self.failures or self.problems
        shown = [f"  {line}" for line in lines[:_SHOWN_ERRORS]]
        if lines[_SHOWN_ERRORS:]:
            shown.append(f"  and {len(lines) - _SHOWN_ERRORS} more")
        return "\n".join(shown) or "  (TensorRT logged nothing)"


@dataclass(frozen=True)
class Backend:
    """A TensorRT that can be used.

    Attributes:
        name: "tensorrt" or "tensorrt_rtx".
        version: of the installed package.
        trt: the Python module.
        logger: for every TensorRT object; silent unless recording, but for internal errors.
    """

    name: BackendName
    version: str
    trt: ModuleType
    logger: Any

    @contextmanager
    def recording(self) -> Iterator[LogLines]:
        """Collect what TensorRT logs inside the block."""
        lines = LogLines()
        self.logger.lines, previous = lines, self.logger.lines
        try:
            yield lines
        finally:
            self.logger.lines = previous

    def load_plugins(self) -> Path:
        """Register this package's plugins; returns the library. Further calls do nothing.

        Raises:
            BackendError: the library does not load, or does not register the creators.
            BuildError: the library cannot be compiled.
        """
        path = plugin_library()
        registry = self.trt.get_plugin_registry()
        if not _missing_creators(registry):
            return path
        with self.recording() as lines:
            registry.load_library(str(path))
            missing = _missing_creators(registry)
        if missing:
            raise BackendError(
                f"plugin library {path}: found no creator for {', '.join(missing)} after {self.name} {self.version} "
                f"loaded it; needed all of {', '.join(io.op_type for io in PLUGINS)}. TensorRT said:\n{lines.errors()}"
            )
        return path


def load(name: BackendName | None = None) -> Backend:
    """Import TensorRT and make it ready to parse, build and run.

    Args:
        name: "tensorrt" or "tensorrt_rtx"; None takes the first that can be imported, in this order.

    Raises:
        BackendError: neither is installed, the wanted one is not, or it is too old or too new.
    """
    if name is not None and name not in BACKENDS:
        raise BackendError(f"backend: found {name!r}; needed one of {', '.join(BACKENDS)}.")
    wanted = BACKENDS if name is None else (name,)
    failures: list[str] = []
    for candidate in wanted:
        for module_name in _IMPORT_NAMES[candidate]:
            try:
                module = importlib.import_module(module_name)
            except (ImportError, OSError) as error:
                failures.append(f"  import {module_name}: {str(error).splitlines()[0] if str(error) else error!r}")
                continue
            if _is_usable(module):
                return _prepare(candidate, module)
            failures.append(f"  import {module_name}: the module has no Builder; its installation is incomplete")
    ways = " or ".join(_INSTALL[candidate] for candidate in reversed(wanted))
    raise BackendError(
        f"TensorRT: found none; needed {' or '.join(wanted)}. Tried:\n" + "\n".join(failures) + f"\n{ways}"
    )


def _is_usable(module: ModuleType) -> bool:
    # A folder of another project named "tensorrt" imports as an empty namespace package.
    return hasattr(module, "Builder") and hasattr(module, "__version__")


@cache
def _prepare(name: BackendName, module: ModuleType) -> Backend:
    version = str(module.__version__)
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not _OLDEST[name] <= found < (_BELOW[name],):
        needed = ".".join(str(part) for part in _OLDEST[name])
        raise BackendError(
            f"{name}: found version {version}; needed {needed} or newer, below {_BELOW[name]}. "
            f"{_INSTALL[name]} --upgrade"
        )
    if name == "tensorrt_rtx" and sys.platform == "linux":
        _provide_library_name()
    return Backend(name, version, module, _recording_logger(module))


def _recording_logger(trt: ModuleType) -> Any:
    severities = trt.ILogger.Severity

    class RecordingLogger(trt.ILogger):  # type: ignore[misc,name-defined]
        """Hands TensorRT's lines to whoever records; internal errors outside a recording go to stderr."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: LogLines | None = None

        def log(self, severity: Any, msg: str) -> None:
            is_problem = severity <= severities.WARNING
            if self.lines is not None:
                if msg.startswith(_LAYER_REPORT):
                    self.lines.layer_reports.append(msg)
                if is_problem:
                    self.lines.problems.append(msg)
                if severity <= severities.ERROR:
                    self.lines.failures.append(msg)
            elif severity <= severities.ERROR:
                sys.stderr.write(f"TensorRT: {msg}\n")

    return RecordingLogger()


def _missing_creators(registry: Any) -> list[str]:
    found = {(creator.name, creator.plugin_version, creator.plugin_namespace) for creator in registry.all_creators}
    return [io.op_type for io in PLUGINS if (io.op_type, PLUGIN_VERSION, PLUGIN_NAMESPACE) not in found]


def _provide_library_name() -> None:
    """Make ``dlopen("libtensorrt_rtx.so")`` work.

    TensorRT-RTX's ONNX parser opens that name when it meets a plugin node; the wheels ship ``libtensorrt_rtx.so.1``
    alone, and the process would end. The dynamic linker matches names against the SONAME of every loaded library, so
    an empty library of that SONAME which depends on the real one answers for it; nothing is written into the wheel.

    Raises:
        BackendError: neither a compiler nor a writable folder beside the library is there.
    """
    if _opens("libtensorrt_rtx.so"):
        return
    library = _loaded_library("libtensorrt_rtx.so.")
    if library is None or (library.parent / "libtensorrt_rtx.so").exists():
        return
    stub = build_cache.cache_dir() / f"tensorrt_rtx_name_{build_cache.content_hash(str(library))}.so"
    try:
        if not stub.exists():
            _compile_name(stub, library)
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    except (OSError, BackendError, BuildError) as error:
        _link_name(library, error)


def _compile_name(stub: Path, library: Path) -> None:
    with build_cache.beside(stub) as path:
        run_compiler(
            ["-shared", "-x", "c++", "/dev/null", "-o", str(path)]
            + ["-Wl,--no-as-needed", "-Wl,-soname,libtensorrt_rtx.so", "-x", "none", str(library)],
            stub.name,
        )


def _link_name(library: Path, reason: Exception) -> None:
    try:
        (library.parent / "libtensorrt_rtx.so").symlink_to(library.name)
    except OSError as error:
        raise BackendError(
            f"{library}: found no libtensorrt_rtx.so beside it, which the ONNX parser opens; could neither compile a "
            f"stand-in ({reason}) nor link the name ({error}). Install g++, or name a compiler with CXX, "
            f"or: ln -s {library.name} {library.parent / 'libtensorrt_rtx.so'}"
        ) from error


def _opens(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _loaded_library(prefix: str) -> Path | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(prefix):
            return path
    return None
