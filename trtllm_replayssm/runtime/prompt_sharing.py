"""The n sequences of a prompt: the first runs it, the others take over its slot's states and the logits behind it.

They are admitted together as far as there are slots; the first in rank is the one whose pieces run. Those that get
their slots later run the prompt again, one for all that are there by then.
"""

from collections.abc import Sequence
from dataclasses import replace

from trtllm_replayssm.runtime.prefix_cache.slot_states import SlotStates
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepPlan


class PromptSharing:
    """Copies the states of a prompt that has just run.

    Args:
        states: copies of slots.
        slots: the counters.
    """

    def __init__(self, states: SlotStates, slots: Slots) -> None:
        self._states = states
        self._slots = slots

    def share(self, plan: StepPlan, followers: Sequence[Request]) -> StepPlan:
        """Let followers have run the last piece of a prompt, too, once ``copy_states`` has been called.

        Args:
            plan: the last piece of a prompt, which has run and is not committed.
            followers: other sequences of that prompt that wait for it in slots of their own.

        Returns:
            The plan with a row for each of them.
        """
        (leader,) = plan.rows
        c, f = int(self._slots.past_lengths[leader.slot]), int(self._slots.checkpoint_lengths[leader.slot])
        rows = [leader]
        for request in followers:
            assert request.slot is not None, "a follower waits in a slot"
            self._slots.resume(request.slot, c, f)
            rows.append(leader._replace(request=request, slot=request.slot, ran_in=leader.slot))
        return replace(plan, rows=tuple(rows))

    def copy_states(self, plan: StepPlan) -> None:
        """Copy the states of the slot that ran a shared piece to those of the followers; before the commit."""
        for row in plan.rows:
            if row.ran_in is not None:
                end = int(self._slots.past_lengths[row.slot]) + len(row.token_ids)
                self._states.copy_slot(row.ran_in, row.slot, end)
