"""Runs the module of a multi-token prediction head beside the torch executor."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.memory_plan import mtp_head_bytes
from trtllm_replayssm.contract.tensors import MTP_PREFIX, mtp_state_specs
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.executors.mtp_executor import MtpExecutor, SharedMatrices, check_head_memory
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor


class TorchMtpExecutor(MtpExecutor):
    """A head as a torch module.

    Args:
        make_head: makes the module, ``builders.models.mtp.MtpHead``, its weights uninitialised.
        geometry: of the model, with the head.
        target: runs the model itself; its embeddings and output matrix are used.
        load_weights: device -> the tensors of ``contract.tensors.mtp_weight_specs``.

    Raises:
        CapacityError: caches and weights do not fit the device.
    """

    def __init__(
        self,
        make_head: Callable[[], nn.Module],
        geometry: ModelGeometry,
        target: TorchExecutor,
        load_weights: Callable[[torch.device], Mapping[str, torch.Tensor]],
    ) -> None:
        device, limits = target.device, target.limits
        device_bytes = mtp_head_bytes(geometry, target.replay, limits)
        check_head_memory(device_bytes, limits, device)
        with torch.device("meta"):
            head = make_head()
        weights = {name.removeprefix(MTP_PREFIX): weight for name, weight in load_weights(device).items()}
        head.load_state_dict(weights, assign=True, strict=True)
        self._head = head.eval().requires_grad_(False)
        specs = mtp_state_specs(geometry, target.replay, limits)
        states = tuple(map(pools.State, specs, pools.allocate(specs, limits, device)))
        for _, pool in states:
            pool.zero_()  # a prompt that was not run from its start leaves rows unwritten, which must be finite
        matrices = SharedMatrices(target.embedding_matrix, target.output_matrix)
        super().__init__(geometry, limits, matrices, states, device_bytes)

    def close(self) -> None:
        """Drop caches and weights; those of the target stay."""
        super().close()
        self._head = nn.Module()

    def _run(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        first_slot: int,
        key_length: int,
    ) -> torch.Tensor:
        states = tuple(pool for _, pool in self.states)
        out: torch.Tensor
        out, _ = self._head(embedded, hidden, *counters, states, key_length, first_slot)
        return out
