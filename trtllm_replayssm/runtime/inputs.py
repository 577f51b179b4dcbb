"""The dock: a plan becomes the step's device tensors, in one copy to the device."""

from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepInputs, StepPlan
from trtllm_replayssm.runtime.transfer import to_device

PADDING_SLOT = -1
_ALIGNMENT = 64  # int32 values, 256 bytes: what a CUDA allocation of its own would have


def build_inputs(plan: StepPlan, slots: Slots, device: torch.device) -> StepInputs:
    """Lay out a plan as tensors.

    Args:
        plan: the rows that run, drafts included.
        slots: the counters; read only.
        device: where the executor wants its inputs.

    Returns:
        int32 tensors, views of one buffer. Decode steps ask for the logits of all S positions, a prompt for the last.
    """
    num_rows, window = plan.num_rows, plan.window
    positions = window if plan.kind == "decode" else 1
    shapes = [(num_rows, window), (num_rows,), (num_rows,), (num_rows,), (num_rows,), (num_rows, positions)]
    starts, size = _layout(shapes)
    buffer = np.zeros(size, dtype=np.int32)
    host = [buffer[start : start + prod(shape)].reshape(shape) for start, shape in zip(starts, shapes, strict=True)]
    _fill(host, plan, slots)
    packed = to_device(buffer, device)
    # The strides of a row-major matrix or vector; a slice and a view would be two calls for each.
    views = [packed.as_strided(shape, (*shape[1:], 1), start) for start, shape in zip(starts, shapes, strict=True)]
    input_ids, past_lengths, checkpoint_lengths, num_tokens, slot_ids, logits_indices = views
    return StepInputs(
        input_ids=input_ids,
        past_lengths=past_lengths,
        checkpoint_lengths=checkpoint_lengths,
        num_tokens=num_tokens,
        slot_ids=slot_ids,
        logits_indices=logits_indices,
        first_slot=plan.first_slot,
        max_past_length=int(slots.past_lengths[plan.row_slots].max()),
    )


def build_fold_inputs(
    slot: int, past_length: int, checkpoint_length: int, window: int, *, device: torch.device
) -> StepInputs:
    """Lay out a prefill window without tokens: it folds a slot's pending rows, and is no step of any request.

    Args:
        slot: whose rows.
        past_length: fold the rows of tokens [checkpoint_length, past_length).
        checkpoint_length: of the slot.
        window: more than 1 + max_draft_len.
        device: where the executor wants its inputs.
    """

    def one(value: int) -> torch.Tensor:
        return to_device(np.array([value], dtype=np.int32), device)

    return StepInputs(
        input_ids=torch.zeros((1, window), dtype=torch.int32, device=device),
        past_lengths=one(past_length),
        checkpoint_lengths=one(checkpoint_length),
        num_tokens=one(0),
        slot_ids=one(slot),
        logits_indices=one(0)[None],
        first_slot=slot,
        max_past_length=past_length,
    )


def _layout(shapes: list[tuple[int, ...]]) -> tuple[list[int], int]:
    """Return where in a buffer tensors of these shapes begin, and how long it is."""
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _fill(host: list[npt.NDArray[np.int32]], plan: StepPlan, slots: Slots) -> None:
    input_ids, past_lengths, checkpoint_lengths, num_tokens, slot_ids, logits_indices = host
    of_step = slice(plan.first_slot, plan.first_slot + plan.num_rows)
    past_lengths[:] = slots.past_lengths[of_step]
    checkpoint_lengths[:] = slots.checkpoint_lengths[of_step]
    slot_ids[:] = PADDING_SLOT
    rows, columns, counts = plan.row_slots - plan.first_slot, np.arange(plan.window), plan.row_lengths
    num_tokens[rows] = counts
    slot_ids[rows] = plan.row_slots
    logits_indices[rows] = counts[:, None] - 1 if plan.kind == "prompt" else np.minimum(columns, counts[:, None] - 1)
    windows = np.zeros((len(rows), plan.window), dtype=np.int32)
    windows[columns < counts[:, None]] = list(chain.from_iterable(planned.token_ids for planned in plan.rows))
    input_ids[rows] = windows
