"""Counters of a step, which are added up over its rows at once, against the formulae of one row."""

import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.tiny_geometry import tiny_geometry
from tests.runtime.helpers import decode_plan, decoding_request, make_request
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.contract.memory import checkpoint_bytes, ring_row_bytes
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.histogram import Histogram
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import RowPlan, StepPlan, Verdict

GEOMETRY = tiny_geometry()
REPLAY = ReplayGeometry(history=8, max_draft_len=3)
TRAFFIC = ("state_bytes_read", "state_bytes_written")
CONVENTIONAL = tuple(f"conventional_{name}" for name in TRAFFIC)


@dataclass(frozen=True)
class Row:
    """A row of a step, with the protocol's symbols; its slot is as many above the one before as ``gap`` says."""

    c: int
    f: int
    n: int
    gap: int


def traffic_of(row: Row, *, is_prefill: bool, is_conventional: bool) -> dict[str, int]:
    """Return one row's counters by the table in the module's text."""
    state, ring_row = checkpoint_bytes(GEOMETRY, REPLAY.state_dtype), ring_row_bytes(GEOMETRY)
    is_flush = row.c - row.f + REPLAY.max_draft_len + 1 > REPLAY.history
    without = ((row.c > 0) * state, state if is_prefill else row.n * state)
    read = (row.f > 0) * state + (row.c - row.f) * ring_row
    moved = (read, state if is_prefill else row.n * ring_row + is_flush * state)
    counted = dict(zip(TRAFFIC + CONVENTIONAL, (without if is_conventional else moved) + without, strict=True))
    return counted | {"num_flushes": is_flush and not is_prefill and not is_conventional}


@st.composite
def rows(draw: st.DrawFn, longest: int) -> Row:
    f = draw(st.sampled_from([0, 1, 7, 2**31 - 100]))
    return Row(f + draw(st.integers(0, REPLAY.history)), f, draw(st.integers(1, longest)), draw(st.integers(1, 3)))


@pytest.mark.parametrize("is_conventional", [False, True])
@settings(max_examples=60, deadline=None)
@given(
    found=st.one_of(st.lists(rows(REPLAY.window), min_size=1, max_size=40), st.lists(rows(9), min_size=1, max_size=1))
)
def test_a_steps_state_bytes_are_those_of_its_rows_together(is_conventional: bool, found: list[Row]) -> None:
    slots = Slots(3 * len(found))
    planned, slot = [], -1
    for row in found:
        slot += row.gap
        slots.resume(slot, row.c, row.f)
        planned.append(RowPlan(make_request(), slot, tuple(range(row.n)), row.n - 1, is_sampled=True))
    recorder = MetricsRecorder(GEOMETRY, REPLAY, is_conventional=is_conventional)
    recorder.count_step(StepPlan("decode", tuple(planned), first_slot=0, num_rows=slot + 1), slots)
    counted = recorder.snapshot()
    is_prefill = max(row.n for row in found) > REPLAY.window
    expected = [traffic_of(row, is_prefill=is_prefill, is_conventional=is_conventional) for row in found]
    for name in expected[0]:
        assert counted[name] == sum(row[name] for row in expected), name
        assert type(counted[name]) is int, name
    assert counted["num_draft_tokens"] == sum(row.n - 1 for row in found)
    assert (counted["num_decode_steps"], counted["num_decode_rows"]) == (1, len(found))


def test_tokens_of_a_step_share_the_time_since_their_sequences_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    recorder = MetricsRecorder(GEOMETRY, REPLAY, is_conventional=False)
    last, drafts = [9.0, 9.0, 9.5, None, 9.0, 9.0], [(), (), (), (), (8, 9), (8, 9)]
    requests = [decoding_request(number, number) for number in range(len(last))]
    for request, last_token_s in zip(requests, last, strict=True):
        request.arrived_s, request.last_token_s = 7.0, last_token_s
    verdicts = [Verdict(1, (4,), (0.0,))] * 4
    verdicts += [Verdict(2, (8, 4), (0.0, 0.0)), Verdict(0, (), (), error=RequestError("refused"))]
    recorder.count_tokens(decode_plan(requests, drafts), verdicts, [verdict.new_token_ids for verdict in verdicts])
    between, first = Histogram(), Histogram()
    for seconds in (1.0, 1.0, 0.5, 0.5, 0.5):
        between.add(seconds)
    first.add(3.0)
    found = recorder.latencies()
    assert (found.inter_token, found.time_to_first_token) == (between, first)
    assert (recorder.snapshot()["num_generated_tokens"], recorder.snapshot()["num_accepted_drafts"]) == (6, 1)
    assert [request.last_token_s for request in requests] == [10.0] * 5 + [9.0]
