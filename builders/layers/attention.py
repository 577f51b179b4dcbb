"""Grouped-query attention over a linear key/value cache."""

import torch
from torch import nn
from torch.nn import functional

from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.layers.flash_attention import FlashStep, attend, finite_values, write_window
from trtllm_replayssm.builders.layers.fused import fused
from trtllm_replayssm.builders.layers.linear import Linear
from trtllm_replayssm.builders.layers.norm import RMSNorm, rms_norm
from trtllm_replayssm.builders.layers.rotary import rotate, rotate_heads
from trtllm_replayssm.builders.layers.step import Step
from trtllm_replayssm.contract.geometry import AttentionGeometry


class Attention(nn.Module):
    """qkv -> norms, rotation -> cache rows c .. c+n-1 written -> attention over 0 .. c+s -> gate -> o_proj.

    Norms, rotation and gate are there where the geometry has them; the cached keys are normed and rotated.
    States, in order: key_cache, value_cache; of all slots, or in an export of the rows of the step.

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
        if step.flash is not None and not onnx_ops.is_exporting():
            return self._forward_flash(hidden, step, step.flash, states)
        query, key, value, gate = self._project(hidden, step)
        assert step.attention_mask is not None, "a model with attention layers makes a mask"
        if onnx_ops.is_exporting():
            key_cache = onnx_ops.tensor_scatter(states[0], key, step.past_lengths)
            value_cache = onnx_ops.tensor_scatter(states[1], value, step.past_lengths)
            out = onnx_ops.attention(query, key_cache, value_cache, step.attention_mask, self.scale)
        else:
            key_cache, value_cache = states
            key_rows, value_rows = map(step.rows_of, states)
            write_rows(key_rows, key, step)
            write_rows(value_rows, value, step)
            out = self._attend(query, key_rows, value_rows, count_finite(key, value), step)
        out = out.transpose(1, 2).flatten(-2)
        if gate is not None:
            out = out * gate.sigmoid()
        return self.o_proj(out), (key_cache, value_cache)

    def _forward_flash(
        self, hidden: torch.Tensor, step: Step, flash: FlashStep, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        g = self.geometry
        packed, gate = self.qkv(hidden), None
        if g.has_output_gate:
            packed, gate = packed.split((g.d_qkv - g.d_query, g.d_query), dim=-1)
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if g.has_qk_norm else (None, None, 0.0)
        cos, sin = (None, None) if step.rotation is None else step.rotation
        query, key, value = split_heads(packed, cos, sin, *norms, n_heads=(g.n_query_heads, g.n_kv_heads))
        key_cache, value_cache = states
        write_window(key_cache, key, flash)
        write_window(value_cache, value, flash)
        out = attend(query, key, value, (key_cache, value_cache), flash, self.scale).flatten(-2)
        if gate is not None:
            out = gate_output(out, gate)
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


@fused
def split_heads(
    packed: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    *,
    n_heads: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a projection into heads, and norm and rotate them where there are weights and a rotation.

    Args:
        packed: [..., Hq hd + 2 Hkv hd].
        cos: [..., rotary_dim / 2].
        sin: as cos.
        q_weight: [hd], of the queries' norm.
        k_weight: [hd], of the keys' norm.
        eps: of both.
        n_heads: Hq and Hkv.

    Returns:
        query [..., Hq, hd], key and value [..., Hkv, hd], these as flash attention wants them.
    """
    n_query_heads, n_kv_heads = n_heads
    heads = torch.unflatten(packed, -1, (n_query_heads + 2 * n_kv_heads, -1))
    query, key, value = torch.split(heads, [n_query_heads, n_kv_heads, n_kv_heads], dim=-2)
    if q_weight is not None and k_weight is not None:
        query = rms_norm(query.float(), q_weight.float(), eps).to(packed.dtype)
        key = rms_norm(key.float(), k_weight.float(), eps).to(packed.dtype)
    if cos is not None and sin is not None:
        query, key = (rotate_heads(part, cos, sin) for part in (query, key))
    return query, *finite_values(key, value)


@fused
def gate_output(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return ``out * sigmoid(gate)``."""
    return out * gate.sigmoid()


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
