"""The two modes that are compared, and the executor of each: the same runtime, the same weights, the same requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

import torch

from trtllm_replayssm.bench.e2e.conventional import tuned_conventional
from trtllm_replayssm.bench.e2e.models import random_weights
from trtllm_replayssm.config import CudaGraphConfig
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor

Mode = Literal["replay", "conventional"]
MODES: Final[tuple[Mode, ...]] = ("replay", "conventional")
REPLAY_KERNELS: Final = "replay"


class OpenMode(NamedTuple):
    """A mode that is ready to run.

    Attributes:
        executor: with random weights.
        kernels: whose kernels run the recurrence of a step.
    """

    executor: TorchExecutor
    kernels: str


@contextmanager
def open_mode(
    mode: Mode,
    geometry: ModelGeometry,
    replay: ReplayGeometry,
    limits: EngineLimits,
    device: torch.device,
    cuda_graphs: CudaGraphConfig | None = None,
) -> Iterator[OpenMode]:
    """Make the executor of a mode, and free its memory afterwards.

    Args:
        mode: replay or conventional.
        geometry: of the model.
        replay: history, window and state type.
        limits: slots and lengths.
        device: where.
        cuda_graphs: which steps are replayed as CUDA graphs; None for none.

    Raises:
        CapacityError: weights and states do not fit the device.
    """

    def executor(*, conventional: bool) -> TorchExecutor:
        return TorchExecutor(
            geometry,
            replay,
            limits,
            lambda target: random_weights(geometry, target),
            device,
            conventional=conventional,
            cuda_graphs=cuda_graphs,
        )

    if mode == "replay":
        opened = OpenMode(executor(conventional=False), REPLAY_KERNELS)
        try:
            yield opened
        finally:
            _close(opened.executor)
        return
    with tuned_conventional(geometry, replay, limits.max_batch_size, device) as kernels:
        opened = OpenMode(executor(conventional=True), kernels)
        try:
            yield opened
        finally:
            _close(opened.executor)


def _close(executor: TorchExecutor) -> None:
    executor.close()
    if executor.device.type == "cuda":
        torch.cuda.empty_cache()
