"""What the adapters of all libraries share: finding a module, the memory of a step, and the gate before its time."""

import importlib
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED, Setting
from trtllm_replayssm.bench.workloads import (
    Packed,
    Weights,
    normal,
    relative_error,
    require,
    telling_launches,
    telling_rows,
)
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.contract.geometry import Mamba2Geometry, ReplayGeometry
from trtllm_replayssm.contract.memory import mamba2_checkpoint_bytes
from trtllm_replayssm.ops.dtypes import torch_dtype

OUTPUT_BOUND = 1e-2
"""Largest error of a peer's output, relative to its token's largest: a peer may round its products to bfloat16, too."""


@cache
def load(module: str) -> Any | None:
    """Import a module of another library, or return None where it or what it needs is not installed."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):
        return None


class History(NamedTuple):
    """What some rows stand on before a launch, on the CPU: a state, and pending inputs after it, oldest first.

    Attributes:
        state: [rows, H, P, N]
        pending: pending tokens of each row; the inputs of others are not read.
        x: [rows, J, H, P]
        B: [rows, J, G, N]
        dt: [rows, J, H], after bias and softplus.
    """

    state: Tensor
    pending: Tensor
    x: Tensor
    B: Tensor
    dt: Tensor


def bare(state: Tensor, m: Mamba2Geometry) -> History:
    """Return the history of states with nothing after them."""
    rows = len(state)
    return History(
        state,
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, 0, m.n_heads, m.head_dim),
        torch.zeros(rows, 0, m.n_groups, m.d_state),
        torch.zeros(rows, 0, m.n_heads),
    )


def expected_output(inputs: dict[str, Tensor], weights: Weights, history: History) -> Tensor:
    """Return what a window should give, [rows, T, H, P] in fp32, by our CPU op, which rounds nothing here.

    Args:
        inputs: x, dt, B and C of the rows.
        weights: per-head constants.
        history: before the window.
    """
    rows, window = inputs["x"].shape[:2]
    most = history.x.size(1)
    replay = ReplayGeometry(history=most + window, max_draft_len=window - 1)

    def ring(pending: Tensor) -> Tensor:
        return torch.cat([pending.float(), pending.new_zeros(rows, replay.ring_rows - most, *pending.shape[2:])], 1)

    # The oldest pending token stands in row 0, and no checkpoint at position 0.
    checkpoint = torch.full((rows,), replay.ring_rows, dtype=torch.int32)
    return ops.mamba2(
        **{name: tensor.cpu().float() for name, tensor in inputs.items()},
        **{name: weight.cpu().float() for name, weight in weights._asdict().items()},
        ssm_state=history.state.cpu().float().clone(),
        x_ring=ring(history.x.cpu()).float(),
        B_ring=ring(history.B.cpu()).float(),
        dt_ring=ring(history.dt.cpu()).float(),
        past_lengths=checkpoint + history.pending.cpu().int(),
        checkpoint_lengths=checkpoint,
        num_tokens=torch.full((rows,), window, dtype=torch.int32),
        slot_ids=torch.arange(rows, dtype=torch.int32),
        history=replay.history,
        max_draft_len=replay.max_draft_len,
    )


def aligned_rows(values: Tensor) -> Tensor:
    """Copy a tensor so that its innermost rows begin at 16 bytes, as a tensor of their own would.

    Triton compiles a kernel anew for a pointer that is aligned otherwise.
    """
    stride = -(-values.size(-1) // 16) * 16
    copy = values.new_empty(*values.shape[:-1], stride)[..., : values.size(-1)]
    return copy.copy_(values)


class PeerStep(ABC):
    """Another library's step, ready to be launched; the inputs lie where a model has them, as ours do.

    Args:
        case: what to run; ``supports`` has been asked.
        device: where.
    """

    implementation: str
    kind: Kind
    module: str
    settings: tuple[Setting, ...] = (SHIPPED,)
    flush_fraction: float | None = None
    mean_pending: float | None = None

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        m, batch = case.geometry, case.batch_size
        self.case, self.device, self.setting = case, device, SHIPPED
        self.num_sets = cases.num_sets(batch * mamba2_checkpoint_bytes(m, case.replay.state_dtype))
        # As many launches as our step has.
        self.num_steps = cases.num_steps(case.replay)
        self.traffic = traffic.conventional_bytes(m, case.replay, cases.ACTIVATION_DTYPE, batch_size=batch)
        self.packed = Packed(case, self.num_sets, device)
        self.library: Any = load(self.module)

    @classmethod
    @abstractmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether the library has a kernel for the case."""

    @abstractmethod
    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set as ``setting`` says; return its output, [batch, T, H, P] or a view of it."""

    @abstractmethod
    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return what some rows of a launch stand on, before it."""

    def telling(self) -> list[tuple[int, int, NDArray[np.int64]]]:
        """Choose launches (step, set) and rows of them to be compared."""
        return [(0, 0, np.arange(min(2, self.case.batch_size)))]

    def check(self) -> float:
        """Compare some rows with our CPU op, and return the largest error of an output.

        Raises:
            NumericsError: an error over the bound for peers.
        """
        return max(self._check(step, index, torch.from_numpy(rows)) for step, index, rows in self.telling())

    def _check(self, step: int, index: int, rows: Tensor) -> float:
        m = self.case.geometry
        on_device = rows.to(self.device)
        inputs = {name: tensor[on_device] for name, tensor in self.packed.inputs(index).items()}
        history = History(*(tensor.cpu().clone() for tensor in self.before(step, index, on_device)))
        expected = expected_output(inputs, self.packed.weights, history)
        found = self.launch(step, index).reshape(self.case.batch_size, -1, m.n_heads, m.head_dim)[on_device]
        error = relative_error(found.flatten(0, 1), expected.flatten(0, 1))
        return require(f"{self.case}: output of {self.implementation}", error, OUTPUT_BOUND)

    def states(self, per_row: int = 1) -> Tensor:
        """Return random states, [sets, batch * per_row, H, P, N]."""
        m = self.case.geometry
        shape = (self.num_sets, self.case.batch_size * per_row, m.n_heads, m.head_dim, m.d_state)
        return normal(shape, torch_dtype(self.case.replay.state_dtype), self.device)

    def by_channel(self, per_head: Tensor) -> Tensor:
        """Expand a per-head constant over head_dim without a copy: by the stride 0 kernels know that it is one."""
        return per_head[..., None].expand(*per_head.shape, self.case.geometry.head_dim)

    def by_state(self, per_head: Tensor) -> Tensor:
        """Expand a per-head constant over head_dim and d_state without a copy."""
        m = self.case.geometry
        return per_head[:, None, None].expand(-1, m.head_dim, m.d_state)


class ReplayedPeerStep(PeerStep):
    """A peer that replays, too; ``flushes`` [steps, sets, batch] says which rows write their state.

    Attributes:
        flushes: set by ``follow``.
    """

    kind: Kind = "replay"
    flushes: NDArray[np.bool_]

    def follow(self, flushes: NDArray[np.bool_], mean_pending: float) -> None:
        """Take over what the cursors say, and count the bytes by it."""
        replay = self.case.replay
        self.flushes = flushes.reshape(self.num_steps, self.num_sets, -1)
        self.flush_fraction, self.mean_pending = float(flushes.mean()), mean_pending
        self.traffic = traffic.replay_bytes(
            self.case.geometry,
            replay,
            cases.ACTIVATION_DTYPE,
            batch_size=self.case.batch_size,
            flush_fraction=self.flush_fraction,
            mean_pending=mean_pending,
        )

    def telling(self) -> list[tuple[int, int, NDArray[np.int64]]]:
        """Choose rows with a flush and without."""
        return [
            (step, index, telling_rows(self.flushes[step, index])) for step, index in telling_launches(self.flushes)
        ]

    def on_device(self, values: NDArray[np.generic]) -> Tensor:
        """Return what all slots have as [steps, sets, batch]; each launch's row is aligned."""
        by_launch = torch.from_numpy(values).view(-1, self.num_sets, self.case.batch_size)
        return aligned_rows(by_launch.to(self.device))
