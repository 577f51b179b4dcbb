"""The ledger: the only caller of ``advance`` in a run, and, beside ``Slots.acquire``, the only writer of lengths.

Whether a step flushed is computed here from the same numbers and by the same predicate as in the kernels; no flag
travels. Rollback is the part of a window that is not added.
"""

from collections.abc import Sequence

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepPlan, Verdict


def commit(plan: StepPlan, verdicts: Sequence[Verdict], slots: Slots, replay: ReplayGeometry) -> None:
    """Write the lengths after a step: once per step, for every row with a slot.

    Args:
        plan: the step that ran.
        verdicts: one per row of the plan.
        slots: in-out, the counters.
        replay: history and window of the executor.
    """
    is_prefill = protocol.is_prefill(plan.window, replay.max_draft_len)
    for row, verdict in zip(plan.rows, verdicts, strict=True):
        c, f = int(slots.past_lengths[row.slot]), int(slots.checkpoint_lengths[row.slot])
        assert 0 <= verdict.num_accepted_tokens <= len(row.token_ids), "more tokens accepted than ran"
        if is_prefill:
            c, f = protocol.advance_prefill(c, verdict.num_accepted_tokens)
        else:
            c, f = protocol.advance(
                c, f, verdict.num_accepted_tokens, history=replay.history, max_draft_len=replay.max_draft_len
            )
        slots.past_lengths[row.slot] = c
        slots.checkpoint_lengths[row.slot] = f
