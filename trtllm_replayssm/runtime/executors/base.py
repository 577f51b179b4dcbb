"""What the loop knows of an executor: one step of the model, and the shapes it was made for."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.memory_plan import MemoryPlan
from trtllm_replayssm.runtime.pools import State
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

TORCH_EXECUTOR = 'the torch executor (executor="torch", --executor torch)'
"""How messages name the way out that every machine has, in the words of Python and of the command line."""


@runtime_checkable
class Executor(Protocol):
    """Runs steps of one model on state pools that it owns.

    Attributes:
        name: "torch" or "tensorrt".
        geometry: the model's shapes.
        replay: history and window.
        limits: slots and lengths; the pools have limits.max_batch_size slots.
        device: where step inputs are wanted.
        is_conventional: whether the recurrent state is rewritten for every token, for comparison.
        memory_plan: what it takes on the device.
    """

    name: str
    geometry: ModelGeometry
    replay: ReplayGeometry
    limits: EngineLimits
    device: torch.device
    is_conventional: bool
    memory_plan: MemoryPlan

    @property
    def states(self) -> Sequence[State]:
        """Every state and its pool, for copies between steps; their addresses stay as they are."""
        ...

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run one step; states are updated in place, nothing is committed.

        A step that flushes must run exactly once per ``advance``.
        """
        ...

    def close(self) -> None:
        """Release device memory; the executor is not used again."""
        ...
