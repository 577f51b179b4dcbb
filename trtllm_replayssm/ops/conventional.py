"""The conventional decode of each recurrence, for comparison: what replay saves is measured against it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.ops import checks
from trtllm_replayssm.ops.gated_delta_net import INPUT_TABLE as GATED_DELTA_NET_INPUTS
from trtllm_replayssm.ops.mamba2 import INPUT_TABLE as MAMBA2_INPUTS
from trtllm_replayssm.ops.reference import gated_delta_net_conventional as gated_delta_net_reference
from trtllm_replayssm.ops.reference import mamba2_conventional as mamba2_reference
from trtllm_replayssm.ops.reference.gated_delta_net import Inputs as GatedDeltaNetInputs
from trtllm_replayssm.ops.reference.gated_delta_net import Weights as GatedDeltaNetWeights
from trtllm_replayssm.ops.reference.mamba2 import Inputs, Weights

_MAMBA2 = "ops.mamba2_conventional"
_GATED_DELTA_NET = "ops.gated_delta_net_conventional"

_COUNTERS = checks.per_row("past_lengths", "num_tokens", "slot_ids")

_MAMBA2_TABLE = (
    *MAMBA2_INPUTS,
    checks.Argument("ssm_snapshots", ("slots", "T + 1", "H", "P", "N"), "state", is_written=True),
    *_COUNTERS,
)

_GATED_DELTA_NET_TABLE = (
    *GATED_DELTA_NET_INPUTS,
    checks.Argument("ssm_snapshots", ("slots", "T + 1", "Hv", "K", "V"), "state", is_written=True),
    *_COUNTERS,
)

Kernel = Callable[[dict[str, Tensor], int], Tensor]
"""Runs a window of one recurrence: the op's tensors by name, and max_draft_len -> what the op returns."""

_stand_ins: dict[str, Kernel] = {}


@contextmanager
def stand_ins(kernels: Mapping[str, Kernel]) -> Iterator[None]:
    """Let other kernels run in the place of plain torch, so that replay is compared with a tuned conventional decode.

    Args:
        kernels: "mamba2" or "gated_delta_net" -> its kernel. It gets checked tensors, addresses the snapshots as it
            likes, and need not zero the outputs of padding rows and invalid tokens.
    """
    before = dict(_stand_ins)
    _stand_ins.update(kernels)
    try:
        yield
    finally:
        _stand_ins.clear()
        _stand_ins.update(before)


def mamba2_conventional(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_snapshots: Tensor,
    past_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    max_draft_len: int,
) -> Tensor:
    """Run a window of every row, rewriting the state for every token. In-out: ssm_snapshots.

    The state after t tokens stands in ``ssm_snapshots[slot, t mod (T + 1)]``, T = 1 + max_draft_len: a step reads row
    c (zeros if c = 0, whatever the memory holds) and writes rows c+1 .. c+n, so that a rejection is a smaller c'. With
    S > T only the state after c + n tokens is written. There is no second counter and no flush.

    Args:
        x: [B, S, H, P] float32, float16 or bfloat16 (the activation type); may be strided.
        dt: [B, S, H], activation type or float32; raw, before bias and softplus.
        B: [B, S, G, N], activation type; head h belongs to group h // (H / G).
        C: [B, S, G, N], activation type.
        A: [H] float32, negative.
        D: [H] float32.
        dt_bias: [H] float32.
        ssm_snapshots: [slots, T + 1, H, P, N] float32, float16 or bfloat16, in-out.
        past_lengths: [B] int32, committed tokens c.
        num_tokens: [B] int32, window tokens n <= S.
        slot_ids: [B] int32; -1 marks a padding row.
        max_draft_len: most draft tokens of a window, T - 1.

    Returns:
        y, [B, S, H, P] of the activation type, contiguous; zero in padding rows and at tokens s >= num_tokens.

    Raises:
        OpArgumentError: wrong shape, type, device or layout; on the CPU also impossible lengths or slots. Nothing has
            been written then.

    Note:
        Plain torch on every device, in fp32; never waits for the device.
    """
    tensors = {
        "x": x,
        "dt": dt,
        "B": B,
        "C": C,
        "A": A,
        "D": D,
        "dt_bias": dt_bias,
        "ssm_snapshots": ssm_snapshots,
        "past_lengths": past_lengths,
        "num_tokens": num_tokens,
        "slot_ids": slot_ids,
    }
    size = checks.check_tensors(_MAMBA2, _MAMBA2_TABLE, tensors)
    checks.check_multiple(_MAMBA2, "x's heads H", size["H"], size["G"], "the groups G of B and C")
    _check_snapshots(_MAMBA2, size, max_draft_len)
    if x.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    checks.check_counters(_MAMBA2, tensors, size)
    if (kernel := _stand_ins.get("mamba2")) is not None:
        return kernel(tensors, max_draft_len)
    y = mamba2_reference.mamba2_conventional(
        Inputs(x, dt, B, C),
        Weights(A, D, dt_bias),
        ssm_snapshots,
        *(counter.long() for counter in (past_lengths, num_tokens, slot_ids)),
        max_draft_len=max_draft_len,
    )
    return y.to(x.dtype).contiguous()


def gated_delta_net_conventional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_snapshots: Tensor,
    past_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    max_draft_len: int,
) -> Tensor:
    """Run a window of every row, rewriting the state for every token. In-out: ssm_snapshots.

    The snapshots are addressed as in ``mamba2_conventional``; the recurrence is that of ``ops.gated_delta_net``.

    Args:
        q: [B, S, Hk, K] float32, float16 or bfloat16 (the activation type); raw; may be strided.
        k: [B, S, Hk, K], activation type; raw.
        v: [B, S, Hv, V], activation type; value head h uses key head h // (Hv / Hk).
        a: [B, S, Hv], activation type or float32; raw, before bias and softplus.
        b: [B, S, Hv], a's type; raw, before the sigmoid.
        A_log: [Hv] float32, as checkpoints store it.
        dt_bias: [Hv] float32.
        ssm_snapshots: [slots, T + 1, Hv, K, V] float32, float16 or bfloat16, in-out.
        past_lengths: [B] int32, committed tokens c.
        num_tokens: [B] int32, window tokens n <= S.
        slot_ids: [B] int32; -1 marks a padding row.
        max_draft_len: most draft tokens of a window, T - 1.

    Returns:
        o, [B, S, Hv, V] of the activation type, contiguous; zero in padding rows and at tokens s >= num_tokens.

    Raises:
        OpArgumentError: wrong shape, type, device or layout; on the CPU also impossible lengths or slots. Nothing has
            been written then.

    Note:
        Plain torch on every device, in fp32; never waits for the device.
    """
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "ssm_snapshots": ssm_snapshots,
        "past_lengths": past_lengths,
        "num_tokens": num_tokens,
        "slot_ids": slot_ids,
    }
    size = checks.check_tensors(_GATED_DELTA_NET, _GATED_DELTA_NET_TABLE, tensors)
    checks.check_same_type(_GATED_DELTA_NET, b=b, a=a)
    checks.check_multiple(_GATED_DELTA_NET, "v's heads Hv", size["Hv"], size["Hk"], "the heads Hk of q and k")
    _check_snapshots(_GATED_DELTA_NET, size, max_draft_len)
    if q.is_meta:
        return torch.empty(v.shape, dtype=v.dtype, device="meta")
    checks.check_counters(_GATED_DELTA_NET, tensors, size)
    if (kernel := _stand_ins.get("gated_delta_net")) is not None:
        return kernel(tensors, max_draft_len)
    o = gated_delta_net_reference.gated_delta_net_conventional(
        GatedDeltaNetInputs(q, k, v, a, b),
        GatedDeltaNetWeights(A_log, dt_bias),
        ssm_snapshots,
        *(counter.long() for counter in (past_lengths, num_tokens, slot_ids)),
        max_draft_len=max_draft_len,
    )
    return o.to(v.dtype).contiguous()


def _check_snapshots(op: str, size: dict[str, int], max_draft_len: int) -> None:
    checks.check_int(op, "max_draft_len", max_draft_len)
    window = protocol.window_length(max_draft_len)
    checks.check_window(op, history=window, max_draft_len=max_draft_len)
    checks.check_equal(op, "ssm_snapshots' rows", size["T + 1"], window + 1, "2 + max_draft_len")
    checks.check_at_least(op, "ssm_snapshots' slots", size["slots"], 1, "a padding row reads slot 0, and drops it")
