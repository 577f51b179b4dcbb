"""Load compiled kernels on a device and launch them on torch's current stream."""

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from trtllm_replayssm.errors import BackendError, OpArgumentError
from trtllm_replayssm.plugins import build
from trtllm_replayssm.plugins.compile_image import architecture_of, has_dependent_launch
from trtllm_replayssm.plugins.specializations import MAX_ROWS, LaunchShape, Role, Specialization

# A kernel gets more dynamic shared memory than this only after asking for it (CUDA programming guide).
_DEFAULT_SHARED_BYTES = 48 * 1024
_thread = threading.local()


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device.

    Attributes:
        function: the driver's handle, a ``CUfunction``.
        shape: its grid, block and shared memory.
        code: the ``cuda.core.ObjectCode`` that keeps it loaded.
        num_multiprocessors: of the device.
        is_dependent: launched with programmatic stream serialization.
    """

    function: Any
    shape: LaunchShape
    code: Any
    num_multiprocessors: int
    is_dependent: bool


@cache
def device_architecture(device_index: int) -> str:
    """Return the architecture that kernels are compiled for on a device.

    Raises:
        UnsupportedError: no kernel runs on this device.
    """
    major, minor = torch.cuda.get_device_capability(device_index)
    return architecture_of(10 * major + minor)


@cache
def load(specialization: Specialization, role: Role, device_index: int) -> LoadedKernel:
    """Compile a kernel for a device, or take it from the cache, and load it: once per process.

    Raises:
        UnsupportedError: no kernel runs on this device, or these constants do not fit it.
        BackendError: cuda-core or NVRTC is not installed, or the driver refuses.
        BuildError: NVRTC refuses the sources.
    """
    architecture = device_architecture(device_index)
    cubin = build.compile_kernel(specialization, role, architecture)
    shape = specialization.launch_shape(specialization.kernel(role, architecture))
    driver: Any = build.cuda_module("bindings.driver")
    core: Any = build.cuda_module("core")
    _make_device_current(device_index)
    code = core.ObjectCode.from_cubin(cubin, name=shape.symbol)
    kernel = code.get_kernel(shape.symbol)
    if shape.dynamic_shared_bytes > _DEFAULT_SHARED_BYTES:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.CUdevice(device_index)
        handle = driver.CUkernel(int(kernel.handle))
        _check(shape.symbol, *driver.cuKernelSetAttribute(attribute, shape.dynamic_shared_bytes, handle, device))
    # A launch takes a CUkernel wherever it takes a CUfunction (CUDA driver API, cuLaunchKernelEx).
    num_multiprocessors = torch.cuda.get_device_properties(device_index).multi_processor_count
    is_dependent = has_dependent_launch(architecture)
    return LoadedKernel(driver.CUfunction(int(kernel.handle)), shape, code, num_multiprocessors, is_dependent)


def launch(kernel: LoadedKernel, params: ctypes.Structure, num_rows: int, device: torch.device) -> None:
    """Launch a kernel for all rows of a step on torch's current stream of a device; does not wait for it.

    Args:
        kernel: loaded on that device.
        params: its ``Params`` struct; copied by the driver before this returns.
        num_rows: rows of the step, 1 to 65535.
        device: with an index.

    Raises:
        OpArgumentError: too many rows.
        BackendError: the driver refuses the launch.
    """
    if num_rows > MAX_ROWS:
        raise OpArgumentError(f"{kernel.shape.symbol}: found {num_rows} rows of a step; needed at most {MAX_ROWS}.")
    driver: Any = build.cuda_module("bindings.driver")
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    with torch.cuda.device(device):
        _make_device_current(device.index)
        config = _launch_config(kernel, num_rows, torch.cuda.current_stream(device).cuda_stream)
        result = driver.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(arguments), 0)
    _check(kernel.shape.symbol, *result)


def _launch_config(kernel: LoadedKernel, num_rows: int, stream: int) -> Any:
    driver: Any = build.cuda_module("bindings.driver")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.shape.grid(num_rows, kernel.num_multiprocessors)
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.shape.block_x, 1, 1
    config.sharedMemBytes = kernel.shape.dynamic_shared_bytes
    config.hStream = driver.CUstream(stream)
    if kernel.is_dependent:
        config.attrs = [_stream_serialization()]
        config.numAttrs = 1
    return config


@cache
def _stream_serialization() -> Any:
    driver: Any = build.cuda_module("bindings.driver")
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _make_device_current(device_index: int) -> None:
    """Bind the device's primary context to this thread: torch does so at its own first driver call, maybe after us."""
    if getattr(_thread, "device_index", None) != device_index:
        build.cuda_module("core").Device(device_index).set_current()
        _thread.device_index = device_index


def _check(symbol: str, result: Any) -> None:
    if result.value != 0:
        raise BackendError(f"{symbol}: found {result.name} from the CUDA driver; needed CUDA_SUCCESS.")
