"""The prefill of fresh prompts: our op with a long window, and the gate that every implementation of it passes."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.gate import ROUNDED_BOUND, relative_error, require
from trtllm_replayssm.bench.recurrences import Packed
from trtllm_replayssm.bench.report import PREFILL, Kind
from trtllm_replayssm.contract import traffic


class Prefill(ABC):
    """The prefill of one prompt in every row.

    Args:
        case: what to run, with ``prefill_tokens``.
        device: where.
    """

    implementation: str
    kind: Kind = "prefill"
    num_steps = 1
    flush_fraction: float | None = None
    mean_pending: float | None = None
    output_bound = ROUNDED_BOUND

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        self.case = case
        self.traffic = traffic.prefill_bytes(
            case.geometry,
            case.replay.state_dtype,
            cases.ACTIVATION_DTYPE,
            batch_size=case.batch_size,
            tokens=case.tokens,
        )
        self.num_sets = cases.num_sets(int(self.traffic.total))
        cases.check_launches(case, self.num_sets)
        self.packed = Packed(case, self.num_sets, device)

    @abstractmethod
    def launch(self, step: int, index: int) -> Tensor:
        """Launch the prefill of one set and return its output, [batch, tokens, *output of a token]."""

    @abstractmethod
    def final_states(self, index: int) -> Tensor:
        """Return the states that the last launch of a set left, [batch, *state] as our op has them."""

    def check(self) -> float:
        """Compare the last row of the first set with the CPU op, in the first head and the last.

        Heads are independent and run by the same code, and the CPU is slow.

        Raises:
            NumericsError: an error over the bound.
        """
        replay, packed = self.case.replay, self.packed
        ends, two = [0, -1], packed.recurrence.first_and_last()
        found = self.launch(0, 0)[-1:, :, ends]
        state = torch.zeros(1, *two.state)
        expected = two.op(
            **{name: tensor[-1:, :, ends].cpu().float() for name, tensor in packed.inputs(0).items()},
            **{name: weight[ends].cpu() for name, weight in packed.weights.items()},
            ssm_state=state,
            **two.rings(1, replay.ring_rows),
            past_lengths=torch.zeros(1, dtype=torch.int32),
            checkpoint_lengths=torch.zeros(1, dtype=torch.int32),
            num_tokens=torch.tensor([self.case.tokens], dtype=torch.int32),
            slot_ids=torch.zeros(1, dtype=torch.int32),
            history=replay.history,
            max_draft_len=replay.max_draft_len,
        )
        what = f"{self.case}: %s of {self.implementation}"
        error = relative_error(self.final_states(0)[-1:, ends], state)
        require(what % "last state", error, self.output_bound)
        return require(what % "output", relative_error(found.flatten(0, 1), expected.flatten(0, 1)), self.output_bound)


class ReplayPrefill(Prefill):
    """The op of a recurrence with a window as long as the prompt, over slots that were just acquired."""

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        batch, recurrence = case.batch_size, self.packed.recurrence
        self.implementation = PREFILL[recurrence.name]
        slots = self.num_sets * batch
        zeros = torch.zeros(batch, dtype=torch.int32, device=device)
        self._slot_ids = torch.arange(slots, dtype=torch.int32, device=device).view(self.num_sets, batch)
        self._tensors = {
            **self.packed.weights,
            **recurrence.pools(case.replay, slots, device),
            "past_lengths": zeros,
            "checkpoint_lengths": zeros,
            "num_tokens": zeros + case.tokens,
        }

    def launch(self, step: int, index: int) -> Tensor:
        """Launch the prefill of one set."""
        replay = self.case.replay
        tensors = {**self._tensors, **self.packed.inputs(index), "slot_ids": self._slot_ids[index]}
        return self.packed.recurrence.op(**tensors, history=replay.history, max_draft_len=replay.max_draft_len)

    def final_states(self, index: int) -> Tensor:
        """Return the checkpoints of a set."""
        return self._tensors["ssm_state"][self._slot_ids[index].long()]
