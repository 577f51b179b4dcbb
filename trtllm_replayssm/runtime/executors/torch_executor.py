"""Runs the model's torch module as it is, on the CPU or on CUDA: no engine, no TensorRT."""

import traceback
from collections.abc import Callable, Mapping

import torch

from trtllm_replayssm.builders.kernels import specializations
from trtllm_replayssm.builders.layers import flash_attention
from trtllm_replayssm.builders.models.registry import create_model
from trtllm_replayssm.config import CudaGraphConfig
from trtllm_replayssm.contract.geometry import EngineLimits, LayerType, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.memory_plan import Execution, plan_memory
from trtllm_replayssm.contract.tensors import state_specs
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.capacity import check_memory
from trtllm_replayssm.runtime.executors.buckets import (
    batch_buckets,
    captured_prompt,
    key_length_buckets,
    prompt_buckets,
)
from trtllm_replayssm.runtime.executors.step_graphs import StepGraphs, StepSizes
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
        cuda_graphs: which steps are captured as CUDA graphs; None runs all of them operation by operation, as on the
            CPU.
        returns_hidden_states: let ``step`` return them as well.

    Raises:
        CapacityError: states and weights do not fit the device, or the captured steps beside them.
        UnsupportedError: there is no CUDA kernel for the model's shapes.
        BackendError: a step cannot be captured.
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
        cuda_graphs: CudaGraphConfig | None = None,
        returns_hidden_states: bool = False,
    ) -> None:
        self.geometry = geometry
        self.replay = replay
        self.limits = limits
        self.device = device
        self.is_conventional = conventional
        self._returns_hidden_states = returns_hidden_states
        if device.type == "cuda" and not conventional:
            specializations(geometry, replay)  # refuses a shape without kernels now rather than at the first step
        self._specs = state_specs(geometry, replay, limits, conventional=conventional)
        how = Execution.of_modules(
            geometry, device.type, is_conventional=conventional, captured_prompt=captured_prompt(cuda_graphs)
        )
        self._execution = how
        self.memory_plan = plan_memory(geometry, replay, limits, how)
        check_memory(self.memory_plan, device)
        with torch.device("meta"):
            module = create_model(geometry, replay, conventional=conventional)
        module.load_state_dict(dict(load_weights(device)), assign=True, strict=True)
        self._module = module.eval().requires_grad_(False)
        self._states = pools.allocate(self._specs, limits, device)
        if how.is_flash:
            # Its kernel weighs a masked value by zero instead of leaving it out; what steps write there is finite.
            for spec, state in zip(self._specs, self._states, strict=True):
                if spec.name.startswith("value_cache"):
                    state.zero_()

        self._graphs: StepGraphs | None = None
        if cuda_graphs is not None and device.type == "cuda":
            self._graphs = StepGraphs(self._run, self._sizes(cuda_graphs), geometry.vocab_size, device)
            if cuda_graphs.warm_up:
                self._warm_up(self._graphs)

    @property
    def states(self) -> tuple[pools.State, ...]:
        """Every state and its pool."""
        return tuple(map(pools.State, self._specs, self._states))

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run the module on the pools and caches of all slots, in place."""
        with torch.inference_mode():
            found = None if self._graphs is None else self._graphs.step(inputs)
            return self._run(inputs, inputs.max_past_length + inputs.input_ids.shape[1]) if found is None else found

    @property
    def embedding_matrix(self) -> torch.Tensor:
        """The embeddings of all tokens: [vocab_size, d_model]."""
        return self._module.embedding.weight

    @property
    def output_matrix(self) -> torch.Tensor:
        """What turns hidden states into logits: [vocab_size, d_model]."""
        return self._module.output_matrix

    def close(self) -> None:
        """Drop the graphs, the pools and the weights; a second call does nothing."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None
        self._states = ()
        if hasattr(self, "_module"):
            del self._module

    def _run(self, inputs: StepInputs, key_length: int, logits: torch.Tensor | None = None) -> StepOutputs:
        how = (self._states, key_length, logits, inputs.first_slot)
        if self._returns_hidden_states:
            step = self._module.forward_with_hidden_states(inputs.tensors(), *how)
            return StepOutputs(*step[:2])
        found, _ = self._module(*inputs.tensors(), *how)
        return StepOutputs(found)

    def _sizes(self, config: CudaGraphConfig) -> StepSizes:
        window = self.replay.window
        return StepSizes(
            batch_buckets(self.limits.max_batch_size, config),
            key_length_buckets(self.limits.kv_capacity(window)),
            window,
            config.enable_padding,
            prompt_buckets(min(self._execution.captured_prompt, self.limits.max_num_tokens), window),
            self._own_length_rows(),
        )

    def _own_length_rows(self) -> int | None:
        if not self.geometry.layers_of(LayerType.ATTENTION):
            return 1
        attention = self.geometry.attention
        assert attention is not None, "a geometry with attention layers describes them"
        is_flash = self._execution.is_flash
        return flash_attention.own_length_rows(attention.n_kv_heads, self.device) if is_flash else None

    def _warm_up(self, graphs: StepGraphs) -> None:
        try:
            with torch.inference_mode():
                graphs.warm_up()
        except BaseException as error:  # also a user's who does not want to wait
            # Nobody else knows this executor yet, and what the error remembers of its steps would keep it.
            self.close()
            _forget_variables(error)
            raise


def _forget_variables(error: BaseException | None) -> None:
    """Let go of what the functions held that an error, or one before it, came through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
