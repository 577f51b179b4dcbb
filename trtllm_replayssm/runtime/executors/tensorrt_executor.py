"""Runs the engine of a model: the gate, the memory that it needs, and its steps.

Neither ``transformers`` nor ``onnx`` nor the builders are needed here, nor TensorRT until an executor is made.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trtllm_replayssm import backend as tensorrt_backend
from trtllm_replayssm.contract.capability import capability_text
from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.contract.manifest import ENGINE_FILE, WEIGHTS_FILE, Manifest
from trtllm_replayssm.contract.memory_plan import Execution, plan_memory
from trtllm_replayssm.contract.tensors import TensorSpec, state_specs, weight_specs
from trtllm_replayssm.errors import BackendError, ManifestError, ReplaySSMError
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.capacity import check_memory
from trtllm_replayssm.runtime.executors import bindings, gate
from trtllm_replayssm.runtime.executors.base import TORCH_EXECUTOR
from trtllm_replayssm.runtime.executors.engine import Engine, profile_of
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs


def obstacle(manifest: Manifest, device: torch.device) -> ReplaySSMError | None:
    """Return why an engine cannot run here: another GPU or TensorRT than it was built for. None when it can."""
    try:
        _enter(manifest, device)
    except ReplaySSMError as error:
        return error
    return None


def allocate_states(
    specs: Sequence[TensorSpec], limits: EngineLimits, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Allocate the pools, uninitialised, and the key/value caches, set to zero this once.

    TensorRT's attention weighs a masked cache row by zero instead of leaving it out, and 0 * NaN is NaN: what is there
    before any token has been written must be finite. What steps write afterwards is finite while the model's own
    values are; docs/decisions.md has the limit.
    """
    states = pools.allocate(specs, limits, device)
    for spec, state in zip(specs, states, strict=True):
        if spec.is_cache:
            state.zero_()
    return states


class TensorRTExecutor:
    """An ``Executor`` around an engine folder.

    Args:
        folder: the engine folder.
        manifest: of the folder.
        device: a CUDA device.
        checkpoint_dir: where the weights are, when the folder has none.

    Attributes:
        manifest: as given.
        weights_file: where the weights are.
        weights: name -> those that the engine has as inputs; none when it embeds them.

    Raises:
        BackendError: no CUDA device, no TensorRT, or TensorRT refuses the engine.
        ManifestError: the engine was built for something else, or is damaged.
        CapacityError: states and weights do not fit the device.
    """

    name = "tensorrt"
    is_conventional = False

    def __init__(
        self, folder: Path, manifest: Manifest, device: torch.device, checkpoint_dir: Path | None = None
    ) -> None:
        self.manifest = manifest
        self.geometry = manifest.geometry
        self.replay = manifest.replay
        self.limits = manifest.limits
        self.backend = _enter(manifest, device)
        self.device = _with_index(device)
        plan = gate.read_engine(folder / ENGINE_FILE, manifest)
        specs = state_specs(self.geometry, self.replay, self.limits)
        is_external = manifest.weights == "external"
        self.weights_file = (checkpoint_dir or folder) / WEIGHTS_FILE
        if is_external:
            gate.check_weights(self.weights_file, manifest)
        how = Execution.of_engine(has_weights=is_external, returns_hidden_states=manifest.mtp is not None)
        self.memory_plan = plan_memory(self.geometry, self.replay, self.limits, how)
        check_memory(self.memory_plan, self.device)
        specs_of_weights = weight_specs(self.geometry) if is_external else ()
        self.weights = load_weights(self.weights_file, specs_of_weights, self.device)
        with torch.cuda.device(self.device):
            self.backend.load_plugins()
            states = map(pools.State, specs, allocate_states(specs, self.limits, self.device))
            self.states: tuple[pools.State, ...] = tuple(states)
            self._buffers = bindings.result_buffers(manifest.tensors, manifest.profiles, self.device)
            self._engine = Engine(
                self.backend, plan, (manifest.tensors, manifest.profiles), self.states, self.weights, self.device
            )

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run the engine once, ordered after the work that the current stream has."""
        kind = profile_of(inputs.input_ids.shape[1], self.replay)
        results = self._engine.run(kind, inputs.tensors(), inputs.first_slot, self._buffers)
        return StepOutputs(results["logits"], results.get("hidden_states"))

    def close(self) -> None:
        """Release contexts, engine, weights and states, in this order, once the device is idle."""
        self._engine.close()
        self.states, self.weights, self._buffers = (), {}, {}


def _enter(manifest: Manifest, device: torch.device) -> tensorrt_backend.Backend:
    if device.type != "cuda" or not torch.cuda.is_available():
        found = f"device {device}" if device.type != "cuda" else "no CUDA device"
        raise BackendError(
            f"TensorRT executor: found {found}; needed a GPU of compute capability "
            f"{capability_text(*manifest.compute_capabilities)}, which the engine was built for. Use {TORCH_EXECUTOR}."
        )
    backend = tensorrt_backend.load(manifest.backend)
    major, minor = torch.cuda.get_device_capability(device)
    gate.check_installation(manifest, gate.Installation(backend.name, backend.version, 10 * major + minor))
    return backend


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def load_weights(path: Path, specs: Sequence[TensorSpec], device: torch.device) -> dict[str, torch.Tensor]:
    """Load those of the tensors that a weights file has; which are missing is found when they are bound.

    Raises:
        ManifestError: it cannot be read.
    """
    if not specs:
        return {}
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            stored = set(file.keys())
            return {spec.name: file.get_tensor(spec.name) for spec in specs if spec.name in stored}
    except (SafetensorError, OSError) as error:
        raise ManifestError(f"{path}: found {error}; needed a readable safetensors file. Copy it again.") from error
