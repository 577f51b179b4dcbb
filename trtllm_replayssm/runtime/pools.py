"""State pools: planned in bytes, checked against the device, then allocated. A slot that is taken is not cleared."""

import os
from collections.abc import Sequence

import torch

from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.contract.memory import tensor_bytes
from trtllm_replayssm.contract.tensors import TensorSpec
from trtllm_replayssm.errors import CapacityError
from trtllm_replayssm.ops.dtypes import torch_dtype

_GIB = 2**30


def check_memory(
    states: Sequence[TensorSpec], weights: Sequence[TensorSpec], limits: EngineLimits, device: torch.device
) -> None:
    """Refuse a plan that the device cannot hold, before anything is allocated.

    Args:
        states: the pools and caches.
        weights: the weights that will be loaded onto the device; empty when they are there already.
        limits: rows of the caches.
        device: CUDA's free memory counts; on the CPU, the machine's whole memory.

    Raises:
        CapacityError: with the numbers.
    """
    state_bytes = sum(tensor_bytes(spec, B=limits.max_batch_size) for spec in states)
    weight_bytes = sum(tensor_bytes(spec) for spec in weights)
    available = _available_bytes(device)
    if state_bytes + weight_bytes > available:
        raise CapacityError(
            f"memory of {device}: found {available / _GIB:.2f} GiB; needed {state_bytes / _GIB:.2f} GiB of states "
            f"({limits.max_batch_size} slots, sequences of {limits.max_seq_len}) and {weight_bytes / _GIB:.2f} GiB of "
            f"weights. Lower max_batch_size or max_seq_len."
        )


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


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # Freed blocks that torch keeps for itself can be had as well.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
