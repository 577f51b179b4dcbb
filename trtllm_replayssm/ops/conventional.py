"""The conventional Mamba-2 decode, for comparison: what replay saves is measured against it."""

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.ops import checks
from trtllm_replayssm.ops.mamba2 import INPUT_TABLE
from trtllm_replayssm.ops.reference import mamba2_conventional as reference
from trtllm_replayssm.ops.reference.mamba2 import Inputs, Weights

_OP = "ops.mamba2_conventional"

_TABLE = (
    *INPUT_TABLE,
    checks.Argument("ssm_snapshots", ("slots", "T + 1", "H", "P", "N"), "state", is_written=True),
    checks.Argument("past_lengths", ("batch",), "int32"),
    checks.Argument("num_tokens", ("batch",), "int32"),
    checks.Argument("slot_ids", ("batch",), "int32"),
)


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
    size = checks.check_tensors(_OP, _TABLE, tensors)
    checks.check_multiple(_OP, "x's heads H", size["H"], size["G"], "the groups G of B and C")
    checks.check_int(_OP, "max_draft_len", max_draft_len)
    window = protocol.window_length(max_draft_len)
    checks.check_window(_OP, history=window, max_draft_len=max_draft_len)
    checks.check_equal(_OP, "ssm_snapshots' rows", size["T + 1"], window + 1, "2 + max_draft_len")
    checks.check_at_least(_OP, "ssm_snapshots' slots", size["slots"], 1, "a padding row reads slot 0, and drops it")
    if x.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    checks.check_slots(_OP, slot_ids, size["slots"])
    checks.check_lengths(_OP, slot_ids=slot_ids, past_lengths=past_lengths, num_tokens=num_tokens, seq_len=size["S"])
    y = reference.mamba2_conventional(
        Inputs(x, dt, B, C),
        Weights(A, D, dt_bias),
        ssm_snapshots,
        *(counter.long() for counter in (past_lengths, num_tokens, slot_ids)),
        max_draft_len=max_draft_len,
    )
    return y.to(x.dtype).contiguous()
