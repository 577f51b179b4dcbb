"""Runs the model's torch module as it is, on the CPU or on CUDA: no engine, no TensorRT."""

from collections.abc import Callable, Mapping

import torch

from trtllm_replayssm.builders.kernels import specializations
from trtllm_replayssm.builders.models.registry import create_model
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.tensors import state_specs, weight_specs
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

WeightLoader = Callable[[torch.device], Mapping[str, torch.Tensor]]


class TorchExecutor:
    """An ``Executor`` around ``builders.models``.

    Args:
        geometry: the model; its dtype is that of weights and activations.
        replay: history, window and state type.
        limits: slots and lengths.
        load_weights: device -> the tensors of ``contract.tensors.weight_specs``; called once the memory plan fits.
        device: "cpu" or "cuda".
        conventional: rewrite the recurrent state for every token, for comparison.

    Raises:
        CapacityError: states and weights do not fit the device.
        UnsupportedError: there is no CUDA kernel for the model's shapes.
    """

    name = "torch"

    def __init__(
        self,
        geometry: ModelGeometry,
        replay: ReplayGeometry,
        limits: EngineLimits,
        load_weights: WeightLoader,
        device: torch.device,
        *,
        conventional: bool = False,
    ) -> None:
        self.geometry = geometry
        self.replay = replay
        self.limits = limits
        self.device = device
        self.is_conventional = conventional
        if device.type == "cuda" and not conventional:
            specializations(geometry, replay)  # refuses a shape without kernels now rather than at the first step
        self._specs = state_specs(geometry, replay, limits, conventional=conventional)
        pools.check_memory(self._specs, weight_specs(geometry), limits, device)
        with torch.device("meta"):
            module = create_model(geometry, replay, conventional=conventional)
        module.load_state_dict(dict(load_weights(device)), assign=True, strict=True)
        self._module = module.eval().requires_grad_(False)
        self._states = pools.allocate(self._specs, limits, device)

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run the module on the step's rows of the caches and on the whole state pools, in place."""
        num_rows, window = inputs.input_ids.shape
        rows = slice(inputs.first_slot, inputs.first_slot + num_rows)
        states = tuple(
            pool[rows] if spec.is_cache else pool for spec, pool in zip(self._specs, self._states, strict=True)
        )
        logits, _ = self._module(*inputs.tensors(), states, key_length=inputs.max_past_length + window)
        return StepOutputs(logits)

    def close(self) -> None:
        """Drop the pools and the weights."""
        self._states = ()
        self._module = torch.nn.Module()
