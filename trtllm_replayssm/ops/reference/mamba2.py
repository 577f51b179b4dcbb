"""Mamba-2 from a checkpoint and a ring of recent inputs, in plain torch: the specification of the CUDA kernels.

Parts, in order: load the pending rows and the window, fold (when due), replay, store. Everything is computed in fp32.
Decays are exponentials of sums of ``A * dt`` over the tokens between two positions (``decays``).

Symbols: b rows, S window tokens, J rows folded or replayed, H heads, P head_dim, G groups, N d_state.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.ops.reference.decays import sum_after, window_decays
from trtllm_replayssm.ops.reference.slots import (
    Cursors,
    load_checkpoint,
    load_ring,
    store_checkpoint,
    store_ring,
    window_mask,
)

# Tokens per block of the prefill scan: the [S, S] decay matrices of a block stay below the size of the state.
CHUNK_SIZE = 64


class Rows(NamedTuple):
    """Inputs of consecutive tokens in fp32; a masked token is zero in all three and so changes nothing.

    Attributes:
        x: [b, J, H, P].
        dt: [b, J, H], after softplus.
        B: [b, J, G, N].
    """

    x: Tensor
    dt: Tensor
    B: Tensor


class Inputs(NamedTuple):
    """A window as it came: x [b, S, H, P], raw dt [b, S, H], B and C [b, S, G, N]; any of the activation types."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


class Weights(NamedTuple):
    """Per-head constants, fp32 [H]."""

    A: Tensor
    D: Tensor
    dt_bias: Tensor


class Pools(NamedTuple):
    """The state of all slots, updated in place; shapes as in ``ops.mamba2``."""

    ssm_state: Tensor
    x_ring: Tensor
    B_ring: Tensor
    dt_ring: Tensor


@torch.no_grad()
def mamba2(
    inputs: Inputs, weights: Weights, pools: Pools, cursors: Cursors, *, history: int, max_draft_len: int
) -> Tensor:
    """Run one step, or a prefill when the window is longer than 1 + max_draft_len; see ``ops.mamba2``.

    ``pools`` is written in place. All rows have a slot; arguments have been checked.

    Returns:
        y, [b, S, H, P] in fp32; zero at tokens s >= num_tokens.
    """
    A = weights.A
    tokens, C = load_window(inputs, weights.dt_bias, cursors.num_tokens)
    if protocol.is_prefill(inputs.x.size(1), max_draft_len):
        y = _prefill(tokens, C, A, pools, cursors, history)
    else:
        y = _step(tokens, C, A, pools, cursors, history, max_draft_len)
        _store_window(inputs, tokens.dt, pools, cursors)
    return add_skip(y, tokens, weights.D, cursors.num_tokens)


def _step(
    tokens: Rows, C: Tensor, A: Tensor, pools: Pools, cursors: Cursors, history: int, max_draft_len: int
) -> Tensor:
    """Fold the rows that are due, then replay the window from checkpoint and pending rows; y without ``D x``."""
    past, checkpoint, _, _ = cursors
    state = load_checkpoint(pools.ssm_state, cursors)
    flushed = protocol.needs_flush(past, checkpoint, history=history, max_draft_len=max_draft_len)
    due = flushed.nonzero().squeeze(1)
    if due.numel() > 0:
        flushing = cursors.at(due)
        folded = fold(state[due], load_pending(pools, flushing, flushing.past_lengths, history), A)
        state[due] = store_checkpoint(folded, pools.ssm_state, flushing.slots)
    # Rows that flushed have nothing left to replay; the others hold at most W - T rows, by the flush predicate.
    end = torch.where(flushed, checkpoint, past)
    pending = load_pending(pools, cursors, end, history - protocol.window_length(max_draft_len))
    return replay(state, pending, tokens, C, A)


def _prefill(tokens: Rows, C: Tensor, A: Tensor, pools: Pools, cursors: Cursors, history: int) -> Tensor:
    """Fold what is pending, scan the window, write the checkpoint once; y without ``D x``."""
    past, checkpoint, num_tokens, slots = cursors
    state = load_checkpoint(pools.ssm_state, cursors)
    state = fold(state, load_pending(pools, cursors, past, history), A)
    y, state = scan(state, tokens, C, A)
    moved = (past + num_tokens > checkpoint).nonzero().squeeze(1)
    store_checkpoint(state[moved], pools.ssm_state, slots[moved])
    return y


def load_window(inputs: Inputs, dt_bias: Tensor, num_tokens: Tensor) -> tuple[Rows, Tensor]:
    """Return the window in fp32, softplus applied (identity above 20), and C; tokens s >= num_tokens are zero."""
    valid = window_mask(num_tokens, inputs.x.size(1))[..., None]
    x, B, C = (torch.where(valid[..., None], part.float(), 0.0) for part in (inputs.x, inputs.B, inputs.C))
    dt = functional.softplus(inputs.dt.float() + dt_bias, threshold=20.0)
    return Rows(x, torch.where(valid, dt, 0.0), B), C


def load_pending(pools: Pools, cursors: Cursors, end: Tensor, num_rows: int) -> Rows:
    """Return the ring rows of tokens [checkpoint_lengths, end), at most ``num_rows``."""
    rings = (pools.x_ring, pools.dt_ring, pools.B_ring)
    return Rows(*(load_ring(ring, cursors, end, num_rows) for ring in rings))


def fold(state: Tensor, rows: Rows, A: Tensor) -> Tensor:
    """Advance the state over rows: ``exp(sum_j a_j) S + sum_j exp(sum_{i>j} a_i) dt_j x_j B_j^T``, a = A dt.

    Args:
        state: [b, H, P, N].
        rows: tokens in order; masked ones anywhere.
        A: [H], negative.

    Returns:
        The new state, [b, H, P, N].
    """
    log_decay = A * rows.dt
    weight = sum_after(log_decay).exp() * rows.dt
    n_groups = rows.B.size(2)
    weighted = _by_group(rows.x * weight[..., None], n_groups)
    update = weighted.transpose(-1, -2) @ rows.B.transpose(1, 2)
    return log_decay.sum(1).exp()[..., None, None] * state + update.view_as(state)


def replay(state: Tensor, pending: Rows, tokens: Rows, C: Tensor, A: Tensor) -> Tensor:
    """Compute outputs from the state before ``pending``, the pending rows, and the window up to each token.

    ``y_s = exp(c_s) S C_s + sum_j exp(c_s - c_j) dt_j (B_j . C_s) x_j`` over the pending rows and window tokens <= s.
    (B_j . C_s) is shared by the heads of a group. A token's output depends on no later token, whatever that one holds.

    Args:
        state: [b, H, P, N].
        pending: J rows that stand between the state and the window.
        tokens: the window's S tokens.
        C: [b, S, G, N].
        A: [H], negative.

    Returns:
        y without ``D x``, [b, S, H, P].
    """
    b, n_heads, head_dim, d_state = state.shape
    seq_len, n_groups = C.shape[1:3]
    since_state, log_decay = window_decays(A * pending.dt, A * tokens.dt)

    grouped_C = C.transpose(1, 2)
    from_state = state.reshape(b, n_groups, n_heads // n_groups * head_dim, d_state) @ grouped_C.transpose(-1, -2)
    y = from_state.view(b, n_heads, head_dim, seq_len).permute(0, 3, 1, 2) * since_state.exp()[..., None]

    x, dt, B = (torch.cat(pair, dim=1) for pair in zip(pending, tokens, strict=True))
    scores = (grouped_C @ B.permute(0, 2, 3, 1)).repeat_interleave(n_heads // n_groups, dim=1)
    weights = (log_decay.exp() * dt[:, None]).permute(0, 3, 1, 2)
    num_pending = pending.x.size(1)
    token = num_pending + torch.arange(seq_len, device=x.device)
    seen = torch.arange(num_pending + seq_len, device=x.device) <= token[:, None]
    # A later token is left out by selection: were it not finite, a weight of 0 would carry it to earlier outputs. The
    # product has it as 0, and its NaN is added from its own token on.
    finite_x = torch.where(x.isfinite(), x, 0.0)
    y = y + (torch.where(seen, scores * weights, 0.0) @ finite_x.transpose(1, 2)).transpose(1, 2)
    return y + (0.0 * x).cumsum(1)[:, num_pending:]


def scan(state: Tensor, tokens: Rows, C: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Run a long window in blocks of CHUNK_SIZE tokens, each parallel inside.

    Returns:
        y without ``D x``, [b, S, H, P], and the state after the last token, [b, H, P, N].
    """
    nothing = Rows(*(part[:, :0] for part in tokens))
    outputs = []
    for start in range(0, C.size(1), CHUNK_SIZE):
        block = Rows(*(part[:, start : start + CHUNK_SIZE] for part in tokens))
        outputs.append(replay(state, nothing, block, C[:, start : start + CHUNK_SIZE], A))
        state = fold(state, block, A)
    return torch.cat(outputs, dim=1), state


def add_skip(y: Tensor, tokens: Rows, D: Tensor, num_tokens: Tensor) -> Tensor:
    """Return ``y + D x``, zero at tokens s >= num_tokens."""
    valid = window_mask(num_tokens, y.size(1))
    return torch.where(valid[..., None, None], y + D[:, None] * tokens.x, 0.0)


def _store_window(inputs: Inputs, dt: Tensor, pools: Pools, cursors: Cursors) -> None:
    """Write the window's tokens s < num_tokens to their ring rows: x and B as they came, dt after softplus."""
    store_ring(inputs.x, pools.x_ring, cursors)
    store_ring(dt, pools.dt_ring, cursors)
    store_ring(inputs.B, pools.B_ring, cursors)


def _by_group(rows: Tensor, n_groups: int) -> Tensor:
    """Reorder [b, J, H, P] to [b, G, J, (H/G) P]."""
    b, num_rows, n_heads, head_dim = rows.shape
    return rows.reshape(b, num_rows, n_groups, n_heads // n_groups * head_dim).transpose(1, 2)
