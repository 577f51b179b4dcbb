"""The memory plan against the device: what fits, what is free, and what to lower where it does not."""

import os
from collections.abc import Callable

import torch

from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.contract.memory_plan import MemoryPlan, size_text
from trtllm_replayssm.errors import CapacityError

_EVERYBODYS_POOL = (0, 0)
_SHORTEST = 256  # no sequence length below this is chosen for a user


def available_bytes(device: torch.device) -> int:
    """Return CUDA's free memory, what torch keeps for anybody included; on the CPU, the machine's whole memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _kept_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _kept_bytes(device: torch.device) -> int:
    """Return what torch keeps of a device's memory without using it, but for that of CUDA graphs, which is theirs."""
    if torch.cuda.memory.get_allocator_backend() != "native":  # the others do not tell pools apart
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == index and segment["segment_pool_id"] == _EVERYBODYS_POOL
    )


def check_memory(plan: MemoryPlan, device: torch.device) -> None:
    """Refuse a plan that the device cannot hold, before anything is allocated.

    Raises:
        CapacityError: with the numbers, and what to lower.
    """
    available = available_bytes(device)
    if plan.total > available:
        slot = size_text(plan.states // plan.limits.max_batch_size)
        raise CapacityError(
            f"memory of {device}: found {size_text(available)}; needed {plan.summary()}. A slot takes {slot}. "
            f"{_way_out(plan)}"
        )


def fitting_limits(
    wanted: EngineLimits, largest_batch: Callable[[EngineLimits], int], *, is_batch_free: bool, is_length_free: bool
) -> EngineLimits:
    """Return limits that fit where the user left something open: fewer slots, or shorter sequences.

    Args:
        wanted: the most slots and the longest sequences to have.
        largest_batch: limits -> how many of their slots fit.
        is_batch_free: whether there may be fewer slots, down to one.
        is_length_free: whether sequences may be shorter; they are halved until all slots fit, or one that is free.
    """
    needed = 1 if is_batch_free else wanted.max_batch_size
    limits = wanted
    while (num_slots := largest_batch(limits)) < needed and is_length_free and limits.max_seq_len // 2 >= _SHORTEST:
        length = limits.max_seq_len // 2
        limits = limits.model_copy(
            update={
                "max_seq_len": length,
                "max_input_len": length - 1,
                "max_num_tokens": min(limits.max_num_tokens, length - 1),
            }
        )
    # What does not fit at all is left for the check to refuse, with its numbers.
    return limits.model_copy(update={"max_batch_size": max(needed, num_slots if is_batch_free else needed)})


def _way_out(plan: MemoryPlan) -> str:
    if plan.weights >= plan.states + plan.step:
        return "The weights are most of it: take a smaller model, a larger device, or dtype 'bfloat16'."
    return "Lower max_batch_size, max_seq_len or max_num_tokens."
