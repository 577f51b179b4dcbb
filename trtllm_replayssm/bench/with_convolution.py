"""The step of Mamba-2 and the convolution before it: as one launch, and as one after the other."""

from collections.abc import Callable

import torch
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.gate import ROUNDED_BOUND
from trtllm_replayssm.bench.recurrences import ACTIVATION, normal
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.workloads import ReplayStep
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.plugins import launch_with_conv


class StepWithConvolution(ReplayStep):
    """``ops.mamba2_with_conv``, one step of every row; its input lies within ``in_proj``'s output, as in a model.

    Args:
        case: what to run, of Mamba-2.
        device: where.
    """

    kind: Kind = "with convolution"
    # The CPU does not round what the convolution makes.
    output_bound = ROUNDED_BOUND

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self.implementation = "mamba2 with convolution"
        m, replay, sets = case.geometry, case.replay, self.num_sets
        self.traffic = traffic.with_conv_bytes(m, replay, cases.ACTIVATION_DTYPE, self.traffic)
        # Of another layer in every set.
        weight = normal((sets, m.conv_dim, m.d_conv), ACTIVATION, device)
        bias = normal((sets, m.conv_dim), ACTIVATION, device)
        ring_shape = (sets * case.batch_size, replay.conv_ring_rows(m.d_conv), m.conv_dim)
        self._pools = {**self._pools, "conv_ring": normal(ring_shape, ACTIVATION, device)}
        self._weights = {**self._weights, "conv_weight": weight[0], "conv_bias": bias[0]}
        for index, tensors in enumerate(self._sets):
            for name in ("x", "B", "C"):
                del tensors[name]
            tensors["xBC"] = self._packed.conv_input(index)
            tensors |= {"conv_weight": weight[index], "conv_bias": bias[index], "conv_ring": self._pools["conv_ring"]}

    @property
    def _op(self) -> Callable[..., Tensor]:
        return ops.mamba2_with_conv

    @property
    def _kernel(self) -> Callable[..., Tensor]:
        return launch_with_conv.mamba2_with_conv


class StepAfterConvolution(StepWithConvolution):
    """The same by two launches."""

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self.implementation = "convolution, then mamba2"

    @property
    def _op(self) -> Callable[..., Tensor]:
        return _in_two_launches

    @property
    def _kernel(self) -> Callable[..., Tensor]:
        return launch_with_conv.mamba2_after_conv


def _in_two_launches(*, history: int, max_draft_len: int, **tensors: Tensor) -> Tensor:
    """Do as ``ops.mamba2_with_conv``, on a device in two launches even where there is a kernel for one."""
    if tensors["xBC"].is_cuda:
        return launch_with_conv.mamba2_after_conv(tensors, history=history, max_draft_len=max_draft_len)
    return ops.mamba2_with_conv(**tensors, history=history, max_draft_len=max_draft_len)
