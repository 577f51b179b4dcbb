"""A driver of ReplayMamba2WithConv: every step beside the convolution and Mamba-2 in turn, held to their very bits.

Those have tests of their own, against the oracle.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.cases import Mamba2Case
from tests.harness.plugin_harness import Harness
from tests.kernels.raw_steps import assert_same_bits, run_in_turn
from tests.ops.driver import POISON, Row
from tests.plugins.plugin_ops import PluginMamba2Driver, mamba2_specialization
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.plugin_io import MAMBA2_WITH_CONV
from trtllm_replayssm.plugins.layouts import split_projection
from trtllm_replayssm.plugins.specializations import Mamba2WithConvSpecialization

InTurn = tuple[Callable[..., Tensor], Callable[..., Tensor]]


RawWindow = namedtuple("RawWindow", ("xBC", "dt"))
"""A step's inputs on the CPU: xBC [b, S, D], dt [b, S, H]."""


class WithConvDriver(PluginMamba2Driver):
    """Runs ReplayMamba2WithConv.

    Args:
        harness: the opened library.
        case: of Mamba-2; dt has the activation type.
        d_conv: taps.
        image: the kernels.
        device: of the plugin.
        in_turn: ``ops.causal_conv1d`` and ``ops.mamba2``, or what runs them on this device with the same bits.
        options: those of ``Driver``.
    """

    io = MAMBA2_WITH_CONV

    def __init__(
        self,
        harness: Harness,
        case: Mamba2Case,
        d_conv: int,
        image: bytes,
        device: str,
        in_turn: InTurn,
        **options: int,
    ) -> None:
        self.d_conv, self.in_turn = d_conv, in_turn
        self.convolution = specialization_with_conv(case, d_conv).convolution
        super().__init__(harness, case, image, device, **options)

    def make_pools(self) -> dict[str, Tensor]:
        rows = protocol.min_conv_ring_rows(self.d_conv, self.case.max_draft_len) + self.case.spare_ring_rows
        shape = (self.num_slots, rows, self.convolution.conv_dim)
        ring = torch.full(shape, torch.nan, dtype=self.case.activation_dtype, device=self.device)
        return super().make_pools() | {"conv_ring": ring}

    def make_weights(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(self.convolution.conv_dim, self.d_conv + 1, generator=generator)
        weight = weight.to(self.case.activation_dtype)
        convolution = {"conv_weight": weight[:, 1:].contiguous(), "conv_bias": weight[:, 0].contiguous()}
        return super().make_weights() | convolution

    def make_window(self, num_tokens: Sequence[int], seq_len: int) -> Any:
        shape = (len(num_tokens), seq_len)
        packed = torch.randn(*shape, self.convolution.conv_dim + self.case.n_heads + 8, generator=self.generator)
        for row, n in enumerate(num_tokens):
            packed[row, n:] = torch.nan
        packed = packed.to(self.case.activation_dtype)
        return RawWindow(packed[..., 8 : -self.case.n_heads], packed[..., -self.case.n_heads :])

    def like_output(self, window: Any) -> Tensor:
        case = self.case
        sizes = {"n_heads": case.n_heads, "head_dim": case.head_dim, "n_groups": case.n_groups, "d_state": case.d_state}
        return split_projection(window.xBC, **sizes)[0]

    def poison_unused(self) -> None:
        super().poison_unused()
        ring = self.pools["conv_ring"]
        for slot, past in enumerate(self.past):
            live = {t % ring.shape[1] for t in range(max(past - (self.d_conv - 1), 0), past)}
            for row in set(range(ring.shape[1])) - live:
                ring[slot, row] = POISON[row % len(POISON)]

    def call(self, rows: Sequence[Row], window: Any) -> Tensor:
        """Enqueue the plugin, and run the two in turn on copies of the pools."""
        tensors = self.tensors(rows, window)
        in_turn: dict[str, Any] = tensors | {name: pool.clone() for name, pool in self.pools.items()}
        in_turn |= {"history": self.case.history, "max_draft_len": self.case.max_draft_len}
        y = self.op(tensors)
        assert_same_bits(self.pools, y, in_turn, run_in_turn(in_turn, *self.in_turn))
        return y

    def _check_memory(self, before: dict[str, Tensor], rows: Sequence[Row], is_prefill: bool) -> None:
        """Leave it to the bits."""

    def _check_row(self, y: Tensor, row: Row, inputs: list[Tensor], is_prefill: bool) -> None:
        """Leave it to the bits."""
        self.flushes += self.writes_checkpoint(row.slot, row.num_tokens, is_prefill)


def specialization_with_conv(case: Mamba2Case, d_conv: int) -> Mamba2WithConvSpecialization:
    """Return the constants of the plugin's kernels."""
    return Mamba2WithConvSpecialization(mamba2_specialization(case), d_conv)
