"""What the adapters of all libraries share: finding a module, the memory of a step, and the gate before its time."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.gate import (
    PEER_PREFILL_BOUND,
    ROUNDED_BOUND,
    relative_error,
    require,
    telling_launches,
    telling_rows,
)
from trtllm_replayssm.bench.prefill import Prefill
from trtllm_replayssm.bench.recurrences import Packed, Recurrence, normal
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED, Setting
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.contract.memory import layer_ring_row_bytes
from trtllm_replayssm.ops.dtypes import torch_dtype


@cache
def load(module: str) -> Any | None:
    """Import a module of another library, or return None where it or what it needs is not installed or not for us."""
    try:
        return importlib.import_module(module)
    # RuntimeError: FlashInfer's kernels refuse a machine so that has not what they are compiled with.
    except (ImportError, OSError, RuntimeError):
        return None


class Launch(NamedTuple):
    """How a Triton kernel is launched."""

    grid: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def relaunched(library: Any, kernel: str, change: Callable[[Launch], Launch]) -> Iterator[None]:
    """Launch a library's Triton kernel otherwise than its own function does, which has no argument for it.

    Args:
        library: the module whose function launches the kernel.
        kernel: its name there.
        change: of every launch.
    """
    original = getattr(library, kernel)
    setattr(library, kernel, _Relaunched(original, change))
    try:
        yield
    finally:
        setattr(library, kernel, original)


class _Relaunched:
    def __init__(self, kernel: Any, change: Callable[[Launch], Launch]) -> None:
        self._kernel, self._change = kernel, change

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **options: Any) -> None:
        launch = self._change(Launch(grid, arguments, options))
        self._kernel[launch.grid](*launch.arguments, **launch.options)


class History(NamedTuple):
    """What some rows stand on before a launch: a state, and pending tokens after it, oldest first.

    Attributes:
        state: [rows, *state] as our op has it.
        pending: pending tokens of each row; the ring rows beyond them are not read.
        rings: name of our op's ring -> [rows, J, *ring row].
    """

    state: Tensor
    pending: Tensor
    rings: dict[str, Tensor]

    def on_cpu(self) -> "History":
        """Return a copy that no launch changes."""
        state, pending, rings = self
        return History(state.cpu().clone(), pending.cpu().clone(), {name: r.cpu().clone() for name, r in rings.items()})


def bare(state: Tensor, recurrence: Recurrence) -> History:
    """Return the history of states with nothing after them."""
    rows = len(state)
    return History(state, torch.zeros(rows, dtype=torch.int32), recurrence.rings(rows, 0))


def expected_output(
    recurrence: Recurrence, inputs: dict[str, Tensor], weights: dict[str, Tensor], history: History
) -> Tensor:
    """Return what a window should give, [rows, T, *output] in fp32, by our CPU op, which rounds nothing here.

    Args:
        recurrence: whose op.
        inputs: of the rows, by the op's names.
        weights: per-head constants, by the op's names.
        history: before the window, on the CPU.
    """
    rows, window = next(iter(inputs.values())).shape[:2]
    most = next(iter(history.rings.values())).size(1)
    replay = ReplayGeometry(history=most + window, max_draft_len=window - 1)

    def ring(pending: Tensor) -> Tensor:
        return torch.cat([pending.float(), pending.new_zeros(rows, replay.ring_rows - most, *pending.shape[2:])], 1)

    # The oldest pending token stands in row 0, and no checkpoint at position 0.
    checkpoint = torch.full((rows,), replay.ring_rows, dtype=torch.int32)
    return recurrence.op(
        **{name: tensor.cpu().float() for name, tensor in inputs.items()},
        **{name: weight.cpu().float() for name, weight in weights.items()},
        ssm_state=history.state.float().contiguous(),
        **{name: ring(pending).float() for name, pending in history.rings.items()},
        past_lengths=checkpoint + history.pending.int(),
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
    output_bound = ROUNDED_BOUND

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        m, batch = case.geometry, case.batch_size
        self.case, self.device, self.setting = case, device, SHIPPED
        self.num_sets = cases.step_sets(case)
        # As many launches as our step has.
        self.num_steps = cases.num_steps(case.replay)
        self.traffic = traffic.conventional_bytes(m, case.replay, cases.ACTIVATION_DTYPE, batch_size=batch)
        self.packed = Packed(case, self.num_sets, device)
        self.library: Any = load(self.module)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a slot's state in the library: as in our op, unless it says otherwise."""
        return self.packed.recurrence.state

    @classmethod
    @abstractmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether the library has a kernel for the case."""

    @abstractmethod
    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set as ``setting`` says; return its output, [batch, T, *output] or a view of it."""

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
        recurrence, on_device = self.packed.recurrence, rows.to(self.device)
        inputs = {name: tensor[on_device] for name, tensor in self.packed.inputs(index).items()}
        history = self.before(step, index, on_device).on_cpu()
        expected = expected_output(recurrence, inputs, self.packed.weights, history)
        found = self.launch(step, index).reshape(self.case.batch_size, -1, *recurrence.output)[on_device]
        error = relative_error(found.flatten(0, 1), expected.flatten(0, 1))
        return require(f"{self.case}: output of {self.implementation}", error, self.output_bound)

    def states(self, per_row: int = 1) -> Tensor:
        """Return random states, [sets, batch * per_row, *state_shape]."""
        shape = (self.num_sets, self.case.batch_size * per_row, *self.state_shape)
        return normal(shape, torch_dtype(self.case.replay.state_dtype), self.device)


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
        row, batch = self.ring_row_bytes(), self.case.batch_size
        self.traffic = self.traffic._replace(
            ring_read=batch * mean_pending * row, ring_written=batch * replay.window * row
        )

    def ring_row_bytes(self) -> int:
        """Return the bytes that the library keeps of one token: as many as we do, unless it says otherwise."""
        return layer_ring_row_bytes(self.case.geometry, cases.ACTIVATION_DTYPE)

    def telling(self) -> list[tuple[int, int, NDArray[np.int64]]]:
        """Choose rows with a flush and without."""
        return [
            (step, index, telling_rows(self.flushes[step, index])) for step, index in telling_launches(self.flushes)
        ]

    def on_device(self, values: NDArray[np.generic]) -> Tensor:
        """Return what all slots have as [steps, sets, batch]; each launch's row is aligned."""
        by_launch = torch.from_numpy(values).view(-1, self.num_sets, self.case.batch_size)
        return aligned_rows(by_launch.to(self.device))


class PeerPrefill(Prefill):
    """Another library's prefill, which returns the last states beside the output.

    Args:
        case: what to run, with ``prefill_tokens``; ``supports`` has been asked.
        device: where.
    """

    module: str
    settings: tuple[Setting, ...] = (SHIPPED,)
    output_bound = PEER_PREFILL_BOUND

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self.setting = self.settings[0]
        self.library: Any = load(self.module)
        self.last_states: Tensor

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say yes: these take any prompt."""
        return True

    def final_states(self, index: int) -> Tensor:
        """Return the states that the last launch left."""
        return self.last_states
