"""``LLM``: open a folder, choose an executor, run requests. The shape is that of TensorRT-LLM's class."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, overload

import torch
from tqdm import tqdm

from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.config import NGramDecodingConfig, ReplayConfig, SamplingParams, SpeculativeConfig
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import Manifest, is_engine_folder, read_manifest
from trtllm_replayssm.contract.tensors import weight_specs
from trtllm_replayssm.errors import CheckpointError, ConfigError, ManifestError, UnsupportedError
from trtllm_replayssm.runtime import prompts as prompt_desk
from trtllm_replayssm.runtime import settings
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.loop import DecodeLoop
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.prompts import Prompt, PromptDesk, Prompts
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.speculative.base import Drafter, NoDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.tokenizer import Tokenizer

ExecutorName = Literal["auto", "torch", "tensorrt"]


class LLM:
    """A language model that generates text.

    Args:
        model: a Hugging Face folder, a rank checkpoint or an engine folder.
        executor: "torch" runs the torch module, "tensorrt" an engine; "auto" takes "tensorrt" for an engine folder
            that this machine can run.
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
        folder = Path(model)
        self._drafter = _make_drafter(speculative_config, drafter)
        options = settings.Options(
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            replay=replay or ReplayConfig(),
            max_draft_len=self._drafter.max_draft_len,
        )
        weights = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._executor, self._limits = _open(folder, executor, options, device, weights)
        self._tokenizer = Tokenizer.from_folder(folder)
        self._desk = PromptDesk(self.geometry, self._limits, self._tokenizer)
        self._recorder = MetricsRecorder(
            self.geometry, self._executor.replay, is_conventional=self._executor.is_conventional
        )
        self._loop = DecodeLoop(self._executor, self._drafter, self._limits, self._recorder)
        self._next_id = 0
        self._lock = threading.Lock()

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
    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, or None."""
        return self._tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too; it counts as one prompt
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = ...,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = ...,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate from one prompt or many.

        Args:
            prompts: text, token ids (a list of ints is one prompt), or a list of either.
            sampling_params: one for all prompts, or one per prompt.
            use_tqdm: show a progress bar, where standard error is a terminal.

        Returns:
            One output for a single prompt; a list, in the prompts' order, for a list. Generation that reaches
            max_seq_len ends there with finish_reason "length".

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing has run then.
        """
        given, is_single = prompt_desk.as_list(prompts)
        params = prompt_desk.params_for(len(given), sampling_params)
        with self._lock:
            requests = self._desk.requests(given, params, self._next_id)
            self._next_id += len(requests)
            self._run(requests, use_tqdm)
        outputs = [request.output() for request in requests]
        return outputs[0] if is_single else outputs

    def metrics(self) -> dict[str, int | float]:
        """Return what all calls of ``generate`` did so far; ``runtime.metrics.Counters`` explains the keys."""
        return self._recorder.snapshot()

    def close(self) -> None:
        """Release the device memory; the object is not used again."""
        self._executor.close()

    def _run(self, requests: Sequence[Request], use_tqdm: bool) -> None:
        started = time.perf_counter()
        try:
            with tqdm(total=len(requests), desc="requests", unit="request", disable=None if use_tqdm else True) as bar:
                for request in requests:
                    self._loop.add(request)
                while self._loop.has_work:
                    bar.update(sum(request.is_finished for request in self._loop.step()))
        finally:
            self._loop.drop_all()
            self._recorder.count_time(started)


def _make_drafter(config: SpeculativeConfig | None, drafter: Drafter | None) -> Drafter:
    if config is not None and drafter is not None:
        raise ConfigError("drafter: found together with speculative_config; needed one of the two.")
    if config is None:
        return drafter or NoDrafter()
    if isinstance(config, NGramDecodingConfig):
        return NGramDrafter(config)
    raise ConfigError(f"speculative_config: found {type(config).__name__}; needed NGramDecodingConfig.")


def _open(
    folder: Path, executor: ExecutorName, options: settings.Options, device: str, checkpoint_dir: Path | None
) -> tuple[Executor, EngineLimits]:
    if executor not in ("auto", "torch", "tensorrt"):
        raise ConfigError(f"executor: found {executor!r}; needed 'auto', 'torch' or 'tensorrt'.")
    manifest = read_manifest(folder) if is_engine_folder(folder) else None
    if executor == "tensorrt" and not options.replay.enabled:
        raise UnsupportedError(
            "replay: found enabled=False with executor='tensorrt'; an engine has no conventional decode. "
            "Use executor='torch'."
        )
    if manifest is None:
        return _open_model(folder, executor, options, device, checkpoint_dir)
    return _open_engine(folder, manifest, executor, options, device, checkpoint_dir)


def _open_model(
    folder: Path, executor: ExecutorName, options: settings.Options, device: str, checkpoint_dir: Path | None
) -> tuple[Executor, EngineLimits]:
    if checkpoint_dir is not None:
        raise ConfigError(f"checkpoint_dir: found {checkpoint_dir}, and {folder} is no engine; leave it out.")
    geometry = open_model_folder(folder, options.dtype).geometry
    if executor == "tensorrt":
        raise ManifestError(
            f"{folder}: found no engine; executor='tensorrt' needed an engine folder. Build one with "
            f"`trtllm-replayssm build`, or use executor='torch'."
        )
    chosen = settings.of_model(geometry, options)
    return _torch_executor(folder, chosen, options, device), chosen.limits


def _open_engine(
    folder: Path,
    manifest: Manifest,
    executor: ExecutorName,
    options: settings.Options,
    device: str,
    checkpoint_dir: Path | None,
) -> tuple[Executor, EngineLimits]:
    # Imported where an engine is: the torch executor needs nothing of TensorRT.
    from trtllm_replayssm.runtime.executors import tensorrt_executor

    chosen = settings.of_engine(manifest, options)
    if executor == "auto":
        is_usable = options.replay.enabled and device != "cpu" and tensorrt_executor.is_usable(manifest)
        executor = "tensorrt" if is_usable else "torch"
    if executor == "tensorrt":
        found = tensorrt_executor.TensorRTExecutor(folder, manifest, _cuda(device), checkpoint_dir)
        return found, chosen.limits
    return _torch_executor(checkpoint_dir or folder, chosen, options, device), chosen.limits


def _torch_executor(weights: Path, chosen: settings.Settings, options: settings.Options, device: str) -> TorchExecutor:
    def load_weights(target: torch.device) -> Mapping[str, torch.Tensor]:
        opened = open_model_folder(weights, chosen.geometry.dtype)
        if weight_specs(opened.geometry) != weight_specs(chosen.geometry):
            raise CheckpointError(f"{weights}: its weights are not those of the engine's model. Name another folder.")
        if not opened.has_weights:
            raise CheckpointError(
                f"{weights}: found no weights in it; needed those of the model. Name the rank checkpoint they are in "
                f"with checkpoint_dir."
            )
        return opened.load_weights(target)

    return TorchExecutor(
        chosen.geometry,
        chosen.replay,
        chosen.limits,
        load_weights,
        _device(device),
        conventional=not options.replay.enabled,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: found {name!r}; needed 'auto', 'cpu', 'cuda' or 'cuda:<n>'.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: found {name!r}; needed 'auto', 'cpu', 'cuda' or 'cuda:<n>'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: found {name!r} with {torch.cuda.device_count()} CUDA devices; use 'cpu'.")
    return device


def _cuda(name: str) -> torch.device:
    return torch.device("cuda") if name == "auto" else _device(name)
