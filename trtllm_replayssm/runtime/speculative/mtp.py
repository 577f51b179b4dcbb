"""Drafts from the model's own multi-token prediction head.

After every step of the model the head reads the hidden states of the tokens that stay, each with the token that
follows it. What it makes of the last one gives the first draft; for every further one it reads its own result as if it
were the model's hidden state. The rows that this writes to the head's caches lie beyond the model's cursor, where the
next step's true ones are put over them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trtllm_replayssm.contract.tensors import TensorSpec
from trtllm_replayssm.runtime.executors.mtp_executor import MtpExecutor
from trtllm_replayssm.runtime.inputs import PADDING_SLOT
from trtllm_replayssm.runtime.pools import State
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import RowPlan, StepInputs, StepOutputs, StepPlan, Verdict
from trtllm_replayssm.runtime.transfer import to_device


class MtpDrafter:
    """Drafts greedily with a multi-token prediction head.

    Args:
        executor: of the head.
        max_draft_len: most drafts of a step; the head runs once for each.
    """

    def __init__(self, executor: MtpExecutor, max_draft_len: int) -> None:
        self.max_draft_len = max_draft_len
        self._executor = executor
        # Sequence -> its slot and how many of its tokens the model has committed.
        self._places: dict[int, tuple[int, int]] = {}
        self._slots: Slots | None = None
        shape = (executor.num_slots, executor.d_model)
        self._last_hidden = torch.zeros(shape, dtype=executor.dtype, device=executor.device)

    @property
    def states(self) -> tuple[State, ...]:
        """The head's caches, and what it made of each slot's last token."""
        hidden = self._last_hidden
        dtype = str(hidden.dtype).removeprefix("torch.")
        return (*self._executor.states, State(TensorSpec("last_hidden_0", dtype, tuple(hidden.shape), "state"), hidden))

    @property
    def device_bytes(self) -> int:
        """What the head takes on the device."""
        return self._executor.device_bytes + self._last_hidden.nbytes

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Do nothing: a sequence is met in its first step."""

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Do nothing: ``follow`` has seen the tokens."""

    def follow(
        self, plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, verdicts: Sequence[Verdict], slots: Slots
    ) -> None:
        """Read a step's hidden states; ``slots`` has the lengths before it is committed."""
        assert outputs.hidden_states is not None, "the executor was made to return hidden states"
        num_rows, window = plan.num_rows, plan.window
        buffer = np.zeros((window + 3) * num_rows, dtype=np.int32)
        following = buffer[: window * num_rows].reshape(num_rows, window)
        counters = buffer[window * num_rows :].reshape(3, num_rows)
        # Padding rows, too, write to the caches in an engine: at their slots' cursors it does no harm.
        counters[0] = slots.past_lengths[plan.first_slot : plan.first_slot + num_rows]
        counters[2] = PADDING_SLOT
        self._slots = slots
        for row, verdict in zip(plan.rows, verdicts, strict=True):
            past, count = int(slots.past_lengths[row.slot]), verdict.num_accepted_tokens
            self._places[row.request.request_id] = (row.slot, past + count)
            if row.ran_in is not None:
                continue  # its states are copied, though its token may be another: the first drafts are worse
            place = row.slot - plan.first_slot
            following[place, :count] = _following(row, verdict, past)
            counters[:, place] = past, count, row.slot
        fed = to_device(buffer, self._executor.device)
        past_lengths, num_tokens, slot_ids = fed[window * num_rows :].view(3, num_rows)
        hidden = self._executor.step(
            fed[: window * num_rows].view(num_rows, window),
            outputs.hidden_states,
            past_lengths,
            num_tokens,
            slot_ids,
            first_slot=plan.first_slot,
            key_length=inputs.max_past_length + window,
        )
        rows = torch.arange(num_rows, device=hidden.device)
        last = hidden[rows, (num_tokens - 1).clamp(min=0)]
        kept = self._last_hidden[plan.first_slot : plan.first_slot + num_rows]
        kept.copy_(torch.where((slot_ids >= 0)[:, None], last, kept))

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Chain the head from what it made of each sequence's last token."""
        wanted = {i: min(limit, self.max_draft_len) for i, limit in limits.items() if limit > 0 and i in self._places}
        if not wanted:
            return {}
        num_rows = 1 + max(self._places[request_id][0] for request_id in wanted)
        host = np.zeros((3, num_rows), dtype=np.int32)
        assert self._slots is not None, "a sequence with a place has been followed"
        host[0] = self._slots.past_lengths[:num_rows]
        host[2] = PADDING_SLOT
        for request_id in wanted:
            slot, length = self._places[request_id]
            host[:, slot] = length, 1, slot
        past_lengths, num_tokens, slot_ids = to_device(host.ravel(), self._executor.device).view(3, num_rows)
        longest = max(wanted.values())
        key_length = 1 + max(self._places[request_id][1] for request_id in wanted)
        hidden = self._last_hidden[:num_rows]
        drafts = [self._executor.choose(hidden)]
        for number in range(longest - 1):
            hidden = self._executor.step(
                drafts[-1][:, None],
                hidden[:, None],
                past_lengths + number,
                num_tokens,
                slot_ids,
                first_slot=0,
                key_length=key_length + number,
            )[:, 0]
            drafts.append(self._executor.choose(hidden))
        chosen = torch.stack(drafts, dim=1).tolist()
        return {i: tuple(chosen[self._places[i][0]][:count]) for i, count in wanted.items()}

    def end(self, request_id: int) -> None:
        """Forget the sequence; its cache rows are written over by the slot's next one."""
        self._places.pop(request_id, None)

    def close(self) -> None:
        """Release the head's device memory."""
        self._executor.close()
        self._last_hidden = self._last_hidden.new_empty(0)


def _following(row: RowPlan, verdict: Verdict, past: int) -> Sequence[int]:
    """Return the token after each window token that stays: chosen after it, in the window, or next in the prompt."""
    count = verdict.num_accepted_tokens
    if not verdict.new_token_ids:
        return row.request.tokens(past + 1, past + 1 + count)
    return verdict.new_token_ids if row.num_drafts else (*row.token_ids[1:], *verdict.new_token_ids)
