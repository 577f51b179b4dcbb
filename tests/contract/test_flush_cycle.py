"""The long run of the protocol, held to the protocol itself: step by step, and as a chain of pending counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.ops.strategies import bounded, seeds
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.flush_cycle import ACCEPTANCE, FlushCycle, accepted_probabilities, flush_cycle
from trtllm_replayssm.errors import ConfigError

windows = st.integers(1, 8)
acceptances = st.floats(0.0, 1.0)


def simulated(history: int, max_draft_len: int, acceptance: float, seed: int) -> FlushCycle:
    """Let slots live by ``advance``; drafts are accepted one by one until the first that is not."""
    rng = np.random.default_rng(seed)
    num_slots, burn_in, num_steps = 2000, 200, 200
    # Spread out from the start: with a single token a step the slots stay as far apart as they began.
    c: NDArray[np.int64] = 1 + np.arange(num_slots) % history
    f = np.zeros(num_slots, np.int64)
    flushes, pending, tokens = 0, 0, 0
    for step in range(burn_in + num_steps):
        is_kept = rng.random((num_slots, max_draft_len)) < acceptance
        accepted = 1 + np.cumprod(is_kept, axis=1, dtype=np.int64).sum(1)
        if step >= burn_in:
            flushes += protocol.needs_flush(c, f, history=history, max_draft_len=max_draft_len).sum()
            pending += (c - f).sum()
            tokens += accepted.sum()
        c, f = protocol.advance(c, f, accepted, history=history, max_draft_len=max_draft_len)
    return FlushCycle(*(float(total) / num_slots / num_steps for total in (flushes, pending, tokens)))


def solved(history: int, max_draft_len: int, acceptance: float) -> FlushCycle:
    """Solve for the distribution of pending counts that a step of ``advance`` leaves as it is."""
    probabilities = accepted_probabilities(max_draft_len, acceptance)
    counts = range(1, 1 + history)
    transition = np.zeros((history, history))
    for pending in counts:
        for accepted, probability in enumerate(probabilities, start=1):
            c, f = protocol.advance(pending, 0, accepted, history=history, max_draft_len=max_draft_len)
            transition[pending - 1, c - f - 1] += probability
    unknowns = np.vstack([transition.T - np.eye(history), np.ones(history)])
    stationary, *_ = np.linalg.lstsq(unknowns, np.eye(history + 1)[history], rcond=None)
    is_flush = [protocol.needs_flush(pending, 0, history=history, max_draft_len=max_draft_len) for pending in counts]
    mean_accepted = np.dot(probabilities, range(1, 2 + max_draft_len))
    return FlushCycle(float(stationary @ is_flush), float(stationary @ counts), float(mean_accepted))


@bounded(12)
@given(window=windows, more=st.integers(0, 32), acceptance=acceptances, seed=seeds)
def test_slots_that_live_by_the_protocol_flush_as_often_as_predicted(
    window: int, more: int, acceptance: float, seed: int
) -> None:
    found = simulated(window + more, window - 1, acceptance, seed)
    expected = flush_cycle(window + more, window - 1, acceptance)
    # 400000 steps, neighbours in time correlated over a cycle: the largest error of these examples is half of this.
    assert found == pytest.approx(expected, rel=0.02)


@bounded(200)
@given(window=windows, more=st.integers(0, 40), acceptance=acceptances)
def test_the_averages_are_those_of_the_stationary_distribution(window: int, more: int, acceptance: float) -> None:
    expected = solved(window + more, window - 1, acceptance)
    assert flush_cycle(window + more, window - 1, acceptance) == pytest.approx(expected, rel=1e-9)


@bounded(200)
@given(window=windows, more=st.integers(0, 40), acceptance=acceptances)
def test_a_flush_folds_in_the_long_run_what_is_committed(window: int, more: int, acceptance: float) -> None:
    """Between W - T and W rows are folded at a time, so the flushes of a token lie between these two."""
    history = window + more
    cycle = flush_cycle(history, window - 1, acceptance)
    folded = cycle.mean_accepted / cycle.flush_fraction
    assert max(1, history - window + 1) * (1 - 1e-12) <= folded <= history * (1 + 1e-12)


@pytest.mark.parametrize("history", [1, 8, 16, 32])
def test_plain_decoding_flushes_once_per_history(history: int) -> None:
    assert flush_cycle(history, 0) == pytest.approx((1 / history, (1 + history) / 2, 1))


@pytest.mark.parametrize("max_draft_len", [0, 1, 7])
def test_a_history_of_one_window_flushes_in_every_step(max_draft_len: int) -> None:
    assert flush_cycle(1 + max_draft_len, max_draft_len).flush_fraction == pytest.approx(1)


@bounded(50)
@given(max_draft_len=st.integers(0, 12), acceptance=acceptances)
def test_accepted_tokens_are_a_leading_run_of_drafts(max_draft_len: int, acceptance: float) -> None:
    found = accepted_probabilities(max_draft_len, acceptance)
    assert len(found) == 1 + max_draft_len and min(found) >= 0 and sum(found) == pytest.approx(1)
    mean = sum(accepted * probability for accepted, probability in enumerate(found, start=1))
    assert mean == pytest.approx(sum(acceptance**drafts for drafts in range(1 + max_draft_len)))


def test_nothing_or_everything_accepted_is_certain() -> None:
    assert accepted_probabilities(3, 0.0) == (1, 0, 0, 0)
    assert accepted_probabilities(3, 1.0) == (0, 0, 0, 1)
    assert accepted_probabilities(0, ACCEPTANCE) == (1,)


def test_a_history_that_holds_no_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="history: found 3 with max_draft_len=3"):
        flush_cycle(3, 3)
