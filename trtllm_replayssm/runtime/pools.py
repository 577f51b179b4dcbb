"""State pools: allocated once, after the memory plan fits. A slot that is taken is not cleared."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.contract.tensors import TensorSpec
from trtllm_replayssm.errors import CapacityError
from trtllm_replayssm.ops.dtypes import torch_dtype


class State(NamedTuple):
    """A state of an executor: what it is and where it is.

    Attributes:
        spec: of ``contract.tensors.state_specs``.
        pool: one row per slot, a key/value cache's as well.
    """

    spec: TensorSpec
    pool: torch.Tensor


def allocate(states: Sequence[TensorSpec], limits: EngineLimits, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Allocate the pools and caches, uninitialised: the ops never read what no token has written.

    Nor do the torch modules. TensorRT's attention does read the whole cache: see
    ``tensorrt_executor.allocate_states``.

    Args:
        states: ``contract.tensors.state_specs``.
        limits: max_batch_size is the rows of the caches.
        device: where.

    Returns:
        One contiguous tensor per spec, in order.

    Raises:
        CapacityError: the device refuses.
    """
    try:
        return tuple(
            torch.empty(
                [limits.max_batch_size if isinstance(dim, str) else dim for dim in spec.shape],
                dtype=torch_dtype(spec.dtype),
                device=device,
            )
            for spec in states
        )
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA; a plain RuntimeError on the CPU
        raise CapacityError(
            f"memory of {device}: found no room for the states ({error}); needed that of {limits.max_batch_size} "
            f"slots. Lower max_batch_size or max_seq_len."
        ) from error
