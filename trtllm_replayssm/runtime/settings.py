"""What a user asked for, made whole: a model's geometry or an engine's manifest fills in what was left open."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import InstanceOf, ValidationError

from trtllm_replayssm.config import CudaGraphConfig, KvCacheConfig, ReplayConfig, SchedulerConfig, UserOptions
from trtllm_replayssm.contract import defaults, protocol
from trtllm_replayssm.contract.geometry import AUTO, EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import Manifest
from trtllm_replayssm.contract.memory_plan import Beside, Execution, largest_batch_size
from trtllm_replayssm.errors import ConfigError, validation_text
from trtllm_replayssm.plugins.history_choice import resolve_history
from trtllm_replayssm.runtime.capacity import fitting_limits
from trtllm_replayssm.runtime.executors.buckets import captured_prompt


class Options(UserOptions):
    """The user's wishes; None where there is none.

    Attributes:
        dtype: activation type, or "auto".
        max_batch_size: requests that run at a time.
        max_seq_len: tokens of the longest sequence.
        max_num_tokens: tokens of the longest prompt piece.
        replay: history, state type and mode.
        max_draft_len: most drafts of the chosen drafter; 0 without one.
        kv_cache_config: how much memory the states may take.
        cuda_graph_config: which steps are replayed as CUDA graphs; None for none.
        returns_hidden_states: whether the drafter reads the model's hidden states.
    """

    dtype: str
    max_batch_size: int | None
    max_seq_len: int | None
    max_num_tokens: int | None
    replay: InstanceOf[ReplayConfig]
    max_draft_len: int
    kv_cache_config: InstanceOf[KvCacheConfig] = KvCacheConfig()
    cuda_graph_config: InstanceOf[CudaGraphConfig] | None = CudaGraphConfig()
    returns_hidden_states: bool = False


@dataclass(frozen=True)
class Settings:
    """What an executor and a loop are made from.

    Attributes:
        geometry: the model.
        replay: history, window and state type.
        limits: what requests are held to.
    """

    geometry: ModelGeometry
    replay: ReplayGeometry
    limits: EngineLimits


def of_model(
    geometry: ModelGeometry,
    options: Options,
    compute_capabilities: Sequence[int] = (),
    available: int | None = None,
    beside: Beside | None = None,
) -> Settings:
    """Return the settings of a model that is no engine.

    Args:
        geometry: the model.
        options: the user's wishes.
        compute_capabilities: of the GPUs whose kernels will run it, as 10 * major + minor; none on the CPU.
        available: bytes that are free on the GPU: slots and lengths that the user left open are made to fit; None, as
            on the CPU, takes the defaults.
        beside: what else will be there.

    Raises:
        ConfigError: history < 1 + max_draft_len, or a limit out of range.
        UnsupportedError: history "auto" for a model that has no kernel for the GPUs.
    """
    history = resolve_history(
        options.replay.history,
        geometry,
        max_draft_len=options.max_draft_len,
        state_dtype=options.replay.state_dtype,
        compute_capabilities=compute_capabilities,
    )
    protocol.check_history(history, options.max_draft_len)
    replay = ReplayGeometry(
        history=history, max_draft_len=options.max_draft_len, state_dtype=options.replay.state_dtype
    )
    max_seq_len = options.max_seq_len
    if max_seq_len is None:
        max_seq_len = min(geometry.max_position_embeddings, defaults.MAX_SEQ_LEN)
    if max_seq_len < 2:
        raise ConfigError(f"max_seq_len: found {max_seq_len}; needed 2 or more, a prompt token and a generated one.")
    max_num_tokens = defaults.MAX_NUM_TOKENS if options.max_num_tokens is None else options.max_num_tokens
    unasked = defaults.MAX_BATCH_SIZE if available is None else defaults.MAX_GPU_BATCH_SIZE
    limits = _limits(
        max_batch_size=unasked if options.max_batch_size is None else options.max_batch_size,
        max_input_len=max_seq_len - 1,
        max_seq_len=max_seq_len,
        max_num_tokens=min(max_num_tokens, max_seq_len - 1),
    )
    if available is not None:
        limits = _fitting(Settings(geometry, replay, limits), options, available, beside)
    return Settings(geometry, replay, limits)


def scheduling(config: object) -> SchedulerConfig:
    """Return the user's ``SchedulerConfig``, or the default for None.

    Raises:
        ConfigError: it is something else.
    """
    if config is None:
        return SchedulerConfig()
    if not isinstance(config, SchedulerConfig):
        raise ConfigError(f"scheduler_config: found {config!r}; needed an instance of SchedulerConfig.")
    return config


def _fitting(wanted: Settings, options: Options, available: int, beside: Beside | None) -> EngineLimits:
    geometry, replay = wanted.geometry, wanted.replay

    def largest(limits: EngineLimits) -> int:
        return largest_batch_size(geometry, replay, limits, how, available=available, fraction=fraction, beside=beside)

    fraction = options.kv_cache_config.free_gpu_memory_fraction
    how = Execution.of_modules(
        geometry,
        "cuda",
        is_conventional=not options.replay.enabled,
        captured_prompt=captured_prompt(options.cuda_graph_config),
    )
    return fitting_limits(
        wanted.limits, largest, is_batch_free=options.max_batch_size is None, is_length_free=options.max_seq_len is None
    )


def of_engine(manifest: Manifest, options: Options) -> Settings:
    """Return the settings of an engine: its own, with limits lowered where the user asked for less.

    Raises:
        ConfigError: the user asked for what the engine was not built with; every such field is named.
    """
    problems = _contradictions(manifest, options)
    if problems:
        raise ConfigError(
            f"engine: found {'; '.join(problems)}. Leave the option out, or build an engine with these values."
        )
    built = manifest.limits
    max_seq_len = built.max_seq_len if options.max_seq_len is None else options.max_seq_len
    max_num_tokens = built.max_num_tokens if options.max_num_tokens is None else options.max_num_tokens
    max_input_len = min(built.max_input_len, max_seq_len)
    limits = _limits(
        max_batch_size=built.max_batch_size if options.max_batch_size is None else options.max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=min(max_num_tokens, max_input_len),
    )
    return Settings(manifest.geometry, manifest.replay, limits)


def _contradictions(manifest: Manifest, options: Options) -> list[str]:
    built, replay = manifest.limits, manifest.replay
    at_most = {
        "max_batch_size": (options.max_batch_size, built.max_batch_size),
        "max_seq_len": (options.max_seq_len, built.max_seq_len),
        "max_num_tokens": (options.max_num_tokens, built.max_num_tokens),
        "max_draft_len": (options.max_draft_len, replay.max_draft_len),
    }
    problems = [
        f"{name}={wanted}, built for at most {limit}"
        for name, (wanted, limit) in at_most.items()
        if wanted is not None and wanted > limit
    ]
    for name in ("history", "state_dtype"):
        wanted, has = getattr(options.replay, name), getattr(replay, name)
        if name in options.replay.model_fields_set and wanted not in (AUTO, has):
            problems.append(f"{name}={wanted}, built for {has}")
    if options.dtype not in ("auto", manifest.geometry.dtype):
        problems.append(f"dtype={options.dtype}, built for {manifest.geometry.dtype}")
    return problems


def _limits(**values: int) -> EngineLimits:
    try:
        return EngineLimits(**values)
    except ValidationError as error:
        raise ConfigError(f"limits: {validation_text(error)}.") from error
