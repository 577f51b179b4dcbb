"""Gated DeltaNet decode, verification and prefill from a checkpoint and a ring of recent tokens."""

import torch
from torch import Tensor

from trtllm_replayssm.ops import checks
from trtllm_replayssm.ops.reference import gated_delta_net as reference
from trtllm_replayssm.ops.reference.slots import Cursors

_OP = "ops.gated_delta_net"

INPUT_TABLE = (
    checks.Argument("q", ("batch", "S", "Hk", "K"), "activation"),
    checks.Argument("k", ("batch", "S", "Hk", "K"), "activation"),
    checks.Argument("v", ("batch", "S", "Hv", "V"), "activation"),
    checks.Argument("a", ("batch", "S", "Hv"), "activation or float32"),
    checks.Argument("b", ("batch", "S", "Hv"), "activation or float32"),
    checks.Argument("A_log", ("Hv",), "float32"),
    checks.Argument("dt_bias", ("Hv",), "float32"),
)
"""What a Gated DeltaNet layer computes with, replayed or not."""

_TABLE = (
    *INPUT_TABLE,
    checks.Argument("ssm_state", ("slots", "Hv", "K", "V"), "state", is_written=True),
    checks.Argument("k_ring", ("slots", "R", "Hk", "K"), "activation", is_written=True),
    checks.Argument("u_ring", ("slots", "R", "Hv", "V"), "float32", is_written=True),
    checks.Argument("g_ring", ("slots", "R", "Hv"), "float32", is_written=True),
    *checks.per_row("past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids"),
)


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    k_ring: Tensor,
    u_ring: Tensor,
    g_ring: Tensor,
    past_lengths: Tensor,
    checkpoint_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    history: int,
    max_draft_len: int,
) -> Tensor:
    """Run a window of every row through the recurrence. In-out: ssm_state, k_ring, u_ring, g_ring.

    Per value head, with q and k at length 1 and ``scale = K^-1/2``, all in fp32:
    ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``, ``S <- exp(g) S``, ``u = beta (v - S^T k)``,
    ``S <- S + k u^T``, ``o = scale S^T q``.

    With S <= T = 1 + max_draft_len this is a step: rows with ``c - f + T > history`` fold their pending rows [f, c)
    into the checkpoint, outputs come from checkpoint and ring, and the window is written to the ring; commit with
    ``ops.advance``. With S > T it is a prefill: everything up to c + n is folded into the checkpoint, the rings are
    only read, and both lengths become c + n. A checkpoint at position 0 is zero and never read, so a slot is started
    by setting both lengths to 0. Rejecting tokens takes no action: their ring rows are overwritten.

    Args:
        q: [B, S, Hk, K] float32, float16 or bfloat16 (the activation type); raw; may be strided.
        k: [B, S, Hk, K], activation type; raw.
        v: [B, S, Hv, V], activation type; value head h uses key head h // (Hv / Hk).
        a: [B, S, Hv], activation type or float32; raw, before bias and softplus.
        b: [B, S, Hv], a's type; raw, before the sigmoid.
        A_log: [Hv] float32, as checkpoints store it.
        dt_bias: [Hv] float32.
        ssm_state: [slots, Hv, K, V] float32, float16 or bfloat16, in-out: the checkpoints.
        k_ring: [slots, R, Hk, K], activation type, in-out: k as it came; position t stands in row t mod R.
        u_ring: [slots, R, Hv, V] float32, in-out.
        g_ring: [slots, R, Hv] float32, in-out.
        past_lengths: [B] int32, committed tokens c.
        checkpoint_lengths: [B] int32, folded tokens f, f <= c.
        num_tokens: [B] int32, window tokens n <= S, at positions c .. c+n-1.
        slot_ids: [B] int32; -1 marks a padding row: nothing is read or written for it.
        history: most pending rows W >= T.
        max_draft_len: most draft tokens of a window, T - 1; R >= W + T.

    Returns:
        o, [B, S, Hv, V] of the activation type, contiguous; zero in padding rows and at tokens s >= num_tokens.

    Raises:
        OpArgumentError: wrong shape, type, device or layout, W < T, too few ring rows; on the CPU also impossible
            lengths or slots. Nothing has been written then.
        UnsupportedError: no kernel for these shapes on CUDA.

    Note:
        Computed in fp32; outputs and checkpoints are rounded once. Keys and queries longer than 1e19 overflow the sum
        of their squares, as in the models' own code.

    Source:
        Gated DeltaNet: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025). The sums over the ring:
        ``ops.reference.gated_delta_net``.
    """
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "ssm_state": ssm_state,
        "k_ring": k_ring,
        "u_ring": u_ring,
        "g_ring": g_ring,
        "past_lengths": past_lengths,
        "checkpoint_lengths": checkpoint_lengths,
        "num_tokens": num_tokens,
        "slot_ids": slot_ids,
    }
    size = checks.check_tensors(_OP, _TABLE, tensors)
    checks.check_same_type(_OP, b=b, a=a)
    checks.check_multiple(_OP, "v's heads Hv", size["Hv"], size["Hk"], "the heads Hk of q and k")
    checks.check_ring(_OP, "k_ring, u_ring and g_ring", size["R"], history=history, max_draft_len=max_draft_len)
    if q.is_meta:
        return torch.empty(v.shape, dtype=v.dtype, device="meta")
    checks.check_counters(_OP, tensors, size, history=history)
    run = _launch if q.is_cuda else _reference
    return run(tensors, history, max_draft_len)


def _launch(tensors: dict[str, Tensor], history: int, max_draft_len: int) -> Tensor:
    from trtllm_replayssm.plugins import launch

    return launch.gated_delta_net(tensors, history=history, max_draft_len=max_draft_len)


def _reference(tensors: dict[str, Tensor], history: int, max_draft_len: int) -> Tensor:
    v, slot_ids = tensors["v"], tensors["slot_ids"]
    used = (slot_ids >= 0).nonzero().squeeze(1)
    o = torch.zeros(v.shape, dtype=v.dtype)
    o[used] = reference.gated_delta_net(
        reference.Inputs(*(tensors[name][used] for name in ("q", "k", "v", "a", "b"))),
        reference.Weights(*(tensors[name] for name in ("A_log", "dt_bias"))),
        reference.Pools(*(tensors[name] for name in ("ssm_state", "k_ring", "u_ring", "g_ring"))),
        Cursors.of(tensors, used),
        history=history,
        max_draft_len=max_draft_len,
    ).to(v.dtype)
    return o
