"""The machine that is measured: its device, its versions, its clocks."""

import os
import platform
import shutil
import subprocess

import torch

from trtllm_replayssm import __version__
from trtllm_replayssm.contract.geometry import Frozen
from trtllm_replayssm.errors import BackendError, ConfigError

_QUERY = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")


class Machine(Frozen):
    """What times depend on beside the code.

    Attributes:
        card: name of the device.
        compute_capability: "9.0".
        multiprocessors: of the device.
        memory_bytes: of the device.
        l2_bytes: its L2 cache.
        nvidia_smi: driver and clocks (MHz) right after the measurements, by nvidia-smi's names; empty without it.
        versions: of this package, Python, torch and torch's CUDA.
    """

    card: str
    compute_capability: str
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    nvidia_smi: dict[str, str]
    versions: dict[str, str]


def cuda_device(name: str) -> torch.device:
    """Return the CUDA device of a name, with its index, for ``bench kernels``.

    Raises:
        ConfigError: no name of a device.
        BackendError: the CPU, or a device that is not there.
    """
    device = _named(name, "cuda or cuda:<n>")
    if device.type == "cpu":
        raise BackendError(f"bench kernels: found device {name}; needed a CUDA device, since its kernels are timed.")
    return _indexed(device, "bench kernels")


def any_device(name: str) -> torch.device:
    """Return the CPU or the CUDA device of a name, for ``bench e2e``.

    Raises:
        ConfigError: no name of a device.
        BackendError: a CUDA device that is not there.
    """
    device = _named(name, "cuda, cuda:<n> or cpu")
    return device if device.type == "cpu" else _indexed(device, "bench e2e", " A tiny model runs with --device cpu.")


def _named(name: str, known: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: found {name!r}; needed {known}.")
    return device


def _indexed(device: torch.device, command: str, otherwise: str = "") -> torch.device:
    if not torch.cuda.is_available():
        raise BackendError(
            f"{command}: found no CUDA device with torch {torch.__version__}; needed one to measure. Run it on a "
            f"machine with an NVIDIA GPU and a CUDA build of torch.{otherwise}"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise BackendError(f"device: found {device} on a machine with {torch.cuda.device_count()} CUDA devices.")
    return torch.device("cuda", index)


def describe(device: torch.device) -> Machine:
    """Describe a device and the software that drives it."""
    versions = {
        "trtllm_replayssm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    if device.type == "cpu":
        return Machine(
            card="CPU",
            compute_capability="none",
            multiprocessors=os.cpu_count() or 1,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            l2_bytes=0,
            nvidia_smi={},
            versions=versions,
        )
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        card=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        nvidia_smi=_ask_nvidia_smi(f"GPU-{properties.uuid}"),
        versions=versions,
    )


def _ask_nvidia_smi(uuid: str) -> dict[str, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--id={uuid}", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_QUERY, (value.strip() for value in done.stdout.split(",")), strict=False))
