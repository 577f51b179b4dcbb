"""From a folder to an executor: what it holds, whether the engine can run here, which device, which weights."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from trtllm_replayssm.builders.checkpoint.model_folder import ModelFolder, folder_kind, open_model_folder
from trtllm_replayssm.builders.models.registry import create_mtp_head
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.manifest import Manifest, is_engine_folder, read_manifest
from trtllm_replayssm.contract.memory_plan import Beside, Execution, mtp_head_bytes, plan_memory
from trtllm_replayssm.contract.tensors import weight_specs
from trtllm_replayssm.errors import CheckpointError, ConfigError, ManifestError, UnsupportedError
from trtllm_replayssm.runtime import settings
from trtllm_replayssm.runtime.capacity import available_bytes
from trtllm_replayssm.runtime.executors.base import TORCH_EXECUTOR, Executor
from trtllm_replayssm.runtime.executors.buckets import captured_prompt
from trtllm_replayssm.runtime.executors.mtp_executor import MtpExecutor
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.executors.torch_mtp_executor import TorchMtpExecutor
from trtllm_replayssm.runtime.prefix_cache.reuse import block_size

ExecutorName = Literal["auto", "torch", "tensorrt"]

_LOGGER = logging.getLogger(__name__)


def open_executor(
    folder: Path,
    executor: ExecutorName,
    options: settings.Options,
    device: str,
    checkpoint_dir: Path | None,
    beside: Beside | None = None,
) -> tuple[Executor, EngineLimits]:
    """Make the executor of a folder.

    Args:
        folder: a Hugging Face folder, a rank checkpoint or an engine folder.
        executor: which one; "auto" takes "tensorrt" for an engine folder that this machine can run.
        options: the user's wishes.
        device: "auto", "cpu", "cuda" or "cuda:<n>".
        checkpoint_dir: where the weights are, for an engine folder that has none.
        beside: what else will be on the device: slots that the user left open leave room for it.

    Returns:
        The executor, and what requests are held to.

    Raises:
        ReplaySSMError: as ``LLM`` says.
    """
    manifest = _checked(folder, executor, options, checkpoint_dir)
    if manifest is None:
        return _open_model(folder, options, device, beside)
    return _open_engine(folder, manifest, executor, options, device, checkpoint_dir)


def check_options(folder: Path, executor: ExecutorName, options: settings.Options, checkpoint_dir: Path | None) -> None:
    """Refuse what ``open_executor`` would refuse on any device; nothing is opened.

    Raises:
        ReplaySSMError: idem.
    """
    manifest = _checked(folder, executor, options, checkpoint_dir)
    weights = checkpoint_dir or folder
    if manifest is None:
        chosen = settings.of_model(open_model_folder(folder, options.dtype).geometry, options)
    else:
        chosen = settings.of_engine(manifest, options)
        if executor == "torch" or manifest.weights == "external" or options.returns_hidden_states:
            _folder_with_weights(weights, chosen.geometry.dtype)
    if options.returns_hidden_states and (manifest is None or executor == "torch"):
        _folder_with_head(weights, chosen.geometry.dtype)
    if options.kv_cache_config.enable_block_reuse:
        block_size(options.kv_cache_config, chosen.limits, chosen.replay)


def _checked(
    folder: Path, executor: ExecutorName, options: settings.Options, checkpoint_dir: Path | None
) -> Manifest | None:
    """Return the manifest of an engine folder, None of others, once the options may go together with it."""
    if executor not in ("auto", "torch", "tensorrt"):
        raise ConfigError(f"executor: found {executor!r}; needed 'auto', 'torch' or 'tensorrt'.")
    manifest = read_manifest(folder) if is_engine_folder(folder) else None
    if executor == "tensorrt" and not options.replay.enabled:
        raise UnsupportedError(
            "executor: found 'tensorrt' for the conventional decode (enabled=False, --conventional), which no engine "
            f"has; needed {TORCH_EXECUTOR}."
        )
    if manifest is None and checkpoint_dir is not None:
        raise ConfigError(f"checkpoint_dir: found {checkpoint_dir} with {folder}, which is no engine; needed none.")
    if manifest is None and executor == "tensorrt":
        folder_kind(folder)  # what is no model at all is the greater fault
        raise ManifestError(
            f"{folder}: found no engine; executor 'tensorrt' needed an engine folder. Build one with "
            f"`trtllm-replayssm build`, or use {TORCH_EXECUTOR}."
        )
    if manifest is not None and executor == "tensorrt" and (without_head := _lack_of_head(folder, manifest, options)):
        raise without_head
    return manifest


def _lack_of_head(folder: Path, manifest: Manifest, options: settings.Options) -> UnsupportedError | None:
    """Return why an engine cannot make the drafts that are asked for; None when it can."""
    if manifest.mtp is not None or not options.returns_hidden_states:
        return None
    return UnsupportedError(
        f"{folder}: found an engine that returns no hidden states, of which the multi-token prediction head makes "
        f"drafts; needed one of `trtllm-replayssm build --speculative_decoding_mode mtp`, or {TORCH_EXECUTOR}."
    )


def _open_model(
    folder: Path, options: settings.Options, device: str, beside: Beside | None
) -> tuple[Executor, EngineLimits]:
    geometry = open_model_folder(folder, options.dtype).geometry
    target = _device(device)
    available = None
    if target.type == "cuda":
        available = available_bytes(target) - options.kv_cache_config.prefix_device_bytes
    chosen = settings.of_model(geometry, options, _kernel_capabilities(options, target), available, beside)
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
    if executor == "auto" and options.replay.enabled and device != "cpu":
        obstacle = _lack_of_head(folder, manifest, options) or tensorrt_executor.obstacle(manifest, _cuda(device))
        if obstacle is None:
            executor = "tensorrt"
        else:
            reason = " ".join(str(obstacle).split())
            _LOGGER.warning("%s: engine not run, torch modules on %s instead. %s", folder, _device(device), reason)
    if executor == "tensorrt":
        found = tensorrt_executor.TensorRTExecutor(folder, manifest, _cuda(device), checkpoint_dir)
        return found, chosen.limits
    return _torch_executor(checkpoint_dir or folder, chosen, options, device), chosen.limits


def _torch_executor(weights: Path, chosen: settings.Settings, options: settings.Options, device: str) -> TorchExecutor:
    def load_weights(target: torch.device) -> Mapping[str, torch.Tensor]:
        opened = _folder_with_weights(weights, chosen.geometry.dtype)
        if weight_specs(opened.geometry) != weight_specs(chosen.geometry):
            raise CheckpointError(
                f"{weights}: found weights that are not those of the engine's model; needed the same names, types and "
                f"shapes. Name the checkpoint that the engine was built from with the option checkpoint_dir."
            )
        return opened.load_weights(target)

    return TorchExecutor(
        chosen.geometry,
        chosen.replay,
        chosen.limits,
        load_weights,
        _device(device),
        conventional=not options.replay.enabled,
        cuda_graphs=options.cuda_graph_config,
        returns_hidden_states=options.returns_hidden_states,
    )


def open_mtp_head(folder: Path, checkpoint_dir: Path | None, target: Executor) -> MtpExecutor:
    """Make what runs the multi-token prediction head of a folder's model, with the embeddings that the target has.

    Args:
        folder: as for ``open_executor``.
        checkpoint_dir: idem.
        target: what that returned; its hidden states are read.

    Raises:
        CheckpointError: there is no such head, or its weights are damaged.
        ManifestError: idem, of an engine.
        BackendError: TensorRT refuses the head's engine.
        CapacityError: its caches and weights do not fit the device.
    """
    if not isinstance(target, TorchExecutor):
        from trtllm_replayssm.runtime.executors.tensorrt_executor import TensorRTExecutor
        from trtllm_replayssm.runtime.executors.tensorrt_mtp_executor import TensorRTMtpExecutor

        assert isinstance(target, TensorRTExecutor), "open_executor returns one of the two"
        return TensorRTMtpExecutor(folder, target)
    weights = checkpoint_dir or folder
    opened = _folder_with_head(weights, target.geometry.dtype)
    return TorchMtpExecutor(
        lambda: create_mtp_head(opened.geometry, target.replay), opened.geometry, target, opened.load_mtp_weights
    )


def _folder_with_weights(weights: Path, dtype: str) -> ModelFolder:
    opened = open_model_folder(weights, dtype)
    if opened.kind == "engine" and not opened.has_weights:  # of other folders the loading says what is missing
        raise CheckpointError(
            f"{weights}: found no weights in it; needed those of the model. Name the rank checkpoint they are in "
            f"with the option checkpoint_dir."
        )
    return opened


def _folder_with_head(weights: Path, dtype: str) -> ModelFolder:
    opened = open_model_folder(weights, dtype)
    if opened.geometry.mtp is None or not opened.has_weights:
        raise CheckpointError(
            f"{weights}: found no multi-token prediction head; needed its weights, mtp.*, in the model's folder. If "
            "the Hugging Face folder has them, `convert` prints why it left them out. Take other drafts, or none."
        )
    return opened


def planned_bytes(folder: Path, options: settings.Options) -> int:
    """Return what a folder's model will take on a GPU, as far as options say: slots and lengths must be among them."""
    geometry = open_model_folder(folder, options.dtype).geometry
    chosen = settings.of_model(geometry, options)
    how = Execution.of_modules(
        geometry, "cuda", is_conventional=False, captured_prompt=captured_prompt(options.cuda_graph_config)
    )
    return plan_memory(geometry, chosen.replay, chosen.limits, how).total


def planned_head_bytes(folder: Path, options: settings.Options, limits: EngineLimits) -> int:
    """Return what the multi-token prediction head of a folder's model will take beside it."""
    geometry = open_model_folder(folder, options.dtype).geometry
    window = protocol.window_length(options.max_draft_len)
    replay = ReplayGeometry(history=window, max_draft_len=options.max_draft_len)  # its caches know the window alone
    return mtp_head_bytes(geometry, replay, limits)


def _device(name: str) -> torch.device:
    """Return the device of a name; a CUDA device with its index, for the current one is a setting of each thread."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: found {name!r}; needed 'auto', 'cpu', 'cuda' or 'cuda:<n>'.") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ConfigError(f"device: found {name!r}; needed 'auto', 'cpu', 'cuda' or 'cuda:<n>'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: found {name!r}; needed one of this machine's {torch.cuda.device_count()} CUDA devices. Use 'cpu'."
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _kernel_capabilities(options: settings.Options, device: torch.device) -> tuple[int, ...]:
    """Return the compute capability whose kernels will run a model; none on the CPU or for the conventional decode."""
    if device.type != "cuda" or not options.replay.enabled:
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return (10 * major + minor,)


def _cuda(name: str) -> torch.device:
    return torch.device("cuda") if name == "auto" else _device(name)
