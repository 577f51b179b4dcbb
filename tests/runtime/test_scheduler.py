"""The desk: order, chunks, fairness, the end of requests."""

import pytest

from tests.runtime.helpers import GREEDY, make_request
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.runtime.commit import commit
from trtllm_replayssm.runtime.request import Request, RequestState
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepPlan, Verdict


class Desk:
    """A scheduler whose steps append token 7 to every row that is sampled."""

    def __init__(self, slots: int, max_num_tokens: int, priority_aging_s: float | None = None) -> None:
        self.slots = Slots(slots)
        self.scheduler = Scheduler(self.slots, max_num_tokens, priority_aging_s=priority_aging_s)
        self.plans: list[StepPlan] = []

    def step(self) -> StepPlan:
        self.scheduler.admit()
        plan = self.scheduler.plan()
        verdicts = [
            Verdict(len(row.token_ids), (7,) if row.is_sampled else (), (0.0,) if row.is_sampled else ())
            for row in plan.rows
        ]
        commit(plan, verdicts, self.slots, ReplayGeometry(history=16))
        self.scheduler.settle(plan, verdicts)
        self.plans.append(plan)
        return plan

    def run(self, *requests: Request) -> list[StepPlan]:
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()
        return self.plans


def request_of(request_id: int, length: int, max_tokens: int = 3) -> Request:
    params = GREEDY.model_copy(update={"max_tokens": max_tokens})
    return make_request(request_id, range(1, length + 1), params)


def test_prompts_run_first_and_then_all_decode_together() -> None:
    plans = Desk(4, 100).run(*(request_of(i, 5) for i in range(3)))
    assert [plan.kind for plan in plans] == ["prompt"] * 3 + ["decode"] * 2
    assert [plan.first_slot for plan in plans[:3]] == [0, 1, 2]
    assert all(plan.num_rows == 3 and len(plan.rows) == 3 for plan in plans[3:])


def test_a_long_prompt_runs_in_pieces_and_only_the_last_is_sampled() -> None:
    plans = Desk(1, 4).run(request_of(0, 10, max_tokens=1))
    assert [row.token_ids for plan in plans for row in plan.rows] == [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10)]
    assert [plan.rows[0].is_sampled for plan in plans] == [False, False, True]


def test_decoding_requests_get_a_step_between_two_pieces_of_a_prompt() -> None:
    plans = Desk(2, 4).run(request_of(0, 2, max_tokens=9), request_of(1, 12, max_tokens=1))
    assert [plan.kind for plan in plans[:6]] == ["prompt", "prompt", "decode", "prompt", "decode", "prompt"]
    parked = plans[2]
    assert [row.slot for row in parked.rows] == [0], "the request within its prompt does not run"


def test_requests_beyond_the_slots_wait_in_order_and_take_freed_slots() -> None:
    requests = [request_of(i, 3, max_tokens=1 + i % 3) for i in range(7)]
    plans = Desk(2, 100).run(*requests)
    started = [plan.rows[0].request.request_id for plan in plans if plan.kind == "prompt"]
    assert started == list(range(7))
    assert all(len(plan.rows) <= 2 for plan in plans)
    assert [len(request.token_ids) for request in requests] == [1 + i % 3 for i in range(7)]
    assert all(request.slot is None for request in requests)


def test_rows_of_a_decode_step_are_slots_in_order_up_to_the_highest_that_runs() -> None:
    desk = Desk(3, 100)
    desk.run(request_of(0, 2, max_tokens=2), request_of(1, 2, max_tokens=9), request_of(2, 2, max_tokens=4))
    decode = [plan for plan in desk.plans if plan.kind == "decode"]
    assert [[row.slot for row in plan.rows] for plan in decode[:3]] == [[0, 1, 2], [1, 2], [1, 2]]
    assert [plan.num_rows for plan in decode] == [3, 3, 3] + [2] * (len(decode) - 3)


def test_tokens_after_the_end_of_a_request_are_dropped() -> None:
    slots = Slots(1)
    scheduler = Scheduler(slots, 100)
    request = request_of(0, 2, max_tokens=3)
    scheduler.add(request)
    scheduler.admit()
    appended = scheduler.settle(scheduler.plan(), [Verdict(2, (4, 5, 6, 8, 9), (0.0,) * 5)])
    assert appended == ((4, 5, 6),)
    assert (request.token_ids, request.finish_reason, slots.num_free) == ([4, 5, 6], "length", 1)
    assert not scheduler.has_work


def under_constant_load(aging_s: float | None, *, low: int, high: int, seconds: int = 400) -> list[tuple[int, int]]:
    """Have one request of low priority and then, every second, one of high priority more than the slots can serve.

    Returns:
        The second of each step in which the first request had a row, and its tokens then.
    """
    desk = Desk(2, 4, aging_s)
    first = request_of(0, 6, max_tokens=5)
    first.priority = low
    desk.scheduler.add(first)
    steps = []
    for second in range(seconds):
        for number in range(2):
            other = request_of(2 * second + number + 1, 2, max_tokens=3)
            other.priority, other.arrived_s = high, float(second)
            desk.scheduler.add(other)
        plan = desk.step()
        if any(row.request is first for row in plan.rows):
            steps.append((second, len(first.token_ids)))
    return steps


def test_strict_priorities_let_the_lowest_wait_for_ever() -> None:
    assert under_constant_load(None, low=0, high=1) == []
    assert under_constant_load(1000.0, low=0, high=1) == []


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 2), (-(10**400), 10**400)], ids=["1", "3", "huge"])
@pytest.mark.parametrize("aging_s", [1.0, 5.0, 20.0])
def test_with_aging_nobody_waits_longer_than_the_difference_is_worth(aging_s: float, low: int, high: int) -> None:
    steps = under_constant_load(aging_s, low=low, high=high)
    if high > 10**6:
        assert steps == [], "a difference of two million is worth a lifetime"
        return
    begun, ended = steps[0][0], steps[-1][0]
    # All that came before the difference was worth it go first: two a second, each of three steps, on two slots.
    assert aging_s * (high - low) <= begun <= 4 * (aging_s * (high - low) + 4)
    assert steps[-1][1] == 5 and ended - begun < 20, "it lost its slot to those that came later"


def test_ending_everything_leaves_free_slots_and_no_work() -> None:
    desk = Desk(2, 4)
    requests = [request_of(i, 6) for i in range(5)]
    for request in requests:
        desk.scheduler.add(request)
    desk.step()
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (2, 3)
    for request in requests:
        desk.scheduler.end(request, "cancelled")
    assert not desk.scheduler.has_work
    assert desk.slots.num_free == 2


def test_a_finished_request_cannot_go_back() -> None:
    request = request_of(0, 2)
    request.end("cancelled")
    with pytest.raises(AssertionError, match="cannot go from finished to waiting"):
        request.move_to(RequestState.WAITING)
