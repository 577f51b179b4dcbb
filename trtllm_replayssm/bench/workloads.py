"""Our kernels with the memory of one case: tensors as a model has them, launches that rotate, and the gate before.

Every workload has ``num_sets`` disjoint sets of slots and inputs and runs ``num_steps`` consecutive steps of each: set
by set, step after step, so that between two uses of a state all the other sets are used.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.report import REPLAY, Kind
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.contract.memory import mamba2_checkpoint_bytes
from trtllm_replayssm.errors import NumericsError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.plugins import launch

OUTPUT_BOUND = 4e-3
"""Largest error of an output, relative to the largest magnitude of its token: one rounding to bfloat16."""
_STATE_BOUNDS = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of a written checkpoint, likewise: fp32 arithmetic, or one unit in the last place where two roundings may differ."""
_GATE_ROWS = 4
_LEAST_CONV_LAUNCHES = 256
ACTIVATION = torch_dtype(cases.ACTIVATION_DTYPE)


class Workload(Protocol):
    """An implementation of a case, ready to be launched."""

    implementation: str
    kind: Kind
    num_sets: int
    num_steps: int
    traffic: traffic.LaunchBytes
    flush_fraction: float | None
    mean_pending: float | None

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set on the current stream and return its output."""
        ...

    def check(self) -> float:
        """Compare some rows with the CPU op, and return the largest error of an output.

        Raises:
            NumericsError: an error over its bound.
        """
        ...


class Weights(NamedTuple):
    """Per-head constants, fp32 [H]."""

    A: Tensor
    D: Tensor
    dt_bias: Tensor


class Packed:
    """The inputs of all sets where a model has them: x, B, C within the convolution's output, dt within ``in_proj``'s.

    Args:
        case: shapes.
        num_sets: sets, each with inputs of its own.
        device: where.
    """

    def __init__(self, case: KernelCase, num_sets: int, device: torch.device) -> None:
        m, rows = case.geometry, (num_sets, case.batch_size, case.tokens)
        self._geometry = m
        self._conv_output = normal((*rows, m.conv_dim), ACTIVATION, device)
        self._in_proj_output = normal((*rows, m.d_in_proj), ACTIVATION, device)
        uniform = torch.rand(3, m.n_heads, device=device)
        step_size = torch.exp(uniform[0] * np.log(100.0) + np.log(0.001))
        # As Mamba-2 is initialised: A in [-16, -1], softplus(dt_bias) in [0.001, 0.1].
        self.weights = Weights(-1 - 15 * uniform[1], 2 * uniform[2] - 1, torch.log(torch.expm1(step_size)))

    def conv_output(self, index: int) -> Tensor:
        """Return one set's x, B and C side by side, [B, T, conv_dim]."""
        return self._conv_output[index]

    def inputs(self, index: int) -> dict[str, Tensor]:
        """Return one set's x [B, T, H, P], dt [B, T, H], B and C [B, T, G, N], all of them views."""
        m = self._geometry
        x, B, C = torch.split(self._conv_output[index], [m.d_inner, *[m.n_groups * m.d_state] * 2], dim=-1)
        return {
            "x": x.view(*x.shape[:-1], m.n_heads, m.head_dim),
            "dt": self._in_proj_output[index, ..., -m.n_heads :],
            "B": B.view(*B.shape[:-1], m.n_groups, m.d_state),
            "C": C.view(*C.shape[:-1], m.n_groups, m.d_state),
        }


class Mamba2Step:
    """``ops.mamba2``, one step of every row.

    Args:
        case: what to run.
        device: where.
        seed: of the cursors.
    """

    implementation = REPLAY
    kind: Kind = "replay"

    def __init__(self, case: KernelCase, device: torch.device, seed: int = 0) -> None:
        m, replay, batch = case.geometry, case.replay, case.batch_size
        self._case = case
        self.num_sets = cases.num_sets(batch * mamba2_checkpoint_bytes(m, replay.state_dtype))
        self.num_steps = cases.num_steps(replay)
        cases.check_launches(case, self.num_sets * self.num_steps)
        slots = self.num_sets * batch
        cursors = cases.draw_cursors(replay, slots, self.num_steps, seed=seed)
        self._flushes = cursors.flushes(replay)
        self.flush_fraction: float | None = float(self._flushes.mean())
        self.mean_pending: float | None = cursors.mean_pending()
        self.traffic = traffic.replay_bytes(
            m,
            replay,
            cases.ACTIVATION_DTYPE,
            batch_size=batch,
            flush_fraction=self.flush_fraction,
            mean_pending=self.mean_pending,
        )
        packed = Packed(case, self.num_sets, device)
        all_pools = pools(case, slots, device)
        lengths = [
            torch.from_numpy(values).to(device).view(self.num_steps, self.num_sets, batch).unbind()
            for values in cursors
        ]
        self._lengths = [
            list(zip(past.unbind(), checkpoint.unbind(), strict=True))
            for past, checkpoint in zip(*lengths, strict=True)
        ]
        num_tokens = torch.full((batch,), replay.window, dtype=torch.int32, device=device)
        slot_ids = torch.arange(slots, dtype=torch.int32, device=device).view(self.num_sets, batch)
        self._sets = [
            {
                **packed.inputs(index),
                **packed.weights._asdict(),
                **all_pools,
                "num_tokens": num_tokens,
                "slot_ids": slot_ids[index],
            }
            for index in range(self.num_sets)
        ]

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        replay = self._case.replay
        return launch.mamba2(self._tensors(step, index), history=replay.history, max_draft_len=replay.max_draft_len)

    def check(self) -> float:
        """Compare some rows with the CPU op: with a flush and without, of one launch if it has both."""
        by_launch = self._flushes.reshape(self.num_steps, self.num_sets, -1)
        return max(self._check(step, index) for step, index in telling_launches(by_launch))

    def _check(self, step: int, index: int) -> float:
        case, replay = self._case, self._case.replay
        tensors = self._tensors(step, index)
        is_flush = self._flushes[step, index * case.batch_size : (index + 1) * case.batch_size]
        rows = torch.from_numpy(telling_rows(is_flush))
        on_cpu = _rows_on_cpu(tensors, rows)
        run: Callable[..., Tensor] = partial(ops.mamba2, history=replay.history, max_draft_len=replay.max_draft_len)
        expected, found = run(**on_cpu), run(**tensors)
        chosen = rows.to(found.device)
        slots = tensors["slot_ids"][chosen].long()
        state_error = relative_error(tensors["ssm_state"][slots], on_cpu["ssm_state"])
        require(f"{case}: checkpoint", state_error, _STATE_BOUNDS[replay.state_dtype])
        return require(f"{case}: output", relative_error(found[chosen].flatten(0, 1), expected.flatten(0, 1)))

    def _tensors(self, step: int, index: int) -> dict[str, Tensor]:
        past, checkpoint = self._lengths[step][index]
        return {**self._sets[index], "past_lengths": past, "checkpoint_lengths": checkpoint}


class CausalConv1dStep:
    """``ops.causal_conv1d``, one step of every row; its input lies within ``in_proj``'s output, as in a model.

    Args:
        case: what to run; the state type plays no part.
        device: where.
        seed: of the positions.
    """

    implementation = "causal_conv1d"
    kind: Kind = "convolution"
    flush_fraction: float | None = None
    mean_pending: float | None = None

    def __init__(self, case: KernelCase, device: torch.device, seed: int = 0) -> None:
        m, replay, batch = case.geometry, case.replay, case.batch_size
        self._case = case
        self.traffic = traffic.conv_bytes(m, replay.window, cases.ACTIVATION_DTYPE, batch_size=batch)
        # No state is large here: what lies between two uses is all that the launches in between touch.
        self.num_sets = cases.num_sets(int(self.traffic.total))
        self.num_steps = -(-_LEAST_CONV_LAUNCHES // self.num_sets)
        cases.check_launches(case, self.num_sets * self.num_steps)
        slots = self.num_sets * batch
        packed = normal((self.num_sets, batch, replay.window, m.d_in_proj), ACTIVATION, device)
        self._x = packed[..., m.d_inner : m.d_inner + m.conv_dim]
        self._weight = normal((self.num_sets, m.conv_dim, m.d_conv), ACTIVATION, device)
        self._bias = normal((self.num_sets, m.conv_dim), ACTIVATION, device)
        self._ring = normal((slots, replay.conv_ring_rows(m.d_conv), m.conv_dim), ACTIVATION, device)
        first = np.random.default_rng(seed).integers(m.d_conv, 64, (self.num_sets, batch))
        past = first + replay.window * np.arange(self.num_steps)[:, None, None]
        self._past = torch.from_numpy(past.astype(np.int32)).to(device)
        self._num_tokens = torch.full((batch,), replay.window, dtype=torch.int32, device=device)
        self._slot_ids = torch.arange(slots, dtype=torch.int32, device=device).view(self.num_sets, batch)

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        return launch.causal_conv1d(self._tensors(step, index), activation="silu")

    def check(self) -> float:
        """Compare some rows of the first launch with the CPU op."""
        tensors = self._tensors(0, 0)
        rows = torch.arange(min(_GATE_ROWS, self._case.batch_size))
        run: Callable[..., Tensor] = ops.causal_conv1d
        expected, found = run(**_rows_on_cpu(tensors, rows)), run(**tensors)[: len(rows)]
        case = self._case
        name = f"{case.shape}, T = {case.replay.window}, batch {case.batch_size}: output of the convolution"
        return require(name, relative_error(found.flatten(0, 1), expected.flatten(0, 1)))

    def _tensors(self, step: int, index: int) -> dict[str, Tensor]:
        return {
            "x": self._x[index],
            "weight": self._weight[index],
            "bias": self._bias[index],
            "conv_ring": self._ring,
            "past_lengths": self._past[step, index],
            "num_tokens": self._num_tokens,
            "slot_ids": self._slot_ids[index],
        }


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed numbers, drawn in place: pools are gigabytes."""
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error along the first axis, relative to the largest magnitude there; inf when not finite."""
    got, want = (t.detach().cpu().float().flatten(1) for t in (found, expected))
    if not bool(got.isfinite().all()):
        return float("inf")
    return float(((got - want).abs().amax(1) / want.abs().amax(1)).max())


def require(what: str, error: float, bound: float = OUTPUT_BOUND) -> float:
    """Return an error that is within its bound.

    Raises:
        NumericsError: it is not.
    """
    if not error <= bound:
        raise NumericsError(
            f"{what}: found an error of {error:.2g} against the CPU; needed at most {bound:.2g}. It was not timed."
        )
    return error


def pools(case: KernelCase, slots: int, device: torch.device) -> dict[str, Tensor]:
    """Return the checkpoints and rings of all slots, full of numbers."""
    m, rows = case.geometry, case.replay.ring_rows
    # The ring holds dt after softplus: positive and small.
    dt_ring = torch.empty(slots, rows, m.n_heads, device=device).uniform_(0.001, 0.1)
    return {
        "ssm_state": normal((slots, m.n_heads, m.head_dim, m.d_state), torch_dtype(case.replay.state_dtype), device),
        "x_ring": normal((slots, rows, m.n_heads, m.head_dim), ACTIVATION, device),
        "B_ring": normal((slots, rows, m.n_groups, m.d_state), ACTIVATION, device),
        "dt_ring": dt_ring,
    }


def telling_launches(flushes: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Choose launches (step, set) that have rows with a flush and without: one that has both, or one of each kind.

    Args:
        flushes: [steps, sets, batch]
    """
    both = np.argwhere(flushes.any(-1) & ~flushes.all(-1))[:1]
    first = flushes[..., 0]
    chosen = both if len(both) else [np.argwhere(kind)[0] for kind in (first, ~first) if kind.any()]
    return [(int(step), int(index)) for step, index in chosen]


def telling_rows(is_flush: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return a few rows: of those with a flush and of those without, the first and the last."""
    kinds = (np.flatnonzero(is_flush), np.flatnonzero(~is_flush))
    return np.unique(np.concatenate([rows[[0, -1]] for rows in kinds if rows.size]))


_BY_ROW = ("x", "dt", "B", "C", "past_lengths", "checkpoint_lengths", "num_tokens")
_BY_SLOT = ("ssm_state", "x_ring", "B_ring", "dt_ring", "conv_ring")


def _rows_on_cpu(tensors: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Copy some rows and their slots, with activations in fp32, so that the expected output is not rounded."""
    slots = tensors["slot_ids"][rows.to(tensors["slot_ids"].device)].long()
    copied: dict[str, Tensor] = {"slot_ids": torch.arange(len(rows), dtype=torch.int32)}
    for name, tensor in tensors.items():
        if name == "slot_ids":
            continue
        if name in _BY_ROW:
            tensor = tensor[rows.to(tensor.device)]
        elif name in _BY_SLOT:
            tensor = tensor[slots.to(tensor.device)]
        is_activation = tensor.dtype == ACTIVATION and name != "ssm_state"
        copied[name] = tensor.cpu().float() if is_activation else tensor.cpu().clone()
    return copied
