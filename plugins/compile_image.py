"""Kernel images: the kernels of one plugin, compiled for the architectures that an engine is built for."""

from collections.abc import Sequence
from dataclasses import replace

from trtllm_replayssm.contract.capability import capability_text
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.plugins import build
from trtllm_replayssm.plugins.kernel_image import KernelEntry, pack
from trtllm_replayssm.plugins.specializations import (
    CONV_PREFIX,
    Mamba2WithConvSpecialization,
    Role,
    Specialization,
    constants_of,
)


def kernel_image(specialization: Specialization, architectures: Sequence[str]) -> bytes:
    """Compile all roles for every architecture and pack them with their launch table.

    Args:
        specialization: the constants of the kernels.
        architectures: of ``build.ARCHITECTURES``; repeated ones count once.

    Returns:
        A kernel image (``plugins.kernel_image``).

    Raises:
        UnsupportedError: an unknown architecture, or one that these constants do not fit.
        BackendError: cuda-core or NVRTC is not installed.
        BuildError: NVRTC refuses the sources.
    """
    entries = [entry for name in dict.fromkeys(architectures) for entry in _entries(specialization, name)]
    return pack(constants_of(specialization), entries)


def architecture_of(compute_capability: int) -> str:
    """Return the architecture to compile for so that the kernel runs on a device.

    Args:
        compute_capability: 10 * major + minor.

    Returns:
        An architecture of that very capability, or of the newest earlier one of the same major number whose cubins run
        on later minors.

    Raises:
        UnsupportedError: no kernel runs on such a device.
    """
    fitting = [
        (capability_of(name), name)
        for name in build.ARCHITECTURES
        if capability_of(name) == compute_capability
        or (not is_exact(name) and compute_capability // 10 * 10 <= capability_of(name) <= compute_capability)
    ]
    if not fitting:
        raise UnsupportedError(
            f"compute capability: found {capability_text(compute_capability)}; needed a device that runs one of "
            f"{', '.join(build.ARCHITECTURES)}."
        )
    return max(fitting)[1]


def capability_of(architecture: str) -> int:
    """Return 10 * major + minor of an architecture's name."""
    return int(architecture.removeprefix("sm_").rstrip("a"))


def is_exact(architecture: str) -> bool:
    """Say whether its cubins run on that capability alone (sm_90a), not on later minors of the same major."""
    return architecture.endswith("a")


def has_dependent_launch(architecture: str) -> bool:
    """Say whether kernels may start before the one before them has finished: since compute capability 9.0.

    All of ours wait by themselves then (``kernels/common/dependent_launch.cuh``).
    """
    return capability_of(architecture) >= 90


def _entries(specialization: Specialization, architecture: str) -> list[KernelEntry]:
    entries = [_entry(specialization, role, architecture) for role in specialization.roles(architecture)]
    if isinstance(specialization, Mamba2WithConvSpecialization):
        convolution = _entries(specialization.convolution, architecture)
        named_apart = [replace(entry, role=CONV_PREFIX + entry.role) for entry in convolution]
        return [*named_apart, *_entries(specialization.step, architecture), *entries]
    return entries


def _entry(specialization: Specialization, role: Role, architecture: str) -> KernelEntry:
    shape = specialization.launch_shape(specialization.kernel(role, architecture))
    return KernelEntry(
        role=role,
        symbol=shape.symbol,
        compute_capability=capability_of(architecture),
        is_exact=is_exact(architecture),
        grid_x=shape.grid_x,
        block_x=shape.block_x,
        dynamic_shared_bytes=shape.dynamic_shared_bytes,
        is_persistent=shape.is_persistent,
        is_dependent_launch=has_dependent_launch(architecture),
        rows_per_block=shape.rows_per_block,
        most_blocks_per_multiprocessor=shape.most_blocks_per_multiprocessor,
        cubin=build.compile_kernel(specialization, role, architecture),
    )
