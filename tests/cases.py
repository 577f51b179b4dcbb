"""Shapes that the ops are tested with: those of real models, scaled in heads, then hostile ones."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.pairwise import pairwise


class ReplayCase(ABC):
    """What the cases of all recurrences have in common: replay constants and types."""

    name: str
    history: int
    max_draft_len: int
    activation: str
    state: str
    spare_ring_rows: int

    @property
    def window(self) -> int:
        return 1 + self.max_draft_len

    @property
    def ring_rows(self) -> int:
        return self.history + self.window + self.spare_ring_rows

    @property
    def activation_dtype(self) -> torch.dtype:
        return DTYPES[self.activation]

    @property
    def state_dtype(self) -> torch.dtype:
        return DTYPES[self.state]

    @property
    @abstractmethod
    def runs_on(self) -> tuple[str, ...]:
        """The devices with an implementation of this shape."""

    @abstractmethod
    def bound(self, device: str) -> tolerances.Bound:
        """Return the greatest errors allowed."""


@dataclass(frozen=True)
class Mamba2Case(ReplayCase):
    """One set of model and replay constants.

    Attributes:
        name: readable test id.
        n_heads: H.
        head_dim: P.
        d_state: N.
        n_groups: G.
        history: W.
        max_draft_len: T - 1.
        activation: type of x, B, C, y and their rings.
        state: type of the checkpoint.
        dt: type of the raw dt input; empty for the activation type.
        spare_ring_rows: ring rows beyond W + T.
    """

    name: str
    n_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    history: int
    max_draft_len: int
    activation: str = "bfloat16"
    state: str = "float32"
    dt: str = ""
    spare_ring_rows: int = 0

    @property
    def dt_dtype(self) -> torch.dtype:
        return DTYPES[self.dt or self.activation]

    @property
    def runs_on(self) -> tuple[str, ...]:
        return ("cpu", "cuda") if self in DEVICE_CASES else ("cpu",)

    def bound(self, device: str) -> tolerances.Bound:
        return tolerances.MAMBA2[device, self.activation, self.state]


@dataclass(frozen=True)
class GatedDeltaNetCase(ReplayCase):
    """One set of model and replay constants.

    Attributes:
        name: readable test id.
        n_key_heads: Hk.
        n_value_heads: Hv.
        key_dim: K.
        value_dim: V.
        history: W.
        max_draft_len: T - 1.
        activation: type of q, k, v, o and the k ring.
        state: type of the checkpoint.
        gate: type of the raw a and b inputs; empty for the activation type.
        spare_ring_rows: ring rows beyond W + T.
    """

    name: str
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    history: int
    max_draft_len: int
    activation: str = "bfloat16"
    state: str = "float32"
    gate: str = ""
    spare_ring_rows: int = 0

    @property
    def gate_dtype(self) -> torch.dtype:
        return DTYPES[self.gate or self.activation]

    @property
    def runs_on(self) -> tuple[str, ...]:
        return ("cpu", "cuda") if self in GATED_DELTA_NET_CASES else ("cpu",)

    def bound(self, device: str) -> tolerances.Bound:
        return tolerances.GATED_DELTA_NET[device, self.activation, self.state]


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# What the kernels are compiled for: every head_dim, d_state, group count, window, history and type occurs, in few
# enough combinations that compiling them takes a minute. Heads are fewer than in the models: they are independent.
DEVICE_CASES = (
    Mamba2Case("nemotron_h-decode", 16, 80, 128, 8, 16, 0),
    Mamba2Case("nemotron_h-T5", 16, 80, 128, 8, 16, 4, dt="float32"),
    Mamba2Case("nemotron_3-T4", 16, 64, 128, 8, 16, 3, spare_ring_rows=3),
    Mamba2Case("mamba2-G1-T4", 8, 64, 128, 1, 16, 3),
    Mamba2Case("N256-T2-W8", 4, 64, 256, 1, 8, 1),
    Mamba2Case("N64-G4-T8-W32", 8, 64, 64, 4, 32, 7),
    Mamba2Case("P80-T8-W8-fp16", 4, 80, 64, 2, 8, 7, "float16"),
    Mamba2Case("W1-fp32", 4, 64, 64, 2, 1, 0, "float32"),
    Mamba2Case("W2-T2-fp32", 4, 80, 128, 2, 2, 1, "float32"),
    Mamba2Case("T3-fp32", 8, 64, 128, 2, 16, 2, "float32", spare_ring_rows=1),
    Mamba2Case("state_bf16", 8, 64, 128, 2, 16, 3, state="bfloat16"),
    Mamba2Case("state_fp16", 8, 64, 128, 2, 16, 3, state="float16"),
    Mamba2Case("T6-W32-fp16-state_fp16", 4, 64, 128, 1, 32, 5, "float16", "float16"),
    Mamba2Case("T7-W8-fp32-state_bf16", 4, 80, 128, 4, 8, 6, "float32", "bfloat16"),
    Mamba2Case("W2-N256-P80", 8, 80, 256, 4, 2, 0),
    Mamba2Case("W32-decode-fp16", 4, 64, 128, 1, 32, 0, "float16", dt="float32"),
    # With the first four and state_bf16, the ones that a GPU with bulk copies runs by the pipelined step.
    Mamba2Case("P128-T8", 4, 128, 128, 2, 16, 7),
    Mamba2Case("HG16-W8-T2-state_bf16", 32, 64, 128, 2, 8, 1, state="bfloat16", spare_ring_rows=2),
    Mamba2Case("P80-decode-state_bf16", 12, 80, 128, 2, 16, 0, state="bfloat16"),
    Mamba2Case("P64-T4-W32", 8, 64, 128, 2, 32, 3),
)

# Heads of a group and head_dim: those of layers with 128x80, 96x80, 64x64, 128x64 and 256x64 heads in 8 groups.
MAIN_HEADS = ((16, 80), (12, 80), (8, 64), (16, 64), (32, 64))
_MOST_HEADS = 64


def _paired_cases(**axes: Sequence[Any]) -> Iterator[Mamba2Case]:
    """Pair every two values of the axes; windows of 1 to 8 tokens take turns, as histories of 8 and more hold all."""
    axes = {"heads": MAIN_HEADS, **axes}
    for index, values in enumerate(pairwise(axes)):
        (heads_per_group, head_dim), n_groups, window = values.pop("heads"), values.pop("n_groups"), 1 + index % 8
        while n_groups * heads_per_group > _MOST_HEADS:
            heads_per_group //= 2
        n_heads, d_state, history = n_groups * heads_per_group, values.pop("d_state"), values.pop("history")
        name = "-".join([f"{n_heads}x{head_dim}-N{d_state}-G{n_groups}-T{window}-W{history}", *values.values()])
        yield Mamba2Case(name, n_heads, head_dim, d_state, n_groups, history, window - 1, **values)


# On a GPU alone, where each of these is another kernel; for the CPU, shapes and types that hypothesis draws say more.
SHAPE_CASES = tuple(
    dict.fromkeys(
        [
            *_paired_cases(
                d_state=(128, 64, 256),
                n_groups=(8, 1, 2, 4),
                history=(16, 8, 32),
                activation=tuple(DTYPES),
                state=tuple(DTYPES),
            ),
            # Those that a GPU with bulk copies runs by the pipelined step.
            *_paired_cases(
                d_state=(128,),
                n_groups=(8, 1, 2),
                history=(16, 8),
                activation=("bfloat16",),
                state=("float32", "bfloat16"),
            ),
        ]
    )
)

# Small, for properties where the type and the model's size do not matter; fp32, so that every digit counts.
FP32_CASES = (
    Mamba2Case("decode", 4, 8, 16, 2, 16, 0, "float32"),
    Mamba2Case("T4", 4, 8, 16, 1, 16, 3, "float32"),
    Mamba2Case("T8-W8", 8, 5, 3, 8, 8, 7, "float32", spare_ring_rows=2),
    Mamba2Case("W1", 2, 3, 7, 1, 1, 0, "float32"),
    Mamba2Case("W2-T2", 6, 16, 4, 2, 2, 1, "float32"),
    Mamba2Case("W32-T5", 2, 80, 8, 2, 32, 4, "float32", spare_ring_rows=5),
)

# Gated DeltaNet: heads of Qwen3-Next and Qwen3.5, fewer of them, and every type. There are kernels for these.
GATED_DELTA_NET_CASES = (
    GatedDeltaNetCase("qwen3_next-decode", 2, 4, 128, 128, 16, 0),
    GatedDeltaNetCase("qwen3_next-T4", 2, 4, 128, 128, 16, 3, gate="float32"),
    GatedDeltaNetCase("qwen3_5-T8-W32", 1, 3, 128, 128, 32, 7, spare_ring_rows=3),
    GatedDeltaNetCase("K64-V96-T2-W8-fp16", 2, 2, 64, 96, 8, 1, "float16"),
    GatedDeltaNetCase("gdn-T3-fp32", 1, 4, 128, 64, 16, 2, "float32", spare_ring_rows=1),
    GatedDeltaNetCase("gdn-W1-fp32", 1, 2, 48, 32, 1, 0, "float32"),
    GatedDeltaNetCase("gdn-state_bf16", 2, 4, 64, 64, 16, 3, state="bfloat16"),
    GatedDeltaNetCase("gdn-state_fp16", 2, 4, 128, 32, 16, 3, "float16", "float16", "float32"),
)


def _paired_delta_cases(**axes: Sequence[Any]) -> Iterator[GatedDeltaNetCase]:
    """Pair every two values of the axes; windows of 1 to 8 tokens take turns."""
    for index, values in enumerate(pairwise(axes)):
        (n_keys, n_values), (key_dim, value_dim) = values.pop("heads"), values.pop("head")
        window, history = 1 + index % 8, values.pop("history")
        name = "-".join([f"{n_keys}x{n_values}-K{key_dim}-V{value_dim}-T{window}-W{history}", *values.values()])
        yield GatedDeltaNetCase(name, n_keys, n_values, key_dim, value_dim, history, window - 1, **values)


# On a GPU alone, as SHAPE_CASES; value heads of a key head as in layers with 32/32, 16/32, 16/48 and 16/64 heads.
_DELTA_HEADS = {"heads": ((2, 4), (2, 6), (2, 8), (3, 3)), "head": ((128, 128), (64, 64))}
GATED_DELTA_NET_SHAPE_CASES = (
    *_paired_delta_cases(**_DELTA_HEADS, history=(16, 8, 32), activation=tuple(DTYPES), state=tuple(DTYPES)),
    # Those that a GPU with bulk copies runs by the pipelined step.
    *_paired_delta_cases(
        **_DELTA_HEADS,
        history=(16, 8),
        activation=("bfloat16",),
        state=("float32", "bfloat16"),
        gate=("bfloat16", "float32"),
    ),
    GatedDeltaNetCase("gdn-2x8-decode-state_bf16", 2, 8, 128, 128, 16, 0, state="bfloat16"),
    GatedDeltaNetCase("gdn-2x6-T4-state_bf16", 2, 6, 128, 128, 16, 3, state="bfloat16", spare_ring_rows=1),
    GatedDeltaNetCase("gdn-2x4-T8", 2, 4, 128, 128, 16, 7),
    GatedDeltaNetCase("gdn-4x4-T2-W8", 4, 4, 128, 128, 8, 1, gate="float32", spare_ring_rows=2),
    GatedDeltaNetCase("gdn-1x4-T6-state_bf16", 1, 4, 128, 128, 16, 5, state="bfloat16"),
    GatedDeltaNetCase("gdn-2x6-T8-state_bf16", 2, 6, 128, 128, 16, 7, state="bfloat16"),
    GatedDeltaNetCase("gdn-2x6-T8", 2, 6, 128, 128, 16, 7),
    GatedDeltaNetCase("gdn-K64-V128-T3", 2, 4, 64, 128, 16, 2),
    GatedDeltaNetCase("gdn-K128-V64-T5-state_bf16", 2, 4, 128, 64, 16, 4, state="bfloat16"),
    GatedDeltaNetCase("gdn-K64-V64-T7-W8", 1, 3, 64, 64, 8, 6),
)
# Small, in fp32.
GATED_DELTA_NET_FP32_CASES = (
    GatedDeltaNetCase("gdn-decode", 1, 2, 16, 8, 16, 0, "float32"),
    GatedDeltaNetCase("gdn-T4", 2, 4, 16, 8, 16, 3, "float32"),
    GatedDeltaNetCase("gdn-T8-W8", 1, 3, 5, 6, 8, 7, "float32", spare_ring_rows=2),
    GatedDeltaNetCase("gdn-W1", 2, 4, 7, 5, 1, 0, "float32"),
    GatedDeltaNetCase("gdn-W2-T2", 2, 6, 4, 16, 2, 1, "float32"),
    GatedDeltaNetCase("gdn-W32-T5", 1, 2, 64, 32, 32, 4, "float32", spare_ring_rows=5),
)

ALL_CASES = (*DEVICE_CASES, *GATED_DELTA_NET_CASES)
ALL_FP32_CASES = (*FP32_CASES, *GATED_DELTA_NET_FP32_CASES)
T4_CASES = (FP32_CASES[1], GATED_DELTA_NET_FP32_CASES[1])
"""One of each recurrence, with three drafts."""

# (channels, d_conv, activation type): one compiled kernel each; every width and type, and channels that fill no block.
CONV_DEVICE_CASES = ((2560, 4, "bfloat16"), (264, 3, "float16"), (98, 2, "float32"))


def on_devices(cases: Sequence[ReplayCase]) -> pytest.MarkDecorator:
    """Parametrise a test with ``case`` and ``device``: all cases on the CPU, those with a kernel on CUDA too."""
    return pytest.mark.parametrize(
        ("case", "device"),
        [
            pytest.param(case, device, id=f"{case.name}-{device}", marks=[pytest.mark.gpu] if device == "cuda" else [])
            for case in cases
            for device in case.runs_on
        ],
    )
