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

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_replayssm.contract import memory, protocol
from trtllm_replayssm.contract.geometry import ModelGeometry, ReplayGeometry
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepPlan, Verdict


@dataclass
class Counters:
    """The running sums; the names are the keys of ``LLM.metrics()``.

    Attributes:
        num_requests: sequences that ran to their end: ``SamplingParams.n`` for a prompt.
        num_prompt_tokens: prompt tokens that ran, once for each sequence.
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
        wall_time_s: seconds within ``generate``.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
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


@dataclass(frozen=True)
class RowTraffic:
    """State bytes that one row of a step moves."""

    read: int
    written: int


class StateTraffic:
    """The byte formulae of one model.

    Args:
        geometry: the model.
        replay: history, window and state type.
    """

    def __init__(self, geometry: ModelGeometry, replay: ReplayGeometry) -> None:
        self._replay = replay
        self._state_bytes = memory.checkpoint_bytes(geometry, replay.state_dtype)
        self._ring_row_bytes = memory.ring_row_bytes(geometry)

    def replayed(self, c: int, f: int, n: int, *, is_prefill: bool, is_flush: bool) -> RowTraffic:
        """Return what checkpoint and rings move."""
        read = (self._state_bytes if f > 0 else 0) + (c - f) * self._ring_row_bytes
        if is_prefill:
            return RowTraffic(read, self._state_bytes)
        return RowTraffic(read, n * self._ring_row_bytes + (self._state_bytes if is_flush else 0))

    def conventional(self, c: int, n: int, *, is_prefill: bool) -> RowTraffic:
        """Return what a state that is rewritten for every token moves."""
        return RowTraffic(self._state_bytes if c > 0 else 0, self._state_bytes * (1 if is_prefill else n))


class MetricsRecorder:
    """Counts the steps of one ``LLM``.

    Args:
        geometry: the model.
        replay: history, window and state type.
        is_conventional: the mode that runs.
    """

    def __init__(self, geometry: ModelGeometry, replay: ReplayGeometry, *, is_conventional: bool) -> None:
        self._counters = Counters()
        self._traffic = StateTraffic(geometry, replay)
        self._replay = replay
        self._is_conventional = is_conventional

    def count_step(self, plan: StepPlan, slots: Slots) -> None:
        """Count a step that ran, before its lengths are committed."""
        counters = self._counters
        if plan.kind == "prompt":
            counters.num_prompt_steps += 1
            counters.num_prompt_tokens += sum(len(row.token_ids) for row in plan.rows)
        else:
            counters.num_decode_steps += 1
            counters.num_decode_rows += len(plan.rows)
        for row in plan.rows:
            counters.num_draft_tokens += row.num_drafts
            self._count_traffic(
                int(slots.past_lengths[row.slot]),
                int(slots.checkpoint_lengths[row.slot]),
                len(row.token_ids),
                is_prefill=protocol.is_prefill(plan.window, self._replay.max_draft_len),
            )

    def count_tokens(self, plan: StepPlan, verdicts: Sequence[Verdict], appended: Sequence[tuple[int, ...]]) -> None:
        """Count what a step added to its sequences."""
        for row, verdict, token_ids in zip(plan.rows, verdicts, appended, strict=True):
            self._counters.num_generated_tokens += len(token_ids)
            # The last of a verdict's tokens is the target's own; a sequence may also end before it.
            drafts = max(0, len(verdict.new_token_ids) - 1)
            self._counters.num_accepted_drafts += min(drafts, len(token_ids))
            self._counters.num_requests += row.request.is_finished

    def count_time(self, started: float) -> None:
        """Add the time since ``started``, a ``time.perf_counter`` value."""
        self._counters.wall_time_s += time.perf_counter() - started

    def reset(self) -> None:
        """Count from zero again."""
        self._counters = Counters()

    def snapshot(self) -> dict[str, Any]:
        """Return the counters, and the ratios that users ask for first; None for one of nothing."""
        c = self._counters
        result = asdict(c)
        result["tokens_per_s"] = c.num_generated_tokens / c.wall_time_s if c.wall_time_s else None
        result["acceptance_rate"] = c.num_accepted_drafts / c.num_draft_tokens if c.num_draft_tokens else None
        return result

    def _count_traffic(self, c: int, f: int, n: int, *, is_prefill: bool) -> None:
        replay, counters = self._replay, self._counters
        is_flush = (
            not is_prefill
            and not self._is_conventional
            and bool(protocol.needs_flush(c, f, history=replay.history, max_draft_len=replay.max_draft_len))
        )
        counters.num_flushes += is_flush
        conventional = self._traffic.conventional(c, n, is_prefill=is_prefill)
        moved = (
            conventional
            if self._is_conventional
            else self._traffic.replayed(c, f, n, is_prefill=is_prefill, is_flush=is_flush)
        )
        counters.state_bytes_read += moved.read
        counters.state_bytes_written += moved.written
        counters.conventional_state_bytes_read += conventional.read
        counters.conventional_state_bytes_written += conventional.written
