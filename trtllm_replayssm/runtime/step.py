"""The doors of one step: what the scheduler plans, what an executor gets, what it returns. All frozen.

Symbols: ``B`` rows, ``S`` window tokens, ``J`` logit positions, ``V`` vocabulary. A row lives for one step; a slot
belongs to a request. Row i of a step stands for slot ``first_slot + i``, because TensorRT's linear cache update writes
cache row i for batch row i.

What each step makes one of for every row is a named tuple: the device waits meanwhile, and a frozen dataclass takes
several times as long to make.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.runtime.outputs import Logprob
from trtllm_replayssm.runtime.request import Request

StepKind = Literal["prompt", "decode"]


class RowPlan(NamedTuple):
    """One request's window in this step.

    Attributes:
        request: whose tokens they are.
        slot: the request's slot.
        token_ids: the window, in order: a piece of the prompt, or the newest token and then the drafts.
        num_drafts: how many of the last window tokens are drafts.
        is_sampled: whether new tokens are chosen from the window's logits; False for a prompt piece but the last.
        ran_in: the slot whose row ran the window, where it is another sequence's of the same prompt.
    """

    request: Request
    slot: int
    token_ids: tuple[int, ...]
    num_drafts: int
    is_sampled: bool
    ran_in: int | None = None

    @property
    def source_slot(self) -> int:
        """The slot whose row of the step has the logits."""
        return self.slot if self.ran_in is None else self.ran_in

    @property
    def drafts(self) -> tuple[int, ...]:
        """The draft tokens of the window."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def with_drafts(self, drafts: tuple[int, ...]) -> "RowPlan":
        """Return the row with draft tokens appended to its window."""
        return self._replace(token_ids=self.token_ids + drafts, num_drafts=len(drafts))


@dataclass(frozen=True)
class StepPlan:
    """Who runs, and with which tokens.

    Attributes:
        kind: "prompt" runs a piece of one prompt, "decode" one window of every decoding request.
        rows: the rows that have a slot, ascending by slot; the others are padding.
        first_slot: slot of row 0.
        num_rows: B.
    """

    kind: StepKind
    rows: tuple[RowPlan, ...]
    first_slot: int
    num_rows: int

    @cached_property
    def window(self) -> int:
        """S, the longest window of a row."""
        return int(self.row_lengths.max())

    @cached_property
    def row_slots(self) -> npt.NDArray[np.int64]:
        """The slot of each row."""
        return np.array([row.slot for row in self.rows])

    @cached_property
    def row_lengths(self) -> npt.NDArray[np.int64]:
        """How many window tokens each row has."""
        return np.array([len(row.token_ids) for row in self.rows])


@dataclass(frozen=True)
class StepInputs:
    """The step inputs of ``contract.tensors.step_specs``, int32, on the executor's device.

    Attributes:
        input_ids: [B, S].
        past_lengths: [B]. A padding row carries its slot's true value: TensorRT's cache update writes S rows at
            that position for every row, and beyond a live request's committed tokens they do no harm.
        checkpoint_lengths: [B].
        num_tokens: [B]; 0 for padding.
        slot_ids: [B]; -1 for padding.
        logits_indices: [B, J], window positions whose logits are wanted.
        first_slot: the key/value cache rows of the step are [first_slot, first_slot + B).
        max_past_length: largest past_lengths of the rows that have a slot, known to the host.
    """

    input_ids: torch.Tensor
    past_lengths: torch.Tensor
    checkpoint_lengths: torch.Tensor
    num_tokens: torch.Tensor
    slot_ids: torch.Tensor
    logits_indices: torch.Tensor
    first_slot: int
    max_past_length: int

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order of ``contract.tensors.step_specs``."""
        return (
            self.input_ids,
            self.past_lengths,
            self.checkpoint_lengths,
            self.num_tokens,
            self.slot_ids,
            self.logits_indices,
        )


@dataclass(frozen=True)
class StepOutputs:
    """What a step returns: never lengths.

    Attributes:
        logits: fp32 [B, J, V]; valid until the next step.
        hidden_states: [B, S, d_model] behind the final norm, of all window tokens, where the executor was made to
            return them; idem.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None

    def first(self, num_rows: int, window: int) -> "StepOutputs":
        """Return the outputs of the first rows and their first tokens, without a copy: the others were padding."""
        hidden = self.hidden_states
        return StepOutputs(self.logits[:num_rows], None if hidden is None else hidden[:num_rows, :window])


class Verdict(NamedTuple):
    """What was decided about one row's window.

    Attributes:
        num_accepted_tokens: window tokens that stay, 0..n.
        new_token_ids: the tokens to append to the sequence: the accepted drafts and the target's own next token.
        logprobs: natural log-probability of each, under the model's logits.
        top_logprobs: for each of them the likeliest tokens at its place; empty where the request does not want them.
        error: why no token could be chosen behind the new ones; it ends the request, unless one of these has, and no
            other request.
    """

    num_accepted_tokens: int
    new_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[int, Logprob], ...] = ()
    error: ReplaySSMError | None = None
