"""Steps as CUDA graphs: captured at a few sizes, on padding, and replayed on a step's rows or on a prompt's tokens.

A graph has its addresses inside. So each has input tensors of its own, which a step is copied into; what it does not
fill stays padding: rows whose slot is -1, tokens behind the ``num_tokens`` of their row. Capturing runs nothing, and
the run before it, which compiles and loads kernels, has padding rows alone: a step that flushes runs once per
``advance``, in a replay. All graphs take their memory from one pool, for they run one after the other; what must
outlive a replay, the logits, is outside of it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from tqdm.auto import tqdm

from trtllm_replayssm.errors import BackendError, CapacityError
from trtllm_replayssm.runtime.executors.buckets import bucket_of
from trtllm_replayssm.runtime.inputs import PADDING_SLOT
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

_LOGGER = logging.getLogger(__name__)


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
        is_prompt: a piece of a prompt, of which the logits of one position are wanted instead of all.
    """

    num_rows: int
    window: int
    key_length: int
    is_prompt: bool = False

    @property
    def num_positions(self) -> int:
        """J."""
        return 1 if self.is_prompt else self.window


@dataclass(frozen=True)
class StepSizes:
    """Which steps are captured.

    Attributes:
        batch_sizes: rows, ascending.
        key_lengths: ascending, the last one the caches' capacity.
        window: most tokens of a decode or verification window, T.
        is_padding: whether a step may run in a size above its own.
        prompt_lengths: tokens of prompt pieces, ascending, above the window.
        own_length_rows: from so many rows on a step takes the same whatever key length is allowed, so that one graph
            serves all; None where it never does.
    """

    batch_sizes: Sequence[int]
    key_lengths: Sequence[int]
    window: int
    is_padding: bool
    prompt_lengths: Sequence[int] = ()
    own_length_rows: int | None = None

    @property
    def keys(self) -> list[GraphKey]:
        """All graphs there can be, prompts and large batches first, so that the others find room in their memory."""
        found = [self.prompt_key(length) for length in reversed(self.prompt_lengths)]
        for rows in reversed(self.batch_sizes):
            lengths = self._key_lengths(rows)[::-1]
            found += [GraphKey(rows, window, length) for window in range(self.window, 0, -1) for length in lengths]
        return found

    def key_of(self, inputs: StepInputs) -> GraphKey | None:
        """Return the graph for a step; None where none is for it."""
        num_rows, window = inputs.input_ids.shape
        if window > self.window:
            return self._prompt_key_of(inputs)
        is_decode = inputs.first_slot == 0 and inputs.logits_indices.shape[1] == window
        rows = bucket_of(self.batch_sizes, num_rows)
        if not is_decode or rows is None or not (self.is_padding or rows == num_rows):
            return None
        length = bucket_of(self._key_lengths(rows), min(inputs.max_past_length + window, self.key_lengths[-1]))
        return None if length is None else GraphKey(rows, window, length)

    def prompt_key(self, length: int) -> GraphKey:
        """Return the graph for prompt pieces padded to a length.

        There is one for all key lengths: the attention of so long windows reads a row's own keys, whatever is allowed.
        """
        return GraphKey(1, length, self.key_lengths[-1], is_prompt=True)

    def _key_lengths(self, num_rows: int) -> Sequence[int]:
        is_one_enough = self.own_length_rows is not None and num_rows >= self.own_length_rows
        return self.key_lengths[-1:] if is_one_enough else self.key_lengths

    def _prompt_key_of(self, inputs: StepInputs) -> GraphKey | None:
        num_rows, window = inputs.input_ids.shape
        length = bucket_of(self.prompt_lengths, window)
        is_one = num_rows == 1 and inputs.logits_indices.shape[1] == 1
        if not is_one or length is None or not (self.is_padding or length == window):
            return None
        # Flash attention lets the last query see the last key, and counts back from there. Where the padding reached
        # beyond the caches, each token would see keys that stand behind it.
        if inputs.max_past_length + length > self.key_lengths[-1]:
            return None
        return self.prompt_key(length)


class StaticInputs:
    """The inputs of one graph: fixed addresses, padding until they are filled.

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
            logits_indices=tensor(rows, key.num_positions),
            first_slot=0,
            max_past_length=key.key_length - window,
        )
        self._filled = (0, 0)

    def fill(self, inputs: StepInputs) -> None:
        """Take over a step's rows; the rows and tokens beyond them are padding, whatever they were before."""
        num_rows, window = inputs.input_ids.shape
        own = [self.inputs.input_ids[:, :window], *self.inputs.tensors()[1:]]
        torch._foreach_copy_([tensor[:num_rows] for tensor in own], list(inputs.tensors()))
        filled_rows, filled_window = self._filled
        if num_rows < filled_rows:
            # num_tokens and lengths of a row without a slot are not read.
            self.inputs.slot_ids[num_rows:filled_rows] = PADDING_SLOT
        if window < filled_window:
            # Not that it matters: no token that counts sees these.
            self.inputs.input_ids[:, window:filled_window] = 0
        self._filled = (num_rows, window)


@dataclass(frozen=True)
class _Captured:
    inputs: StaticInputs
    outputs: list[StepOutputs]  # one, of the run that was captured: a replay writes to its addresses
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
        return found.outputs[0].first(*inputs.input_ids.shape)

    def warm_up(self) -> None:
        """Capture all that there can be: no later step waits for a capture."""
        keys = self._sizes.keys
        _LOGGER.info("%s: capturing %d steps as CUDA graphs", self._device, len(keys))
        for key in tqdm(keys, desc="capturing steps", unit="step", disable=None):
            if key not in self._captured:
                self._captured[key] = self._captured_at(key)

    def close(self) -> None:
        """Drop all graphs and their memory."""
        self._captured.clear()

    def _captured_at(self, key: GraphKey) -> _Captured:
        static = StaticInputs(key, self._device)
        shape = (key.num_rows, key.num_positions, self._vocab_size)
        logits = self._logits[: prod(shape)].view(shape)
        outputs: list[StepOutputs] = []

        def run() -> None:
            outputs[:] = [self._run(static.inputs, key.key_length, logits)]

        replay = self._capture(run)
        return _Captured(static, outputs, replay)


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
            CapacityError: the device has no room for the step.
            BackendError: the capture failed.
        """
        try:
            return self._captured(run)
        except RuntimeError as error:
            if not _is_no_room(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CapacityError(
                f"CUDA graphs: found no room on {self._device} to capture a step ({reason}); needed what a step works "
                f"with, and about 1 MiB for each graph. Lower max_batch_size or max_num_tokens, or capture fewer "
                f"steps (cuda_graph_config; --no_warm_up)."
            ) from error

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
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
                if _is_no_room(error):
                    raise
                raise BackendError(
                    f"CUDA graph: found a step that cannot be captured ({error}); needed one without allocations and "
                    f"waits of its own. Run without graphs: cuda_graph_config=None."
                ) from error
        return graph.replay


def _is_no_room(error: BaseException | None) -> bool:
    """Say whether memory ran out: torch's, what a graph takes when it is made, or what a library wants for itself."""
    while error is not None:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text:
            return True
        error = error.__context__
    return False
