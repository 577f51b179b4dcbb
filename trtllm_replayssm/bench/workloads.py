"""Our kernels with the memory of one case: tensors as a model has them, launches that rotate, and the gate before.

Every workload has ``num_sets`` disjoint sets of slots and inputs and runs ``num_steps`` consecutive steps of each: set
by set, step after step, so that between two uses of a state all the other sets are used.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trtllm_replayssm import ops
from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import Cursors, KernelCase
from trtllm_replayssm.bench.gate import (
    OUTPUT_BOUND,
    STATE_BOUNDS,
    relative_error,
    require,
    rows_on_cpu,
    telling_launches,
    telling_rows,
)
from trtllm_replayssm.bench.recurrences import ACTIVATION, Packed, normal, recurrence_of
from trtllm_replayssm.bench.report import REPLAY, Kind
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.plugins import launch

_GATE_ROWS = 4
_LEAST_CONV_LAUNCHES = 256


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


class ReplayStep:
    """The op of a recurrence, one step of every row.

    Args:
        case: what to run.
        device: where.
    """

    kind: Kind = "replay"
    output_bound = OUTPUT_BOUND

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        m, replay, batch = case.geometry, case.replay, case.batch_size
        self._case = case
        self._recurrence = recurrence_of(m)
        self.implementation = REPLAY[self._recurrence.name]
        self.num_sets = cases.step_sets(case)
        self.num_steps = cases.num_steps(replay)
        slots = self.num_sets * batch
        cursors = self._draw_cursors(replay, slots)
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
        self._packed = packed = Packed(case, self.num_sets, device)
        self._weights, self._pools = packed.weights, self._recurrence.pools(replay, slots, device)
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
                **self._weights,
                **self._pools,
                "num_tokens": num_tokens,
                "slot_ids": slot_ids[index],
            }
            for index in range(self.num_sets)
        ]

    def _draw_cursors(self, replay: ReplayGeometry, num_slots: int) -> Cursors:
        return cases.draw_cursors(replay, num_slots, cases.num_steps(replay))

    @property
    def _op(self) -> Callable[..., Tensor]:
        return self._recurrence.op

    @property
    def _kernel(self) -> Callable[..., Tensor]:
        return self._recurrence.kernel

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        replay = self._case.replay
        return self._kernel(self._tensors(step, index), history=replay.history, max_draft_len=replay.max_draft_len)

    def check(self) -> float:
        """Compare some rows with the CPU op: with a flush and without, of one launch if it has both."""
        by_launch = self._flushes.reshape(self.num_steps, self.num_sets, -1)
        return max(self._check(step, index) for step, index in telling_launches(by_launch))

    def _check(self, step: int, index: int) -> float:
        case, replay = self._case, self._case.replay
        tensors = self._tensors(step, index)
        is_flush = self._flushes[step, index * case.batch_size : (index + 1) * case.batch_size]
        rows = torch.from_numpy(telling_rows(is_flush))
        on_cpu = rows_on_cpu(tensors, rows, pools=self._pools, weights=self._weights)
        run = partial(self._op, history=replay.history, max_draft_len=replay.max_draft_len)
        expected, found = run(**on_cpu), run(**tensors)
        chosen = rows.to(found.device)
        slots = tensors["slot_ids"][chosen].long()
        state_error = relative_error(tensors["ssm_state"][slots], on_cpu["ssm_state"])
        require(f"{case}: checkpoint", state_error, STATE_BOUNDS[replay.state_dtype])
        output_error = relative_error(found[chosen].flatten(0, 1), expected.flatten(0, 1))
        return require(f"{case}: output of {self.implementation}", output_error, self.output_bound)

    def _tensors(self, step: int, index: int) -> dict[str, Tensor]:
        past, checkpoint = self._lengths[step][index]
        return {**self._sets[index], "past_lengths": past, "checkpoint_lengths": checkpoint}


class CausalConv1dStep:
    """``ops.causal_conv1d``, one step of every row; its input lies within ``in_proj``'s output, as in a model.

    Args:
        case: what to run; the state type plays no part.
        device: where.
    """

    implementation = "causal_conv1d"
    kind: Kind = "convolution"
    flush_fraction: float | None = None
    mean_pending: float | None = None

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        m, replay, batch = case.geometry, case.replay, case.batch_size
        self._case = case
        self.traffic = traffic.conv_bytes(m, replay.window, cases.ACTIVATION_DTYPE, batch_size=batch)
        self.num_sets = cases.conv_sets(case)
        self.num_steps = -(-_LEAST_CONV_LAUNCHES // self.num_sets)
        slots = self.num_sets * batch
        packed = normal((self.num_sets, batch, replay.window, m.d_in_proj), ACTIVATION, device)
        self._x = recurrence_of(m).conv_input(packed)
        self._weight = normal((self.num_sets, m.conv_dim, m.d_conv), ACTIVATION, device)
        self._bias = normal((self.num_sets, m.conv_dim), ACTIVATION, device)
        self._ring = normal((slots, replay.conv_ring_rows(m.d_conv), m.conv_dim), ACTIVATION, device)
        first = np.random.default_rng(cases.SEED).integers(m.d_conv, 64, (self.num_sets, batch))
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
        on_cpu = rows_on_cpu(tensors, rows, pools=("conv_ring",), weights=("weight", "bias"))
        expected, found = run(**on_cpu), run(**tensors)[: len(rows)]
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
