"""The desk: which requests run in a step, and what becomes of them after it. No tensors here.

Requests take slots by rank: higher priority first, then the order in which they came. With aging, one more of priority
puts a request before those that came at most so many seconds earlier, so that nobody is overtaken for ever; ranks never
change, and the queue stays sorted. A step is a piece of one prompt,
or one window of every decoding request. Prompts go first, yet of the steps between two decode steps at most
``max_prompt_steps`` are pieces of prompts, of ``max_num_tokens`` tokens together: so long can a running request wait
for its next token, however many prompts there are. Pieces start at multiples of ``max_num_tokens`` all the same:
where a prompt is cut does not depend on what else runs.

A request takes the slot of the lowest and youngest one that has less priority and ranks behind it, which goes back to
waiting. So does the lowest and youngest one when the running sequences outgrow ``max_tokens``. It keeps its tokens;
when its turn comes again, they run as a prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trtllm_replayssm.contract import defaults
from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.runtime.outputs import FinishReason
from trtllm_replayssm.runtime.request import Request, RequestState, text_failure
from trtllm_replayssm.runtime.request_heap import RequestHeap
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import RowPlan, StepPlan, Verdict

_HIGHEST_AGED = 10**6  # of a priority that is added to seconds, which are floats; beyond it all are alike


class Turnover(NamedTuple):
    """Who lost a slot and who got one, in this order.

    Attributes:
        preempted: back to waiting.
        admitted: from waiting to a slot, preempted ones perhaps among them.
    """

    preempted: tuple[Request, ...]
    admitted: tuple[Request, ...]


class Scheduler:
    """Owns the requests' states and decides whose turn it is.

    Args:
        slots: the slots to give out.
        max_num_tokens: longest piece of a prompt, and most prompt tokens between two decode steps.
        max_prompt_steps: most pieces between two decode steps.
        priority_aging_s: seconds of waiting that count as one more of priority; None for strict priorities.
        max_tokens: most tokens of all running sequences together, room for the next step included; None for what the
            slots hold. At least as many as the longest sequence.
        max_draft_len: most drafts of a window.
        block_size: no piece reaches over a multiple of so many tokens; None lets them.
    """

    def __init__(
        self,
        slots: Slots,
        max_num_tokens: int,
        *,
        max_prompt_steps: int = defaults.MAX_PROMPT_STEPS,
        priority_aging_s: float | None = None,
        max_tokens: int | None = None,
        max_draft_len: int = 0,
        block_size: int | None = None,
    ) -> None:
        self._slots = slots
        self._max_num_tokens = max_num_tokens
        self._max_prompt_steps = max_prompt_steps
        self._max_tokens = max_tokens
        self._max_draft_len = max_draft_len
        self._block_size = block_size
        self._priority_aging_s = priority_aging_s
        self._waiting = RequestHeap(self.rank)
        self._running: dict[int, Request] = {}
        # Since the last decode step, and counted only while a request waited for one.
        self._prompt_steps = 0
        self._prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    def rank(self, request: Request) -> tuple[float, int]:
        """Return a key that orders requests by whose turn it is, the first one's the least; it stays the same."""
        if self._priority_aging_s is None:
            return (-request.priority, request.request_id)
        priority = min(max(request.priority, -_HIGHEST_AGED), _HIGHEST_AGED)
        return (request.arrived_s - priority * self._priority_aging_s, request.request_id)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.add(request)

    def admit(self) -> Turnover:
        """Give slots to the waiting requests whose turn it is, and take them from those that must make room."""
        preempted = self._shrink()
        admitted = []
        while (request := self._waiting.first()) is not None:
            victims = self._victims(request)
            if victims is None:
                break
            for victim in victims:
                self._preempt(victim)
                preempted.append(victim)
            self._waiting.remove(request)
            request.slot = self._slots.acquire()
            request.move_to(RequestState.PREFILL)
            self._running[request.slot] = request
            admitted.append(request)
        return Turnover(tuple(preempted), tuple(admitted))

    def plan(self) -> StepPlan:
        """Plan the next step; there must be work, and ``admit`` must have run."""
        prefilling: list[Request] = []
        decoding: list[int] = []
        for slot in sorted(self._running):
            request = self._running[slot]
            if request.state is RequestState.PREFILL:
                prefilling.append(request)
            else:
                decoding.append(slot)
        if prefilling:
            row = self._next_piece(min(prefilling, key=self.rank))
            if not decoding or self._may_delay(len(row.token_ids)):
                self._prompt_steps += bool(decoding)
                self._prompt_tokens += len(row.token_ids) if decoding else 0
                return StepPlan("prompt", (row,), first_slot=row.slot, num_rows=1)
        self._prompt_steps = self._prompt_tokens = 0
        return self._plan_decode(decoding)

    def siblings(self, request: Request) -> list[Request]:
        """Return the other sequences of a prompt that have slots and have not begun to generate either."""
        if request.params.n == 1 or not request.is_fresh:
            return []
        running = self._running.values()
        return [r for r in running if r.prompt_id == request.prompt_id and r.is_fresh and r is not request]

    def settle(self, plan: StepPlan, verdicts: Sequence[Verdict]) -> tuple[tuple[int, ...], ...]:
        """Append the new tokens to their requests and release the slots of finished ones.

        Returns:
            Per row of the plan the tokens that were appended: fewer than the verdict's where the request ended.
        """
        return tuple(self._settle_row(row, verdict) for row, verdict in zip(plan.rows, verdicts, strict=True))

    def end(self, request: Request, reason: FinishReason, error: ReplaySSMError | None = None) -> None:
        """End a request before its time, wherever it stands; between two steps only."""
        request.end(reason, error)
        self._waiting.remove(request)
        self._release(request)

    def _next_piece(self, request: Request) -> RowPlan:
        assert request.slot is not None, "a prefilling request has a slot"
        start = int(self._slots.past_lengths[request.slot])
        end = min(self._piece_end(start), request.num_tokens)
        is_last = end == request.num_tokens
        return RowPlan(request, request.slot, request.tokens(start, end), num_drafts=0, is_sampled=is_last)

    def _piece_end(self, start: int) -> int:
        end = start + self._max_num_tokens
        # From a block's border on, a prompt runs in the same pieces wherever it began: reuse changes no rounding.
        return end if self._block_size is None else min(end, (start // self._block_size + 1) * self._block_size)

    def _may_delay(self, num_tokens: int) -> bool:
        """Whether a piece of so many tokens may go before the decode step that requests wait for."""
        is_first = self._prompt_steps == 0
        fits = self._prompt_tokens + num_tokens <= self._max_num_tokens
        return is_first or (fits and self._prompt_steps < self._max_prompt_steps)

    def _plan_decode(self, slots: Sequence[int]) -> StepPlan:
        rows = []
        for slot in slots:
            request = self._running[slot]
            rows.append(RowPlan(request, slot, (request.token_ids[-1],), 0, True))
        return StepPlan("decode", tuple(rows), first_slot=0, num_rows=slots[-1] + 1)

    def _settle_row(self, row: RowPlan, verdict: Verdict) -> tuple[int, ...]:
        request, before = row.request, len(row.request.token_ids)
        new_token_ids = verdict.new_token_ids
        tops = verdict.top_logprobs or (None,) * len(new_token_ids)
        for token_id, logprob, top in zip(new_token_ids, verdict.logprobs, tops, strict=True):
            if request.state is RequestState.PREFILL:
                request.move_to(RequestState.DECODE)
            try:
                request.append(token_id, logprob, top)
            except ReplaySSMError as error:  # the grammar's
                request.end("error", error)
            except BaseException as error:  # noqa: BLE001 - one request's trouble; what Rust panics with is no Exception
                request.end("error", text_failure(request.request_id, error))
            if request.is_finished:
                break
        else:
            if verdict.error is None:
                return new_token_ids
            request.end("error", verdict.error)
        self._release(request)
        return new_token_ids[: len(request.token_ids) - before]

    def _release(self, request: Request) -> None:
        if request.slot is not None:
            del self._running[request.slot]
            self._slots.release(request.slot)
            request.slot = None

    def _preempt(self, request: Request) -> None:
        assert request.slot is not None, "a running request has a slot"
        request.num_computed = max(request.num_computed, int(self._slots.past_lengths[request.slot]))
        self._release(request)
        request.move_to(RequestState.WAITING)
        self._waiting.add(request)

    def _shrink(self) -> list[Request]:
        """Preempt requests until the next step of the others fits."""
        preempted = []
        while self._room() < 0:
            victim = max(self._running.values(), key=self.rank)
            self._preempt(victim)
            preempted.append(victim)
        return preempted

    def _victims(self, request: Request) -> list[Request] | None:
        """Return who must go so that a waiting request can run; None where those of lower priority do not suffice."""
        lacking_slots, room = int(not self._slots.num_free), self._room() - self._need(request)
        victims: list[Request] = []
        if not lacking_slots and room >= 0:
            return victims
        lower = [running for running in self._running.values() if running.priority < request.priority]
        behind = [running for running in lower if self.rank(running) > self.rank(request)]
        for victim in sorted(behind, key=self.rank, reverse=True):
            victims.append(victim)
            room += self._need(victim)
            if len(victims) >= lacking_slots and room >= 0:
                return victims
        return None

    def _room(self) -> float:
        """Return how many tokens may still be held after the next step."""
        if self._max_tokens is None:
            return float("inf")
        return self._max_tokens - sum(self._need(request) for request in self._running.values())

    def _need(self, request: Request) -> int:
        """Return the most tokens that a request holds after the next step."""
        last = len(request.prompt_token_ids) + request.max_new_tokens
        return min(request.num_tokens + self._max_draft_len, last)
