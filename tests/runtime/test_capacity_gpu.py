"""The memory plan against what torch allocates in the largest steps."""

import pytest
import torch

from tests.runtime.test_step_graphs import step_inputs
from trtllm_replayssm import CudaGraphConfig
from trtllm_replayssm.contract.geometry import (
    AttentionGeometry,
    EngineLimits,
    GatedDeltaNetGeometry,
    LayerType,
    Mamba2Geometry,
    MlpGeometry,
    ModelGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.tensors import weight_specs
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.sampling import TokenRule, choose_tokens
from trtllm_replayssm.runtime.step import StepInputs

pytestmark = pytest.mark.gpu

# cuBLAS's workspaces, one for each of two streams, and what blocks lose to rounding.
BESIDE = 100 * 2**20
PROMPT = 9000
# Narrower than what is compiled: that would take the test's time, and less memory.
COMMON = {
    "vocab_size": 32000,
    "d_model": 512,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "attention": AttentionGeometry(n_query_heads=4, n_kv_heads=2, head_dim=64),
    "eos_token_ids": (2,),
}


def geometry(family: str, dtype: str) -> ModelGeometry:
    if family == "mamba2":
        own = {
            "architecture": "NemotronHForCausalLM",
            "layer_types": (LayerType.MAMBA2, LayerType.ATTENTION, LayerType.MLP),
            "mamba2": Mamba2Geometry(n_heads=8, head_dim=64, d_state=64, n_groups=2, d_conv=4),
            "mlp": MlpGeometry(d_ff=1000, activation="relu2"),
        }
    else:
        own = {
            "architecture": "Qwen3_5ForCausalLM",
            "layer_types": (LayerType.GATED_DELTA_NET, LayerType.ATTENTION, LayerType.MLP),
            "mamba2": None,
            "gated_delta_net": GatedDeltaNetGeometry(
                n_key_heads=4, n_value_heads=8, key_dim=64, value_dim=64, d_conv=4
            ),
            "mlp": MlpGeometry(d_ff=500, activation="swiglu"),
        }
    return ModelGeometry.model_validate(COMMON | own | {"dtype": dtype})


@pytest.mark.parametrize(
    ("family", "dtype", "graphs"),
    [
        ("mamba2", "bfloat16", CudaGraphConfig()),
        ("gdn", "bfloat16", None),
        ("mamba2", "float32", CudaGraphConfig()),
    ],
)
def test_the_largest_steps_stay_within_the_plan(family: str, dtype: str, graphs: CudaGraphConfig | None) -> None:
    found = geometry(family, dtype)
    device = torch.device("cuda", torch.cuda.current_device())
    limits = EngineLimits(max_batch_size=64, max_input_len=PROMPT, max_seq_len=PROMPT + 1, max_num_tokens=PROMPT)

    def load(device: torch.device) -> dict[str, torch.Tensor]:
        return {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)  # type: ignore[arg-type]
            for spec in weight_specs(found)
        }

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    executor = TorchExecutor(found, ReplayGeometry(max_draft_len=3), limits, load, device, cuda_graphs=graphs)
    for window in (1, 4):
        decode = on_device(step_inputs(64, window, past=2000), device)
        logits = executor.step(decode).logits.flatten(0, 1)
        choose_tokens(logits, [TokenRule(0.8, 0, 0.9, row) for row in range(len(logits))], [5] * len(logits))
    for length in (1000, 600, PROMPT, 1024):  # with graphs and flash attention, all but the longest are captured
        executor.step(on_device(step_inputs(1, length, positions=1), device))
    torch.cuda.synchronize()
    peak, plan = torch.cuda.max_memory_allocated() - before, executor.memory_plan
    executor.close()
    assert plan.weights + plan.states < peak <= plan.total + BESIDE
    # Nor is the plan for steps out of proportion.
    assert plan.step < 4 * (peak - plan.weights - plan.states) + BESIDE


def on_device(inputs: StepInputs, device: torch.device) -> StepInputs:
    tensors = [tensor.to(device) for tensor in inputs.tensors()]
    names = ("input_ids", "past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids", "logits_indices")
    return StepInputs(
        **dict(zip(names, tensors, strict=True)),
        first_slot=inputs.first_slot,
        max_past_length=inputs.max_past_length,
    )
