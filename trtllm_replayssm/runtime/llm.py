"""``LLM``: open a folder, run requests. The shape is that of TensorRT-LLM's class."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self, overload

from tqdm.auto import tqdm

from trtllm_replayssm.config import NGramDecodingConfig, ReplayConfig, SamplingParams, SpeculativeConfig
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.errors import ConfigError, RequestError
from trtllm_replayssm.runtime import prompts as prompt_desk
from trtllm_replayssm.runtime import settings
from trtllm_replayssm.runtime.loop import DecodeLoop
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.opening import ExecutorName, open_executor
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.prompts import Inputs, Prompt, PromptDesk
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.speculative.base import Drafter, NoDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.tokenizer import Tokenizer


class LLM:
    """A language model that generates text; as a context manager it closes itself.

    Args:
        model: a Hugging Face folder, a rank checkpoint or an engine folder.
        executor: "torch" runs the torch module, "tensorrt" an engine; "auto" takes "tensorrt" for an engine folder
            that this machine can run; where it cannot, the log has a warning with the reason.
        dtype: activation type; "auto" takes the checkpoint's.
        device: "cpu", "cuda" or "cuda:<n>"; "auto" takes CUDA where there is one.
        max_batch_size: requests that run at a time, further ones queue; by default 8, or what the engine has.
        max_seq_len: tokens of the longest sequence, prompt and generation together; by default the model's context, at
            most 4096, or what the engine has.
        max_num_tokens: tokens of the longest prompt piece that runs in one step; by default 2048, or the engine's.
        replay: how recurrent layers keep their state.
        speculative_config: where draft tokens come from; None decodes plainly.
        drafter: your own source of draft tokens, instead of ``speculative_config``.
        checkpoint_dir: where the weights are, for an engine folder that has none.

    Raises:
        ConfigError: contradictory or impossible options.
        CheckpointError: the folder is no model, or its weights are not complete.
        ManifestError: the engine folder is damaged or built for something else.
        BackendError: executor="tensorrt" where TensorRT or its GPU is missing.
        CapacityError: the states do not fit the device.
    """

    def __init__(  # noqa: PLR0913 - one keyword per option, as users of TensorRT-LLM know them
        self,
        model: str | Path,
        *,
        executor: ExecutorName = "auto",
        dtype: str = "auto",
        device: str = "auto",
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_num_tokens: int | None = None,
        replay: ReplayConfig | None = None,
        speculative_config: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
        checkpoint_dir: str | Path | None = None,
    ) -> None:
        self._folder = folder = _path("model", model)
        self._drafter = _make_drafter(speculative_config, drafter)
        options = settings.Options(
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            replay=ReplayConfig() if replay is None else replay,
            max_draft_len=self._drafter.max_draft_len,
        )
        weights = None if checkpoint_dir is None else _path("checkpoint_dir", checkpoint_dir)
        self._executor, self._limits = open_executor(folder, executor, options, str(device), weights)
        self._tokenizer = Tokenizer.from_folder(folder)
        self._desk = PromptDesk(self.geometry, self._limits, self._tokenizer)
        self._recorder = MetricsRecorder(
            self.geometry, self._executor.replay, is_conventional=self._executor.is_conventional
        )
        self._loop = DecodeLoop(self._executor, self._drafter, self._limits, self._recorder)
        self._next_id = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        limits = f"max_batch_size={self.limits.max_batch_size}, max_seq_len={self.limits.max_seq_len}"
        closed = ", closed" if self._is_closed else ""
        return (
            f"LLM({str(self._folder)!r}, executor={self.executor!r}, device={self.device!r}, "
            f"dtype={self.geometry.dtype!r}, {limits}, history={self.replay.history}{closed})"
        )

    @property
    def geometry(self) -> ModelGeometry:
        """The model's shapes."""
        return self._executor.geometry

    @property
    def replay(self) -> ReplayGeometry:
        """History, window and state type in use."""
        return self._executor.replay

    @property
    def limits(self) -> EngineLimits:
        """What requests are held to."""
        return self._limits

    @property
    def executor(self) -> str:
        """The executor in use: "torch" or "tensorrt"."""
        return self._executor.name

    @property
    def device(self) -> str:
        """Where the executor runs: "cpu", "cuda" or "cuda:<n>"."""
        return str(self._executor.device)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, or None."""
        return self._tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too; it counts as one prompt
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = ...,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        inputs: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = ...,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        inputs: Inputs,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate from one prompt or many.

        Args:
            inputs: one prompt or a list of prompts. A prompt is text, token ids (a list of ints is one prompt),
                {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: one for all prompts, or one per prompt.
            use_tqdm: show a progress bar, in a notebook and where standard error is a terminal.

        Returns:
            One output for a single prompt; a list, in the prompts' order, for a list. Generation that reaches
            max_seq_len ends there with finish_reason "length".

        Raises:
            RequestError: a prompt or its parameters cannot be served, or the ``LLM`` is closed; nothing has run then.
        """
        prompts, is_single = prompt_desk.as_list(inputs)
        params = prompt_desk.params_for(len(prompts), sampling_params)
        with self._lock:
            if self._is_closed:
                raise RequestError("generate: found an LLM that was closed; needed an open one. Make another.")
            requests = self._desk.requests(prompts, params, self._next_id)
            self._next_id += len(requests)
            self._run(requests, use_tqdm)
        sequences = iter(requests)
        outputs = [first.output(*islice(sequences, first.params.n - 1)) for first in sequences]
        return outputs[0] if is_single else outputs

    def metrics(self) -> dict[str, Any]:
        """Return what all calls of ``generate`` did so far; ``runtime.metrics.Counters`` explains the keys.

        The ``conventional_*`` bytes are those of the same steps without replay. Under speculation these hold a
        snapshot of the state for every token of a window, as the conventional decode needs to roll back.
        ``tokens_per_s`` is None before the first call, ``acceptance_rate`` while no draft has been proposed.
        """
        return self._recorder.snapshot()

    def reset_metrics(self) -> None:
        """Count from zero again, after a warm-up for instance."""
        with self._lock:
            self._recorder.reset()

    def close(self) -> None:
        """Release the device memory, once a running ``generate`` has ended; nothing can be generated afterwards."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._executor.close()

    def _run(self, requests: Sequence[Request], use_tqdm: bool) -> None:
        started = time.perf_counter()
        try:
            with _progress_bar(len(requests), use_tqdm) as bar:
                for request in requests:
                    self._loop.add(request)
                while self._loop.has_work:
                    bar.update(sum(request.is_finished for request in self._loop.step()))
        finally:
            self._loop.drop_all()
            self._recorder.count_time(started)


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}: found {type(value).__name__}; needed the path of a folder.")
    return Path(value)


def _progress_bar(count: int, is_wanted: bool) -> Any:
    # None shows the bar on a terminal alone; a notebook's standard error is none.
    disable = None if "ipykernel" not in sys.modules else False
    return tqdm(total=count, desc="requests", unit="request", disable=disable if is_wanted else True)


def _make_drafter(config: SpeculativeConfig | None, drafter: Drafter | None) -> Drafter:
    if config is not None and drafter is not None:
        raise ConfigError("drafter: found together with speculative_config; needed one of the two.")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter: found {type(drafter).__name__}; needed an object with max_draft_len, begin, observe, propose "
            f"and end."
        )
    if config is None:
        return NoDrafter() if drafter is None else drafter
    if isinstance(config, NGramDecodingConfig):
        return NGramDrafter(config)
    raise ConfigError(f"speculative_config: found {type(config).__name__}; needed NGramDecodingConfig.")
