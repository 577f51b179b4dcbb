"""Runs the multi-token prediction head of a model that the torch executor runs, with caches of its own.

The head's key/value caches have a row for each slot, as the model's; what stands at a position belongs to the hidden
state there. So they roll back by the model's own cursor.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.memory_plan import mtp_head_bytes, size_text
from trtllm_replayssm.contract.tensors import MTP_PREFIX, mtp_state_specs
from trtllm_replayssm.errors import CapacityError
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.capacity import available_bytes
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor


class MtpExecutor:
    """A head, its weights and its caches.

    Args:
        make_head: makes the module, ``builders.models.mtp.MtpHead``, its weights uninitialised.
        geometry: of the model, with the head.
        target: runs the model itself; its embeddings and output matrix are used.
        load_weights: device -> the tensors of ``contract.tensors.mtp_weight_specs``.

    Attributes:
        device_bytes: what caches and weights take on the device.

    Raises:
        CapacityError: caches and weights do not fit the device.
    """

    def __init__(
        self,
        make_head: Callable[[], nn.Module],
        geometry: ModelGeometry,
        target: TorchExecutor,
        load_weights: Callable[[torch.device], Mapping[str, torch.Tensor]],
    ) -> None:
        self.device = target.device
        self.num_slots = target.limits.max_batch_size
        self.d_model = geometry.d_model
        self.dtype = target.embedding_matrix.dtype
        self._target = target
        self._specs = specs = mtp_state_specs(geometry, target.replay, target.limits)
        self.device_bytes = mtp_head_bytes(geometry, target.replay, target.limits)
        _check_memory(self.device_bytes, target)
        with torch.device("meta"):
            head = make_head()
        weights = {name.removeprefix(MTP_PREFIX): weight for name, weight in load_weights(self.device).items()}
        head.load_state_dict(weights, assign=True, strict=True)
        self._head = head.eval().requires_grad_(False)
        self._states = pools.allocate(specs, target.limits, self.device)
        for state in self._states:
            state.zero_()  # a prompt that was not run from its start leaves rows unwritten, which must be finite

    @property
    def states(self) -> tuple[pools.State, ...]:
        """The head's caches."""
        return tuple(map(pools.State, self._specs, self._states))

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
            past_lengths: [B] int32, c.
            num_tokens: [B] int32.
            slot_ids: [B] int32, -1 for padding.
            first_slot: row i has the caches of slot first_slot + i.
            key_length: at least max(c) + S.

        Returns:
            [B, S, d_model]: what ``choose`` makes the tokens at c+2 .. c+S+1 of.
        """
        embedded = functional.embedding(token_ids, self._target.embedding_matrix)
        states = tuple(state[first_slot : first_slot + len(token_ids)] for state in self._states)
        out: torch.Tensor = self._head(embedded, hidden, past_lengths, num_tokens, slot_ids, states, key_length)
        return out

    @torch.inference_mode()
    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token behind each hidden state: [..., d_model] -> [...] int64."""
        return functional.linear(hidden, self._target.output_matrix).argmax(dim=-1)

    def close(self) -> None:
        """Drop caches and weights; those of the target stay."""
        self._states = ()
        self._head = nn.Module()


def _check_memory(needed: int, target: TorchExecutor) -> None:
    """Refuse what does not fit beside the target, before anything is allocated."""
    num_slots = target.limits.max_batch_size
    available = available_bytes(target.device)
    if needed > available:
        raise CapacityError(
            f"memory of {target.device}: found {size_text(available)} beside the model; needed {size_text(needed)} for "
            f"the multi-token prediction head and its caches. Lower max_batch_size ({num_slots}) or max_seq_len."
        )
