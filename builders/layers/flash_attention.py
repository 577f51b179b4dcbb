"""Attention on the key/value caches as they are: nothing is copied, masked or expanded.

Torch's flash attention kernel reads them, each row at its own length. It reads the keys once for each query head, but
once for a group of heads where a row has a single query, or queries that all see the same keys. So a window of a few
tokens, whose queries all see what stands before it, attends to that without a mask, the queries of a group of heads as
one, and to itself in plain operations; the two parts are weighed by the sums of their exponentials. Only for single
queries does the kernel share out a row's keys among thread blocks, so each of few rows is one query of many heads;
where rows are enough to keep the GPU busy, as many queries of one head are faster (docs/decisions.md).

The kernel for sequences of different lengths takes keys as one tensor of rows [rows, heads, hd] with a first row and a
length for each sequence. A cache [B, H, capacity, hd] is that, seen with strides: head h of sequence b starts at row
``(b H + h) capacity``, so the rows of head 0 lie ``hd`` apart and those of head h are reached by a stride of
``capacity hd``. Which of them are a sequence's is found on the device, by its slot, so that a captured step serves any.

The kernel weighs a masked value by zero, and 0 * NaN is NaN. So value caches start as zeros and never hold what is not
finite: a token with such a key or value gets NaN as its key, which spoils exactly the tokens that see it, and zeros as
its value.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from trtllm_replayssm.builders.layers.fused import fused_windows
from trtllm_replayssm.contract.geometry import AttentionGeometry

_TYPES = (torch.float16, torch.bfloat16)
# Of a verification step; a prompt's piece of so few tokens may run as one.
_LONGEST_WINDOW = 8
# Of a context from which sharing out a row's keys gains more than its second kernel costs, for half as many rows as
# multiprocessors or more.
_LONG_CONTEXT = 4096


@dataclass(frozen=True)
class FlashStep:
    """Where queries and keys are found and written; the same for all layers of a step.

    Attributes:
        num_queries: of each sequence, as the kernel gets them: S, or of a window 1 (queries as heads) or S G (heads as
            queries), with G query heads to a key head.
        first_queries: [B + 1] int32, first of them of each sequence.
        first_keys: [B + 1] int32, first cache row of each sequence, of head 0; the last number means nothing.
        num_past: [B] int32, keys before the window.
        num_keys: [B] int32, keys that a sequence's last query may see.
        longest: a host number that no row with a slot has more keys than.
        rows: [B, 1] int64, whose cache each sequence has.
        positions: [B, S] int64, the window's places in them.
    """

    num_queries: int
    first_queries: torch.Tensor
    first_keys: torch.Tensor
    num_past: torch.Tensor
    num_keys: torch.Tensor
    longest: int
    rows: torch.Tensor
    positions: torch.Tensor


def is_flash(geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether the kernel runs this attention."""
    return device.type == "cuda" and dtype in _TYPES and geometry.is_flash_width


def own_length_rows(n_heads: int, device: torch.device) -> int:
    """Return from how many rows on attention takes what the rows' own lengths ask for, whatever key length is allowed.

    The kernel shares out a row's keys, by that length, while rows times key heads are fewer than 1.6 times the
    multiprocessors (torch's ``flash_api.cpp``); a window's own border, in ``flash_step``, lies below.

    Args:
        n_heads: key heads of a row.
        device: where.
    """
    return -(-8 * _multiprocessors(device) // (5 * n_heads))


def flash_step(
    past_lengths: torch.Tensor,
    slot_ids: torch.Tensor,
    seq_len: int,
    cache: torch.Tensor,
    key_length: int,
    group_size: int,
) -> FlashStep:
    """Return where a step's queries and keys are.

    Args:
        past_lengths: [B] int32.
        slot_ids: [B] int32; a row without a slot sees its own window alone, in the cache of its number.
        seq_len: window tokens S.
        cache: [slots, H, capacity, hd], any layer's.
        key_length: at least max(c) + S of the rows with a slot.
        group_size: query heads of each key head.
    """
    num_rows, device = len(past_lengths), past_lengths.device
    _, n_heads, capacity, _ = cache.shape
    numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    # A row without a slot may have any length, and its cache the tokens of a sequence that does not run in this step.
    # What it writes goes to the last place, where no token that is kept ever stands.
    has_slot = slot_ids >= 0
    rows = torch.where(has_slot, slot_ids, numbers[:num_rows])
    first = torch.where(has_slot, past_lengths, capacity).long()
    positions = first[:, None] + torch.arange(seq_len, device=device)
    num_past = torch.where(has_slot, past_lengths, 0)
    num_queries = seq_len
    if _is_window(seq_len):
        # Unless the keys of a row are shared out, a row and key head is one thread block.
        enough = _multiprocessors(device) // (1 if key_length >= _LONG_CONTEXT else 2)
        num_queries = 1 if num_rows * n_heads < enough else seq_len * group_size
    return FlashStep(
        num_queries=num_queries,
        first_queries=numbers * num_queries,
        # The kernel reads where a sequence begins, and how long it is elsewhere.
        first_keys=functional.pad(rows * (n_heads * capacity), (0, 1)),
        num_past=num_past,
        num_keys=(num_past + seq_len).clamp(max=capacity),
        longest=key_length,
        rows=rows[:, None].long(),
        positions=positions.clamp(max=capacity - 1),
    )


def write_window(cache: torch.Tensor, update: torch.Tensor, step: FlashStep) -> None:
    """Write a whole window, valid or not: the rows behind a sequence's valid tokens belong to tokens to come.

    Args:
        cache: [slots, H, capacity, hd], in-out.
        update: [B, S, H, hd].
        step: where.
    """
    cache[step.rows, :, step.positions] = update


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    step: FlashStep,
    scale: float,
) -> torch.Tensor:
    """Attend over the caches: query s of a row sees what stands before the window and tokens 0 .. s of it.

    Args:
        query: [B, S, Hq, hd].
        key: [B, S, Hkv, hd], the window's, which the caches hold already.
        value: as key.
        caches: keys and values, [slots, Hkv, capacity, hd] each.
        step: the step's lengths.
        scale: of the products.

    Returns:
        [B, S, Hq, hd].
    """
    if _is_window(query.shape[1]):
        return _attend_in_window(query, key, value, caches, step, scale)
    out, _ = _flash(query, caches, step, step.num_keys, scale, is_causal=True)
    return out


def _is_window(seq_len: int) -> bool:
    return 1 < seq_len <= _LONGEST_WINDOW


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _attend_in_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    step: FlashStep,
    scale: float,
) -> torch.Tensor:
    num_rows, seq_len, _, width = query.shape
    n_kv_heads = key.shape[2]
    grouped = query.view(num_rows, seq_len, n_kv_heads, -1, width)
    # [B, Hkv, S G, hd], then as the kernel gets them: [B, 1, Hkv S G, hd] or [B, S G, Hkv, hd].
    by_head = grouped.transpose(1, 2).flatten(2, 3)
    are_heads = step.num_queries == 1
    packed = by_head.flatten(1, 2)[:, None] if are_heads else by_head.transpose(1, 2).contiguous()
    past, log_sums = _flash(packed, caches, step, step.num_past, scale, is_causal=False)
    # In another order, by rows first, they would be as many, and wrong.
    expected = (packed.shape[2], num_rows * packed.shape[1])
    assert log_sums.shape == expected, f"log sums: found {tuple(log_sums.shape)}; needed {expected}, heads by queries"
    if are_heads:
        sums = log_sums.view(n_kv_heads, seq_len, -1, num_rows).permute(3, 1, 0, 2)
    else:
        past = past.transpose(1, 2)
        sums = log_sums.view(n_kv_heads, num_rows, seq_len, -1).permute(1, 2, 0, 3)
    past = past.reshape(num_rows, n_kv_heads, seq_len, -1, width).transpose(1, 2)
    out = add_window(grouped, key, value, past, sums, step.num_past, scale)
    return out.reshape(query.shape)


@fused_windows
def add_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: torch.Tensor,
    log_sums: torch.Tensor,
    num_past: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return what the queries of a window see, of what they see before it and the window itself.

    With ``m`` the largest exponent, an output is the sum of exp(e - m) v over all keys, over the sum of exp(e - m);
    what the kernel returns is such a quotient over its own keys, and the logarithm of its sum of exp(e).

    Args:
        query: [B, S, Hkv, G, hd].
        key: [B, S, Hkv, hd].
        value: as key; finite.
        past: as query, what is seen before the window.
        log_sums: [B, S, Hkv, G] fp32, of the exponentials there.
        num_past: [B] int32; where it is 0, ``past`` and ``log_sums`` mean nothing.
        scale: of the products.

    Returns:
        As query.
    """
    seq_len = query.shape[1]
    # [B, S, S, Hkv, G], queries by keys; sums of products, not matrix products: few numbers, and nothing is stored.
    exponents = (query[:, :, None].float() * key[:, None, :, :, None].float()).sum(-1) * scale
    positions = torch.arange(seq_len, device=query.device)
    is_hidden = (positions > positions[:, None])[None, :, :, None, None]
    exponents = exponents.masked_fill(is_hidden, -torch.inf)
    has_past = (num_past > 0)[:, None, None, None]
    past_exponent = torch.where(has_past, log_sums, -torch.inf)
    largest = torch.maximum(exponents.amax(2), past_exponent)
    weights = torch.exp(exponents - largest[:, :, None])
    past_weight = torch.exp(past_exponent - largest)
    seen = (weights[..., None] * value[:, None, :, :, None].float()).sum(2)
    seen = seen + past_weight[..., None] * torch.where(has_past[..., None], past.float(), 0.0)
    return (seen / (weights.sum(2) + past_weight)[..., None]).to(query.dtype)


def _flash(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    step: FlashStep,
    num_keys: torch.Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on query [B, S, Hq, hd]; return the same shape, and the log sums of exponentials [Hq, B S]."""
    seq_len = query.shape[1]
    out, log_sums = torch.ops.aten._flash_attention_forward(
        query.flatten(0, 1),
        *(_rows(cache) for cache in caches),
        step.first_queries,
        step.first_keys,
        seq_len,
        step.longest,
        0.0,  # no dropout
        is_causal,  # counted from the last query and the last key
        False,  # no debug mask
        scale=scale,
        seqused_k=num_keys,
    )[:2]
    return torch.unflatten(out, 0, (-1, seq_len)), log_sums


def finite_values(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [..., hd] with NaN and zeros for a token and head where either is not finite."""
    is_spoilt = ~(key.isfinite() & value.isfinite()).all(-1, keepdim=True)
    return key.masked_fill(is_spoilt, torch.nan), value.masked_fill(is_spoilt, 0.0)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    num_rows, n_heads, capacity, width = cache.shape
    count = num_rows * n_heads * capacity - (n_heads - 1) * capacity
    return cache.as_strided((count, n_heads, width), (width, capacity * width, 1))
