"""Hybrid models: recurrent layers, attention and MLPs, each a residual layer of its own, a norm and one mixer.

Nemotron-H counts its layers so. A layer of Qwen3-Next or Qwen3.5 is two of these: a recurrence or attention behind the
first norm, an MLP behind the second.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.embedding import Embedding, gather_positions
from trtllm_replayssm.builders.layers.flash_attention import flash_step, is_flash
from trtllm_replayssm.builders.layers.gated_delta_net import ConventionalGatedDeltaNet, GatedDeltaNet
from trtllm_replayssm.builders.layers.linear import Linear
from trtllm_replayssm.builders.layers.mamba2 import ConventionalMamba2, Mamba2
from trtllm_replayssm.builders.layers.mlp import GatedMlp, Mlp
from trtllm_replayssm.builders.layers.norm import RMSNorm
from trtllm_replayssm.builders.layers.rotary import rotation
from trtllm_replayssm.builders.layers.step import Step, attention_mask
from trtllm_replayssm.contract.geometry import AttentionGeometry, LayerType, ModelGeometry, ReplayGeometry
from trtllm_replayssm.ops.dtypes import torch_dtype

Mixer = Mamba2 | GatedDeltaNet | Attention | Mlp | GatedMlp


class Counters(NamedTuple):
    """What the rows of a step stand for, each [B] int32; ``HybridModel.forward`` explains them."""

    past_lengths: torch.Tensor
    checkpoint_lengths: torch.Tensor
    num_tokens: torch.Tensor
    slot_ids: torch.Tensor


def make_step(
    a: AttentionGeometry | None,
    cache: torch.Tensor | None,
    counters: Counters,
    seq_len: int,
    key_length: int | None,
    first_slot: int,
) -> Step:
    """Make what the layers of one step share.

    Args:
        a: the attention, or None.
        cache: the first key cache, [slots, Hkv, capacity, hd]; None without attention layers.
        counters: of the step.
        seq_len: window tokens S.
        key_length: as for ``HybridModel.forward``.
        first_slot: idem.
    """
    if cache is None or a is None:
        return Step(*counters, 0, None, None)
    capacity, past_lengths = cache.shape[2], counters.past_lengths
    if key_length is None and past_lengths.device.type == "cpu" and not onnx_ops.is_exporting():
        key_length = int(past_lengths.max()) + seq_len if len(past_lengths) else 0
    key_length = capacity if key_length is None else min(key_length, capacity)
    turn = None
    if a.rope_theta is not None:
        turn = rotation(past_lengths, seq_len, a.rotary_dim, a.rope_theta, cache.dtype)
    if is_flash(a, cache.dtype, cache.device) and not onnx_ops.is_exporting():
        group_size = a.n_query_heads // a.n_kv_heads
        flash = flash_step(past_lengths, counters.slot_ids, seq_len, cache, key_length, group_size)
        return Step(*counters, key_length, None, turn, flash)
    mask = attention_mask(past_lengths, seq_len, key_length)
    return Step(*counters, key_length, mask, turn, first_slot=first_slot)


class Layer(nn.Module):
    """``hidden + mixer(norm(hidden))``.

    Args:
        mixer: recurrence, attention or MLP.
        geometry: of the model.
    """

    def __init__(self, mixer: Mixer, geometry: ModelGeometry) -> None:
        super().__init__()
        self.norm = RMSNorm(geometry.d_model, geometry.norm_eps, torch_dtype(geometry.norm_dtype))
        self.mixer = mixer

    def forward(
        self, hidden: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the layer on ``hidden [B, S, d_model]``; ``states`` are in-out. Returns (hidden, present states)."""
        mixed, present = self.mixer(self.norm(hidden), step, states)
        return hidden + mixed, present


class HybridModel(nn.Module):
    """A causal language model with explicit states; its parameter names are a rank checkpoint's keys.

    Args:
        geometry: of the model.
        replay: history, window and state type.
        conventional: rewrite the recurrent state for every token, for comparison; cannot be exported.
    """

    def __init__(self, geometry: ModelGeometry, replay: ReplayGeometry, *, conventional: bool = False) -> None:
        super().__init__()
        self.geometry = geometry
        self.replay = replay
        dtype = torch_dtype(geometry.dtype)
        self.embedding = Embedding(geometry.vocab_size, geometry.d_model, dtype)
        mixers = [make_mixer(kind, geometry, replay, conventional) for kind in geometry.layer_types]
        self.layers = nn.ModuleList(Layer(mixer, geometry) for mixer in mixers)
        self.final_norm = RMSNorm(geometry.d_model, geometry.norm_eps, torch_dtype(geometry.norm_dtype))
        if not geometry.tie_word_embeddings:
            self.lm_head = Linear(geometry.d_model, geometry.vocab_size, dtype)
        # Where the states of each layer begin, and at the end how many there are.
        self.first_states = tuple(accumulate((mixer.num_states for mixer in mixers), initial=0))
        caches = (
            first for first, mixer in zip(self.first_states, mixers, strict=False) if isinstance(mixer, Attention)
        )
        self.first_cache = next(caches, None)

    def forward(  # noqa: PLR0913 - a network's inputs, one by one
        self,
        input_ids: torch.Tensor,
        past_lengths: torch.Tensor,
        checkpoint_lengths: torch.Tensor,
        num_tokens: torch.Tensor,
        slot_ids: torch.Tensor,
        logits_indices: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        key_length: int | None = None,
        logits: torch.Tensor | None = None,
        first_slot: int = 0,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run one step: a decode or verification window (S <= T), or a prefill window (S > T).

        Args:
            input_ids: [B, S] int32.
            past_lengths: [B] int32, committed tokens c.
            checkpoint_lengths: [B] int32, folded tokens f.
            num_tokens: [B] int32, window tokens n <= S of each row.
            slot_ids: [B] int32, -1 for a padding row.
            logits_indices: [B, J] int32, window positions whose logits are wanted.
            states: in-out, in the order of ``contract.tensors.state_specs``.
            key_length: how many leading cache rows attention may have to read: at least max(c) + S. A host value;
                None takes the least number on the CPU and the caches' capacity elsewhere (no host sync).
            logits: where to write the logits; None makes a tensor.
            first_slot: row i has a slot of first_slot + i, or none; the key/value caches are found so.

        Returns:
            (logits [B, J, vocab_size] fp32, present states): the given states, updated in place.
        """
        counters = Counters(past_lengths, checkpoint_lengths, num_tokens, slot_ids)
        hidden, present = self._run_layers(input_ids, counters, states, key_length, first_slot)
        return self._head(self.final_norm(gather_positions(hidden, logits_indices)), logits), present

    def forward_with_hidden_states(
        self,
        step_inputs: tuple[torch.Tensor, ...],
        states: tuple[torch.Tensor, ...],
        key_length: int | None = None,
        logits: torch.Tensor | None = None,
        first_slot: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run one step as ``forward`` does; ``step_inputs`` are its first six arguments.

        Returns:
            (logits, hidden states [B, S, d_model] behind the final norm, present states): of the hidden states a
            multi-token prediction head makes drafts.
        """
        counters = Counters(*step_inputs[1:5])
        hidden, present = self._run_layers(step_inputs[0], counters, states, key_length, first_slot)
        hidden = self.final_norm(hidden)
        return self._head(gather_positions(hidden, step_inputs[5]), logits), hidden, present

    @property
    def output_matrix(self) -> torch.Tensor:
        """The matrix that turns hidden states behind the final norm into logits: [vocab_size, d_model]."""
        head = self.embedding if self.geometry.tie_word_embeddings else self.lm_head
        return head.weight

    def _run_layers(
        self,
        input_ids: torch.Tensor,
        counters: Counters,
        states: tuple[torch.Tensor, ...],
        key_length: int | None,
        first_slot: int,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        assert len(states) == self.first_states[-1], f"needed {self.first_states[-1]} states, found {len(states)}"
        cache = None if self.first_cache is None else states[self.first_cache]
        step = make_step(self.geometry.attention, cache, counters, input_ids.shape[1], key_length, first_slot)
        hidden = self.embedding(input_ids)
        present: list[torch.Tensor] = []
        for layer, (first, end) in zip(self.layers, pairwise(self.first_states), strict=True):
            hidden, updated = layer(hidden, step, states[first:end])
            present += updated
        return hidden, tuple(present)

    def _head(self, hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        found = functional.linear(hidden, self.output_matrix)
        return found.float() if logits is None else logits.copy_(found)


def make_mixer(kind: LayerType, geometry: ModelGeometry, replay: ReplayGeometry, conventional: bool = False) -> Mixer:
    """Make the mixer of one layer; the arguments are those of ``HybridModel``."""
    d_model, eps, dtype = geometry.d_model, geometry.norm_eps, torch_dtype(geometry.dtype)
    if kind is LayerType.MAMBA2:
        assert geometry.mamba2 is not None
        mamba2 = ConventionalMamba2 if conventional else Mamba2
        return mamba2(geometry.mamba2, d_model, replay, eps, dtype)
    if kind is LayerType.GATED_DELTA_NET:
        assert geometry.gated_delta_net is not None
        gated_delta_net = ConventionalGatedDeltaNet if conventional else GatedDeltaNet
        return gated_delta_net(geometry.gated_delta_net, d_model, replay, eps, dtype)
    if kind is LayerType.ATTENTION:
        assert geometry.attention is not None
        return Attention(geometry.attention, d_model, eps, dtype, torch_dtype(geometry.norm_dtype))
    assert geometry.mlp is not None
    mlp = GatedMlp if geometry.mlp.activation == "swiglu" else Mlp
    return mlp(geometry.mlp, d_model, dtype)
