"""Attention on the key/value caches as they are: nothing is copied, masked or expanded.

Plain decoding and prompts run torch's flash attention kernel, each row at its own length; windows of a few tokens are
matrix products, which read the keys once for all heads of a group.

The kernel for sequences of different lengths takes keys as one tensor of rows [rows, heads, hd] with a first row and a
length for each sequence. A cache [B, H, capacity, hd] is that, seen with strides: head h of sequence b starts at row
``(b H + h) capacity``, so the rows of head 0 lie ``hd`` apart and those of head h are reached by a stride of
``capacity hd``.

Both weigh a masked value by zero, and 0 * NaN is NaN. So value caches start as zeros and never hold what is not
finite: a token with such a key or value gets NaN as its key, which spoils exactly the tokens that see it, and zeros as
its value.
"""

from dataclasses import dataclass

import torch

from trtllm_replayssm.builders.layers.fused import fused_for_any_size
from trtllm_replayssm.contract.geometry import AttentionGeometry

_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashStep:
    """Where queries and keys are found and written; the same for all layers of a step.

    Attributes:
        first_queries: [B + 1] int32, first query row of each sequence.
        first_keys: [B + 1] int32, first cache row of each sequence, of head 0.
        num_keys: [B] int32, keys that a sequence's last query may see.
        longest: a host number that no row with a slot has more keys than.
        rows: [B, 1] int64, the cache rows of the step.
        positions: [B, S] int64, the window's places in them.
    """

    first_queries: torch.Tensor
    first_keys: torch.Tensor
    num_keys: torch.Tensor
    longest: int
    rows: torch.Tensor
    positions: torch.Tensor


def is_flash(geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether the kernel runs this attention."""
    return device.type == "cuda" and dtype in _TYPES and geometry.is_flash_width


def flash_step(
    past_lengths: torch.Tensor, slot_ids: torch.Tensor, seq_len: int, cache: torch.Tensor, key_length: int
) -> FlashStep:
    """Return where a step's queries and keys are.

    Args:
        past_lengths: [B] int32.
        slot_ids: [B] int32; a row without a slot sees its own window alone.
        seq_len: window tokens S.
        cache: [B, H, capacity, hd], any layer's.
        key_length: at least max(c) + S of the rows with a slot.
    """
    num_rows, n_heads, capacity, _ = cache.shape
    device = past_lengths.device
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    # A row without a slot may have any length, and its cache the tokens of a sequence that does not run in this step.
    # What it writes goes to the last place, where no token that is kept ever stands.
    has_slot = slot_ids >= 0
    first = torch.where(has_slot, past_lengths, capacity).long()
    positions = first[:, None] + torch.arange(seq_len, device=device)
    return FlashStep(
        first_queries=rows * seq_len,
        first_keys=rows * (n_heads * capacity),
        num_keys=(torch.where(has_slot, past_lengths, 0) + seq_len).clamp(max=capacity),
        longest=key_length,
        rows=rows[:num_rows, None].long(),
        positions=positions.clamp(max=capacity - 1),
    )


def write_window(cache: torch.Tensor, update: torch.Tensor, step: FlashStep) -> None:
    """Write a whole window, valid or not: the rows behind a sequence's valid tokens belong to tokens to come.

    Args:
        cache: [B, H, capacity, hd], in-out.
        update: [B, S, H, hd].
        step: where.
    """
    cache[step.rows, :, step.positions] = update


def flash_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, step: FlashStep, scale: float
) -> torch.Tensor:
    """Attend over the caches: query s of a row sees keys 0 .. num_keys - S + s.

    Args:
        query: [B, S, Hq, hd].
        key_cache: [B, Hkv, capacity, hd].
        value_cache: as key_cache.
        step: the step's lengths.
        scale: of the products.

    Returns:
        [B, S, Hq, hd].
    """
    seq_len = query.shape[1]
    out = torch.ops.aten._flash_attention_forward(
        query.flatten(0, 1),
        _rows(key_cache),
        _rows(value_cache),
        step.first_queries,
        step.first_keys,
        seq_len,
        step.longest,
        0.0,  # no dropout
        True,  # causal, counted from the last query and the last key
        False,  # no debug mask
        scale=scale,
        seqused_k=step.num_keys,
    )[0]
    return torch.unflatten(out, 0, (-1, seq_len))


def window_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, step: FlashStep, scale: float
) -> torch.Tensor:
    """Attend as ``flash_attention`` does, in matrix products whose rows are a window's queries of a group of heads.

    The flash kernel reads the keys once for each query head where a window has several tokens; this reads them once,
    for all rows up to the longest.
    """
    num_rows, seq_len, n_heads, width = query.shape
    n_kv_heads = key_cache.shape[1]
    # [B Hkv, G S, hd] and [B Hkv, keys, hd]: the caches' own places, since head follows head and row follows row.
    queries = (
        torch.unflatten(query, 2, (n_kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(num_rows * n_kv_heads, -1, width)
    )
    keys, values = (cache[:, :, : step.longest].flatten(0, 1) for cache in (key_cache, value_cache))
    if query.is_cuda:
        scores = torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32)
    else:
        scores = torch.bmm(queries.float(), keys.transpose(1, 2).float())
    shape = (num_rows, n_heads, seq_len, step.longest)
    weights = window_weights(scores.view(shape), step.num_keys, scale, query.dtype)
    out = torch.bmm(weights.view(scores.shape), values)
    return out.view(num_rows, n_heads, seq_len, width).transpose(1, 2)


@fused_for_any_size
def window_weights(scores: torch.Tensor, num_keys: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the softmax of the scores [B, Hq, S, keys] that a query may see, and zero for others, even for a NaN."""
    _, _, seq_len, longest = scores.shape
    positions = torch.arange(longest, device=scores.device)
    last = num_keys[:, None] - seq_len + torch.arange(seq_len, device=scores.device)
    is_hidden = positions > last[:, None, :, None]
    return (scores * scale).masked_fill(is_hidden, -torch.inf).softmax(-1).to(dtype)


def finite_values(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [..., hd] with NaN and zeros for a token and head where either is not finite."""
    is_spoilt = ~(key.isfinite() & value.isfinite()).all(-1, keepdim=True)
    return key.masked_fill(is_spoilt, torch.nan), value.masked_fill(is_spoilt, 0.0)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    num_rows, n_heads, capacity, width = cache.shape
    count = num_rows * n_heads * capacity - (n_heads - 1) * capacity
    return cache.as_strided((count, n_heads, width), (width, capacity * width, 1))
