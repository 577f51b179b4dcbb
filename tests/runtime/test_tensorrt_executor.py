"""The TensorRT executor as far as a machine without a GPU can take it.

The gate is compared with made-up installations. The bindings are driven by ``engine_stand_in``, in the place of
TensorRT's engine and context. No engine runs here; that needs a supported GPU.
"""

import hashlib
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.builders.tiny_geometry import random_weights, tiny_geometry, tiny_qwen_geometry
from tests.runtime.engine_stand_in import LEFT_IN_CACHES, EngineStandIn, ModelContext
from tests.runtime.helpers import GREEDY, make_request
from tests.runtime.manifests import PLAN, tiny_manifest
from trtllm_replayssm import KvCacheConfig, NGramDecodingConfig, backend
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.step import Step
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import ENGINE_FILE, CheckpointRecord, Manifest, PluginRecord
from trtllm_replayssm.contract.memory_plan import Execution, plan_memory
from trtllm_replayssm.contract.tensors import state_specs
from trtllm_replayssm.errors import BackendError, CheckpointError, ManifestError
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.executors import bindings, engine, gate, tensorrt_executor
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.loop import DecodeLoop
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

HERE = gate.Installation("tensorrt_rtx", "1.7.1.116", 89)
CPU = torch.device("cpu")


def test_an_engine_built_for_this_machine_passes_the_gate() -> None:
    gate.check_installation(tiny_manifest(), HERE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"backend": "tensorrt"}, "backend: built with tensorrt, found tensorrt_rtx"),
        ({"backend_version": "1.8.0.1"}, "backend_version: built with 1.8.0.1, found 1.7.1.116"),
        ({"compute_capabilities": (80, 120)}, "compute_capabilities: built for 8.0, 12.0, found a GPU of 8.9"),
    ],
)
def test_the_gate_names_the_field_that_differs(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ManifestError, match=named):
        gate.check_installation(tiny_manifest(**changes), HERE)


def test_the_gate_names_a_plugin_of_another_version() -> None:
    other = PluginRecord(
        op_type="ReplayMamba2", version="2", namespace="x", nodes=1, kernels_sha256="0", kernels_bytes=1
    )
    with pytest.raises(ManifestError, match="x::ReplayMamba2 version 2"):
        gate.check_installation(tiny_manifest(plugins=(other,)), HERE)


def test_a_plan_that_is_missing_short_or_changed_is_refused(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    with pytest.raises(ManifestError, match="No such file"):
        gate.read_engine(tmp_path / ENGINE_FILE, manifest)
    for content, named in ((PLAN[:-1], "engine_bytes"), (PLAN[:-1] + b"?", "engine_sha256")):
        (tmp_path / "rank0.engine").write_bytes(content)
        with pytest.raises(ManifestError, match=named):
            gate.read_engine(tmp_path / ENGINE_FILE, manifest)
    (tmp_path / "rank0.engine").write_bytes(PLAN)
    assert gate.read_engine(tmp_path / ENGINE_FILE, manifest) == PLAN


def test_weights_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    header = (2).to_bytes(8, "little") + b"{}"
    path = tmp_path / "rank0.safetensors"
    with pytest.raises(ManifestError, match="checkpoint_dir"):
        gate.check_weights(path, tiny_manifest())
    path.write_bytes(header + b"values")
    gate.check_weights(path, tiny_manifest())
    sha256, num_bytes = hashlib.sha256(header).hexdigest(), path.stat().st_size
    gate.check_weights(path, tiny_manifest(checkpoint=CheckpointRecord(header_sha256=sha256, weights_bytes=num_bytes)))
    for record, named in (
        (CheckpointRecord(header_sha256="1" * 64, weights_bytes=num_bytes), r"checkpoint\.header_sha256: found "),
        (
            CheckpointRecord(header_sha256=sha256, weights_bytes=num_bytes + 1),
            r"checkpoint\.weights_bytes: found 16, n",
        ),
    ):
        with pytest.raises(ManifestError, match=named):
            gate.check_weights(path, tiny_manifest(checkpoint=record))
    path.write_bytes(header[:-1])
    with pytest.raises(CheckpointError, match="found a safetensors header of 2 bytes; needed at most 1"):
        gate.check_weights(path, tiny_manifest())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no CUDA device")
def test_without_a_gpu_the_executor_says_what_is_missing_and_what_to_use_instead(tmp_path: Path) -> None:
    assert "no CUDA device" in str(tensorrt_executor.obstacle(tiny_manifest(), torch.device("cuda")))
    with pytest.raises(
        BackendError, match=r"no CUDA device; needed a GPU of compute capability 8\.0, 8\.9.*--executor torch"
    ):
        tensorrt_executor.TensorRTExecutor(tmp_path, tiny_manifest(), torch.device("cuda"))
    with pytest.raises(BackendError, match=r"device cpu; needed a GPU"):
        tensorrt_executor.TensorRTExecutor(tmp_path, tiny_manifest(), CPU)


def test_the_executor_imports_without_transformers_onnx_or_the_builders() -> None:
    code = """
        import sys
        for name in ("transformers", "onnx", "onnxscript", "trtllm_replayssm.builders", "tensorrt", "tensorrt_rtx"):
            sys.modules[name] = None
        import trtllm_replayssm.runtime.executors.tensorrt_executor
        import trtllm_replayssm.runtime.loop
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_tensorrt_has_every_method_that_the_executor_calls() -> None:
    trt = backend.load("tensorrt_rtx").trt
    engine = ("num_io_tensors", "get_tensor_name", "get_tensor_dtype", "get_tensor_shape", "get_aliased_input_tensor")
    context = ("set_optimization_profile_async", "set_input_shape", "set_tensor_address", "execute_async_v3")
    assert all(hasattr(trt.ICudaEngine, name) for name in (*engine, "create_execution_context"))
    assert all(hasattr(trt.IExecutionContext, name) for name in context)
    assert hasattr(trt.Runtime, "deserialize_cuda_engine")
    assert bindings.DTYPE_NAMES.keys() <= set(trt.DataType.__members__)


def poisoned(states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    for state in states:
        state.fill_(float("nan"))
    return states


class StandInExecutor:
    """``TensorRTExecutor.step`` without a GPU: the same bindings, a stand-in behind them."""

    name = "tensorrt"
    is_conventional = False
    device = CPU

    def __init__(
        self,
        manifest: Manifest,
        weights: dict[str, torch.Tensor],
        states: Sequence[torch.Tensor] | None = None,
        left_in_caches: float = LEFT_IN_CACHES,
    ) -> None:
        self.geometry, self.replay, self.limits = manifest.geometry, manifest.replay, manifest.limits
        self.memory_plan = plan_memory(self.geometry, self.replay, self.limits, Execution(has_activations=False))
        self.kinds: list[str] = []
        specs = state_specs(self.geometry, self.replay, self.limits)
        states = states or poisoned(pools.allocate(specs, self.limits, CPU))
        self.states = tuple(map(pools.State, specs, states))
        self.buffers = bindings.result_buffers(manifest.tensors, manifest.profiles, CPU)
        self.bindings = bindings.Bindings(manifest.tensors, self.states, weights)
        self.contexts = [ModelContext(manifest, left_in_caches) for _ in range(2)]
        for index, context in enumerate(self.contexts):
            context.set_optimization_profile_async(index, 0)
            self.bindings.bind_fixed(context)

    def step(self, inputs: StepInputs) -> StepOutputs:
        kind = engine.profile_of(inputs.input_ids.shape[1], self.replay)
        self.kinds.append(kind)
        context = self.contexts[["decode", "prefill"].index(kind)]
        results = self.bindings.bind_step(context, inputs.tensors(), inputs.first_slot, self.buffers)
        context.execute()
        return StepOutputs(results["logits"])

    def close(self) -> None:
        pass


def generate(
    executor: Executor, prompts: list[list[int]], max_draft_len: int, cache_config: KvCacheConfig | None = None
) -> list[list[int]]:
    drafter = NGramDrafter(NGramDecodingConfig(max_draft_len=max_draft_len))
    recorder = MetricsRecorder(executor.geometry, executor.replay, is_conventional=False)
    loop = DecodeLoop(executor, drafter, executor.limits, recorder, cache_config=cache_config)
    requests = [
        make_request(i, prompt, GREEDY, max_new_tokens=min(24, executor.limits.max_seq_len - len(prompt)))
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        loop.add(request)
    while loop.has_work:
        loop.step()
    if loop.reuse is not None:
        assert loop.reuse.metrics()["num_prefix_hits"] > len(prompts) // 2
    return [request.token_ids for request in requests]


@pytest.fixture(scope="module", params=[tiny_geometry("M*-M"), tiny_qwen_geometry("G*-G")], ids=["mamba2", "qwen"])
def geometry(request: pytest.FixtureRequest) -> ModelGeometry:
    assert isinstance(request.param, ModelGeometry)
    return request.param


def test_generation_through_the_bindings_equals_the_torch_executor(geometry: ModelGeometry) -> None:
    replay = ReplayGeometry(history=8, max_draft_len=2)
    limits = EngineLimits(max_batch_size=3, max_input_len=60, max_seq_len=64, max_num_tokens=11)
    weights = random_weights(geometry)
    manifest = tiny_manifest(geometry=geometry, replay=replay, limits=limits)
    # Prompts of one token, of less than a window, of several pieces, and up to the engine's longest sequence.
    prompts = [[5], [7, 8], list(range(3, 50)), [9, 4] * 6, list(range(2, 62)), [1, 2, 3] * 7]
    plain = TorchExecutor(geometry, replay, limits, lambda _: weights, CPU)
    executor = StandInExecutor(manifest, weights)
    assert generate(executor, prompts, 2) == generate(plain, prompts, 2)
    assert set(executor.kinds) == {"decode", "prefill"}


def test_prefixes_are_reused_through_the_bindings_and_ended_sequences_are_folded(geometry: ModelGeometry) -> None:
    replay = ReplayGeometry(history=8, max_draft_len=2)
    limits = EngineLimits(max_batch_size=2, max_input_len=60, max_seq_len=64, max_num_tokens=11)
    weights = random_weights(geometry)
    base = [*range(3, 20), *range(3, 20)]
    prompts = [base[:length] + [7] for length in (33, 33, 9, 33, 25, 32, 20, 17, 9, 33)]
    expected = generate(TorchExecutor(geometry, replay, limits, lambda _: weights, CPU), prompts, 2)
    prompts += [[*prompt, *tokens] for prompt, tokens in zip(prompts[4:7], expected[4:7], strict=True)]
    expected = generate(TorchExecutor(geometry, replay, limits, lambda _: weights, CPU), prompts, 2)
    config = KvCacheConfig(
        enable_block_reuse=True, tokens_per_block=8, device_cache_size=2**20, reuse_generated_tokens=True
    )
    manifest = tiny_manifest(geometry=geometry, replay=replay, limits=limits)
    assert generate(StandInExecutor(manifest, weights), prompts, 2, config) == expected


def test_attention_that_weighs_masked_rows_meets_no_garbage_in_new_caches(
    geometry: ModelGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As TensorRT's attention does: the model's own leaves unwritten rows out.
    def attend(
        self: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        num_finite: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        keys, values = key[:, :, : step.key_length], value[:, :, : step.key_length]
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=step.attention_mask, scale=self.scale, enable_gqa=True
        )

    replay = ReplayGeometry(history=8, max_draft_len=2)
    limits = EngineLimits(max_batch_size=3, max_input_len=60, max_seq_len=64, max_num_tokens=11)
    weights = random_weights(geometry)
    prompts = [[5], list(range(3, 50)), [9, 4] * 6, [7, 8]]
    expected = generate(TorchExecutor(geometry, replay, limits, lambda _: weights, CPU), prompts, 2)
    allocate = pools.allocate
    monkeypatch.setattr(pools, "allocate", lambda *arguments: poisoned(allocate(*arguments)))
    monkeypatch.setattr(Attention, "_attend", attend)
    states = tensorrt_executor.allocate_states(state_specs(geometry, replay, limits), limits, CPU)
    manifest = tiny_manifest(geometry=geometry, replay=replay, limits=limits)
    assert generate(StandInExecutor(manifest, weights, states, left_in_caches=1.0), prompts, 2) == expected


def test_an_engine_whose_tensors_are_not_the_manifests_is_refused() -> None:
    manifest = tiny_manifest()
    bindings.check_engine(EngineStandIn(manifest.tensors), manifest.tensors)
    renamed = EngineStandIn(manifest.tensors)
    renamed.records["other"] = renamed.records.pop("logits")
    with pytest.raises(ManifestError, match="logits, other"):
        bindings.check_engine(renamed, manifest.tensors)
    retyped = EngineStandIn(manifest.tensors)
    retyped.dtypes["logits"] = "HALF"
    with pytest.raises(ManifestError, match=r"tensor logits: found float16 .*; needed float32"):
        bindings.check_engine(retyped, manifest.tensors)


def test_a_state_that_shares_memory_with_another_input_is_refused() -> None:
    manifest = tiny_manifest()
    shared = EngineStandIn(manifest.tensors)
    shared.aliases["present_ssm_state_0"] = None
    bindings.check_engine(shared, manifest.tensors)
    shared.aliases["present_ssm_state_0"] = "past_ssm_state_3"
    with pytest.raises(BackendError, match="present_ssm_state_0: found an alias of past_ssm_state_3"):
        bindings.check_engine(shared, manifest.tensors)


def test_weights_that_are_missing_or_of_another_type_are_refused(geometry: ModelGeometry) -> None:
    manifest, weights = tiny_manifest(geometry=geometry), random_weights(geometry)
    for name, replaced in (("final_norm.weight", None), ("final_norm.weight", torch.zeros(3))):
        wrong = {key: value for key, value in weights.items() if key != name}
        if replaced is not None:
            wrong[name] = replaced
        with pytest.raises(ManifestError, match=name):
            StandInExecutor(manifest, wrong)
