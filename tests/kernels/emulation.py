"""Run the very CUDA sources on the CPU: compiled by g++ against ``emulator/host_cuda.h``, on torch CPU tensors.

The methods of ``Emulator`` have the signatures of the ops; the same ``Params`` are packed as by ``plugins.launch``.
"""

import ctypes
import os
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtllm_replayssm.contract import plugin_io
from trtllm_replayssm.plugins.build import SOURCE_DIR
from trtllm_replayssm.plugins.layouts import split_projection
from trtllm_replayssm.plugins.params import (
    causal_conv1d_params,
    causal_conv1d_role,
    gated_delta_net_params,
    mamba2_params,
    mamba2_with_conv_params,
)
from trtllm_replayssm.plugins.specializations import (
    CausalConv1dSpecialization,
    GatedDeltaNetSpecialization,
    Kernel,
    Mamba2Specialization,
    Mamba2WithConvSpecialization,
    Specialization,
)

EMULATOR_DIR = Path(__file__).parent / "emulator"
_STALE_BYTES = 2**18
PARAMS = {
    "mamba2": "Mamba2Params",
    "causal_conv1d": "CausalConv1dParams",
    "gated_delta_net": "GatedDeltaNetParams",
}


def compile_host(output: Path, source: Path, defines: dict[str, str], *include_dirs: Path) -> ctypes.CDLL:
    """Compile a C++ file to a shared object and load it."""
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    # The kernels reinterpret bytes as CUDA compilers allow; unused pragmas are CUDA's.
    command += ["-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
    command += [f"-D{name}={value}" for name, value in defines.items()]
    command += [f"-I{folder}" for folder in include_dirs]
    done = subprocess.run([*command, str(source), "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(output))


def compile_emulated(
    output: Path, specialization: Specialization, kernel: Kernel, source_dir: Path = SOURCE_DIR
) -> ctypes.CDLL:
    """Compile one kernel for the emulator to a shared object and load it."""
    defines = specialization.defines(kernel) | {
        "KERNEL_SOURCE": f'"{specialization.folder}/{kernel}.cu"',
        "KERNEL_SYMBOL": specialization.launch_shape(kernel).symbol,
        "KERNEL_PARAMS": "Mamba2WithConvParams" if kernel == "step_with_conv" else PARAMS[specialization.folder],
    }
    return compile_host(output, EMULATOR_DIR / "driver.cpp", defines, EMULATOR_DIR, source_dir)


@cache
def emulated(specialization: Specialization, kernel: Kernel, source_dir: Path = SOURCE_DIR) -> ctypes.CDLL:
    """Compile one kernel for the emulator, once; the sources may be an altered copy."""
    with tempfile.TemporaryDirectory() as folder:
        return compile_emulated(Path(folder) / "kernel.so", specialization, kernel, source_dir)


class EmulationError(Exception):
    """A kernel did what a GPU forbids, or what does not end there; the message says what, and where.

    The input tensors may be left as they were before the kernel before has ended.
    """


@dataclass(frozen=True)
class Emulator:
    """One way to run the kernels.

    Attributes:
        kernel: which one; None chooses by the window as ``launch`` does. "pipelined_step" runs the windows it is for.
        prefill: what then runs the longer ones.
        is_descending: reverse the order in which threads run between barriers.
        source_dir: the sources, ours or an altered copy.
        num_multiprocessors: how many thread blocks a persistent kernel has at most.
    """

    kernel: Kernel | None = None
    prefill: Kernel = "prefill"
    is_descending: bool = False
    source_dir: Path = SOURCE_DIR
    num_multiprocessors: int = 1

    def mamba2(self, *, history: int, max_draft_len: int, **tensors: Tensor) -> Tensor:
        """Emulate ``ops.mamba2`` on CUDA."""
        x, B = tensors["x"], tensors["B"]
        specialization = Mamba2Specialization(
            n_heads=x.shape[2],
            head_dim=x.shape[3],
            d_state=B.shape[3],
            n_groups=B.shape[2],
            history=history,
            max_draft_len=max_draft_len,
            activation_dtype=dtype_name(x),
            state_dtype=dtype_name(tensors["ssm_state"]),
            dt_dtype=dtype_name(tensors["dt"]),
        )
        # An output that the kernel does not write stays NaN and is found.
        y = torch.full(x.shape, torch.nan, dtype=x.dtype)
        inputs = tuple(tensors[name] for name in plugin_io.MAMBA2.inputs)
        self._run_recurrence(specialization, mamba2_params, inputs, y)
        return y

    def mamba2_with_conv(self, *, history: int, max_draft_len: int, **tensors: Tensor | None) -> Tensor:
        """Emulate the kernel behind ``ops.mamba2_with_conv`` on CUDA, a step."""
        named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        (n_heads, head_dim), (n_groups, d_state) = named["x_ring"].shape[2:], named["B_ring"].shape[2:]
        sizes: dict[str, int] = {"n_heads": n_heads, "head_dim": head_dim, "n_groups": n_groups, "d_state": d_state}
        x, B, C = split_projection(named["xBC"], **sizes)
        step = Mamba2Specialization(
            **sizes,
            history=history,
            max_draft_len=max_draft_len,
            activation_dtype=dtype_name(x),
            state_dtype=dtype_name(named["ssm_state"]),
            dt_dtype=dtype_name(named["dt"]),
        )
        named |= {"x": x, "B": B, "C": C}
        inputs = tuple(named[name] for name in plugin_io.MAMBA2.inputs)
        convolution = (named["conv_weight"], tensors["conv_bias"], named["conv_ring"])
        y, num_taken = torch.full(x.shape, torch.nan, dtype=x.dtype), torch.zeros(1, dtype=torch.int32)
        params = mamba2_with_conv_params(inputs, convolution, y, num_taken.data_ptr())
        specialization = Mamba2WithConvSpecialization(step, named["conv_weight"].shape[1])
        self._run(specialization, "step_with_conv", params, (*inputs, *convolution), y)
        check_counter(num_taken)
        return y

    def gated_delta_net(self, *, history: int, max_draft_len: int, **tensors: Tensor) -> Tensor:
        """Emulate ``ops.gated_delta_net`` on CUDA."""
        k, v = tensors["k"], tensors["v"]
        specialization = GatedDeltaNetSpecialization(
            n_key_heads=k.shape[2],
            n_value_heads=v.shape[2],
            key_dim=k.shape[3],
            value_dim=v.shape[3],
            history=history,
            max_draft_len=max_draft_len,
            activation_dtype=dtype_name(v),
            state_dtype=dtype_name(tensors["ssm_state"]),
            gate_dtype=dtype_name(tensors["a"]),
        )
        o = torch.full(v.shape, torch.nan, dtype=v.dtype)
        inputs = tuple(tensors[name] for name in plugin_io.GATED_DELTA_NET.inputs)
        self._run_recurrence(specialization, gated_delta_net_params, inputs, o)
        return o

    def causal_conv1d(self, *, activation: str | None, **tensors: Tensor | None) -> Tensor:
        """Emulate ``ops.causal_conv1d`` on CUDA."""
        x, weight = tensors["x"], tensors["weight"]
        assert x is not None and weight is not None
        specialization = CausalConv1dSpecialization(x.shape[2], weight.shape[1], dtype_name(x))
        y = torch.full(x.shape, torch.nan, dtype=x.dtype)
        inputs = tuple(tensors[name] for name in plugin_io.CAUSAL_CONV1D.inputs)
        kernel = self.kernel or causal_conv1d_role(x.shape[1])
        self._run(specialization, kernel, causal_conv1d_params(inputs, y, is_silu=activation == "silu"), inputs, y)
        return y

    def _run_recurrence(
        self,
        specialization: Mamba2Specialization | GatedDeltaNetSpecialization,
        pack: Callable[[tuple[Tensor, ...], Tensor, int], Any],
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        num_taken = torch.zeros(1, dtype=torch.int32)
        kernel = (self.kernel or "step") if output.shape[1] <= specialization.window else self.prefill
        self._run(specialization, kernel, pack(inputs, output, num_taken.data_ptr()), inputs, output)
        check_counter(num_taken)

    def _run(
        self, specialization: Specialization, kernel: Kernel, params: Any, inputs: tuple[Tensor | None, ...], y: Tensor
    ) -> None:
        library = emulated(specialization, kernel, self.source_dir)
        shape = specialization.launch_shape(kernel)
        grid_x, grid_y, _ = shape.grid(y.shape[0], self.num_multiprocessors)
        stale = declare_memory(library, [tensor for tensor in inputs if tensor is not None])
        library.emulate.restype = ctypes.c_char_p
        failure = library.emulate(ctypes.byref(params), grid_x, grid_y, int(self.is_descending))
        del stale  # needed as long as the launch
        if failure is not None:
            raise EmulationError(failure.decode())


def check_counter(num_taken: Tensor) -> None:
    """Refuse a counter of work that a launch did not leave as the next one needs it."""
    if num_taken.item() != 0:
        raise EmulationError(f"the counter was left at {num_taken.item()}: the next launch would begin with it")


def declare_memory(library: ctypes.CDLL, tensors: list[Tensor]) -> list[bytes]:
    """Tell the emulator where tensors are, and what stands there while the kernel before this one still runs.

    Lengths and slots are then any numbers, floating-point numbers NaN. Large memory, the pools', stays as it is.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    stale = []
    for address, tensor in storages.items():
        num_bytes = tensor.untyped_storage().nbytes()
        content = None
        if tensor.dtype == torch.int32:
            rng = np.random.default_rng(zlib.crc32(tensor.numpy().tobytes()))
            small, any_number = rng.integers(-3, 40, num_bytes // 4), rng.integers(-(2**31), 2**31, num_bytes // 4)
            content = np.where(rng.random(num_bytes // 4) < 0.7, small, any_number).astype(np.int32).tobytes()
        elif num_bytes <= _STALE_BYTES:
            content = b"\xff" * num_bytes
        if content is not None:
            stale.append(content)
        library.declare(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), content)
    return stale


def dtype_name(tensor: Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch.")
