"""Slots, the ledger and the dock: who owns which row, and what the step is told about lengths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.helpers import decode_plan, decoding_request, make_request
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.runtime.commit import commit
from trtllm_replayssm.runtime.inputs import build_inputs
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import RowPlan, StepPlan, Verdict

CPU = torch.device("cpu")


def test_the_lowest_free_slot_is_taken_and_its_counters_start_at_zero() -> None:
    slots = Slots(3)
    assert [slots.acquire(), slots.acquire(), slots.acquire()] == [0, 1, 2]
    slots.past_lengths[:] = 9
    slots.checkpoint_lengths[:] = 5
    slots.release(2)
    slots.release(0)
    assert slots.acquire() == 0
    assert (slots.past_lengths.tolist(), slots.checkpoint_lengths.tolist()) == ([0, 9, 9], [0, 5, 5])


def test_a_slot_that_nobody_has_is_neither_given_nor_given_back() -> None:
    slots = Slots(1)
    slots.acquire()
    with pytest.raises(AssertionError, match="only while one is free"):
        slots.acquire()
    slots.release(0)
    with pytest.raises(AssertionError, match="given back twice"):
        slots.release(0)


@given(st.lists(st.booleans(), max_size=60))
def test_no_slot_is_ever_owned_twice(takes: list[bool]) -> None:
    slots, owned = Slots(5), set()
    for take in takes:
        if take and slots.num_free:
            slot = slots.acquire()
            assert slot not in owned
            owned.add(slot)
        elif owned:
            slots.release(owned.pop())
        assert slots.num_free == 5 - len(owned)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 4), st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_commit_follows_the_protocol_for_any_acceptance_pattern(
    extra_history: int, max_draft_len: int, accepts: list[int]
) -> None:
    window = 1 + max_draft_len
    replay = ReplayGeometry(history=window + extra_history - 1, max_draft_len=max_draft_len)
    slots, request = Slots(1), decoding_request(0, slots_slot := 0)
    slots.acquire()
    c = f = 0
    for wanted in accepts:
        accepted = min(wanted, window)
        if c - f + window > replay.history:
            f = c
        c += accepted
        plan = decode_plan([request], [tuple(range(max_draft_len))])
        commit(plan, [Verdict(accepted, (), ())], slots, replay)
        assert (slots.past_lengths[slots_slot], slots.checkpoint_lengths[slots_slot]) == (c, f)
        assert c - f <= replay.history


def test_a_window_longer_than_a_verification_folds_everything() -> None:
    slots, replay = Slots(1), ReplayGeometry(history=16, max_draft_len=2)
    slot = slots.acquire()
    for length, expected in ((3, (3, 0)), (4, (7, 7)), (1, (8, 7))):
        row = RowPlan(make_request(), slot, tuple(range(length)), num_drafts=0, is_sampled=False)
        commit(StepPlan("prompt", (row,), slot, 1), [Verdict(length, (), ())], slots, replay)
        assert (slots.past_lengths[slot], slots.checkpoint_lengths[slot]) == expected


def test_idle_rows_are_padding_that_carries_the_true_length_of_its_slot() -> None:
    slots = Slots(4)
    for _ in range(4):
        slots.acquire()
    slots.past_lengths[:] = [10, 20, 30, 40]
    slots.checkpoint_lengths[:] = [1, 2, 3, 4]
    plan = decode_plan([decoding_request(0, 0, [50]), decoding_request(1, 2, [60])], [(51, 52), ()])
    inputs = build_inputs(plan, slots, CPU)
    assert inputs.input_ids.tolist() == [[50, 51, 52], [0, 0, 0], [60, 0, 0]]
    assert inputs.past_lengths.tolist() == [10, 20, 30]
    assert inputs.checkpoint_lengths.tolist() == [1, 2, 3]
    assert inputs.num_tokens.tolist() == [3, 0, 1]
    assert inputs.slot_ids.tolist() == [0, -1, 2]
    assert inputs.logits_indices.tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0]]
    assert (inputs.first_slot, inputs.max_past_length) == (0, 30)


def test_a_prompt_piece_is_one_row_that_stands_for_its_slot() -> None:
    slots = Slots(4)
    for _ in range(4):
        slots.acquire()
    slots.past_lengths[:] = [10, 20, 30, 40]
    row = RowPlan(make_request(), 2, (5, 6, 7), num_drafts=0, is_sampled=True)
    inputs = build_inputs(StepPlan("prompt", (row,), first_slot=2, num_rows=1), slots, CPU)
    assert inputs.input_ids.tolist() == [[5, 6, 7]]
    assert inputs.past_lengths.tolist() == [30]
    assert inputs.slot_ids.tolist() == [2]
    assert inputs.logits_indices.tolist() == [[2]]
    assert inputs.first_slot == 2


def test_step_inputs_are_int32_and_start_on_256_byte_borders() -> None:
    slots = Slots(3)
    requests = [decoding_request(i, slots.acquire()) for i in range(3)]
    inputs = build_inputs(decode_plan(requests, [(1, 2)] * 3), slots, CPU)
    base = inputs.input_ids.data_ptr()
    for tensor in inputs.tensors():
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert (tensor.data_ptr() - base) % 256 == 0
    assert np.all(slots.past_lengths == 0), "building inputs wrote a length"
