"""Where draft tokens come from. Plain decoding is the drafter that proposes none."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from trtllm_replayssm.runtime.pools import State
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs, StepPlan, Verdict


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens that may follow a sequence; wrong ones cost time, never correctness.

    Attributes:
        max_draft_len: most tokens it ever proposes for one sequence.
    """

    max_draft_len: int

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Meet a sequence: a new one, or one that was ended for want of a slot, with its generated tokens behind."""
        ...

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Learn which tokens were really appended to a sequence."""
        ...

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Propose drafts.

        Args:
            limits: request id -> most drafts that are of use, 0 or more.

        Returns:
            request id -> at most so many tokens; a missing request has none.
        """
        ...

    def end(self, request_id: int) -> None:
        """Forget a sequence."""
        ...


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that holds device memory."""

    def close(self) -> None:
        """Release it; the drafter is not used again."""
        ...


@runtime_checkable
class HiddenStateDrafter(Drafter, Protocol):
    """A drafter that reads what the model computed.

    Attributes:
        states: what it keeps of each slot: copied with the executor's own when a prompt's states are reused.
    """

    @property
    def states(self) -> Sequence[State]:
        """As above."""
        ...

    def follow(
        self, plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, verdicts: Sequence[Verdict], slots: Slots
    ) -> None:
        """Learn from a step that ran: after it was judged, before its lengths are committed and its tokens appended.

        Args:
            plan: the step.
            inputs: as the executor got them.
            outputs: with hidden states.
            verdicts: one per row of the plan.
            slots: the lengths before the step; read only.
        """
        ...


class NoDrafter:
    """Plain decoding: one token a step."""

    max_draft_len = 0

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Propose none."""
        return {}

    def end(self, request_id: int) -> None:
        """Do nothing."""
