"""The recurrences as a benchmark sees them: what their ops take, and where a model has it; one class a family."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.contract.geometry import (
    GatedDeltaNetGeometry,
    Mamba2Geometry,
    RecurrenceGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.plugin_io import GATED_DELTA_NET, MAMBA2, PluginIO
from trtllm_replayssm.contract.tensors import slot_states
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.plugins import launch

ACTIVATION = torch_dtype(cases.ACTIVATION_DTYPE)

# What the rings of fp32 hold: dt after softplus is positive and small, the log decay g negative, u is any number.
_RING_RANGES = {"dt_ring": (0.001, 0.1), "g_ring": (-0.5, -0.001)}


class Recurrence(ABC):
    """One layer's recurrence.

    Attributes:
        name: of its op, and of the function that launches its kernels.
        io: the op's arguments in order.
        output: shape of one token's output.
        state: shape of one slot's checkpoint.
    """

    name: ClassVar[str]
    io: ClassVar[PluginIO]
    output: tuple[int, int]

    def __init__(self, m: RecurrenceGeometry) -> None:
        self.state, self._rings = slot_states(m)
        self.pool_names = tuple(self.io.inputs[index] for index in self.io.aliases.values())

    @property
    def op(self) -> Callable[..., Tensor]:
        """The op, on the CPU and on devices."""
        op: Callable[..., Tensor] = getattr(ops, self.name)
        return op

    @property
    def kernel(self) -> Callable[..., Tensor]:
        """What the op does on a device once its arguments are checked."""
        kernel: Callable[..., Tensor] = getattr(launch, self.name)
        return kernel

    @abstractmethod
    def draw_weights(self, device: torch.device) -> dict[str, Tensor]:
        """Return per-head constants as models are initialised, fp32 [heads], by the op's names."""

    @abstractmethod
    def inputs(self, conv_output: Tensor, in_proj_output: Tensor) -> dict[str, Tensor]:
        """Return the op's inputs as views of what the convolution and ``in_proj`` made, by the op's names."""

    @abstractmethod
    def conv_input(self, in_proj_output: Tensor) -> Tensor:
        """Return the channels of ``in_proj``'s output that the convolution reads."""

    @abstractmethod
    def first_and_last(self) -> "Recurrence":
        """Return the recurrence of the first head and the last alone, each with keys or B and C of its own."""

    def pools(self, replay: ReplayGeometry, slots: int, device: torch.device) -> dict[str, Tensor]:
        """Return the checkpoints and rings of all slots, full of numbers, by the op's names."""
        made = {"ssm_state": normal((slots, *self.state), torch_dtype(replay.state_dtype), device)}
        for name, (_, dtype, row) in zip(self.pool_names[1:], self._rings, strict=True):
            shape = (slots, replay.ring_rows, *row)
            made[name] = normal(shape, ACTIVATION if dtype is None else torch_dtype(dtype), device)
            if name in _RING_RANGES:
                made[name].uniform_(*_RING_RANGES[name])
        return made

    def rings(self, slots: int, rows: int) -> dict[str, Tensor]:
        """Return rings full of zeros for the CPU, fp32, by the op's names."""
        names = self.pool_names[1:]
        return {name: torch.zeros(slots, rows, *row) for name, (_, _, row) in zip(names, self._rings, strict=True)}


class Mamba2(Recurrence):
    """``ops.mamba2``; ``in_proj`` packs [z, x, B, C, dt]."""

    name = "mamba2"
    io = MAMBA2

    def __init__(self, m: Mamba2Geometry) -> None:
        super().__init__(m)
        self.geometry = m
        self.output = (m.n_heads, m.head_dim)

    def draw_weights(self, device: torch.device) -> dict[str, Tensor]:
        """Return A in [-16, -1], D in [-1, 1], and dt_bias."""
        uniform = torch.rand(3, self.geometry.n_heads, device=device)
        return {"A": -1 - 15 * uniform[1], "D": 2 * uniform[2] - 1, "dt_bias": _dt_bias(uniform[0])}

    def inputs(self, conv_output: Tensor, in_proj_output: Tensor) -> dict[str, Tensor]:
        """Return x [B, T, H, P], dt [B, T, H], B and C [B, T, G, N]."""
        m = self.geometry
        x, B, C = torch.split(conv_output, [m.d_inner, *[m.n_groups * m.d_state] * 2], dim=-1)
        return {
            "x": torch.unflatten(x, -1, (m.n_heads, m.head_dim)),
            "dt": in_proj_output[..., -m.n_heads :],
            "B": torch.unflatten(B, -1, (m.n_groups, m.d_state)),
            "C": torch.unflatten(C, -1, (m.n_groups, m.d_state)),
        }

    def conv_input(self, in_proj_output: Tensor) -> Tensor:
        """Return x, B and C side by side."""
        m = self.geometry
        return in_proj_output[..., m.d_inner : m.d_inner + m.conv_dim]

    def first_and_last(self) -> "Mamba2":
        """Return the recurrence of two heads in two groups."""
        return Mamba2(self.geometry.model_copy(update={"n_heads": 2, "n_groups": 2}))


class GatedDeltaNet(Recurrence):
    """``ops.gated_delta_net``; ``in_proj`` packs [q, k, v, z, b, a]."""

    name = "gated_delta_net"
    io = GATED_DELTA_NET

    def __init__(self, m: GatedDeltaNetGeometry) -> None:
        super().__init__(m)
        self.geometry = m
        self.output = (m.n_value_heads, m.value_dim)

    def draw_weights(self, device: torch.device) -> dict[str, Tensor]:
        """Return A_log, for decay rates in [1, 16], and dt_bias."""
        uniform = torch.rand(2, self.geometry.n_value_heads, device=device)
        return {"A_log": torch.log(1 + 15 * uniform[1]), "dt_bias": _dt_bias(uniform[0])}

    def inputs(self, conv_output: Tensor, in_proj_output: Tensor) -> dict[str, Tensor]:
        """Return q and k [B, T, Hk, K], v [B, T, Hv, V], a and b [B, T, Hv]."""
        m = self.geometry
        q, k, v = torch.split(conv_output, [m.d_key, m.d_key, m.d_value], dim=-1)
        b, a = torch.split(in_proj_output[..., -2 * m.n_value_heads :], m.n_value_heads, dim=-1)
        return {
            "q": torch.unflatten(q, -1, (m.n_key_heads, m.key_dim)),
            "k": torch.unflatten(k, -1, (m.n_key_heads, m.key_dim)),
            "v": torch.unflatten(v, -1, (m.n_value_heads, m.value_dim)),
            "a": a,
            "b": b,
        }

    def conv_input(self, in_proj_output: Tensor) -> Tensor:
        """Return q, k and v side by side."""
        return in_proj_output[..., : self.geometry.conv_dim]

    def first_and_last(self) -> "GatedDeltaNet":
        """Return the recurrence of two value heads, each with a key head."""
        return GatedDeltaNet(self.geometry.model_copy(update={"n_key_heads": 2, "n_value_heads": 2}))


def recurrence_of(m: RecurrenceGeometry) -> Recurrence:
    """Return the recurrence of a layer."""
    return Mamba2(m) if isinstance(m, Mamba2Geometry) else GatedDeltaNet(m)


class Packed:
    """The inputs of all sets where a model has them: within the convolution's output, and within ``in_proj``'s.

    Args:
        case: shapes.
        num_sets: sets, each with inputs of its own.
        device: where.
    """

    def __init__(self, case: KernelCase, num_sets: int, device: torch.device) -> None:
        m, rows = case.geometry, (num_sets, case.batch_size, case.tokens)
        self.recurrence = recurrence_of(m)
        self._conv_output = normal((*rows, m.conv_dim), ACTIVATION, device)
        self._in_proj_output = normal((*rows, m.d_in_proj), ACTIVATION, device)
        self.weights = self.recurrence.draw_weights(device)

    def conv_output(self, index: int) -> Tensor:
        """Return one set's output of the convolution, [B, T, conv_dim]."""
        return self._conv_output[index]

    def conv_input(self, index: int) -> Tensor:
        """Return the channels that one set's convolution reads, [B, T, conv_dim], a view."""
        return self.recurrence.conv_input(self._in_proj_output[index])

    def inputs(self, index: int) -> dict[str, Tensor]:
        """Return one set's inputs by the op's names, all of them views."""
        return self.recurrence.inputs(self._conv_output[index], self._in_proj_output[index])


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed numbers, drawn in place: pools are gigabytes."""
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def _dt_bias(uniform: Tensor) -> Tensor:
    """Return biases whose softplus lies in [0.001, 0.1], as both families are initialised."""
    step_size = torch.exp(uniform * np.log(100.0) + np.log(0.001))
    return torch.log(torch.expm1(step_size))
