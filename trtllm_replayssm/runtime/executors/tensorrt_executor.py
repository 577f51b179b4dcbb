"""Runs an engine: the gate, the deserialised plan, one context per profile, states in place.

Neither ``transformers`` nor ``onnx`` nor the builders are needed here, nor TensorRT until an executor is made.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from trtllm_replayssm import backend as tensorrt_backend
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.capability import capability_text
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.manifest import WEIGHTS_FILE, Manifest
from trtllm_replayssm.contract.memory_plan import Execution, plan_memory
from trtllm_replayssm.contract.tensors import TensorSpec, state_specs, weight_specs
from trtllm_replayssm.errors import BackendError, ManifestError, ReplaySSMError
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.capacity import check_memory
from trtllm_replayssm.runtime.executors import bindings, gate
from trtllm_replayssm.runtime.executors.base import TORCH_EXECUTOR
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs


def obstacle(manifest: Manifest, device: torch.device) -> ReplaySSMError | None:
    """Return why an engine cannot run here: another GPU or TensorRT than it was built for. None when it can."""
    try:
        _enter(manifest, device)
    except ReplaySSMError as error:
        return error
    return None


def profile_of(inputs: StepInputs, replay: ReplayGeometry) -> Literal["decode", "prefill"]:
    """Return the optimization profile of a step: windows of at most T tokens run in the decode profile."""
    return "prefill" if protocol.is_prefill(inputs.input_ids.shape[1], replay.max_draft_len) else "decode"


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
        self.geometry = manifest.geometry
        self.replay = manifest.replay
        self.limits = manifest.limits
        backend = _enter(manifest, device)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        plan = gate.read_engine(folder, manifest)
        specs = state_specs(self.geometry, self.replay, self.limits)
        is_external = manifest.weights == "external"
        weights_file = (checkpoint_dir or folder) / WEIGHTS_FILE
        if is_external:
            gate.check_weights(weights_file, manifest)
        how = Execution(has_weights=is_external, has_activations=False)
        self.memory_plan = plan_memory(self.geometry, self.replay, self.limits, how)
        check_memory(self.memory_plan, self.device)
        weights = _load_weights(weights_file, weight_specs(self.geometry), self.device) if is_external else {}
        with torch.cuda.device(self.device):
            backend.load_plugins()
            self._backend = backend
            self._engine = _deserialize(backend, plan)
            bindings.check_engine(self._engine, manifest)
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            states = allocate_states(specs, self.limits, self.device)
            self.states = tuple(map(pools.State, specs, states))
            self._bindings = bindings.Bindings(manifest, states, weights, self._logits_buffer())
            self._contexts = {kind: self._context(manifest.profile_index(kind)) for kind in ("decode", "prefill")}

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run the engine once, ordered after the work that the current stream has."""
        kind = profile_of(inputs, self.replay)
        context = self._contexts[kind]
        current = torch.cuda.current_stream(self.device)
        with self._backend.recording() as lines:
            logits = self._bindings.bind_step(context, inputs)
            # A stream of its own: on the default stream TensorRT adds synchronisations.
            self._stream.wait_stream(current)
            has_run = context.execute_async_v3(self._stream.cuda_stream)
            current.wait_stream(self._stream)
        if not has_run:
            raise BackendError(f"engine: a {kind} step failed. TensorRT said:\n{lines.errors()}")
        return StepOutputs(logits)

    def close(self) -> None:
        """Release contexts, engine, weights and states, in this order, once the device is idle."""
        self._stream.synchronize()
        self._contexts.clear()
        self.states = ()
        del self._engine, self._bindings

    def _logits_buffer(self) -> torch.Tensor:
        values = self.limits.max_batch_size * self.replay.window * self.geometry.vocab_size
        return torch.empty(values, dtype=torch.float32, device=self.device)

    def _context(self, profile: int) -> Any:
        with self._backend.recording() as lines:
            context = self._engine.create_execution_context()
            is_ready = context is not None and context.set_optimization_profile_async(profile, self._stream.cuda_stream)
        if not is_ready:
            raise BackendError(
                f"engine: no execution context for profile {profile}; the device may lack memory. TensorRT said:\n"
                f"{lines.errors()}"
            )
        self._stream.synchronize()
        self._bindings.bind_fixed(context)
        return context


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


def _deserialize(backend: tensorrt_backend.Backend, plan: bytes) -> Any:
    with backend.recording() as lines:
        engine = backend.trt.Runtime(backend.logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise BackendError(
            f"engine: {backend.name} {backend.version} does not deserialise it. TensorRT said:\n{lines.errors()}\n"
            f"Build it again for this machine, or use {TORCH_EXECUTOR}."
        )
    return engine


def _load_weights(path: Path, specs: Sequence[TensorSpec], device: torch.device) -> Mapping[str, torch.Tensor]:
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            # A file may hold a multi-token prediction head, too, which no engine has; what lacks is found at binding.
            stored = set(file.keys())
            return {spec.name: file.get_tensor(spec.name) for spec in specs if spec.name in stored}
    except (SafetensorError, OSError) as error:
        raise ManifestError(f"{path}: found {error}; needed a readable safetensors file. Copy it again.") from error
