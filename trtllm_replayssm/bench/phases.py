"""Steps in one phase of the cursors: no row flushes, or every one does; what a flush costs beside its bytes."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import Cursors, KernelCase
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.workloads import ReplayStep
from trtllm_replayssm.contract.geometry import ReplayGeometry


class _StepInOnePhase(ReplayStep, ABC):
    """The op of a recurrence, with every count of pending rows of the phase equally often.

    Args:
        case: what to run.
        device: where.
    """

    kind: Kind = "one phase"
    phase: ClassVar[str]

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self.implementation = f"{self.implementation}, {self.phase}"

    def _draw_cursors(self, replay: ReplayGeometry, num_slots: int) -> Cursors:
        """Return lengths that stay as they are: a replayed graph runs them again anyhow."""
        counts = self._pending(replay)
        checkpoint = np.random.default_rng(cases.SEED).integers(1, 1 + 4 * replay.ring_rows, num_slots)
        past = checkpoint + counts.start + np.arange(num_slots) % len(counts)
        steps = cases.num_steps(replay)
        return Cursors(*(np.tile(lengths.astype(np.int32), (steps, 1)) for lengths in (past, checkpoint)))

    @abstractmethod
    def _pending(self, replay: ReplayGeometry) -> range:
        """Return the counts of pending rows that belong to the phase."""


class StepWithoutFlush(_StepInOnePhase):
    """A step that folds nothing."""

    phase = "no row flushes"

    def _pending(self, replay: ReplayGeometry) -> range:
        return range(replay.history - replay.window + 1)


class StepOfFlushes(_StepInOnePhase):
    """A step that folds the pending rows of every row and writes every state."""

    phase = "all rows flush"

    def _pending(self, replay: ReplayGeometry) -> range:
        return range(replay.history - replay.window + 1, replay.history + 1)
