"""Gated DeltaNet from a checkpoint and a ring of recent tokens, in plain torch: the specification of the CUDA kernels.

With ``S <- exp(g_t) S; u_t = beta_t (v_t - S^T k_t); S <- S + k_t u_t^T; o_t = S^T q_t`` the state is a plain sum over
tokens of decayed k u^T, so that pending rows fold in one product. The u of a window depend on each other: they are
found token by token, by forward substitution. Everything is computed in fp32, u and g are stored in fp32, and k is
stored as it came and normalised again on use: what is folded is, bit by bit, what the outputs were computed from.

Parts, in order: load the pending rows and the window, fold (when due), replay, store.

Symbols: b rows, S window tokens, J rows folded or replayed, Hk key heads, H value heads, K key_dim, V value_dim. Once
loaded, q and k are repeated for the value heads that share them.
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

# Tokens per block of the prefill scan: enough to read the state seldom, few enough to keep [S, S] matrices small.
CHUNK_SIZE = 64

_NORM_EPS = 1e-6
"""Added to the sum of squares, as the models' prefill does it."""


class Inputs(NamedTuple):
    """A window as it came: q and k [b, S, Hk, K], v [b, S, H, V], a and b [b, S, H]; any of the activation types."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


class Weights(NamedTuple):
    """Per-head constants, fp32 [H]."""

    A_log: Tensor
    dt_bias: Tensor


class Pools(NamedTuple):
    """The state of all slots, updated in place; shapes as in ``ops.gated_delta_net``."""

    ssm_state: Tensor
    k_ring: Tensor
    u_ring: Tensor
    g_ring: Tensor


class Window(NamedTuple):
    """A window in fp32; a masked token is zero in all but beta and so changes nothing.

    Attributes:
        q: [b, S, H, K], normalised and scaled.
        k: [b, S, H, K], normalised.
        v: [b, S, H, V].
        g: [b, S, H], the log decay.
        beta: [b, S, H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Rows(NamedTuple):
    """What consecutive tokens add to the state, in fp32; a masked token is zero in all three and so adds nothing.

    Attributes:
        k: [b, J, H, K], normalised.
        u: [b, J, H, V].
        g: [b, J, H], the log decay.
    """

    k: Tensor
    u: Tensor
    g: Tensor


@torch.no_grad()
def gated_delta_net(
    inputs: Inputs, weights: Weights, pools: Pools, cursors: Cursors, *, history: int, max_draft_len: int
) -> Tensor:
    """Run one step, or a prefill when the window is longer than 1 + max_draft_len; see ``ops.gated_delta_net``.

    ``pools`` is written in place. All rows have a slot; arguments have been checked.

    Returns:
        o, [b, S, H, V] in fp32; zero at tokens s >= num_tokens.
    """
    window = load_window(inputs, weights, cursors.num_tokens)
    if protocol.is_prefill(inputs.q.size(1), max_draft_len):
        o = _prefill(window, pools, cursors, history)
    else:
        o, u = _step(window, pools, cursors, history, max_draft_len)
        store_ring(inputs.k, pools.k_ring, cursors)
        store_ring(u, pools.u_ring, cursors)
        store_ring(window.g, pools.g_ring, cursors)
    return mask_outputs(o, cursors.num_tokens)


def _step(window: Window, pools: Pools, cursors: Cursors, history: int, max_draft_len: int) -> tuple[Tensor, Tensor]:
    """Fold the rows that are due, then replay the window from checkpoint and pending rows; return o and u."""
    past, checkpoint, _, _ = cursors
    state = load_checkpoint(pools.ssm_state, cursors)
    flushed = protocol.needs_flush(past, checkpoint, history=history, max_draft_len=max_draft_len)
    due = flushed.nonzero().squeeze(1)
    if due.numel() > 0:
        flushing = cursors.at(due)
        folded = fold(state[due], load_pending(pools, flushing, flushing.past_lengths, history))
        state[due] = store_checkpoint(folded, pools.ssm_state, flushing.slots)
    # Rows that flushed have nothing left to replay; the others hold at most W - T rows, by the flush predicate.
    end = torch.where(flushed, checkpoint, past)
    pending = load_pending(pools, cursors, end, history - protocol.window_length(max_draft_len))
    return replay(state, pending, window)


def _prefill(window: Window, pools: Pools, cursors: Cursors, history: int) -> Tensor:
    """Fold what is pending, scan the window, write the checkpoint once; return o."""
    past, checkpoint, num_tokens, slots = cursors
    state = load_checkpoint(pools.ssm_state, cursors)
    state = fold(state, load_pending(pools, cursors, past, history))
    o, state = scan(state, window)
    moved = (past + num_tokens > checkpoint).nonzero().squeeze(1)
    store_checkpoint(state[moved], pools.ssm_state, slots[moved])
    return o


def load_window(inputs: Inputs, weights: Weights, num_tokens: Tensor) -> Window:
    """Return the window in fp32: q and k normalised, g and beta computed; tokens s >= num_tokens are zero."""
    n_heads, key_dim = inputs.v.size(2), inputs.k.size(3)
    valid = window_mask(num_tokens, inputs.q.size(1))[..., None]
    q, k, v = (torch.where(valid[..., None], part.float(), 0.0) for part in (inputs.q, inputs.k, inputs.v))
    step_size = functional.softplus(inputs.a.float() + weights.dt_bias, threshold=20.0)
    g = torch.where(valid, -weights.A_log.exp() * step_size, 0.0)
    beta = torch.where(valid, inputs.b.float(), 0.0).sigmoid()
    return Window(normalise(q, n_heads) * key_dim**-0.5, normalise(k, n_heads), v, g, beta)


def load_pending(pools: Pools, cursors: Cursors, end: Tensor, num_rows: int) -> Rows:
    """Return the ring rows of tokens [checkpoint_lengths, end), at most ``num_rows``."""
    rings = (pools.k_ring, pools.u_ring, pools.g_ring)
    k, u, g = (load_ring(ring, cursors, end, num_rows) for ring in rings)
    return Rows(normalise(k, u.size(2)), u, g)


def normalise(rows: Tensor, n_heads: int) -> Tensor:
    """Return keys or queries [b, J, Hk, K] at length 1, repeated for the value heads: [b, J, H, K]."""
    unit = rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _NORM_EPS)
    return unit.repeat_interleave(n_heads // rows.size(2), dim=2)


def fold(state: Tensor, rows: Rows) -> Tensor:
    """Advance the state over rows: ``exp(sum_j g_j) S + sum_j exp(sum_{i>j} g_i) k_j u_j^T``.

    Args:
        state: [b, H, K, V].
        rows: tokens in order; masked ones anywhere.

    Returns:
        The new state, [b, H, K, V].
    """
    weighted = rows.u * sum_after(rows.g).exp()[..., None]
    update = rows.k.permute(0, 2, 3, 1) @ weighted.transpose(1, 2)
    return rows.g.sum(1).exp()[..., None, None] * state + update


def replay(state: Tensor, pending: Rows, window: Window) -> tuple[Tensor, Tensor]:
    """Compute outputs and u from the state before ``pending``, the pending rows, and the window up to each token.

    What key k of token s reads is ``exp(c_s) S^T k + sum_j exp(c_s - c_j) (k_j . k) u_j`` over the pending rows and the
    window tokens j < s; a query reads the same, with j <= s. A token's results depend on no later token, whatever that
    one holds: the sums end where they end, and no factor of 0 stands for what is beyond.

    Args:
        state: [b, H, K, V].
        pending: J rows that stand between the state and the window.
        window: S tokens.

    Returns:
        o and u, both [b, S, H, V].
    """
    num_pending, seq_len = pending.k.size(1), window.k.size(1)
    since_state, log_decay = window_decays(pending.g, window.g)
    readers = torch.stack([window.k, window.q]).transpose(2, 3)
    from_state = (readers @ state) * since_state.exp().transpose(1, 2)[..., None]
    keys = torch.cat([pending.k, window.k], dim=1)
    weights = (readers @ keys.permute(0, 2, 3, 1)) * log_decay.exp().permute(0, 3, 1, 2)

    v, beta = window.v.transpose(1, 2), window.beta.transpose(1, 2)[..., None]
    u = torch.cat([pending.u.transpose(1, 2), torch.empty_like(v)], dim=2)
    o = torch.empty_like(v)
    for s in range(seq_len):
        row, now = num_pending + s, slice(s, s + 1)
        predicted = from_state[0, :, :, now] + weights[0, :, :, now, :row] @ u[:, :, :row]
        u[:, :, row : row + 1] = beta[:, :, now] * (v[:, :, now] - predicted)
        o[:, :, now] = from_state[1, :, :, now] + weights[1, :, :, now, : row + 1] @ u[:, :, : row + 1]
    return o.transpose(1, 2), u[:, :, num_pending:].transpose(1, 2)


def scan(state: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Run a long window in blocks of CHUNK_SIZE tokens.

    Returns:
        o, [b, S, H, V], and the state after the last token, [b, H, K, V].
    """
    nothing = Rows(window.k[:, :0], window.v[:, :0], window.g[:, :0])
    outputs = []
    for start in range(0, window.q.size(1), CHUNK_SIZE):
        block = Window(*(part[:, start : start + CHUNK_SIZE] for part in window))
        o, u = replay(state, nothing, block)
        outputs.append(o)
        state = fold(state, Rows(block.k, u, block.g))
    return torch.cat(outputs, dim=1), state


def mask_outputs(o: Tensor, num_tokens: Tensor) -> Tensor:
    """Return o, zero at tokens s >= num_tokens."""
    return torch.where(window_mask(num_tokens, o.size(1))[..., None, None], o, 0.0)
