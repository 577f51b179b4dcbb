"""Decode and verification steps as CUDA graphs: captured at a few sizes, on padding, and replayed on a step's rows.

A graph has its addresses inside. So each has input tensors of its own, which a step is copied into; what it does not
fill stays padding, whose slot is -1. Capturing runs nothing, and the run before it, which compiles and loads kernels,
has padding rows alone: a step that flushes runs once per ``advance``, in a replay. All graphs take their memory from
one pool, for they run one after the other; what must outlive a replay, the logits, is outside of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_replayssm.errors import BackendError
from trtllm_replayssm.runtime.executors.buckets import bucket_of
from trtllm_replayssm.runtime.inputs import PADDING_SLOT
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs


class RunStep(Protocol):
    """Runs a step's work on the current stream."""

    def __call__(self, inputs: StepInputs, key_length: int, logits: torch.Tensor) -> StepOutputs:
        """Run a step.

        Args:
            inputs: of the step.
            key_length: how many leading rows of the caches attention may read.
            logits: where to write them, fp32 [B, J, V].
        """
        ...


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function does, without doing it, and returns what does it."""


@dataclass(frozen=True, order=True)
class GraphKey:
    """What a captured step is made for.

    Attributes:
        num_rows: B.
        window: S.
        key_length: how many leading rows of the caches attention may read.
    """

    num_rows: int
    window: int
    key_length: int


@dataclass(frozen=True)
class StepSizes:
    """Which steps are captured.

    Attributes:
        batch_sizes: rows, ascending.
        key_lengths: ascending, the last one the caches' capacity.
        window: most tokens of a decode or verification window, T.
        is_padding: whether a step may run in a size above its own.
    """

    batch_sizes: Sequence[int]
    key_lengths: Sequence[int]
    window: int
    is_padding: bool

    def key_of(self, inputs: StepInputs) -> GraphKey | None:
        """Return the graph for a step; None where none is for it, as for a prompt's pieces."""
        num_rows, window = inputs.input_ids.shape
        is_decode = inputs.first_slot == 0 and window <= self.window and inputs.logits_indices.shape[1] == window
        rows = bucket_of(self.batch_sizes, num_rows)
        length = bucket_of(self.key_lengths, min(inputs.max_past_length + window, self.key_lengths[-1]))
        if not is_decode or rows is None or length is None or not (self.is_padding or rows == num_rows):
            return None
        return GraphKey(rows, window, length)


class StaticInputs:
    """The inputs of one graph: fixed addresses, rows of padding until they are filled.

    Args:
        key: sizes of the graph.
        device: where.
    """

    def __init__(self, key: GraphKey, device: torch.device) -> None:
        rows, window = key.num_rows, key.window

        def tensor(*shape: int, value: int = 0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self.inputs = StepInputs(
            input_ids=tensor(rows, window),
            past_lengths=tensor(rows),
            checkpoint_lengths=tensor(rows),
            num_tokens=tensor(rows),
            slot_ids=tensor(rows, value=PADDING_SLOT),
            logits_indices=tensor(rows, window),
            first_slot=0,
            max_past_length=key.key_length - window,
        )
        self._num_filled = 0

    def fill(self, inputs: StepInputs) -> None:
        """Take over a step's rows; the rows beyond them are padding, whatever they were before."""
        num_rows = len(inputs.slot_ids)
        torch._foreach_copy_([own[:num_rows] for own in self.inputs.tensors()], list(inputs.tensors()))
        if num_rows < self._num_filled:
            # num_tokens and lengths of a row without a slot are not read.
            self.inputs.slot_ids[num_rows : self._num_filled] = PADDING_SLOT
        self._num_filled = num_rows


@dataclass(frozen=True)
class _Captured:
    inputs: StaticInputs
    outputs: StepOutputs
    replay: Callable[[], None]


class StepGraphs:
    """The graphs of one executor, each captured when a step first asks for it.

    Args:
        run: runs a step.
        sizes: which steps are captured.
        vocab_size: V.
        device: where.
        capture: how; by default as a CUDA graph.
    """

    def __init__(
        self,
        run: RunStep,
        sizes: StepSizes,
        vocab_size: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._run = run
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._device = device
        self._capture = CudaCapture(device) if capture is None else capture
        self._captured: dict[GraphKey, _Captured] = {}
        # Not of the pool: a step's logits hold until the next step, whatever graph is captured in between.
        size = sizes.batch_sizes[-1] * sizes.window * vocab_size
        self._logits = torch.empty(size, dtype=torch.float32, device=device)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What has been captured."""
        return tuple(self._captured)

    def step(self, inputs: StepInputs) -> StepOutputs | None:
        """Run a step that there is a graph for; None, with nothing done, for another."""
        key = self._sizes.key_of(inputs)
        if key is None:
            return None
        if key not in self._captured:
            self._captured[key] = self._captured_at(key)
        found = self._captured[key]
        found.inputs.fill(inputs)
        found.replay()
        return found.outputs.first_rows(len(inputs.slot_ids))

    def warm_up(self) -> None:
        """Capture plain and longest windows of all batch sizes, for the shortest sequences, largest sizes first."""
        for num_rows in reversed(self._sizes.batch_sizes):
            for window in sorted({1, self._sizes.window}, reverse=True):
                key = GraphKey(num_rows, window, self._sizes.key_lengths[0])
                if key not in self._captured:
                    self._captured[key] = self._captured_at(key)

    def _captured_at(self, key: GraphKey) -> _Captured:
        static = StaticInputs(key, self._device)
        shape = (key.num_rows, key.window, self._vocab_size)
        logits = self._logits[: key.num_rows * key.window * self._vocab_size].view(shape)
        outputs: list[StepOutputs] = []

        def run() -> None:
            outputs[:] = [self._run(static.inputs, key.key_length, logits)]

        replay = self._capture(run)
        return _Captured(static, outputs[0], replay)


class CudaCapture:
    """Captures CUDA graphs on one device, from one memory pool.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Libraries keep a workspace for each stream: the run before a capture makes that of the capture's.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once, then capture; the run must change nothing that a second one would change again.

        Raises:
            BackendError: the capture failed.
        """
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may use the device meanwhile, for another model for instance.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    run()
            except RuntimeError as error:
                raise BackendError(
                    f"CUDA graph: found a step that cannot be captured ({error}); needed one without allocations and "
                    f"waits of its own. Decode without graphs: cuda_graph_config=None."
                ) from error
        return graph.replay
