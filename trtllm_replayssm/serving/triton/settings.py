"""How a Triton model opens its folder: the ``parameters`` of its ``config.pbtxt``, all of them strings there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from trtllm_replayssm.config import (
    CudaGraphConfig,
    DecodingConfig,
    DraftTargetDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    ReplayConfig,
    SchedulerConfig,
)
from trtllm_replayssm.contract.geometry import ActivationDtype, Frozen, StateDtype
from trtllm_replayssm.errors import ConfigError, validation_text
from trtllm_replayssm.wishes import given, kv_cache_config

DraftSource = Literal["ngram", "mtp", "draft"]

_DRAFTS: dict[DraftSource, type[DecodingConfig]] = {
    "ngram": NGramDecodingConfig,
    "mtp": MTPDecodingConfig,
    "draft": DraftTargetDecodingConfig,
}


class ModelSettings(Frozen):
    """Options of one model, by the names of ``LLM`` and of the ``run`` command.

    Attributes:
        engine_dir: the folder; a relative path begins at the model's version folder.
        checkpoint_dir: the weights, for an engine folder that has none.
        executor: "auto", "torch" or "tensorrt".
        dtype: of the activations.
        max_batch_size: requests that run at a time.
        max_seq_len: tokens of the longest sequence.
        max_num_tokens: tokens of the longest prompt piece of a step.
        max_queue_size: most requests that wait; further ones are refused with the status "unavailable".
        max_prompt_steps: most pieces of prompts between two decode steps; None for ``SchedulerConfig``'s default.
        max_sequences: most sequences that one request may ask for.
        enable_block_reuse: whether prompts may start from the states of earlier ones that begin alike.
        tokens_per_block: of ``KvCacheConfig``, as the next four; None for its default.
        tokens_per_snapshot: idem.
        device_cache_size: idem.
        host_cache_size: idem.
        free_gpu_memory_fraction: idem.
        history: most pending tokens of a slot, or "auto".
        state_dtype: of the recurrent state.
        speculative: where drafts come from; None for none.
        max_draft_len: most drafts of a step.
        speculative_model: the draft model's folder, for speculative="draft".
        warm_up: whether all CUDA graphs are captured before the model is ready.
        cancellation_check_period_ms: how often requests are looked through for cancelled ones.
        metrics_period_ms: how often the metrics are brought up to date while there are requests.
    """

    # The parameters are strings, and numbers are read from them.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    engine_dir: str
    checkpoint_dir: str | None = None
    executor: Literal["auto", "torch", "tensorrt"] = "auto"
    dtype: Literal["auto"] | ActivationDtype = "auto"
    max_batch_size: int | None = Field(default=None, ge=1)
    max_seq_len: int | None = Field(default=None, ge=1)
    max_num_tokens: int | None = Field(default=None, ge=1)
    max_queue_size: int | None = Field(default=None, ge=0)
    max_prompt_steps: int | None = Field(default=None, ge=1)
    max_sequences: int = Field(default=128, ge=1)
    enable_block_reuse: bool = False
    tokens_per_block: int | None = Field(default=None, ge=1)
    tokens_per_snapshot: int | None = Field(default=None, ge=1)
    device_cache_size: int | None = Field(default=None, ge=0)
    host_cache_size: int | None = Field(default=None, ge=0)
    free_gpu_memory_fraction: float | None = Field(default=None, gt=0, le=1)
    history: int | Literal["auto"] | None = None
    state_dtype: StateDtype | None = None
    speculative: DraftSource | None = None
    max_draft_len: int | None = Field(default=None, ge=1)
    speculative_model: str | None = None
    warm_up: bool = True
    cancellation_check_period_ms: int = Field(default=100, ge=1)
    metrics_period_ms: int = Field(default=1000, ge=1)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read options that are all written as text.

        Raises:
            ConfigError: naming every one that is unknown or out of range.
        """
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            raise ConfigError(f"{validation_text(error)}.") from None

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Read the parameters of a model configuration; Triton's own ones have names of capital letters."""
        return cls.of({name: value for name, value in parameters.items() if not name.isupper()})

    def parameters(self) -> dict[str, str]:
        """Return what ``from_parameters`` reads; what is None is left out."""
        return {name: str(value) for name, value in self.model_dump(exclude_none=True).items()}

    def llm_options(self, version_folder: Path, device: str) -> dict[str, Any]:
        """Return the keyword arguments of ``LLM``.

        Args:
            version_folder: where relative paths begin.
            device: of Triton's instance.
        """
        model = None if self.speculative_model is None else version_folder / self.speculative_model
        drafts = given(max_draft_len=self.max_draft_len, speculative_model=model)
        if drafts and self.speculative is None:
            raise ConfigError(f"{', '.join(drafts)}: found without speculative; needed both or neither.")
        cache = kv_cache_config(
            free_gpu_memory_fraction=self.free_gpu_memory_fraction,
            enable_block_reuse=self.enable_block_reuse,
            tokens_per_block=self.tokens_per_block,
            tokens_per_snapshot=self.tokens_per_snapshot,
            device_cache_size=self.device_cache_size,
            host_cache_size=self.host_cache_size,
            switch="enable_block_reuse",
        )
        options: dict[str, Any] = {
            "model": version_folder / self.engine_dir,
            "checkpoint_dir": None if self.checkpoint_dir is None else version_folder / self.checkpoint_dir,
            "executor": self.executor,
            "dtype": self.dtype,
            "device": device,
            "max_batch_size": self.max_batch_size,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens,
            "scheduler_config": SchedulerConfig(
                **given(max_queue_size=self.max_queue_size, max_prompt_steps=self.max_prompt_steps)
            ),
            "kv_cache_config": cache,
            "cuda_graph_config": CudaGraphConfig(warm_up=self.warm_up),
            "replay": ReplayConfig(**given(history=self.history, state_dtype=self.state_dtype)),
        }
        if self.speculative is not None:
            options["speculative_config"] = _DRAFTS[self.speculative](**drafts)
        return options
