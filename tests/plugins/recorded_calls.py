"""Scenarios of a plugin beside the recording driver, for tests that then change one thing of them."""

import ctypes
from dataclasses import replace

from tests.harness.recorded_run import Call, Recording, Scenario
from tests.plugins.plugin_calls import INTS, right_tensors
from tests.plugins.plugin_networks import generic_roles, specialization_of
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2, MAMBA2_WITH_CONV, PluginIO
from trtllm_replayssm.plugins import kernel_image
from trtllm_replayssm.plugins.params import (
    CausalConv1dParams,
    GatedDeltaNetParams,
    Mamba2Params,
    Mamba2WithConvParams,
)
from trtllm_replayssm.plugins.specializations import constants_of

PARAMS: dict[str, type[ctypes.Structure]] = {
    CAUSAL_CONV1D.op_type: CausalConv1dParams,
    MAMBA2.op_type: Mamba2Params,
    GATED_DELTA_NET.op_type: GatedDeltaNetParams,
    MAMBA2_WITH_CONV.op_type: Mamba2WithConvParams,
}
"""Of each plugin the largest argument of its kernels."""
WORKSPACE = 0x8880000


def entry(role: str, **changes: object) -> kernel_image.KernelEntry:
    base = kernel_image.KernelEntry(role, f"symbol_{role}", 90, False, 11, 160, 0, b"cubin")
    return replace(base, **changes)  # type: ignore[arg-type]


def generic_entry(role: str) -> kernel_image.KernelEntry:
    return entry(role, grid_x=7, block_x=64) if role.endswith("prefill") else entry(role)


def image_of(io: PluginIO, *entries: kernel_image.KernelEntry) -> bytes:
    return kernel_image.pack(constants_of(specialization_of(io)), entries)


def addresses_of(io: PluginIO) -> list[int]:
    """Return one address per tensor, the inputs' all different, aliased outputs at their input's."""
    inputs = [0x10000 * (1 + i) for i in range(len(io.inputs))]
    return inputs + [inputs[io.aliases[k]] if k in io.aliases else 0x9990000 for k in range(len(io.outputs))]


def call_of(io: PluginIO, batch: int = 2, seq_len: int = 4, stream: int = 0, move: tuple[str, ...] = ()) -> Call:
    addresses = addresses_of(io)
    for k, name in enumerate(io.outputs):
        if k in io.aliases and name in move:
            addresses[len(io.inputs) + k] += 0x100
    tensors = {name: (desc.shape, desc.dtype) for name, desc in right_tensors(io, batch, seq_len).items()}
    return Call(tensors, addresses, stream, WORKSPACE)


def scenario(io: PluginIO, *calls: Call, image: bytes | None = None, **changes: object) -> Scenario:
    image = image or image_of(io, *(generic_entry(role) for role in generic_roles(specialization_of(io))))
    size = ctypes.sizeof(PARAMS[io.op_type])
    return replace(Scenario(io.op_type, INTS[io.op_type], image, list(calls), size), **changes)  # type: ignore[arg-type]


def require_quiet(recording: Recording) -> None:
    assert recording.attach_refusal is None
    assert set(recording.refusals) <= {None}
    assert recording.messages == ""
