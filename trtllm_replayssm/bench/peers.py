"""Other libraries' kernels for the same step, measured where they can be imported."""

import importlib
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.workloads import Packed, normal, relative_error, require
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.contract.memory import mamba2_checkpoint_bytes
from trtllm_replayssm.ops.dtypes import torch_dtype

_ROWS = 2


@cache
def _selective_state_update() -> Callable[..., Tensor] | None:
    try:
        module: Any = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    except ImportError:
        return None
    function: Callable[..., Tensor] = module.selective_state_update
    return function


def peers() -> dict[str, str]:
    """Return the version of every peer, or that it is not installed."""
    return {"mamba_ssm": "not installed" if _selective_state_update() is None else metadata.version("mamba_ssm")}


def has_mamba_ssm(case: KernelCase) -> bool:
    """Say whether ``mamba_ssm`` is there and runs the case: it decodes one token at a time."""
    return case.replay.window == 1 and _selective_state_update() is not None


class MambaSsmStep:
    """``mamba_ssm``'s ``selective_state_update``: the conventional decode of one token, the state rewritten.

    Called as mamba_ssm's own Mamba-2 layer does: per-head constants are expanded over head_dim and d_state without
    copies, by which the function knows that they are the same in a whole head.

    Args:
        case: what to run, with T = 1.
        device: where.
    """

    implementation = "mamba_ssm selective_state_update"
    num_steps = 1
    flush_fraction: float | None = None
    mean_pending: float | None = None

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        m, batch, dtype = case.geometry, case.batch_size, case.replay.state_dtype
        self._case = case
        # As many launches as the replayed step has.
        self.num_steps = cases.num_steps(case.replay)
        self.num_sets = cases.num_sets(batch * mamba2_checkpoint_bytes(m, dtype))
        self.traffic = traffic.conventional_bytes(m, case.replay, cases.ACTIVATION_DTYPE, batch_size=batch)
        self._packed = Packed(case, self.num_sets, device)
        shape = (self.num_sets, batch, m.n_heads, m.head_dim, m.d_state)
        self._state = normal(shape, torch_dtype(dtype), device)
        self._weights = self._packed.weights
        self._by_channel = [
            weight[:, None].expand(-1, m.head_dim) for weight in (self._weights.D, self._weights.dt_bias)
        ]
        self._A = self._weights.A[:, None, None].expand(-1, m.head_dim, m.d_state)

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        update = _selective_state_update()
        assert update is not None, "the caller asked has_mamba_ssm"
        x, dt, B, C = (tensor[:, 0] for tensor in self._packed.inputs(index).values())
        D, dt_bias = self._by_channel
        dt = dt[..., None].expand(-1, -1, x.size(-1))
        return update(self._state[index], x, dt, self._A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)

    def check(self) -> float:
        """Compare the first rows of the first launch with the conventional CPU op."""
        rows = min(_ROWS, self._case.batch_size)
        inputs = {name: tensor[:rows].cpu().float() for name, tensor in self._packed.inputs(0).items()}
        state = self._state[0, :rows].cpu()
        expected = ops.mamba2_conventional(
            **inputs,
            **{name: weight.cpu() for name, weight in self._weights._asdict().items()},
            ssm_snapshots=torch.stack([state, torch.zeros_like(state)], dim=1),
            # After two tokens the state stands in row 0.
            past_lengths=torch.full((rows,), 2, dtype=torch.int32),
            num_tokens=torch.ones(rows, dtype=torch.int32),
            slot_ids=torch.arange(rows, dtype=torch.int32),
            max_draft_len=0,
        )
        found = self.launch(0, 0)[:rows]
        return require(f"{self._case}: output of {self.implementation}", relative_error(found, expected[:, 0]))
