"""Attention on the key/value caches as they are, by torch's flash attention kernel: each row at its own length.

The kernel for sequences of different lengths takes keys as one tensor of rows [rows, heads, hd] with a first row and a
length for each sequence. A cache [B, H, capacity, hd] is that, seen with strides: head h of sequence b starts at row
``(b H + h) capacity``, so the rows of head 0 lie ``hd`` apart and those of head h are reached by a stride of
``capacity hd``. Nothing is copied, masked or expanded, and what a step reads follows its sequences' lengths.

The kernel weighs a masked value by zero, and 0 * NaN is NaN. So value caches start as zeros and never hold what is not
finite: a token with such a key or value gets NaN as its key, which spoils exactly the tokens that see it, and zeros as
its value.
"""

from dataclasses import dataclass

import torch

from trtllm_replayssm.contract.geometry import AttentionGeometry

_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashLengths:
    """Where the kernel finds queries and keys; the same for all layers of a step.

    Attributes:
        first_queries: [B + 1] int32, first query row of each sequence.
        first_keys: [B + 1] int32, first cache row of each sequence, of head 0.
        num_keys: [B] int32, keys that a sequence's last query may see.
        longest: a host number that no row with a slot has more keys than.
    """

    first_queries: torch.Tensor
    first_keys: torch.Tensor
    num_keys: torch.Tensor
    longest: int


def is_flash(geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether the kernel runs this attention."""
    return device.type == "cuda" and dtype in _TYPES and geometry.is_flash_width


def flash_lengths(
    past_lengths: torch.Tensor, slot_ids: torch.Tensor, seq_len: int, cache: torch.Tensor, key_length: int
) -> FlashLengths:
    """Return the lengths of a step.

    Args:
        past_lengths: [B] int32.
        slot_ids: [B] int32; a row without a slot sees its own window alone.
        seq_len: window tokens S.
        cache: [B, H, capacity, hd], any layer's.
        key_length: at least max(c) + S of the rows with a slot.
    """
    num_rows, n_heads, capacity, _ = cache.shape
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=past_lengths.device)
    num_keys = torch.where(slot_ids >= 0, past_lengths, 0) + seq_len
    return FlashLengths(rows * seq_len, rows * (n_heads * capacity), num_keys, key_length)


def flash_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, lengths: FlashLengths, scale: float
) -> torch.Tensor:
    """Attend over the caches: query s of a row sees keys 0 .. num_keys - S + s.

    Args:
        query: [B, S, Hq, hd].
        key_cache: [B, Hkv, capacity, hd].
        value_cache: as key_cache.
        lengths: of the step.
        scale: of the products.

    Returns:
        [B, S, Hq, hd].
    """
    seq_len = query.shape[1]
    out = torch.ops.aten._flash_attention_forward(
        query.flatten(0, 1),
        _rows(key_cache),
        _rows(value_cache),
        lengths.first_queries,
        lengths.first_keys,
        seq_len,
        lengths.longest,
        0.0,  # no dropout
        True,  # causal, counted from the last query and the last key
        False,  # no debug mask
        scale=scale,
        seqused_k=lengths.num_keys,
    )[0]
    return torch.unflatten(out, 0, (-1, seq_len))


def finite_values(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [B, H, S, hd] with NaN and zeros for a token and head where either is not finite."""
    is_spoilt = ~(key.isfinite() & value.isfinite()).all(-1, keepdim=True)
    return key.masked_fill(is_spoilt, torch.nan), value.masked_fill(is_spoilt, 0.0)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    num_rows, n_heads, capacity, width = cache.shape
    count = num_rows * n_heads * capacity - (n_heads - 1) * capacity
    return cache.as_strided((count, n_heads, width), (width, capacity * width, 1))
