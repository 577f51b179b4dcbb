"""Multi-token prediction heads: what follows the next token, from that token and the hidden state before it."""

from itertools import accumulate, pairwise

import torch
from torch import nn

from trtllm_replayssm.builders.layers.linear import Linear
from trtllm_replayssm.builders.layers.norm import RMSNorm
from trtllm_replayssm.builders.models.hybrid import Counters, Layer, make_mixer, make_step
from trtllm_replayssm.contract.geometry import ModelGeometry, ReplayGeometry
from trtllm_replayssm.ops.dtypes import torch_dtype


class MtpHead(nn.Module):
    """``norm(layers(projection([norm(embedding of the next token), norm(hidden state)])))``.

    The hidden state at position i and the token at i + 1 give one at position i again, of which the model's output
    matrix makes the logits of token i + 2. It may take the place of the model's hidden state at i + 1, to go on.
    Parameter names are a rank checkpoint's keys without their prefix.

    Args:
        geometry: of the model, with a head.
        replay: of the model; the head has no recurrence.
    """

    def __init__(self, geometry: ModelGeometry, replay: ReplayGeometry) -> None:
        super().__init__()
        assert geometry.mtp is not None, "a model with a head describes it"
        width, eps = geometry.d_model, geometry.norm_eps
        norm_dtype = torch_dtype(geometry.norm_dtype)
        self.geometry = geometry
        self.embedding_norm = RMSNorm(width, eps, norm_dtype)
        self.hidden_norm = RMSNorm(width, eps, norm_dtype)
        self.projection = Linear(2 * width, width, torch_dtype(geometry.dtype))
        mixers = [make_mixer(kind, geometry, replay) for kind in geometry.mtp.layer_types]
        self.layers = nn.ModuleList(Layer(mixer, geometry) for mixer in mixers)
        self.final_norm = RMSNorm(width, eps, norm_dtype)
        self.first_states = tuple(accumulate((mixer.num_states for mixer in mixers), initial=0))

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        past_lengths: torch.Tensor,
        num_tokens: torch.Tensor,
        slot_ids: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        key_length: int | None = None,
        first_slot: int = 0,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run positions c .. c+S-1.

        Args:
            embedded: [B, S, d_model], the embeddings of the tokens at c+1 .. c+S.
            hidden: [B, S, d_model], the hidden states at c .. c+S-1, behind the final norm.
            past_lengths: [B] int32, c.
            num_tokens: [B] int32, window tokens n <= S of each row.
            slot_ids: [B] int32, -1 for a padding row.
            states: in-out, in the order of ``contract.tensors.mtp_state_specs``.
            key_length: as for ``HybridModel.forward``.
            first_slot: idem.

        Returns:
            ([B, S, d_model] behind the head's final norm, present states): the given states, updated in place.
        """
        assert len(states) == self.first_states[-1], f"needed {self.first_states[-1]} states, found {len(states)}"
        hidden = self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        counters = Counters(past_lengths, past_lengths, num_tokens, slot_ids)
        cache = states[0] if states else None
        step = make_step(self.geometry.attention, cache, counters, hidden.shape[1], key_length, first_slot)
        present: list[torch.Tensor] = []
        for layer, (first, end) in zip(self.layers, pairwise(self.first_states), strict=True):
            hidden, updated = layer(hidden, step, states[first:end])
            present += updated
        return self.final_norm(hidden), tuple(present)
