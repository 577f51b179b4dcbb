"""Building an engine: everything is checked first, then exported, compiled and built in a folder of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from trtllm_replayssm import __version__
from trtllm_replayssm import backend as backends
from trtllm_replayssm.backend import Backend
from trtllm_replayssm.builders import engine_folder, kernels
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.builders.checkpoint.staging import check_output, staged_folder
from trtllm_replayssm.builders.network import NetworkTask, require_packages, write_network_apart
from trtllm_replayssm.builders.plan import Plan, build_plan, target_capabilities
from trtllm_replayssm.builders.profiles import bindings, mtp_bindings, profiles
from trtllm_replayssm.builders.progress import BuildProgress
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.geometry import EngineLimits, History, ModelGeometry, ReplayGeometry, StateDtype
from trtllm_replayssm.contract.manifest import (
    ENGINE_FILE,
    MTP_ENGINE_FILE,
    WEIGHTS_FILE,
    BackendName,
    BuildReport,
    Manifest,
    MtpRecord,
    SpeculativeDecodingMode,
    TensorRecord,
    WeightsMode,
)
from trtllm_replayssm.errors import CheckpointError, ConfigError, validation_text
from trtllm_replayssm.plugins.history_choice import longest_history, resolve_history
from trtllm_replayssm.plugins.specializations import MAX_ROWS

ONNX_FILE = "model.onnx"
MTP_ONNX_FILE = "mtp.onnx"
# TensorRT's dimensions are 32-bit integers, and so are the lengths of a step.
_MAX_DIMENSION = 2**31 - 1
_NETWORK_STEP = "write network"


@dataclass(frozen=True)
class BuildTask:
    """A build whose every setting has been checked.

    Attributes:
        checkpoint_dir: where config, weights and tokenizer are.
        geometry: of the model.
        replay: history, window and state type.
        limits: what the engine will accept.
        weights: where the weights will be.
        has_weights: whether checkpoint_dir holds them.
        has_head: whether the multi-token prediction head gets an engine, too.
        backend: the TensorRT to build with.
        capabilities: targets as 10 * major + minor.
    """

    checkpoint_dir: Path
    geometry: ModelGeometry
    replay: ReplayGeometry
    limits: EngineLimits
    weights: WeightsMode
    has_weights: bool
    has_head: bool
    backend: Backend
    capabilities: tuple[int, ...]


def build(  # noqa: PLR0913 - the options of the command line, by their names
    checkpoint_dir: Path | str,
    output_dir: Path | str,
    *,
    backend: BackendName | None = None,
    max_batch_size: int = defaults.MAX_BATCH_SIZE,
    max_input_len: int = defaults.MAX_INPUT_LEN,
    max_seq_len: int | None = None,
    max_num_tokens: int | None = None,
    max_draft_len: int = 0,
    history: History = defaults.HISTORY,
    state_dtype: StateDtype = defaults.STATE_DTYPE,
    weights: WeightsMode = "external",
    speculative_decoding_mode: SpeculativeDecodingMode | None = None,
    compute_capabilities: Sequence[int] | None = None,
    progress: BuildProgress | None = None,
) -> Path:
    """Build an engine folder.

    Args:
        checkpoint_dir: a rank checkpoint; with external weights a folder with only a config.json will do, a Hugging
            Face model's or a rank checkpoint's.
        output_dir: folder to write, new or empty. It appears whole, or not at all.
        backend: "tensorrt" or "tensorrt_rtx"; None takes the first that is installed.
        max_batch_size: slots, and rows of a decode step.
        max_input_len: tokens of the longest prompt.
        max_seq_len: tokens of prompt and generation together; None adds 1024 to max_input_len.
        max_num_tokens: tokens of the longest prefill window; None takes max_input_len, at most 2048.
        max_draft_len: most draft tokens of a step; 0 without speculation.
        history: most pending tokens of a slot, at least 1 + max_draft_len; "auto" takes what costs least for the
            model, the state type, max_draft_len and the GPUs.
        state_dtype: type of the recurrent state in memory.
        weights: "external" keeps them out of the plan, to be bound at load; "embedded" puts them into it.
        speculative_decoding_mode: "mtp" builds an engine of the model's multi-token prediction head beside its own;
            all other drafts need max_draft_len alone.
        compute_capabilities: GPUs to build for, as 10 * major + minor; None takes the backend's default.
        progress: where to show the steps.

    Returns:
        output_dir.

    Raises:
        ConfigError: settings that contradict each other, or an output that is taken.
        CheckpointError: not a rank checkpoint, no weights to embed, or no head.
        UnsupportedError: there is no kernel for the shapes of the model's layers.
        BackendError: no TensorRT that can build this.
        BuildError: TensorRT or the compilers refused; with their own lines.
    """
    require_packages()
    output_dir = Path(output_dir)
    longest, limits = _settings(
        history, max_draft_len, state_dtype, (max_batch_size, max_input_len, max_seq_len, max_num_tokens)
    )
    _check_mode(speculative_decoding_mode, max_draft_len)
    check_output(output_dir)
    folder, geometry, has_weights = _open_checkpoint(Path(checkpoint_dir), weights)
    has_head = speculative_decoding_mode == "mtp"
    if has_head and geometry.mtp is None:
        raise CheckpointError(
            f"{folder}: found no multi-token prediction head; speculative_decoding_mode 'mtp' needed its weights, "
            "mtp.*, in the rank checkpoint. Those that convert left out are named in its account."
        )
    kernels.specializations(geometry, longest)
    chosen = backends.load(backend)
    capabilities = target_capabilities(chosen, compute_capabilities)
    resolved = resolve_history(
        history,
        geometry,
        max_draft_len=max_draft_len,
        state_dtype=state_dtype,
        compute_capabilities=capabilities,
    )
    replay = longest.model_copy(update={"history": resolved})
    task = BuildTask(folder, geometry, replay, limits, weights, has_weights, has_head, chosen, capabilities)
    with progress or BuildProgress() as shown:
        with shown.step("load plugins"):  # before the long steps: a missing compiler is found here
            chosen.load_plugins()
        with staged_folder(output_dir) as staging:
            _build_in(staging, task, shown)
    return output_dir


def _build_in(staging: Path, task: BuildTask, progress: BuildProgress) -> None:
    if task.has_weights:
        engine_folder.link_weights(task.checkpoint_dir, staging)
    weights_file = staging / WEIGHTS_FILE if task.has_weights else None
    onnx_file, mtp_onnx_file = staging / ONNX_FILE, staging / MTP_ONNX_FILE
    # Here and not in the child, which finds them in the cache: beside the export the compiler's memory would count.
    with progress.step("compile kernels"):
        kernels.kernel_images(task.geometry, task.replay, task.capabilities)
    with progress.step(_NETWORK_STEP):
        network = write_network_apart(
            NetworkTask(
                geometry=task.geometry,
                replay=task.replay,
                limits=task.limits,
                compute_capabilities=task.capabilities,
                onnx_file=onnx_file,
                weights_file=weights_file if task.weights == "embedded" else None,
                mtp_onnx_file=mtp_onnx_file if task.has_head else None,
            )
        )
    progress.split(_NETWORK_STEP, network.seconds, rest="start process")
    built = (task.geometry, task.replay, task.limits, task.weights)
    tensors = bindings(*built, returns_hidden_states=task.has_head)
    ranges = profiles(task.replay, task.limits)

    def planned(source: Path, name: str, records: tuple[TensorRecord, ...], label: str = "") -> Plan:
        found = build_plan(task.backend, source, staging / name, records, ranges, task.capabilities, progress, label)
        source.unlink()
        return found

    plan, head, mtp = planned(onnx_file, ENGINE_FILE, tensors), None, None
    if task.has_head:
        mtp_tensors = mtp_bindings(*built)
        head = planned(mtp_onnx_file, MTP_ENGINE_FILE, mtp_tensors, " mtp")
        mtp = MtpRecord(tensors=mtp_tensors, engine_sha256=head.sha256, engine_bytes=head.num_bytes)
    manifest = Manifest(
        package_version=__version__,
        backend=task.backend.name,
        backend_version=task.backend.version,
        compute_capabilities=task.capabilities,
        geometry=task.geometry,
        replay=task.replay,
        limits=task.limits,
        tensors=tensors,
        profiles=ranges,
        plugins=network.plugins,
        weights=task.weights,
        checkpoint=engine_folder.checkpoint_record(weights_file),
        engine_sha256=plan.sha256,
        engine_bytes=plan.num_bytes,
        mtp=mtp,
    )
    report = BuildReport(
        network_layers=plan.network_layers,
        engine_layers=plan.engine_layers,
        warnings=plan.warnings + (() if head is None else head.warnings),
        seconds=progress.seconds,
        mtp_network_layers=() if head is None else head.network_layers,
        mtp_engine_layers=() if head is None else head.engine_layers,
    )
    engine_folder.write_descriptions(staging, task.checkpoint_dir, manifest, report)


def _check_mode(mode: object, max_draft_len: int) -> None:
    if mode not in (None, "mtp"):
        raise ConfigError(
            f"speculative_decoding_mode: found {mode!r}; needed 'mtp' or nothing: drafts of other kinds need "
            "max_draft_len alone."
        )
    if mode is not None and max_draft_len < 1:
        raise ConfigError(
            f"speculative_decoding_mode: found {mode!r} with max_draft_len={max_draft_len}; needed max_draft_len of 1 "
            "or more."
        )


def _settings(
    history: History,
    max_draft_len: int,
    state_dtype: StateDtype,
    lengths: tuple[int, int, int | None, int | None],
) -> tuple[ReplayGeometry, EngineLimits]:
    max_batch_size, max_input_len, max_seq_len, max_num_tokens = lengths
    try:
        # What "auto" becomes depends on the model and the GPUs; until these are known, the longest that it may become.
        longest = longest_history(history, max_draft_len)
        replay = ReplayGeometry(history=longest, max_draft_len=max_draft_len, state_dtype=state_dtype)
        limits = EngineLimits(
            max_batch_size=max_batch_size,
            max_input_len=max_input_len,
            max_seq_len=max_input_len + defaults.MAX_NEW_TOKENS if max_seq_len is None else max_seq_len,
            max_num_tokens=min(max_input_len, defaults.MAX_NUM_TOKENS) if max_num_tokens is None else max_num_tokens,
        )
    except ValidationError as error:
        raise ConfigError(f"{validation_text(error)}.") from error
    _check_bounds(replay, limits)
    return replay, limits


def _check_bounds(replay: ReplayGeometry, limits: EngineLimits) -> None:
    """Refuse what neither kernels nor TensorRT can index: their longest grid axis, and dimensions of 32 bits."""
    if limits.max_batch_size > MAX_ROWS:
        raise ConfigError(f"max_batch_size: found {limits.max_batch_size}; needed at most {MAX_ROWS}.")
    longest = _MAX_DIMENSION - (limits.kv_capacity(replay.window) - limits.max_seq_len)
    if limits.max_seq_len > longest:
        raise ConfigError(f"max_seq_len: found {limits.max_seq_len}; needed at most {longest}.")


def _open_checkpoint(folder: Path, weights: WeightsMode) -> tuple[Path, ModelGeometry, bool]:
    opened = open_model_folder(folder)
    if opened.kind == "engine":
        raise CheckpointError(
            f"{folder}: found an engine folder; needed a rank checkpoint, which engines are built from."
        )
    if opened.kind == "huggingface" and opened.has_weights:
        raise CheckpointError(
            f"{folder}: found a Hugging Face folder with its weights; needed a rank checkpoint. Make one with: "
            f"trtllm-replayssm convert --model_dir {folder} --output_dir CKPT"
        )
    if weights == "embedded" and not opened.has_weights:
        raise CheckpointError(
            f"{folder}: found no {WEIGHTS_FILE}; needed the weights to embed. Leave --weights at external, or convert "
            "the model first."
        )
    if opened.has_weights:
        opened.load_weights()  # mapped, not read: checks that they are complete
    return folder, opened.geometry, opened.has_weights
