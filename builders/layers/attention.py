"""Grouped-query attention over a linear key/value cache."""

import torch
from torch import nn
from torch.nn import functional

from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.layers.flash_attention import finite_values, flash_attention
from trtllm_replayssm.builders.layers.linear import Linear
from trtllm_replayssm.builders.layers.norm import RMSNorm
from trtllm_replayssm.builders.layers.rotary import rotate
from trtllm_replayssm.builders.layers.step import Step
from trtllm_replayssm.contract.geometry import AttentionGeometry


class Attention(nn.Module):
    """qkv -> norms, rotation -> cache rows c .. c+n-1 written -> attention over 0 .. c+s -> gate -> o_proj.

    Norms, rotation and gate are there where the geometry has them; the cached keys are normed and rotated.
    States, in order: key_cache, value_cache; row i of a cache belongs to row i of the step.

    Args:
        geometry: of the attention.
        d_model: hidden width.
        eps: of the norms of queries and keys.
        dtype: of activations and weights.
        norm_dtype: of the norms' weights.
    """

    num_states = 2

    def __init__(
        self, geometry: AttentionGeometry, d_model: int, eps: float, dtype: torch.dtype, norm_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.scale = geometry.head_dim**-0.5
        self.qkv = Linear(d_model, geometry.d_qkv, dtype)
        if geometry.has_qk_norm:
            self.q_norm = RMSNorm(geometry.head_dim, eps, norm_dtype)
            self.k_norm = RMSNorm(geometry.head_dim, eps, norm_dtype)
        self.o_proj = Linear(geometry.d_query, d_model, dtype)

    def forward(
        self, hidden: torch.Tensor, step: Step, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Attend with ``hidden [B, S, d_model]``; the caches are in-out. Returns (hidden, present caches)."""
        query, key, value, gate = self._project(hidden, step)
        if onnx_ops.is_exporting():
            assert step.attention_mask is not None, "a model with attention layers makes a mask"
            key_cache = onnx_ops.tensor_scatter(states[0], key, step.past_lengths)
            value_cache = onnx_ops.tensor_scatter(states[1], value, step.past_lengths)
            out = onnx_ops.attention(query, key_cache, value_cache, step.attention_mask, self.scale).transpose(1, 2)
        elif step.flash is not None:
            key_cache, value_cache = states
            key, value = finite_values(key, value)
            write_rows(key_cache, key, step)
            write_rows(value_cache, value, step)
            out = flash_attention(query.transpose(1, 2), key_cache, value_cache, step.flash, self.scale)
        else:
            key_cache, value_cache = states
            write_rows(key_cache, key, step)
            write_rows(value_cache, value, step)
            out = self._attend(query, key_cache, value_cache, count_finite(key, value), step).transpose(1, 2)
        out = out.flatten(-2)
        if gate is not None:
            out = out * gate.sigmoid()
        return self.o_proj(out), (key_cache, value_cache)

    def _project(
        self, hidden: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return query [B, Hq, S, hd], key and value [B, Hkv, S, hd], and the output's gate [B, S, Hq hd] or None."""
        g = self.geometry
        packed, gate = self.qkv(hidden), None
        if g.has_output_gate:
            packed, gate = packed.split((g.d_qkv - g.d_query, g.d_query), dim=-1)
        packed = torch.unflatten(packed, -1, (-1, g.head_dim)).transpose(1, 2)
        query, key, value = torch.split(packed, [g.n_query_heads, g.n_kv_heads, g.n_kv_heads], dim=1)
        if g.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if g.rotary_dim:
            assert step.rotation is not None, "a model with rotary position embedding makes a rotation"
            query, key = rotate(query, *step.rotation), rotate(key, *step.rotation)
        return query, key, value, gate

    def _attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        num_finite: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Attend in torch: ``query [B, Hq, S, hd]``; returns the same shape."""
        assert step.attention_mask is not None, "a model with attention layers makes a mask"
        # A masked row weighs zero, yet zero times what is not finite is NaN: a draft that will be rejected must not
        # reach the tokens before it, nor what an unwritten row holds any token. So rows are replaced from the end of
        # the window on, or from its first token that is not finite; that token and those after it do see it.
        positions = torch.arange(step.key_length, dtype=torch.int32, device=query.device)
        num_live = step.past_lengths + torch.minimum(step.num_tokens, num_finite)
        is_live = (positions < num_live[:, None])[:, None, :, None]
        key = key_cache[:, :, : step.key_length].masked_fill(~is_live, 0.0)
        value = value_cache[:, :, : step.key_length].masked_fill(~is_live, 0.0)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=step.attention_mask, scale=self.scale, enable_gqa=True
        )
        sees_others = torch.arange(query.shape[2], device=query.device) >= num_finite[:, None]
        return out.masked_fill(sees_others[:, None, :, None], torch.nan)


def count_finite(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Count the window's leading tokens whose keys and values are all finite: ``[B, Hkv, S, hd]`` twice -> [B]."""
    is_finite = (key.isfinite() & value.isfinite()).all(-1).all(1)
    return is_finite.cumprod(-1).sum(-1)


def write_rows(cache: torch.Tensor, update: torch.Tensor, step: Step) -> None:
    """Write the window's valid tokens to their cache rows; every other row keeps its bytes.

    Args:
        cache: [B, Hkv, capacity, hd], in-out; capacity >= S.
        update: [B, Hkv, S, hd].
        step: lengths and slots; token s of row b is valid when s < n and the row has a slot.
    """
    capacity, seq_len = cache.shape[2], update.shape[2]
    offsets = torch.arange(seq_len, dtype=torch.int64, device=cache.device)
    # Invalid tokens write back what their row holds, so no boolean index (a host sync on CUDA) is needed. Taken
    # modulo the capacity the S positions of a row differ, so none of them meets a valid token's row.
    positions = (step.past_lengths[:, None] + offsets) % capacity
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
    is_valid = (offsets < step.num_tokens[:, None]) & (step.slot_ids >= 0)[:, None]
    held = cache[rows, :, positions]
    cache[rows, :, positions] = torch.where(is_valid[..., None, None], update.transpose(1, 2), held)
