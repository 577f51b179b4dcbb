"""Plugins called with torch tensors, as the ops are: pools and rings are updated in place; and what drives them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests import tolerances
from tests.cases import DTYPES, GatedDeltaNetCase, Mamba2Case, ReplayCase
from tests.harness.plugin_harness import Harness, HarnessPlugin, TensorDesc, shapes_of
from tests.kernels.emulation import compile_emulated
from tests.ops.driver import Driver, Row, bits, int32
from tests.ops.gated_delta_net_driver import GatedDeltaNetDriver
from tests.ops.mamba2_driver import Mamba2Driver
from trtllm_replayssm import ops
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2, PluginIO
from trtllm_replayssm.plugins.compile_image import architecture_of, kernel_image
from trtllm_replayssm.plugins.kernel_image import KernelEntry, pack
from trtllm_replayssm.plugins.specializations import (
    CONV_PREFIX,
    CausalConv1dSpecialization,
    GatedDeltaNetSpecialization,
    Mamba2Specialization,
    Mamba2WithConvSpecialization,
    Role,
    Specialization,
    constants_of,
)


class PluginOp:
    """A plugin object that went the way of an engine's: built, stored, created again, attached.

    Args:
        harness: the opened library.
        io: which plugin.
        ints: its fields.
        image: its kernels.
        device: of the tensors; "cpu" beside a driver that runs kernels on the CPU.
    """

    def __init__(self, harness: Harness, io: PluginIO, ints: dict[str, int], image: bytes, device: str) -> None:
        # A context is current in this thread once something was allocated.
        torch.empty(1, device=device)
        built = HarnessPlugin.of(harness, io, ints, image)
        self.io, self.plugin, self.device = io, built.deserialized().attached(), device

    def __call__(self, tensors: dict[str, Tensor]) -> Tensor:
        """Run on torch's current stream; returns the output that is no state."""
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        dense = {name: tensors[name] for name in self.io.inputs}
        for name in dense:
            if self.io.inputs.index(name) not in self.io.aliases.values():
                dense[name] = dense[name].contiguous()
            assert dense[name].is_contiguous(), f"TensorRT hands {name} over contiguous"
        inputs, outputs = shapes_of(self.io, {name: _desc(tensor) for name, tensor in dense.items()})
        like = dense[self.io.inputs[self.io.source(0)]]
        result = torch.full(outputs[0].shape, torch.nan, dtype=like.dtype, device=like.device)
        # Filled with NaN of any type: what is read there must have been written.
        num_bytes = self.plugin.workspace_bytes(inputs, outputs)
        workspace = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=like.device)
        addresses = [dense[name].data_ptr() for name in self.io.inputs]
        addresses += [addresses[self.io.aliases[k]] if k else result.data_ptr() for k in range(len(outputs))]
        self.plugin.on_shape_change(inputs, outputs)
        self.plugin.enqueue(inputs, outputs, addresses, stream, workspace.data_ptr())
        return result


def _desc(tensor: Tensor) -> TensorDesc:
    return TensorDesc(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def device_image(specialization: Specialization) -> bytes:
    """Compile the kernels for the present GPU."""
    major, minor = torch.cuda.get_device_capability()
    return kernel_image(specialization, [architecture_of(10 * major + minor)])


def emulated_image(specialization: Specialization, folder: Path) -> bytes:
    """Compile the kernels for the CPU; the image holds their paths where cubins would be."""
    entries = [_emulated_entry(specialization, role, folder) for role in specialization.roles("sm_80")]
    return pack(constants_of(specialization), entries)


def emulated_image_with_conv(specialization: Mamba2WithConvSpecialization, folder: Path) -> bytes:
    """As ``emulated_image``, with the kernels that devices with bulk copies have."""
    parts: list[tuple[str, Specialization]] = [
        (CONV_PREFIX, specialization.convolution),
        ("", specialization.step),
        ("", specialization),
    ]
    entries = [_emulated_entry(part, role, folder, prefix) for prefix, part in parts for role in part.roles("sm_90a")]
    return pack(constants_of(specialization), entries)


def _emulated_entry(specialization: Specialization, role: Role, folder: Path, prefix: str = "") -> KernelEntry:
    shape = specialization.launch_shape(role)
    output = folder / f"{shape.symbol}.so"
    compile_emulated(output, specialization, role)
    return KernelEntry(
        prefix + role,
        shape.symbol,
        90,
        False,
        shape.grid_x,
        shape.block_x,
        shape.dynamic_shared_bytes,
        str(output).encode(),
        is_persistent=shape.is_persistent,
        rows_per_block=shape.rows_per_block,
        most_blocks_per_multiprocessor=shape.most_blocks_per_multiprocessor,
    )


def mamba2_specialization(case: Mamba2Case) -> Mamba2Specialization:
    """Return the constants of a case's kernels; the plugin takes dt in the activation type."""
    return Mamba2Specialization(
        n_heads=case.n_heads,
        head_dim=case.head_dim,
        d_state=case.d_state,
        n_groups=case.n_groups,
        history=case.history,
        max_draft_len=case.max_draft_len,
        activation_dtype=case.activation,  # type: ignore[arg-type]
        state_dtype=case.state,  # type: ignore[arg-type]
        dt_dtype=case.activation,  # type: ignore[arg-type]
    )


def gated_delta_net_specialization(case: GatedDeltaNetCase) -> GatedDeltaNetSpecialization:
    """Return the constants of a case's kernels; the plugin takes a and b in the activation type."""
    return GatedDeltaNetSpecialization(
        n_key_heads=case.n_key_heads,
        n_value_heads=case.n_value_heads,
        key_dim=case.key_dim,
        value_dim=case.value_dim,
        history=case.history,
        max_draft_len=case.max_draft_len,
        activation_dtype=case.activation,  # type: ignore[arg-type]
        state_dtype=case.state,  # type: ignore[arg-type]
        gate_dtype=case.activation,  # type: ignore[arg-type]
    )


def specialization_of_case(case: ReplayCase) -> Specialization:
    """Return the constants of a case's kernels."""
    if isinstance(case, GatedDeltaNetCase):
        return gated_delta_net_specialization(case)
    assert isinstance(case, Mamba2Case)
    return mamba2_specialization(case)


class PluginDriver(Driver):
    """A driver of an op, with its comparisons and its checks of memory, that runs the plugin instead."""

    io: ClassVar[PluginIO]

    def __init__(
        self, harness: Harness, case: ReplayCase, image: bytes, device: str, *, num_slots: int = 4, seed: int = 0
    ) -> None:
        super().__init__(case, device, num_slots, seed)
        ints = {"history": case.history, "max_draft_len": case.max_draft_len}
        self.op = PluginOp(harness, self.io, ints, image, device)

    def call(self, rows: Sequence[Row], window: Any) -> Tensor:
        """Enqueue the plugin."""
        return self.op(self.tensors(rows, window))


class PluginMamba2Driver(PluginDriver, Mamba2Driver):
    """Runs ReplayMamba2."""

    io = MAMBA2


class PluginGatedDeltaNetDriver(PluginDriver, GatedDeltaNetDriver):
    """Runs ReplayGatedDeltaNet."""

    io = GATED_DELTA_NET


def plugin_driver(harness: Harness, case: ReplayCase, image: bytes, device: str, **options: int) -> PluginDriver:
    """Return the driver of a case's plugin."""
    make = PluginGatedDeltaNetDriver if isinstance(case, GatedDeltaNetCase) else PluginMamba2Driver
    return make(harness, case, image, device, **options)


class ConvolutionPair:
    """ReplayCausalConv1d on a device beside ``ops.causal_conv1d`` on the CPU, fed the same.

    Args:
        harness: the opened library.
        specialization: channels, taps and type.
        image: the kernels.
        device: of the plugin.
        window: T, the most tokens of a step.
        silu: apply SiLU.
    """

    def __init__(
        self,
        harness: Harness,
        specialization: CausalConv1dSpecialization,
        image: bytes,
        device: str,
        *,
        window: int,
        silu: bool,
    ) -> None:
        self.op = PluginOp(harness, CAUSAL_CONV1D, {"activation": int(silu)}, image, device)
        self.device, self.window, self.silu = device, window, silu
        self.dtype = specialization.activation_dtype
        self.generator = torch.Generator().manual_seed(specialization.conv_dim)
        self.channels = specialization.conv_dim
        self.weight = self._random(self.channels, specialization.d_conv)
        self.bias = self._random(self.channels)
        rows = specialization.d_conv - 1 + window
        self.ring = torch.full((3, rows, self.channels), torch.nan, dtype=DTYPES[self.dtype])
        self.device_ring = self.ring.clone().to(device)
        self.past = [0, 0, 0]

    def drive(self, num_steps: int) -> None:
        """Run windows of every length, prefills that wrap the ring, padding, idle rows, any acceptance."""
        for step in range(num_steps):
            is_prefill = step % 11 == 0
            seq_len = 3 * self.ring.shape[1] + step if is_prefill else 1 + step % self.window
            slots = [[0, 1, 2], [2, -1, 0], [1, 2, -1, 0]][step % 3]
            counts = [seq_len if step % 4 else self._int(seq_len) for _ in slots]
            self._compare(step, seq_len, slots, counts)
            for slot, n in zip(slots, counts, strict=True):
                if slot >= 0:
                    self.past[slot] += n if is_prefill else self._int(n)

    def _compare(self, step: int, seq_len: int, slots: list[int], counts: list[int]) -> None:
        tensors = {
            "x": self._random(len(slots), seq_len, self.channels),
            "weight": self.weight,
            "bias": self.bias,
            "past_lengths": int32([self.past[s] if s >= 0 else 0 for s in slots]),
            "num_tokens": int32([n if s >= 0 else 0 for n, s in zip(counts, slots, strict=True)]),
            "slot_ids": int32(slots),
        }
        expected = ops.causal_conv1d(**tensors, conv_ring=self.ring, activation="silu" if self.silu else None)
        moved = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        found = self.op(moved | {"conv_ring": self.device_ring}).cpu()
        error = (found.double() - expected.double()).abs().amax() / expected.double().abs().amax().clamp_min(1e-30)
        # Both results are rounded once.
        bound = 2 * tolerances.CAUSAL_CONV1D["cuda", self.dtype].output
        assert error <= bound, f"step {step}: error {error:.2e}; bound {bound:.2e}"
        assert torch.equal(bits(self.device_ring), bits(self.ring)), f"step {step}: the rings differ"

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(DTYPES[self.dtype])

    def _int(self, most: int) -> int:
        return int(torch.randint(0, most + 1, (), generator=self.generator))
