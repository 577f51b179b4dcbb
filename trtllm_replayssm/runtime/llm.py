"""``LLM``: open a folder, run requests. The shape is that of TensorRT-LLM's class."""

import logging
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, overload

from tqdm.auto import tqdm

from trtllm_replayssm.config import (
    CudaGraphConfig,
    KvCacheConfig,
    ReplayConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
)
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.memory_plan import MemoryPlan
from trtllm_replayssm.errors import ConfigError, RequestError
from trtllm_replayssm.runtime import settings
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.handle import RequestHandle
from trtllm_replayssm.runtime.intake import Intake
from trtllm_replayssm.runtime.metrics import Latencies, MetricsRecorder
from trtllm_replayssm.runtime.opening import ExecutorName, open_executor
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.prompts import Inputs, Prompt, PromptDesk, as_list, params_for
from trtllm_replayssm.runtime.serving_loop import make_serving_loop
from trtllm_replayssm.runtime.speculative import factory
from trtllm_replayssm.runtime.speculative.base import Drafter, ModelDrafter, NoDrafter
from trtllm_replayssm.runtime.tokenizer import Tokenizer

_LOGGER = logging.getLogger(__name__)
_ALL_GRAPHS = CudaGraphConfig()


class LLM:
    """A language model that generates text; as a context manager it closes itself.

    Any number of threads and event loops may use it at a time. A thread of its own runs the model's steps, from the
    first request on; a process that is forked off after that has no such thread, and needs an ``LLM`` of its own.

    Args:
        model: a Hugging Face folder, a rank checkpoint or an engine folder.
        executor: "torch" runs the torch module, "tensorrt" an engine; "auto" takes "tensorrt" for an engine folder
            that this machine can run; where it cannot, the log has a warning with the reason.
        dtype: activation type; "auto" takes the checkpoint's.
        device: "cpu", "cuda" or "cuda:<n>"; "auto" takes CUDA where there is one.
        max_batch_size: requests that run at a time, further ones queue; by default 8 on the CPU, as many as fit a GPU's
            memory, at most 256, or what the engine has.
        max_seq_len: tokens of the longest sequence, prompt and generation together; by default the model's context, at
            most 4096 and what fits a GPU's memory, or what the engine has.
        max_num_tokens: tokens of the longest prompt piece that runs in one step; by default 2048, or the engine's.
        replay: how recurrent layers keep their state.
        scheduler_config: how many requests may wait, and how prompts and decoding take turns.
        kv_cache_config: how many tokens the running sequences may hold, how much of a GPU's memory states may take
            where max_batch_size is not given, and whether prompts that begin alike share what was computed for them.
        speculative_config: where draft tokens come from; None decodes plainly.
        drafter: your own source of draft tokens, instead of ``speculative_config``.
        checkpoint_dir: where the weights are, for an engine folder that has none.
        cuda_graph_config: which steps the torch executor replays as CUDA graphs on a GPU; None for none.

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
        scheduler_config: SchedulerConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        speculative_config: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
        checkpoint_dir: str | Path | None = None,
        cuda_graph_config: CudaGraphConfig | None = _ALL_GRAPHS,
    ) -> None:
        folder, scheduling = _path("model", model), settings.scheduling(scheduler_config)
        max_draft_len = factory.max_draft_len(speculative_config, drafter)
        options = settings.Options(
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            replay=ReplayConfig() if replay is None else replay,
            max_draft_len=max_draft_len,
            returns_hidden_states=factory.reads_hidden_states(speculative_config, drafter),
            kv_cache_config=KvCacheConfig() if kv_cache_config is None else kv_cache_config,
            cuda_graph_config=cuda_graph_config,
        )
        weights = None if checkpoint_dir is None else _path("checkpoint_dir", checkpoint_dir)
        beside = factory.memory_beside(speculative_config, weights or folder, options)
        with ExitStack() as unless_whole:  # what does not fit beside the model leaves none of it on the device
            opened, self._limits = open_executor(folder, executor, options, str(device), weights, beside)
            unless_whole.callback(opened.close)
            self._tokenizer = Tokenizer.from_folder(folder)
            target = factory.Target(opened, self._limits, options, self._tokenizer, folder, weights)
            made = factory.make_drafter(speculative_config, drafter, target)
            if isinstance(made, ModelDrafter) and made is not drafter:
                unless_whole.callback(made.close)
            self._start(f"{str(folder)!r}, ", opened, made, scheduling, options.kv_cache_config)
            unless_whole.pop_all()
        _LOGGER.info("memory of %s: %s", opened.device, self._memory_plan.summary())

    @classmethod
    def from_executor(
        cls, executor: Executor, *, scheduler_config: SchedulerConfig | None = None, drafter: Drafter | None = None
    ) -> Self:
        """Serve an executor that was made elsewhere, of random weights for instance; prompts are token ids.

        Args:
            executor: runs the steps; closed with the ``LLM``. Requests are held to its limits.
            scheduler_config: as for the class.
            drafter: your own source of draft tokens, at most as many as the executor's windows have room for.

        Raises:
            ConfigError: no executor or no drafter, or drafts that the executor's windows have no room for.
        """
        if not isinstance(executor, Executor):
            raise ConfigError(f"executor: found {type(executor).__name__}; needed an object that runs a model's steps.")
        wanted, most = factory.max_draft_len(None, drafter), executor.replay.max_draft_len
        if wanted > most:
            raise ConfigError(f"drafter: found max_draft_len {wanted}; needed at most {most}.")
        llm = cls.__new__(cls)
        llm._limits, llm._tokenizer = executor.limits, None
        scheduling = settings.scheduling(scheduler_config)
        llm._start("", executor, NoDrafter() if drafter is None else drafter, scheduling, KvCacheConfig())
        return llm

    def _start(
        self,
        name: str,
        executor: Executor,
        drafter: Drafter,
        scheduling: SchedulerConfig,
        cache: KvCacheConfig,
    ) -> None:
        self._name, self._executor, self._drafter = name, executor, drafter
        beside = {"prefix_cache": cache.prefix_device_bytes, "drafter": factory.device_bytes(drafter)}
        self._memory_plan = executor.memory_plan.model_copy(update=beside)
        self._recorder = MetricsRecorder(self.geometry, executor.replay, is_conventional=executor.is_conventional)
        self._serving = make_serving_loop(executor, drafter, self._limits, self._recorder, scheduling, cache)
        self._intake = Intake(PromptDesk(self.geometry, self._limits, self._tokenizer), self._serving)
        # Also when nobody closes it, and when Python ends.
        self._finalizer = weakref.finalize(self, self._serving.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        limits = f"max_batch_size={self.limits.max_batch_size}, max_seq_len={self.limits.max_seq_len}"
        closed = ", closed" if self._serving.is_closed else ""
        return (
            f"LLM({self._name}executor={self.executor!r}, device={self.device!r}, "
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
    def memory_plan(self) -> MemoryPlan:
        """What the model takes on its device: weights, states, the largest step, and what is there beside it."""
        return self._memory_plan

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

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken: the model is open, and no step of it has failed."""
        return not self._serving.is_closed and self._serving.failure is None

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
            RequestError: a prompt or its parameters cannot be served, there are more than could ever wait, or the
                ``LLM`` is closed; nothing has run then.
            QueueFullError: more prompts than may wait now; nothing has run then.
            ReplaySSMError: what ended a request; the others have run to their ends. ``generate_async`` gives each its
                own.
        """
        prompts, is_single = as_list(inputs)
        params = params_for(len(prompts), sampling_params)
        handles = self._intake.queue(prompts, params, self)
        try:
            with _progress_bar(sum(len(handle.sequences) for handle in handles), use_tqdm) as bar:
                for handle in handles:
                    handle.wait()
                    bar.update(len(handle.sequences))
        finally:  # after an interrupt nobody wants the rest
            for handle in handles:
                handle.abort()
        outputs = [handle.result() for handle in handles]
        return outputs[0] if is_single else outputs

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestHandle:
        """Queue one prompt and return at once; from any thread, with or without an event loop.

        Args:
            inputs: the prompt, as for ``generate``.
            sampling_params: its rules.
            streaming: let the handle be iterated over while the output grows.
            priority: higher ones run first, and take the slots of lower ones, which go on later; equals run in the
                order in which they came.
            timeout_s: seconds from now after which the request ends, with the tokens that it has by then and
                finish_reason "timeout"; None for never.

        Returns:
            A handle to wait for, to iterate over or to abort.

        Raises:
            RequestError: the prompt or its parameters cannot be served, or the ``LLM`` is closed.
            QueueFullError: as many requests wait as may.
            ExecutorError: a step of the model has failed before.
            CapacityError: the process can have no thread for the steps.
        """
        prompts, is_single = as_list(inputs)
        if not is_single:
            raise RequestError(f"inputs: found a list of {len(prompts)} prompts; needed one. Call once for each.")
        params = params_for(1, sampling_params)
        (handle,) = self._intake.queue(
            prompts, params, self, streaming=streaming, priority=priority, timeout_s=timeout_s
        )
        return handle

    def submit(
        self,
        inputs: Inputs,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        streaming: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[RequestHandle]:
        """Queue one prompt or many, all of them or none, and return a handle for each at once.

        Prompts and rules are given as for ``generate``, the rest as for ``generate_async``, whose errors it raises.
        """
        prompts, _ = as_list(inputs)
        params = params_for(len(prompts), sampling_params)
        return self._intake.queue(prompts, params, self, streaming=streaming, priority=priority, timeout_s=timeout_s)

    def metrics(self) -> dict[str, Any]:
        """Return what all requests did so far; ``runtime.metrics.Counters`` explains the keys.

        The ``conventional_*`` bytes are those of the same steps without replay. Under speculation these hold a
        snapshot of the state for every token of a window, as the conventional decode needs to roll back.
        ``tokens_per_s`` is None before the first request, ``acceptance_rate`` while no draft has been proposed.
        ``num_running`` and ``num_waiting`` are the sequences with and without a slot at this moment.
        """
        now = {"num_running": self._serving.num_running, "num_waiting": self._serving.num_waiting}
        return self._recorder.snapshot() | now | self._serving.prefix_metrics()

    def latencies(self) -> Latencies:
        """Return how long sequences waited for their tokens so far, as histograms."""
        return self._recorder.latencies()

    def reset_metrics(self) -> None:
        """Count from zero again, after a warm-up for instance."""
        self._recorder.reset()
        self._serving.reset_prefix_metrics()

    def close(self) -> None:
        """Release the device memory; nothing can be generated afterwards.

        Requests that have not ended do so before the next step, with a ``ShutdownError``.
        """
        self._serving.close()

    shutdown = close
    """TensorRT-LLM's name for it."""


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}: found {type(value).__name__}; needed the path of a folder.")
    return Path(value)


def _progress_bar(count: int, is_wanted: bool) -> Any:
    # None shows the bar on a terminal alone; a notebook's standard error is none.
    disable = None if "ipykernel" not in sys.modules else False
    return tqdm(total=count, desc="requests", unit="request", disable=disable if is_wanted else True)
