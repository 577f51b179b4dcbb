"""A deserialised plan, with an execution context for each of its profiles."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from trtllm_replayssm import backend as tensorrt_backend
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.contract.manifest import ProfileRecord, TensorRecord
from trtllm_replayssm.errors import BackendError
from trtllm_replayssm.runtime.executors import bindings
from trtllm_replayssm.runtime.executors.base import TORCH_EXECUTOR
from trtllm_replayssm.runtime.pools import State

StepProfile = Literal["decode", "prefill"]


def profile_of(window: int, replay: ReplayGeometry) -> StepProfile:
    """Return the optimization profile of a step: windows of at most T tokens run in the decode profile."""
    return "prefill" if protocol.is_prefill(window, replay.max_draft_len) else "decode"


class Engine:
    """An engine whose states are updated in place.

    Args:
        backend: with the plugins loaded.
        plan: the serialised engine.
        records: what the manifest says of its bindings and its profiles.
        states: every state and its pool.
        weights: name -> tensor of the weight inputs.
        device: the current CUDA device.

    Raises:
        BackendError: TensorRT refuses the plan.
        ManifestError: it is not the one that the manifest describes, or its weights are others.
    """

    def __init__(
        self,
        backend: tensorrt_backend.Backend,
        plan: bytes,
        records: tuple[Sequence[TensorRecord], Sequence[ProfileRecord]],
        states: Sequence[State],
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        tensors, profiles = records
        self._backend, self._device = backend, device
        self._engine: Any = _deserialize(backend, plan)
        bindings.check_engine(self._engine, tensors)
        # A stream of its own: on the default stream TensorRT adds synchronisations.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bindings = bindings.Bindings(tensors, states, weights)
        self._contexts = {profile.name: self._context(index) for index, profile in enumerate(profiles)}

    def run(
        self,
        profile: StepProfile,
        inputs: Sequence[torch.Tensor],
        first_slot: int,
        buffers: Mapping[str, torch.Tensor],
    ) -> Mapping[str, torch.Tensor]:
        """Run once, ordered after the work that the current stream has; that stream goes on after it.

        Args:
            profile: of the step.
            inputs: the step's inputs in the order of the network.
            first_slot: row i of the step has the cache rows of slot first_slot + i.
            buffers: where the results will be; none of them may be among the inputs.

        Returns:
            Name -> result, in its buffer.
        """
        context = self._contexts[profile]
        current = torch.cuda.current_stream(self._device)
        with self._backend.recording() as lines:
            results = self._bindings.bind_step(context, inputs, first_slot, buffers)
            self._stream.wait_stream(current)
            has_run = context.execute_async_v3(self._stream.cuda_stream)
            current.wait_stream(self._stream)
        if not has_run:
            raise BackendError(f"engine: a {profile} step failed. TensorRT said:\n{lines.errors()}")
        return results

    def close(self) -> None:
        """Release contexts and engine, in this order, once the device is idle; a second call does nothing."""
        self._stream.synchronize()
        self._contexts.clear()
        self._engine = None
        self._bindings = bindings.Bindings((), (), {})

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


def _deserialize(backend: tensorrt_backend.Backend, plan: bytes) -> Any:
    with backend.recording() as lines:
        engine = backend.trt.Runtime(backend.logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise BackendError(
            f"engine: {backend.name} {backend.version} does not deserialise it. TensorRT said:\n{lines.errors()}\n"
            f"Build it again for this machine, or use {TORCH_EXECUTOR}."
        )
    return engine
