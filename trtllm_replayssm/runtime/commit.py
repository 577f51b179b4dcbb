"""The ledger: the only caller of ``advance`` in a run, and, beside ``Slots.acquire``, the only writer of lengths.

Whether a step flushed is computed here from the same numbers and by the same predicate as in the kernels; no flag
travels. Rollback is the part of a window that is not added.
"""

from collections.abc import Sequence

import numpy as np

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
    rows = plan.row_slots
    accepted = np.array([verdict.num_accepted_tokens for verdict in verdicts], dtype=np.int32)
    assert len(accepted) == len(rows), "one verdict per row"
    assert (accepted >= 0).all(), "no tokens are taken back"
    assert (accepted <= plan.row_lengths).all(), "more tokens accepted than ran"
    c, f = slots.past_lengths[rows], slots.checkpoint_lengths[rows]
    if protocol.is_prefill(plan.window, replay.max_draft_len):
        c, f = protocol.advance_prefill(c, accepted)
    else:
        c, f = protocol.advance(c, f, accepted, history=replay.history, max_draft_len=replay.max_draft_len)
    slots.past_lengths[rows], slots.checkpoint_lengths[rows] = c, f
