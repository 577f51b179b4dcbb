"""Compile the kernels with NVRTC: a specialization, a role and an architecture give a cubin; no GPU is needed.

Cubins are cached on disk by the hash of all that goes into them (``plugins.cache``), so each is compiled once per
machine. The CUDA packages are imported at the first compilation, not with this module.
"""

import hashlib
import importlib
import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trtllm_replayssm.errors import BackendError, BuildError, UnsupportedError
from trtllm_replayssm.plugins.cache import cache_dir, content_hash, write_beside
from trtllm_replayssm.plugins.specializations import Kernel, Role, Specialization

SOURCE_DIR = Path(__file__).parent / "kernels"
MAX_SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_103a": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""Architecture -> shared memory that one thread block may have, in bytes (CUDA programming guide)."""
ARCHITECTURES = tuple(MAX_SHARED_BYTES)
INSTALL = (
    "pip install 'cuda-core>=1.0' 'cuda-bindings>=13.0' 'nvidia-cuda-nvrtc>=13.0' 'nvidia-cuda-runtime>=13.0' "
    "'nvidia-cuda-cccl>=13.0'"
)
"""The packages of the ``cuda13`` extra, as pyproject.toml lists them."""
RACECHECK_VARIABLE = "TRTLLM_REPLAYSSM_RACECHECK"
"""When set, kernels are compiled with barriers that compute-sanitizer's racecheck understands."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def compile_kernel(specialization: Specialization, role: Role, architecture: str) -> bytes:
    """Compile one kernel, or take it from the cache.

    Args:
        specialization: the kernel's constants.
        role: one that the specialization has for the architecture.
        architecture: one of ``ARCHITECTURES``.

    Returns:
        The cubin.

    Raises:
        UnsupportedError: an unknown architecture, or one whose shared memory is too small for these constants.
        BackendError: cuda-core or NVRTC is not installed.
        BuildError: NVRTC refuses the sources (its log is in the message), or the cache cannot be written.
    """
    check_architecture(specialization, role, architecture)
    entry = cache_dir() / "kernels" / f"{_key(specialization, role, architecture)}.cubin"
    cubin = _read_entry(entry)
    if cubin is None:
        cubin = _compile(specialization, role, architecture)
        write_beside(entry, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def check_architecture(specialization: Specialization, role: Role, architecture: str) -> None:
    """Refuse a kernel that an architecture does not have or cannot hold.

    Raises:
        UnsupportedError: an unknown architecture, a role that the specialization has not for it, or one whose shared
            memory is too small for these constants.
    """
    if architecture not in MAX_SHARED_BYTES:
        raise UnsupportedError(f"architecture: found {architecture!r}; needed one of {', '.join(ARCHITECTURES)}.")
    if role not in specialization.roles(architecture):
        raise UnsupportedError(
            f"{specialization}: found no {role} kernel for {architecture}; needed a role of "
            f"{', '.join(specialization.roles(architecture))}."
        )
    kernel = specialization.kernel(role, architecture)
    needed, available = specialization.launch_shape(kernel).dynamic_shared_bytes, MAX_SHARED_BYTES[architecture]
    if needed > available:
        raise UnsupportedError(
            f"{specialization}: found {needed} bytes of shared memory in its {role} kernel; needed at most {available} "
            f"on {architecture}. Lower history or max_draft_len, or use a 16-bit activation type."
        )


def _key(specialization: Specialization, role: Role, architecture: str) -> str:
    kernel = specialization.kernel(role, architecture)
    options = [f"{name}={value}" for name, value in sorted(_macros(specialization, kernel).items())]
    parts: list[bytes | str] = [kernel, architecture, *options, _nvrtc_version()]
    for folder in ("common", "nvrtc", specialization.folder):
        for path in sorted(path for path in (SOURCE_DIR / folder).rglob("*") if path.is_file()):
            parts += [path.relative_to(SOURCE_DIR).as_posix(), path.read_bytes()]
    return content_hash(*parts)


def _macros(specialization: Specialization, kernel: Kernel) -> dict[str, str]:
    """Return the macros that a kernel is compiled with."""
    macros = specialization.defines(kernel)
    return {**macros, "REPLAY_EVERY_LANE_ARRIVES": "1"} if os.environ.get(RACECHECK_VARIABLE) else macros


def _read_entry(entry: Path) -> bytes | None:
    """Return a cached cubin; None when it is absent or not what was written."""
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _compile(specialization: Specialization, role: Role, architecture: str) -> bytes:
    core = cuda_module("core")
    kernel = specialization.kernel(role, architecture)
    source = SOURCE_DIR / specialization.folder / f"{kernel}.cu"
    options = core.ProgramOptions(
        name=f"{specialization.folder}/{kernel}.cu",
        arch=architecture,
        std="c++17",
        include_path=[str(SOURCE_DIR), str(SOURCE_DIR / "nvrtc")],
        define_macro=list(_macros(specialization, kernel).items()),
    )
    try:
        return bytes(core.Program(source.read_text(), "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core does not export the class that it raises
        raise BuildError(
            f"{source.name} for {specialization}: found an error of NVRTC {_nvrtc_version()} for {architecture}; "
            f"needed sources that compile. Its log:\n{error}"
        ) from error


def cuda_module(name: str) -> ModuleType:
    """Import ``cuda.<name>``: the CUDA packages are optional and load when they are first used.

    Raises:
        BackendError: the package is not installed.
    """
    try:
        return importlib.import_module(f"cuda.{name}")
    except ImportError as error:
        raise BackendError(
            f"cuda.{name}: found {error}; needed cuda-core and NVRTC of CUDA 13. Install them with: {INSTALL}"
        ) from error


@cache
def _nvrtc_version() -> str:
    nvrtc: Any = cuda_module("bindings.nvrtc")
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise BackendError(
            f"NVRTC: found {error}; needed the NVRTC library of CUDA 13. Install it with: {INSTALL}"
        ) from error
    return f"{major}.{minor}"
