"""Runs the multi-token prediction head of a model, with caches of its own: what its executors have in common.

The head's key/value caches have a row for each slot, as the model's; what stands at a position belongs to the hidden
state there. So they roll back by the model's own cursor. Embedding and output matrix are the model's, and the latter is
not read by a step that no draft is made of.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch.nn import functional

from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry
from trtllm_replayssm.contract.memory_plan import size_text
from trtllm_replayssm.errors import CapacityError
from trtllm_replayssm.runtime.capacity import available_bytes
from trtllm_replayssm.runtime.pools import State


class SharedMatrices(NamedTuple):
    """What a head has of its model.

    Attributes:
        embedding: the embeddings of all tokens, [vocab_size, d_model].
        output: what turns hidden states into logits, [vocab_size, d_model].
    """

    embedding: torch.Tensor
    output: torch.Tensor


class MtpExecutor(ABC):
    """A head, its weights and its caches.

    Args:
        geometry: of the model, with the head.
        limits: slots and lengths.
        matrices: of the model.
        states: the head's caches.
        device_bytes: what caches and weights take on the device.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        limits: EngineLimits,
        matrices: SharedMatrices,
        states: tuple[State, ...],
        device_bytes: int,
    ) -> None:
        self.num_slots = limits.max_batch_size
        self.d_model = geometry.d_model
        self.dtype = matrices.embedding.dtype
        self.device = matrices.embedding.device
        self.states = states
        self.device_bytes = device_bytes
        self._matrices: SharedMatrices | None = matrices

    @torch.inference_mode()
    def step(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        past_lengths: torch.Tensor,
        num_tokens: torch.Tensor,
        slot_ids: torch.Tensor,
        *,
        first_slot: int,
        key_length: int,
    ) -> torch.Tensor:
        """Run positions c .. c+S-1 of some slots; the caches are updated in place, nothing is committed.

        Args:
            token_ids: [B, S], the tokens at c+1 .. c+S.
            hidden: [B, S, d_model], the hidden states at c .. c+S-1: the model's, or this method's.
            past_lengths: [B] int32, c; also of padding rows, as in ``StepInputs``.
            num_tokens: [B] int32.
            slot_ids: [B] int32, -1 for padding.
            first_slot: row i has the caches of slot first_slot + i.
            key_length: at least max(c) + S.

        Returns:
            [B, S, d_model]: what ``choose`` makes the tokens at c+2 .. c+S+1 of.
        """
        assert self._matrices is not None, "the executor is open"
        embedded = functional.embedding(token_ids, self._matrices.embedding)
        return self._run(embedded, hidden, (past_lengths, num_tokens, slot_ids), first_slot, key_length)

    @torch.inference_mode()
    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token behind each hidden state: [..., d_model] -> [...] int64."""
        assert self._matrices is not None, "the executor is open"
        return functional.linear(hidden, self._matrices.output).argmax(dim=-1)

    def close(self) -> None:
        """Drop caches and weights; those of the target stay."""
        self.states = ()
        self._matrices = None

    @abstractmethod
    def _run(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        first_slot: int,
        key_length: int,
    ) -> torch.Tensor:
        """Do what ``step`` says; ``counters`` are its past_lengths, num_tokens and slot_ids."""


def check_head_memory(needed: int, limits: EngineLimits, device: torch.device) -> None:
    """Refuse what does not fit beside the target, before anything is allocated.

    Raises:
        CapacityError: with the numbers, and what to lower.
    """
    available = available_bytes(device)
    if needed > available:
        raise CapacityError(
            f"memory of {device}: found {size_text(available)} beside the model; needed {size_text(needed)} for "
            f"the multi-token prediction head and its caches. Lower max_batch_size ({limits.max_batch_size}) or "
            f"max_seq_len."
        )
