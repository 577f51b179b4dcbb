"""The C++ TensorRT plugin library: found, or compiled with g++ alone on first use.

``libtrtllm_replayssm_plugin.so`` links to neither TensorRT nor CUDA; TensorRT's headers are all it needs, and they are
looked for where an installed TensorRT has them. ``python -m trtllm_replayssm.plugins.library --output DIR`` leaves a
copy for C++ programs and for Triton.
"""

import argparse
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_replayssm.errors import BackendError, BuildError, ReplaySSMError
from trtllm_replayssm.plugins.cache import beside, cache_dir, content_hash

LIBRARY_NAME = "libtrtllm_replayssm_plugin.so"
LIBRARY_VARIABLE = "TRTLLM_REPLAYSSM_PLUGIN_LIBRARY"
INCLUDE_VARIABLE = "TENSORRT_INCLUDE_DIR"

SOURCE_DIR = Path(__file__).resolve().parent / "cpp"
KERNEL_DIR = Path(__file__).resolve().parent / "kernels"
_HEADER = "NvInferRuntime.h"
_VERSION_HEADER = "NvInferVersion.h"
_OLDEST_HEADERS = (10, 14)
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
# The registry that loaded the library may unload it while an engine, or the module cache, still points into it.
_LINK_FLAGS = ("-Wl,-z,nodelete", "-ldl", "-pthread")
_COMPILE_SECONDS = 300


def plugin_library() -> Path:
    """Return the path of the plugin library; compile it into the cache when it is not there.

    ``$TRTLLM_REPLAYSSM_PLUGIN_LIBRARY`` names a prebuilt one, which then is taken as it is.

    Raises:
        BackendError: the named library does not exist, or no TensorRT headers or compiler are found.
        BuildError: the compiler refuses the sources, or the cache cannot be written.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        path = Path(named).expanduser().resolve()
        if not path.is_file():
            raise BackendError(
                f"{LIBRARY_VARIABLE}: found {named!r}, which is no file; needed the path of {LIBRARY_NAME}. "
                "Unset it to compile the library, or build one with python -m trtllm_replayssm.plugins.library."
            )
        return path
    return compile_library(LIBRARY_NAME, sorted(SOURCE_DIR.glob("*.cpp")))


def compile_library(name: str, sources: Sequence[Path]) -> Path:
    """Compile a shared library against TensorRT's headers into the cache; do nothing when it is there.

    Safe for processes that do so at once. ``$CXX`` is respected.

    Args:
        name: file name, ``lib<...>.so``.
        sources: C++ files; headers beside them and in ``plugins`` count as their content.

    Returns:
        ``<cache>/<content hash>/<name>``.

    Raises:
        BackendError: no TensorRT headers or no compiler.
        BuildError: the compiler refuses the sources, or the cache cannot be written.
    """
    include = tensorrt_include_dir()
    options = [*_FLAGS, "-isystem", str(include), "-idirafter", str(SOURCE_DIR / "cuda_shim")]
    command = [*_compiler(), *options, *_LINK_FLAGS]
    digest = content_hash(name, *command, platform.machine(), *(part for file in _inputs(sources) for part in file))
    path = cache_dir() / digest / name
    if path.is_file():
        return path
    with beside(path) as temporary:
        run_compiler([*options, *map(str, sources), "-o", str(temporary), *_LINK_FLAGS], name)
    return path


def tensorrt_include_dir() -> Path:
    """Return the folder of TensorRT's C++ headers.

    Looked for in ``$TENSORRT_INCLUDE_DIR``, the system's folders, and the ``kernel-lens`` wheel, which carries them.

    Raises:
        BackendError: none is new enough; the message lists the places and the way out.
    """
    named = os.environ.get(INCLUDE_VARIABLE)
    if named:
        return _require_headers([Path(named).expanduser()], f"{INCLUDE_VARIABLE}={named}")
    machine = platform.machine()
    places = [
        *(Path(root) / "include" for root in (os.environ.get("TENSORRT_ROOT"), os.environ.get("TRT_ROOT")) if root),
        Path(f"/usr/include/{machine}-linux-gnu"),
        Path("/usr/include"),
        Path("/usr/local/include"),
        Path("/usr/local/tensorrt/include"),
        Path("/opt/tensorrt/include"),
        *_wheel_folders("kernel_lens", "include/tensorrt"),
    ]
    return _require_headers(places, "TensorRT headers")


def header_version(include: Path) -> tuple[int, int, int] | None:
    """Return (major, minor, patch) of the TensorRT headers in a folder; None when they are not there."""
    try:
        text = (include / _VERSION_HEADER).read_text(errors="replace")
    except OSError:
        return None
    if not (include / _HEADER).is_file():
        return None
    values = [_macro(text, f"NV_TENSORRT_{part}") for part in ("MAJOR", "MINOR", "PATCH")]
    major, minor, patch = (0 if value is None else value for value in values)
    return major, minor, patch


def _macro(text: str, name: str) -> int | None:
    """Return the number that a macro stands for, through other macros."""
    for _ in range(4):
        match = re.search(rf"^\s*#\s*define\s+{name}\s+(\w+)", text, re.MULTILINE)
        if match is None:
            return None
        if match.group(1).isdigit():
            return int(match.group(1))
        name = match.group(1)
    return None


def _require_headers(places: Sequence[Path], what: str) -> Path:
    searched: list[str] = []
    for place in places:
        version = header_version(place)
        if version is not None and version[:2] >= _OLDEST_HEADERS:
            return place
        found = f"no {_HEADER}" if version is None else "version " + ".".join(map(str, version))
        searched.append(f"  {place}: {found}")
    raise BackendError(
        f"{what}: found none that fit; needed {_HEADER} of TensorRT {_OLDEST_HEADERS[0]}.{_OLDEST_HEADERS[1]} or "
        "newer. Looked in:\n" + "\n".join(searched) + f"\nName their folder with {INCLUDE_VARIABLE}, or: "
        "pip install --no-deps kernel-lens==2.0.1 (a wheel that carries them)"
    )


def _wheel_folders(package: str, inside: str) -> list[Path]:
    """Return a folder inside an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return [Path(f"<site-packages>/{package}/{inside}")]
    return [Path(place) / inside for place in spec.submodule_search_locations or ()]


def _inputs(sources: Sequence[Path]) -> list[tuple[str, bytes]]:
    """Return the name and content of every file that may go into a compilation."""
    headers = {header for folder in {SOURCE_DIR, *(s.parent for s in sources)} for header in folder.rglob("*.h")}
    # The kernels' params.h are included by the plugins, and by nobody's choice may they be stale.
    headers |= set(KERNEL_DIR.rglob("*.h"))
    version = tensorrt_include_dir() / _VERSION_HEADER
    return [(path.name, path.read_bytes()) for path in [*sources, *sorted(headers), version]]


def run_compiler(arguments: Sequence[str], name: str) -> None:
    """Run the C++ compiler: ``$CXX``, or g++.

    Args:
        arguments: its command line.
        name: what is compiled, for messages.

    Raises:
        BackendError: there is no compiler.
        BuildError: it fails; what it said is in the message.
    """
    command = [*_compiler(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except FileNotFoundError as error:
        raise BackendError(
            f"{name}: found no compiler {command[0]!r}; needed g++ with C++17. Install g++, or name another with CXX."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{name}: found {command[0]} running for {_COMPILE_SECONDS} s; needed less.") from error
    if done.returncode:
        raise BuildError(f"{name}: {command[0]} returned {done.returncode}. It said:\n{done.stderr.strip()}")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the library, copy it where asked, and print its path."""
    parser = argparse.ArgumentParser(prog="python -m trtllm_replayssm.plugins.library", description=main.__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to copy the library to; made if absent")
    output = parser.parse_args(arguments).output
    try:
        path = plugin_library()
        if output is not None:
            copy = Path(output) / LIBRARY_NAME
            with beside(copy) as temporary:
                temporary.write_bytes(path.read_bytes())
            path = copy
    except ReplaySSMError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
