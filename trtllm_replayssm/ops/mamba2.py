"""Mamba-2 decode, verification and prefill from a checkpoint and a ring of recent inputs."""

import torch
from torch import Tensor

from trtllm_replayssm.ops import checks
from trtllm_replayssm.ops.reference import mamba2 as reference
from trtllm_replayssm.ops.reference.slots import Cursors

_OP = "ops.mamba2"

WEIGHT_TABLE = (
    checks.Argument("A", ("H",), "float32"),
    checks.Argument("D", ("H",), "float32"),
    checks.Argument("dt_bias", ("H",), "float32"),
)
POOL_TABLE = (
    checks.Argument("ssm_state", ("slots", "H", "P", "N"), "state", is_written=True),
    checks.Argument("x_ring", ("slots", "R", "H", "P"), "activation", is_written=True),
    checks.Argument("B_ring", ("slots", "R", "G", "N"), "activation", is_written=True),
    checks.Argument("dt_ring", ("slots", "R", "H"), "float32", is_written=True),
)

INPUT_TABLE = (
    checks.Argument("x", ("batch", "S", "H", "P"), "activation"),
    checks.Argument("dt", ("batch", "S", "H"), "activation or float32"),
    checks.Argument("B", ("batch", "S", "G", "N"), "activation"),
    checks.Argument("C", ("batch", "S", "G", "N"), "activation"),
    *WEIGHT_TABLE,
)
"""What a Mamba-2 layer computes with, replayed or not."""

_TABLE = (
    *INPUT_TABLE,
    *POOL_TABLE,
    *checks.per_row("past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids"),
)


def mamba2(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    x_ring: Tensor,
    B_ring: Tensor,
    dt_ring: Tensor,
    past_lengths: Tensor,
    checkpoint_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    history: int,
    max_draft_len: int,
) -> Tensor:
    """Run a window of every row through the recurrence. In-out: ssm_state, x_ring, B_ring, dt_ring.

    With S <= T = 1 + max_draft_len this is a step: rows with ``c - f + T > history`` fold their pending rows [f, c)
    into the checkpoint, outputs come from checkpoint and ring, and the window is written to the ring; commit with
    ``ops.advance``. With S > T it is a prefill: everything up to c + n is folded into the checkpoint, the rings are
    only read, and both lengths become c + n. A checkpoint at position 0 is zero and never read, so a slot is started
    by setting both lengths to 0. Rejecting tokens takes no action: their ring rows are overwritten.

    Args:
        x: [B, S, H, P] float32, float16 or bfloat16 (the activation type); may be strided.
        dt: [B, S, H], activation type or float32; raw, before bias and softplus.
        B: [B, S, G, N], activation type; head h belongs to group h // (H / G).
        C: [B, S, G, N], activation type.
        A: [H] float32, negative.
        D: [H] float32.
        dt_bias: [H] float32.
        ssm_state: [slots, H, P, N] float32, float16 or bfloat16, in-out: the checkpoints.
        x_ring: [slots, R, H, P], activation type, in-out; the token at position t stands in row t mod R.
        B_ring: [slots, R, G, N], activation type, in-out.
        dt_ring: [slots, R, H] float32, in-out; after softplus.
        past_lengths: [B] int32, committed tokens c.
        checkpoint_lengths: [B] int32, folded tokens f, f <= c.
        num_tokens: [B] int32, window tokens n <= S, at positions c .. c+n-1.
        slot_ids: [B] int32; -1 marks a padding row: nothing is read or written for it.
        history: most pending rows W >= T.
        max_draft_len: most draft tokens of a window, T - 1; R >= W + T.

    Returns:
        y, [B, S, H, P] of the activation type, contiguous; zero in padding rows and at tokens s >= num_tokens.

    Raises:
        OpArgumentError: wrong shape, type, device or layout, W < T, too few ring rows; on the CPU also impossible
            lengths or slots. Nothing has been written then.
        UnsupportedError: no kernel for these shapes on CUDA.

    Note:
        On the CPU computed in fp32; outputs and checkpoints are rounded once.

    Source:
        Mamba-2: Dao and Gu, "Transformers are SSMs" (2024). The closed form over the ring: ``ops.reference.mamba2``.
    """
    tensors = {
        "x": x,
        "dt": dt,
        "B": B,
        "C": C,
        "A": A,
        "D": D,
        "dt_bias": dt_bias,
        "ssm_state": ssm_state,
        "x_ring": x_ring,
        "B_ring": B_ring,
        "dt_ring": dt_ring,
        "past_lengths": past_lengths,
        "checkpoint_lengths": checkpoint_lengths,
        "num_tokens": num_tokens,
        "slot_ids": slot_ids,
    }
    size = checks.check_tensors(_OP, _TABLE, tensors)
    _check_sizes(size, history, max_draft_len)
    if x.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    checks.check_counters(_OP, tensors, size, history=history)
    run = _launch if x.is_cuda else _reference
    return run(tensors, history, max_draft_len)


def _check_sizes(size: dict[str, int], history: int, max_draft_len: int) -> None:
    checks.check_multiple(_OP, "x's heads H", size["H"], size["G"], "the groups G of B and C")
    checks.check_ring(_OP, "x_ring, B_ring and dt_ring", size["R"], history=history, max_draft_len=max_draft_len)


def _launch(tensors: dict[str, Tensor], history: int, max_draft_len: int) -> Tensor:
    from trtllm_replayssm.plugins import launch

    return launch.mamba2(tensors, history=history, max_draft_len=max_draft_len)


def _reference(tensors: dict[str, Tensor], history: int, max_draft_len: int) -> Tensor:
    x, slot_ids = tensors["x"], tensors["slot_ids"]
    used = (slot_ids >= 0).nonzero().squeeze(1)
    cursors = Cursors.of(tensors, used)
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[used] = reference.mamba2(
        reference.Inputs(*(tensors[name][used] for name in ("x", "dt", "B", "C"))),
        reference.Weights(*(tensors[name] for name in ("A", "D", "dt_bias"))),
        reference.Pools(*(tensors[name] for name in ("ssm_state", "x_ring", "B_ring", "dt_ring"))),
        cursors,
        history=history,
        max_draft_len=max_draft_len,
    ).to(x.dtype)
    return y
