"""``mamba_ssm``: the conventional decode of one token, and the chunked scan of a prompt."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.common import History, Launch, PeerPrefill, bare, relaunched
from trtllm_replayssm.bench.peers.mamba2 import Mamba2PeerStep
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED, Setting

TILES: tuple[Setting, ...] = tuple(
    {"BLOCK_SIZE_M": rows, "num_warps": warps} for rows, warps in ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (32, 2))
)
"""Rows of a state by a block, and its warps: the tiles that win for one shape or batch size or another on an H200."""


class SelectiveStateUpdate(Mamba2PeerStep):
    """``selective_state_update``: the state is rewritten for every token.

    Called as mamba_ssm's own Mamba-2 layer does. The function has no argument for its tile, so the kernel that it
    launches is replaced by one that takes the tile of the setting.
    """

    implementation = "mamba_ssm selective_state_update"
    kind: Kind = "conventional"
    module = "mamba_ssm.ops.triton.selective_state_update"
    settings = (SHIPPED, *TILES)

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._state = self.states()
        self._weights = self.expanded_weights()

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of one token."""
        return case.replay.window == 1

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs = {name: tensor[:, 0] for name, tensor in self.packed.inputs(index).items()}
        inputs["dt"] = self.by_channel(inputs["dt"])
        with _tile(self.library, self.setting):
            y: Tensor = self.library.selective_state_update(
                self._state[index], **inputs, **self._weights, dt_softplus=True
            )
        return y

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states."""
        return bare(self._state[index][rows], self.packed.recurrence)


_KERNEL = "_selective_scan_update_kernel"


def _tile(library: Any, setting: Setting) -> AbstractContextManager[None]:
    """Give the kernel, whose last argument is the rows of a block, the rows and warps of a setting."""
    if not setting:
        return nullcontext()

    def with_tile(launch: Launch) -> Launch:
        arguments = (*launch.arguments[:-1], setting["BLOCK_SIZE_M"])
        return launch._replace(arguments=arguments, options={"num_warps": setting["num_warps"]})

    return relaunched(library, _KERNEL, with_tile)


class ChunkScan(PeerPrefill):
    """``mamba_chunk_scan_combined``, which tunes its own kernels."""

    implementation = "mamba_ssm mamba_chunk_scan_combined"
    module = "mamba_ssm.ops.triton.ssd_combined"
    settings: tuple[Setting, ...] = ({"chunk_size": 256}, {"chunk_size": 128})

    @torch.no_grad()
    def launch(self, step: int, index: int) -> Tensor:
        """Launch the prefill of one set."""
        inputs = self.packed.inputs(index)
        weights = self.packed.weights
        y: Tensor
        y, self.last_states = self.library.mamba_chunk_scan_combined(
            inputs["x"],
            inputs["dt"],
            weights["A"],
            inputs["B"],
            inputs["C"],
            self.setting["chunk_size"],
            D=weights["D"],
            dt_bias=weights["dt_bias"],
            dt_softplus=True,
            return_final_states=True,
        )
        return y
