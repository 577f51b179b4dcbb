"""What happened, counted: requests, tokens, steps, drafts, flushes, and the state bytes that the protocol moves.

State bytes are those of the recurrent layers: checkpoint and rows of its rings. The convolution ring, the key/value
cache and the weights are the same with and without replay and are left out. Per row of a step, with c, f, n the
protocol's symbols, ``state`` the bytes of one slot's checkpoint and ``ring row`` those of one token's rows:

==============================  ==============================================  ==================================
step                            read                                            written
==============================  ==============================================  ==================================
replay, window (S <= T)         [f > 0] state + (c - f) ring rows               n ring rows + [flush] state
replay, prefill (S > T)         [f > 0] state + (c - f) ring rows               state
conventional, window            [c > 0] state                                   n states: one snapshot a token
conventional, prefill           [c > 0] state                                   state
==============================  ==============================================  ==================================
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_replayssm.contract import memory, protocol
from trtllm_replayssm.contract.geometry import ModelGeometry, ReplayGeometry
from trtllm_replayssm.runtime.histogram import Histogram
from trtllm_replayssm.runtime.outputs import FinishReason
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import RowPlan, StepPlan, Verdict

_RowLengths = npt.NDArray[np.integer[Any]]


@dataclass
class Counters:
    """The running sums; the names are the keys of ``LLM.metrics()``.

    Attributes:
        num_requests: sequences that ran to their end: ``SamplingParams.n`` for a prompt.
        num_cancelled: sequences that were aborted.
        num_timed_out: sequences whose time was over.
        num_failed: sequences that an error ended.
        num_preemptions: how often a sequence lost its slot to another one.
        num_prompt_tokens: prompt tokens that ran; once for all sequences of a prompt that had slots at the time.
        num_recomputed_tokens: tokens that ran in pieces of a prompt because their sequence had lost its slot.
        num_generated_tokens: tokens that were appended to a sequence.
        num_prompt_steps: steps that ran a piece of a prompt.
        num_decode_steps: steps that ran one window of every decoding request.
        num_decode_rows: windows of all decode steps together.
        num_draft_tokens: drafts proposed and verified.
        num_accepted_drafts: drafts that entered a sequence.
        num_flushes: rows of steps that folded their pending rows into a checkpoint; prefill not counted.
        state_bytes_read: see the module's table, for the mode that ran.
        state_bytes_written: idem.
        conventional_state_bytes_read: what the same steps move without replay.
        conventional_state_bytes_written: idem; one state, or under speculation one snapshot, per token of a window,
            rejected drafts included.
        wall_time_s: seconds in which there were requests to run.
    """

    num_requests: int = 0
    num_cancelled: int = 0
    num_timed_out: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_steps: int = 0
    num_decode_steps: int = 0
    num_decode_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    num_flushes: int = 0
    state_bytes_read: int = 0
    state_bytes_written: int = 0
    conventional_state_bytes_read: int = 0
    conventional_state_bytes_written: int = 0
    wall_time_s: float = 0.0


@dataclass
class Latencies:
    """How long users waited; the names are the keys of ``LLM.latencies()``.

    Attributes:
        time_to_first_token: from a sequence's arrival to its first token.
        inter_token: from a token to the next of its sequence; tokens that came in one step share the time since the
            step before.
    """

    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)


_COUNTER_OF_END: dict[FinishReason, str] = {
    "stop": "num_requests",
    "length": "num_requests",
    "cancelled": "num_cancelled",
    "timeout": "num_timed_out",
    "error": "num_failed",
}


@dataclass(frozen=True)
class Traffic:
    """State bytes that the rows of a step move together."""

    read: int
    written: int


class StateTraffic:
    """The byte formulae of one model, added up over the rows of a step.

    Args:
        geometry: the model.
        replay: history, window and state type.
    """

    def __init__(self, geometry: ModelGeometry, replay: ReplayGeometry) -> None:
        self._replay = replay
        self._state_bytes = memory.checkpoint_bytes(geometry, replay.state_dtype)
        self._ring_row_bytes = memory.ring_row_bytes(geometry)

    def replayed(
        self, c: _RowLengths, f: _RowLengths, n: _RowLengths, *, is_prefill: bool, num_flushes: int
    ) -> Traffic:
        """Return what checkpoint and rings move."""
        read = self._state_bytes * int(np.count_nonzero(f)) + self._ring_row_bytes * int((c - f).sum())
        if is_prefill:
            return Traffic(read, self._state_bytes * len(n))
        return Traffic(read, self._ring_row_bytes * int(n.sum()) + self._state_bytes * num_flushes)

    def conventional(self, c: _RowLengths, n: _RowLengths, *, is_prefill: bool) -> Traffic:
        """Return what a state that is rewritten for every token moves."""
        num_states = len(n) if is_prefill else int(n.sum())
        return Traffic(self._state_bytes * int(np.count_nonzero(c)), self._state_bytes * num_states)


class MetricsRecorder:
    """Counts the steps of one ``LLM``: one thread counts, any thread may read.

    Args:
        geometry: the model.
        replay: history, window and state type.
        is_conventional: the mode that runs.
    """

    def __init__(self, geometry: ModelGeometry, replay: ReplayGeometry, *, is_conventional: bool) -> None:
        self._counters = Counters()
        self._latencies = Latencies()
        self._lock = threading.Lock()
        self._traffic = StateTraffic(geometry, replay)
        self._replay = replay
        self._is_conventional = is_conventional

    def count_step(self, plan: StepPlan, slots: Slots) -> None:
        """Count a step that ran, before its lengths are committed."""
        with self._lock:
            counters = self._counters
            if plan.kind == "prompt":
                counters.num_prompt_steps += 1
                for row in plan.rows:
                    self._count_piece(row, int(slots.past_lengths[row.slot]))
            else:
                counters.num_decode_steps += 1
                counters.num_decode_rows += len(plan.rows)
            counters.num_draft_tokens += sum(row.num_drafts for row in plan.rows)
            self._count_traffic(
                slots.past_lengths[plan.row_slots],
                slots.checkpoint_lengths[plan.row_slots],
                plan.row_lengths,
                is_prefill=protocol.is_prefill(plan.window, self._replay.max_draft_len),
            )

    def count_tokens(self, plan: StepPlan, verdicts: Sequence[Verdict], appended: Sequence[tuple[int, ...]]) -> None:
        """Count what a step added to its sequences."""
        now = time.perf_counter()
        waits: Counter[tuple[float, int]] = Counter()  # those of a step are mostly the same
        with self._lock:
            for row, verdict, token_ids in zip(plan.rows, verdicts, appended, strict=True):
                num_tokens = len(token_ids)
                self._counters.num_generated_tokens += num_tokens
                # The last of a verdict's tokens is the target's own, where it has one; a sequence may also end before.
                drafts = len(verdict.new_token_ids) - (verdict.error is None)
                if drafts > 0:
                    self._counters.num_accepted_drafts += min(drafts, num_tokens)
                if not num_tokens:
                    continue
                request = row.request
                if request.last_token_s is None:
                    self._latencies.time_to_first_token.add(now - request.arrived_s)
                else:
                    waits[request.last_token_s, num_tokens] += num_tokens
                request.last_token_s = now
            for (since, num_tokens), times in waits.items():
                self._latencies.inter_token.add((now - since) / num_tokens, times)

    def count_end(self, request: Request) -> None:
        """Count a sequence that has ended, in whatever way."""
        assert request.finish_reason is not None, "it has not ended"
        name = _COUNTER_OF_END[request.finish_reason]
        with self._lock:
            setattr(self._counters, name, getattr(self._counters, name) + 1)

    def count_preemptions(self, number: int) -> None:
        """Count sequences that lost their slots."""
        with self._lock:
            self._counters.num_preemptions += number

    def count_time(self, seconds: float) -> None:
        """Add time in which there were requests to run."""
        with self._lock:
            self._counters.wall_time_s += seconds

    def unlock_in_child(self) -> None:
        """In a process that was forked off, go on counting: whoever held the lock may not be here."""
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Count from zero again."""
        with self._lock:
            self._counters = Counters()
            self._latencies = Latencies()

    def snapshot(self) -> dict[str, Any]:
        """Return the counters, and the ratios that users ask for first; None for one of nothing."""
        with self._lock:
            result = asdict(self._counters)
        seconds, drafts = result["wall_time_s"], result["num_draft_tokens"]
        result["tokens_per_s"] = result["num_generated_tokens"] / seconds if seconds else None
        result["acceptance_rate"] = result["num_accepted_drafts"] / drafts if drafts else None
        return result

    def latencies(self) -> Latencies:
        """Return a copy of the latencies so far."""
        with self._lock:
            return deepcopy(self._latencies)

    def _count_piece(self, row: RowPlan, start: int) -> None:
        """Tell the tokens of a piece apart: the prompt's, the first time that they run, and others."""
        request, length = row.request, len(row.token_ids)
        new = max(min(start + length, len(request.prompt_token_ids)) - max(start, request.num_computed), 0)
        self._counters.num_prompt_tokens += new
        self._counters.num_recomputed_tokens += length - new

    def _count_traffic(self, c: _RowLengths, f: _RowLengths, n: _RowLengths, *, is_prefill: bool) -> None:
        replay, counters = self._replay, self._counters
        num_flushes = 0
        if not (is_prefill or self._is_conventional):
            flushes = protocol.needs_flush(c, f, history=replay.history, max_draft_len=replay.max_draft_len)
            num_flushes = int(np.count_nonzero(flushes))
        counters.num_flushes += num_flushes
        conventional = self._traffic.conventional(c, n, is_prefill=is_prefill)
        moved = (
            conventional
            if self._is_conventional
            else self._traffic.replayed(c, f, n, is_prefill=is_prefill, num_flushes=num_flushes)
        )
        counters.state_bytes_read += moved.read
        counters.state_bytes_written += moved.written
        counters.conventional_state_bytes_read += conventional.read
        counters.conventional_state_bytes_written += conventional.written
