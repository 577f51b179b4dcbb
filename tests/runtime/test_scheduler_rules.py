"""The scheduler alone, against any sequence of arrivals, ends and steps that hypothesis thinks of."""

import random
import time
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.runtime.helpers import GREEDY, make_request
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.runtime.commit import commit
from trtllm_replayssm.runtime.request import Request, RequestState
from trtllm_replayssm.runtime.request_heap import RequestHeap
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepPlan, Verdict

REPLAY = ReplayGeometry(history=8, max_draft_len=2)
LONGEST = 30  # prompt and generation


def token_at(position: int) -> int:
    return 10_000 + position


def with_drafts(plan: StepPlan, count: int) -> StepPlan:
    """Draft what will be accepted, as far as the requests may still generate it."""
    if plan.kind == "prompt":
        return plan
    rows = []
    for row in plan.rows:
        start = row.request.num_tokens
        length = min(count, row.request.num_remaining - 1)
        rows.append(row.with_drafts(tuple(token_at(start + i) for i in range(length))))
    return replace(plan, rows=tuple(rows))


class Requests(RuleBasedStateMachine):
    """Requests come and are ended; steps accept any number of drafts."""

    @initialize(
        slots=st.integers(1, 4),
        piece=st.integers(3, 12),
        prompt_steps=st.integers(1, 3),
        max_tokens=st.none() | st.integers(LONGEST, 3 * LONGEST),
        aging_s=st.sampled_from([None, 2.0, 10.0]),
    )
    def open(self, slots: int, piece: int, prompt_steps: int, max_tokens: int | None, aging_s: float | None) -> None:
        self.slots, self.piece, self.prompt_steps, self.max_tokens = Slots(slots), piece, prompt_steps, max_tokens
        self.scheduler = Scheduler(
            self.slots,
            piece,
            max_prompt_steps=prompt_steps,
            priority_aging_s=aging_s,
            max_tokens=max_tokens,
            max_draft_len=REPLAY.max_draft_len,
        )
        self.requests: list[Request] = []
        self.held: dict[int, list[int]] = {}  # slot -> the tokens whose state it has
        self.pieces_before_decode: list[int] = []

    @rule(length=st.integers(1, 20), num_tokens=st.integers(1, 10), priority=st.integers(-1, 1))
    def come(self, length: int, num_tokens: int, priority: int) -> None:
        number = len(self.requests)
        params = GREEDY.model_copy(update={"max_tokens": num_tokens})
        request = make_request(number, [100 * number + i for i in range(length)], params)
        request.priority, request.arrived_s = priority, float(number)
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: any(not request.is_finished for request in self.requests))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if not r.is_finished]))
        self.scheduler.end(request, "cancelled")

    @precondition(lambda self: self.scheduler.has_work)
    @rule(accepted=st.integers(0, REPLAY.max_draft_len), fails=st.integers(0, 12))
    def step(self, accepted: int, fails: int) -> None:
        running = [request for request in self.requests if request.slot is not None]
        preempted, admitted = self.scheduler.admit()
        assert not set(admitted).intersection(running).difference(preempted)
        stayed = set(running).difference(preempted)
        rank = self.scheduler.rank
        for gone in preempted:
            # One of no lower priority goes only where the running sequences outgrow the budget, and then the last one.
            able = [r for r in stayed if r.priority <= gone.priority]
            assert all(rank(gone) > rank(request) for request in able), "not the youngest, lowest"
        self.check_turns()
        plan = with_drafts(self.scheduler.plan(), accepted)
        self.check_delay(plan)
        verdicts = [self.verdict(plan, index, is_refused=fails == index) for index in range(len(plan.rows))]
        commit(plan, verdicts, self.slots, REPLAY)
        self.scheduler.settle(plan, verdicts)

    def verdict(self, plan: StepPlan, index: int, *, is_refused: bool) -> Verdict:
        """Run one row: what its slot holds is the sequence so far, and nothing else."""
        row = plan.rows[index]
        request, slot = row.request, row.slot
        past = int(self.slots.past_lengths[slot])
        held = self.held.setdefault(slot, [])
        del held[past:]
        held += row.token_ids
        assert held == [*request.tokens(0, request.num_tokens), *row.drafts][: len(held)], "a slot has another sequence"
        if plan.kind == "prompt":
            assert past % self.piece == 0, "a prompt is cut where another one would not be"
            assert row.is_sampled == (len(held) == request.num_tokens)
        else:
            assert len(held) == request.num_tokens + row.num_drafts
        if is_refused:
            return Verdict(0, (), (), error=RuntimeError("refused"))  # type: ignore[arg-type]
        if not row.is_sampled:
            return Verdict(len(row.token_ids), (), ())
        last = token_at(request.num_tokens + row.num_drafts)
        new = (*row.drafts, last)
        return Verdict(len(row.token_ids), new, (0.0,) * len(new))

    def check_turns(self) -> None:
        """No waiting request ranks before a running one of lower priority, unless making room would not help."""
        running = [r for r in self.requests if r.slot is not None]
        waiting = [r for r in self.requests if r.state is RequestState.WAITING]
        assert running, "there is work and nobody runs"
        if waiting:
            rank = self.scheduler.rank
            first = min(waiting, key=rank)
            lower = [r for r in running if r.priority < first.priority and rank(r) > rank(first)]
            room = self.budget() - sum(self.need(r) for r in running if r not in lower)
            has_slot = bool(self.slots.num_free or lower)
            assert not has_slot or self.need(first) > room
            peers = [r for r in running if r.priority == first.priority and r.request_id > first.request_id]
            # An older peer waits only where it lost its place, and until it fits again.
            assert not peers or self.max_tokens is not None or first.num_computed > 0

    def check_delay(self, plan: StepPlan) -> None:
        """Between two steps of a decoding request few pieces of prompts run, of few tokens."""
        if plan.kind == "decode":
            self.pieces_before_decode.clear()
        elif any(request.state is RequestState.DECODE for request in self.requests):
            self.pieces_before_decode.append(len(plan.rows[0].token_ids))
            assert len(self.pieces_before_decode) <= self.prompt_steps
            assert sum(self.pieces_before_decode) <= self.piece

    def need(self, request: Request) -> int:
        most = len(request.prompt_token_ids) + request.max_new_tokens
        return min(request.num_tokens + REPLAY.max_draft_len, most)

    def budget(self) -> float:
        return float("inf") if self.max_tokens is None else self.max_tokens

    @invariant()
    def slots_belong_to_running_requests(self) -> None:
        if not hasattr(self, "slots"):
            return
        owned = [request.slot for request in self.requests if request.slot is not None]
        assert len(owned) == len(set(owned)) == self.scheduler.num_running
        assert self.slots.num_free == len(self.slots.past_lengths) - len(owned)
        assert all(request.slot is None for request in self.requests if request.is_finished)
        waiting = sum(request.state is RequestState.WAITING for request in self.requests)
        assert self.scheduler.num_waiting == waiting

    def teardown(self) -> None:
        """Whatever is left runs to its end, in a bounded number of steps."""
        if not hasattr(self, "slots"):
            return
        for _ in range(200 * (1 + len(self.requests))):
            if not self.scheduler.has_work:
                break
            self.step(0, 99)
            held = sum(self.need(r) for r in self.requests if r.slot is not None)
            assert held <= self.budget() + (1 + REPLAY.max_draft_len) * len(self.slots.past_lengths)
        assert all(request.is_finished for request in self.requests)
        assert self.slots.num_free == len(self.slots.past_lengths)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class Counted(int):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int.__lt__(self, other)


def test_a_queue_of_twenty_thousand_costs_a_few_comparisons_a_request() -> None:
    count, rng = 20_000, random.Random(3)
    heap = RequestHeap(lambda request: (Counted(rng.randrange(50)), request.request_id))
    requests = [make_request(number) for number in range(count)]
    Counted.comparisons = 0
    for request in requests:
        heap.add(request)
    removed = rng.sample(requests, count // 2)
    assert all(heap.remove(request) for request in removed)
    assert not heap.remove(removed[0]) and len(heap) == count - len(removed)
    order = [heap.pop() for _ in range(len(heap))]
    assert len({request.request_id for request in order} | {request.request_id for request in removed}) == count
    assert heap.first() is None and not heap.requests()
    assert Counted.comparisons < 40 * count  # 2 log2(count) is 29


def test_twenty_thousand_requests_are_queued_ended_and_run() -> None:
    slots, rng = Slots(64), random.Random(5)
    scheduler = Scheduler(slots, 512)
    params = GREEDY.model_copy(update={"max_tokens": 2})
    requests = [make_request(number, (1, 2), params) for number in range(20_000)]
    started = time.perf_counter()
    for request in requests:
        request.priority = rng.randrange(3)
        scheduler.add(request)
    for request in rng.sample(requests, 15_000):
        scheduler.end(request, "cancelled")
    begun: list[Request] = []
    while scheduler.has_work:
        scheduler.admit()
        plan = scheduler.plan()
        verdicts = [Verdict(len(row.token_ids), (7,), (0.0,)) for row in plan.rows]
        commit(plan, verdicts, slots, REPLAY)
        scheduler.settle(plan, verdicts)
        begun += [row.request for row in plan.rows if plan.kind == "prompt"]
    assert time.perf_counter() - started < 60  # about a second; where each costs a walk through the queue, minutes
    assert len(begun) == 5_000 and sum(request.finish_reason == "length" for request in requests) == 5_000
    assert begun == sorted(begun, key=scheduler.rank)
