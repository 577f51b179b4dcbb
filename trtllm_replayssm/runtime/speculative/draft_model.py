"""Drafts from a smaller model, which runs on an executor and slots of its own.

A round of k drafts is k steps of the draft model, each for all sequences at a time. The first runs the tokens that the
model has not read, one or two of them as a rule, and commits them: they are part of the sequence. Each of the others
runs a window that begins behind them and holds the drafts so far, and commits nothing: a draft is a ring row. How many
drafts of the last window the target took is known when the next round begins; so many are committed then. So the draft
model's states roll back as the target's do, by a cursor that does not advance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.runtime.commit import commit
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.inputs import build_inputs
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import RowPlan, StepKind, StepPlan, Verdict


@dataclass(eq=False)
class _Sequence:
    """One sequence as the draft model knows it.

    Attributes:
        request: stands for the sequence in a plan's rows.
        slot: its slot in the draft model's pools.
        tokens: prompt and generated tokens; drafts are not among them.
        drafts: of the present round.
        open_row: the last step's window of drafts, not committed yet.
    """

    request: Request
    slot: int
    tokens: list[int]
    drafts: list[int]
    open_row: RowPlan | None = None


class DraftModelDrafter:
    """Drafts greedily with a smaller model.

    Args:
        executor: of the draft model; its windows hold at least max_draft_len + 1 tokens.
        limits: slots, as many as the target has, and the longest prompt piece.
        max_draft_len: most drafts of a step.
    """

    def __init__(self, executor: Executor, limits: EngineLimits, max_draft_len: int) -> None:
        self.max_draft_len = max_draft_len
        self._executor = executor
        self._max_num_tokens = limits.max_num_tokens
        self._slots = Slots(limits.max_batch_size)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def device_bytes(self) -> int:
        """What the draft model takes on the device."""
        return self._executor.memory_plan.total

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Take a slot; the prompt is read, in pieces, once drafts are wanted."""
        prompt = tuple(prompt_token_ids)
        request = Request(request_id, None, prompt, SamplingParams(), seed=0, end_ids=frozenset(), max_new_tokens=1)
        self._sequences[request_id] = _Sequence(request, self._slots.acquire(), list(prompt), [])

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Note generated tokens; what the draft model has not read of them it reads in the next round."""
        self._sequences[request_id].tokens.extend(token_ids)

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Draft for the sequences whose prompt has been read; of longer arrears at most max_num_tokens are read."""
        wanted = [self._sequences[request_id] for request_id, limit in limits.items() if limit > 0]
        for sequence in wanted:
            self._settle(sequence)
            sequence.drafts.clear()
        self._read_arrears(wanted)
        ready = [sequence for sequence in wanted if len(self._unread(sequence)) <= self._executor.replay.window]
        lengths = {s.request.request_id: min(limits[s.request.request_id], self.max_draft_len) for s in ready}
        for count in range(max(lengths.values(), default=0)):
            self._draft([s for s in ready if lengths[s.request.request_id] > count])
        return {sequence.request.request_id: tuple(sequence.drafts) for sequence in ready}

    def end(self, request_id: int) -> None:
        """Give the slot back."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._slots.release(sequence.slot)

    def close(self) -> None:
        """Release the draft model's device memory."""
        self._executor.close()

    def _unread(self, sequence: _Sequence) -> tuple[int, ...]:
        return tuple(sequence.tokens[int(self._slots.past_lengths[sequence.slot]) :])

    def _settle(self, sequence: _Sequence) -> None:
        """Commit the drafts of the last window that became part of the sequence."""
        row, sequence.open_row = sequence.open_row, None
        if row is not None:
            pairs = zip(row.token_ids, self._unread(sequence), strict=False)
            num_accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self._commit(_plan("decode", [row]), [num_accepted])

    def _read_arrears(self, sequences: Sequence[_Sequence]) -> None:
        """Read prompts, and what was generated while no drafts were wanted, but for the token before the first draft.

        That one runs together with the other sequences' in the first step of the round.
        """
        budget = self._max_num_tokens
        for sequence in sequences:
            while budget > 0 and len(unread := self._unread(sequence)) > self._executor.replay.window:
                piece = unread[: min(self._max_num_tokens, len(unread) - 1)]
                plan = _plan("prompt", [_row(sequence, piece)])
                self._executor.step(build_inputs(plan, self._slots, self._executor.device))
                self._commit(plan, [len(piece)])
                budget -= len(piece)

    def _draft(self, sequences: Sequence[_Sequence]) -> None:
        """Run one step of the draft model, for one more draft of each sequence."""
        is_first = not sequences[0].drafts
        windows = {s.slot: self._unread(s) if is_first else tuple(s.drafts) for s in sequences}
        by_slot = sorted(sequences, key=lambda sequence: sequence.slot)
        plan = _plan("decode", [_row(sequence, windows[sequence.slot]) for sequence in by_slot])
        if not is_first:
            self._settle_nothing(by_slot)
        outputs = self._executor.step(build_inputs(plan, self._slots, self._executor.device))
        # The lowest id among equals, as the target's greedy choice has it.
        best = outputs.logits.argmax(dim=-1).tolist()
        for sequence, row in zip(by_slot, plan.rows, strict=True):
            sequence.drafts.append(best[row.slot][len(row.token_ids) - 1])
            sequence.open_row = None if is_first else row
        if is_first:
            self._commit(plan, [len(row.token_ids) for row in plan.rows])

    def _settle_nothing(self, sequences: Sequence[_Sequence]) -> None:
        """Commit none of the last windows: the next ones hold the same drafts and one more."""
        rows = [sequence.open_row for sequence in sequences if sequence.open_row is not None]
        if rows:
            self._commit(_plan("decode", rows), [0] * len(rows))

    def _commit(self, plan: StepPlan, counts: Sequence[int]) -> None:
        commit(plan, [Verdict(count, (), ()) for count in counts], self._slots, self._executor.replay)


def _row(sequence: _Sequence, token_ids: tuple[int, ...]) -> RowPlan:
    return RowPlan(sequence.request, sequence.slot, token_ids, num_drafts=0, is_sampled=False)


def _plan(kind: StepKind, rows: Sequence[RowPlan]) -> StepPlan:
    """Return a step of these rows, ascending by slot; a prompt's has its own slot alone."""
    first, last = (rows[0].slot if kind == "prompt" else 0), rows[-1].slot
    return StepPlan(kind, tuple(rows), first_slot=first, num_rows=last + 1 - first)
