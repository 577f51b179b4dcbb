"""Stand-ins for other libraries: their documented signatures, computed token by token in plain torch on the CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.bench.peers import common

OPS = "vllm.model_executor.layers.mamba.ops"
LAUNCHED: list[object] = []
"""The launch settings that reached a double."""


def recur(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor | None = None, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run one token over states [rows, H, P, N]; dt [rows, H] is ready; return the new states and the output."""
    heads = x.size(1)
    B, C = (
        part.float().repeat_interleave(heads // part.size(1), dim=1)[:, :, None] for part in (B, B if C is None else C)
    )
    decay = torch.exp(dt * A[:, 0, 0])[..., None, None]
    state = decay * state.float() + dt[..., None, None] * B * x.float()[..., None]
    y = (state * C).sum(-1)
    return state, y if D is None else y + D * x.float()


def ready(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """Return dt [rows, H] after bias and softplus, of tensors that were expanded over head_dim without a copy."""
    assert dt.stride(-1) == dt_bias.stride(-1) == 0, "else kernels take a slow path"
    return functional.softplus(dt[..., 0].float() + dt_bias[:, 0].float())


class Kernel:
    """A Triton kernel: called with a grid and its arguments, of which the last is the tile's rows."""

    def __getitem__(self, grid: object) -> Any:
        return lambda rows, num_warps: LAUNCHED.append((rows, num_warps))


def mamba_ssm_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
) -> Tensor:
    assert dt_softplus and A.stride()[1:] == (0, 0)
    sys.modules["mamba_ssm.ops.triton.selective_state_update"]._selective_scan_update_kernel[None](4, num_warps=4)
    new, y = recur(state, x, ready(dt, dt_bias), A, B, C, D)
    state.copy_(new)
    return y.to(x.dtype)


def vllm_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    state_batch_indices: Tensor,
    out: Tensor,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    null_block_id: int = 0,
) -> None:
    is_used = state_batch_indices[:, 0] != null_block_id
    assert dt_softplus and (is_used | (null_block_id < 0)).all(), "slot 0 is nobody's"
    window = state_batch_indices.size(1)
    if not is_used.all():
        used = is_used.repeat_interleave(window)
        ends = None if cu_seqlens is None else cu_seqlens[: int(is_used.sum()) + 1]
        accepted = None if num_accepted_tokens is None else num_accepted_tokens[is_used]
        dt_of_used = dt[..., 0][used][..., None].expand(-1, *dt.shape[1:])
        part = out[used]
        vllm_update(
            *(state, x[used], dt_of_used, A, B[used], C[used], D, dt_bias, True),
            *(state_batch_indices[is_used], part, accepted, ends, null_block_id),
        )
        out[used] = part
        return
    slots = state_batch_indices.long()
    first = torch.zeros(len(slots), dtype=torch.long) if num_accepted_tokens is None else num_accepted_tokens.long() - 1
    assert cu_seqlens is None or cu_seqlens.diff().eq(window).all()
    current = state[slots[torch.arange(len(slots)), first]].float()
    dt = ready(dt, dt_bias)
    for t in range(window):
        rows = slice(t, None, window)
        current, y = recur(current, x[rows], dt[rows], A, B[rows], C[rows], D)
        out[rows] = y.to(out.dtype)
        state[slots[:, t]] = current.to(state.dtype)


def vllm_token_replay(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    x_cache: Tensor,
    dt_cache: Tensor,
    B_cache: Tensor,
    write_pos: Tensor,
    is_flush: Tensor,
    max_cache_len: int,
    out: Tensor,
    bc_pre: Tensor | None = None,
) -> None:
    assert dt_softplus and x_cache.shape[1:3] == (x.size(1), max_cache_len) and write_pos.dtype == torch.int32
    assert bc_pre is None or bc_pre.shape == (len(x), B.size(1), max_cache_len)
    dt = ready(dt, dt_bias)
    for row, pending in enumerate(write_pos.tolist()):
        one = slice(row, row + 1)
        current = state[one].float()
        for j in range(pending):
            current, _ = recur(current, x_cache[one, :, j], dt_cache[one, :, j], A, B_cache[one, :, j])
        current, y = recur(current, x[one], dt[one], A, B[one], C[one], D)
        out[one] = y.to(out.dtype)
        if is_flush[row]:
            assert pending == max_cache_len - 1
            state[one] = current.to(state.dtype)
        else:
            x_cache[row, :, pending], B_cache[row, :, pending], dt_cache[row, :, pending] = x[row], B[row], dt[row]


def vllm_spec(
    state_checkpoint: Tensor,
    post_conv_cache: Tensor,
    dt_cache: Tensor,
    conv_out: Tensor,
    dt_spec: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    write_pos: Tensor,
    post_conv_state_pos: Tensor,
    is_flush: Tensor,
    query_start_loc: Tensor,
    state_batch_indices: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    d_inner: int,
    ngroups: int,
    dstate: int,
    dt_softplus: bool,
    bc_pre: Tensor,
) -> Tensor:
    assert dt_softplus and is_flush.dtype == torch.int8
    rows, heads = post_conv_cache.size(1), A.size(0)
    assert rows & (rows - 1) == 0 and rows >= max_cache_len and bc_pre.shape[1:3] == (ngroups, rows)
    x, B, C = torch.split(conv_out, [d_inner, ngroups * dstate, ngroups * dstate], dim=-1)
    x = x.reshape(len(x), heads, -1)
    B, C = (part.reshape(len(x), ngroups, -1) for part in (B, C))
    out = torch.empty_like(x)
    for row, slot in enumerate(state_batch_indices.tolist()):
        assert slot > 0
        pending, origin = int(write_pos[slot]), int(post_conv_state_pos[slot])
        assert bool(is_flush[slot]) == (pending + 2 * max_spec_len > max_cache_len)
        current = state_checkpoint[slot : slot + 1].float()
        for j in range(pending):
            where = (origin + j) % rows
            old_x, old_B = torch.split(post_conv_cache[slot, where], [d_inner, ngroups * dstate])
            dt = functional.softplus(dt_cache[slot : slot + 1, :, where].float() + dt_bias[:, 0])
            current, _ = recur(current, old_x.view(1, heads, -1), dt, A, old_B.view(1, ngroups, -1))
        for token in range(int(query_start_loc[row]), int(query_start_loc[row + 1])):
            one = slice(token, token + 1)
            dt = functional.softplus(dt_spec[one].float() + dt_bias[:, 0])
            current, y = recur(current, x[one], dt, A, B[one], C[one], D)
            out[one] = y.to(out.dtype)
    return out


def flashinfer_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    state_batch_indices: Tensor,
    out: Tensor,
    algorithm: str,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int = 0,
    disable_state_update: bool = False,
) -> Tensor:
    LAUNCHED.append(algorithm)
    assert dt_softplus and D.dtype == dt_bias.dtype == dt.dtype and A.dtype == torch.float32
    if algorithm == "horizontal":
        raise RuntimeError("no such kernel for this device")
    if intermediate_states_buffer is None:
        new, y = recur(state, x, ready(dt, dt_bias), A, B, C, D)
        state.copy_(new)
        return out.copy_(y)
    assert cache_steps == x.size(1) and disable_state_update and intermediate_state_indices is not None
    current = state.float()
    for t in range(cache_steps):
        current, y = recur(current, x[:, t], ready(dt[:, t], dt_bias), A, B[:, t], C[:, t], D)
        intermediate_states_buffer[intermediate_state_indices.long(), t] = current.to(state.dtype)
        out[:, t] = y.to(out.dtype)
    return out


def flashinfer_replay(
    state: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    state_batch_indices: Tensor,
    cb_scaled: Tensor,
    cumAdt_vec: Tensor,
    cb_old: Tensor,
    **options: object,
) -> Tensor:
    LAUNCHED.append((options, {name: value for name, value in os.environ.items() if name.startswith("FLASHINFER_SSU")}))
    assert dt_softplus and ring_start.dtype == prev_num_accepted_tokens.dtype == torch.int32
    batch, window, heads, _ = x.shape
    ring = x_cache.size(2)
    assert cb_scaled.shape[:3] == cb_old.shape[:3] == (batch, heads, 32) and cumAdt_vec.shape == (batch, heads, 16)
    for row in range(batch):
        one = slice(row, row + 1)
        current, pending = state[one].float(), int(prev_num_accepted_tokens[row])
        for j in range(pending):
            where = (int(ring_start[row]) + j) % ring
            current, _ = recur(current, x_cache[one, :, where], dt_cache[one, :, where], A, B_cache[one, :, where])
        if pending + window > ring - window:
            state[one] = current.to(state.dtype)
        for t in range(window):
            current, y = recur(current, x[one, t], ready(dt[one, t], dt_bias), A, B[one, t], C[one, t], D)
            out[one, t] = y.to(out.dtype)
    return out


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    return_final_states: bool,
) -> tuple[Tensor, Tensor]:
    assert dt_softplus and return_final_states and not torch.is_grad_enabled()
    state = torch.zeros(x.size(0), x.size(2), x.size(3), B.size(3))
    y = torch.empty_like(x)
    for t in range(x.size(1)):
        ready_dt = functional.softplus(dt[:, t].float() + dt_bias)
        state, y_t = recur(state, x[:, t], ready_dt, A[:, None, None], B[:, t], C[:, t], D[:, None])
        y[:, t] = y_t.to(x.dtype)
    return y, state


@contextmanager
def recorded(*setting: object) -> Iterator[None]:
    LAUNCHED.append(setting)
    yield


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Put the doubles in the libraries' places."""
    contents: dict[str, dict[str, object]] = {
        "mamba_ssm.ops.triton.selective_state_update": {
            "selective_state_update": mamba_ssm_update,
            "_selective_scan_update_kernel": Kernel(),
        },
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": chunk_scan},
        f"{OPS}.mamba_ssm": {"selective_state_update": vllm_update, "override_ssm_config": recorded},
        f"{OPS}.replayssm_config": {"override_replayssm_config": recorded},
        f"{OPS}.selective_state_update_replayssm_output_only": {
            "selective_state_update_replayssm_output_only": vllm_token_replay
        },
        f"{OPS}.selective_state_update_replayssm_state_and_output": {
            "selective_state_update_replayssm_state_and_output": vllm_token_replay
        },
        f"{OPS}.selective_state_update_replayssm_spec": {"selective_state_update_replayssm_spec": vllm_spec},
        "flashinfer.mamba": {"selective_state_update": flashinfer_update, "checkpointing_ssu": flashinfer_replay},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        for key, value in values.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.0 of {name}")
    LAUNCHED.clear()
    common.load.cache_clear()
    yield SimpleNamespace(**{name.split(".")[-1]: sys.modules[name] for name in contents})
    common.load.cache_clear()
