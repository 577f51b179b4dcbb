"""The desk: which requests run in a step, and what becomes of them after it. No tensors here.

Requests take slots in the order they came. Prompts go first, one piece a step; between two pieces of a long prompt the
decoding requests get a step, so that no prompt stalls them for longer than one piece takes.
"""

from collections import deque
from collections.abc import Sequence

from trtllm_replayssm.runtime.request import Request, RequestState
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import RowPlan, StepPlan, Verdict


class Scheduler:
    """Owns the requests' states and decides whose turn it is.

    Args:
        slots: the slots to give out.
        max_num_tokens: longest piece of a prompt.
    """

    def __init__(self, slots: Slots, max_num_tokens: int) -> None:
        self._slots = slots
        self._max_num_tokens = max_num_tokens
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._is_decode_due = False

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def admit(self) -> tuple[Request, ...]:
        """Give free slots to waiting requests, first come first served; return the admitted ones."""
        admitted = []
        while self._waiting and self._slots.num_free:
            request = self._waiting.popleft()
            request.slot = self._slots.acquire()
            request.move_to(RequestState.PREFILL)
            self._running[request.slot] = request
            admitted.append(request)
        return tuple(admitted)

    def plan(self) -> StepPlan:
        """Plan the next step; there must be work, and ``admit`` must have run."""
        prefilling = [r for r in self._running.values() if r.state is RequestState.PREFILL]
        decoding = [slot for slot in sorted(self._running) if self._running[slot].state is RequestState.DECODE]
        if prefilling and not (decoding and self._is_decode_due):
            return self._plan_prompt(min(prefilling, key=lambda request: request.request_id))
        self._is_decode_due = False
        return self._plan_decode(decoding)

    def settle(self, plan: StepPlan, verdicts: Sequence[Verdict]) -> tuple[tuple[int, ...], ...]:
        """Append the new tokens to their requests and release the slots of finished ones.

        Returns:
            Per row of the plan the tokens that were appended: fewer than the verdict's where the request ended.
        """
        return tuple(self._settle_row(row, verdict) for row, verdict in zip(plan.rows, verdicts, strict=True))

    def drop_all(self) -> tuple[Request, ...]:
        """Forget every request, waiting or running, and release the slots; return the forgotten ones."""
        dropped = (*self._waiting, *self._running.values())
        for slot in self._running:
            self._slots.release(slot)
        self._waiting.clear()
        self._running.clear()
        self._is_decode_due = False
        return dropped

    def _plan_prompt(self, request: Request) -> StepPlan:
        assert request.slot is not None, "a prefilling request has a slot"
        start = int(self._slots.past_lengths[request.slot])
        piece = request.prompt_token_ids[start : start + self._max_num_tokens]
        is_last = start + len(piece) == len(request.prompt_token_ids)
        self._is_decode_due = not is_last
        row = RowPlan(request, request.slot, piece, num_drafts=0, is_sampled=is_last)
        return StepPlan("prompt", (row,), first_slot=request.slot, num_rows=1)

    def _plan_decode(self, slots: Sequence[int]) -> StepPlan:
        rows = tuple(
            RowPlan(self._running[slot], slot, (self._running[slot].token_ids[-1],), num_drafts=0, is_sampled=True)
            for slot in slots
        )
        return StepPlan("decode", rows, first_slot=0, num_rows=slots[-1] + 1)

    def _settle_row(self, row: RowPlan, verdict: Verdict) -> tuple[int, ...]:
        request, before = row.request, len(row.request.token_ids)
        tops = verdict.top_logprobs or (None,) * len(verdict.new_token_ids)
        for token_id, logprob, top in zip(verdict.new_token_ids, verdict.logprobs, tops, strict=True):
            if request.state is RequestState.PREFILL:
                request.move_to(RequestState.DECODE)
            request.append(token_id, logprob, top)
            if request.is_finished:
                self._slots.release(row.slot)
                del self._running[row.slot]
                request.slot = None
                break
        return tuple(request.token_ids[before:])
