"""The memory plan against what is allocated, and against a device that is too small."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders.tiny_geometry import tiny_geometry, tiny_qwen_geometry
from tests.mtp_models import make_with_mtp
from tests.runtime.test_settings import options
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, DraftTargetDecodingConfig, KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig
from trtllm_replayssm.config import DecodingConfig
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.memory_plan import Execution, MemoryPlan, plan_memory
from trtllm_replayssm.contract.tensors import state_specs, weight_specs
from trtllm_replayssm.errors import CapacityError, ConfigError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime import capacity, opening, pools, settings
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor
from trtllm_replayssm.runtime.executors.torch_mtp_executor import TorchMtpExecutor
from trtllm_replayssm.runtime.speculative import factory
from trtllm_replayssm.runtime.speculative.adaptive import AdaptiveDrafter, hidden_state_drafter
from trtllm_replayssm.runtime.speculative.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter

CPU = torch.device("cpu")
LIMITS = EngineLimits(max_batch_size=5, max_input_len=90, max_seq_len=91, max_num_tokens=33)
REPLAY = ReplayGeometry(history=8, max_draft_len=2)
GEOMETRIES = [tiny_geometry("M*-M"), tiny_qwen_geometry("G*-G", dtype="bfloat16"), tiny_geometry("*-")]


def head_parameters(drafter: MtpDrafter) -> Iterator[torch.Tensor]:
    assert isinstance(drafter._executor, TorchMtpExecutor)
    return drafter._executor._head.parameters()


def num_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["mamba2", "qwen", "attention"])
@pytest.mark.parametrize("is_conventional", [False, True], ids=["replay", "conventional"])
def test_states_and_weights_of_the_plan_are_what_is_allocated(geometry: ModelGeometry, is_conventional: bool) -> None:
    plan = plan_memory(geometry, REPLAY, LIMITS, Execution(is_conventional=is_conventional))
    specs = state_specs(geometry, REPLAY, LIMITS, conventional=is_conventional)
    states = dict(zip((spec.name for spec in specs), pools.allocate(specs, LIMITS, CPU), strict=True))
    assert plan.states == num_bytes(states.values())
    assert plan.kv_caches == num_bytes(state for name, state in states.items() if "cache" in name)
    assert plan.conv_rings == num_bytes(state for name, state in states.items() if "conv" in name)
    assert plan.checkpoints == num_bytes(state for name, state in states.items() if "ssm" in name)
    weights = [torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in weight_specs(geometry)]  # type: ignore[arg-type]
    assert plan.weights == num_bytes(weights)
    assert plan.total == sum(plan.parts().values()) == plan.weights + plan.states + plan.step


def test_the_largest_step_is_a_long_prompt_or_a_wide_batch() -> None:
    def step(limits: dict[str, int], how: Execution) -> MemoryPlan:
        return plan_memory(GEOMETRIES[0], REPLAY, LIMITS.model_copy(update=limits), how)

    eager, graphs, flash = Execution(), Execution(has_graphs=True), Execution(is_flash=True)
    prompts, batches = {"max_num_tokens": 66}, {"max_batch_size": 500}
    assert step(prompts, eager).activations > step({}, eager).activations
    assert step(batches, eager).activations > 10 * step({}, eager).activations
    assert step(batches, eager).logits == 100 * step({}, eager).logits
    # Tokens are sampled in parts.
    assert step({"max_batch_size": 10**8}, eager).logits < 10**8 * step({"max_batch_size": 1}, eager).logits / 2
    # Captured steps keep their memory beside a prompt's.
    assert step({}, graphs).activations > step({}, eager).activations
    # A captured prompt takes the same memory, and more where it has more tokens; none has more than a prompt's piece.
    captured = [Execution(has_graphs=True, captured_prompt=tokens) for tokens in (5, 32, 33, 1024)]
    few, more, whole, beyond = (step({"max_batch_size": 1}, how).activations for how in captured)
    assert step({"max_batch_size": 1}, graphs).activations < few < more < whole == beyond
    assert whole == 2 * step({"max_batch_size": 1}, eager).activations
    assert step(batches, captured[-1]).activations == step(batches, graphs).activations
    # Flash attention makes nothing that is as long as the keys.
    long = {"max_seq_len": 10**6}
    assert step(long, flash).activations == step({}, flash).activations
    assert step(long, eager).activations > 1000 * step({}, eager).activations


def test_prompts_are_captured_where_attention_finds_a_slots_cache_on_the_device() -> None:
    def captured(pattern: str, dtype: str, device: str, longest: int | None) -> tuple[bool, int]:
        geometry = tiny_geometry(pattern, dtype=dtype)
        how = Execution.of_modules(geometry, device, is_conventional=False, captured_prompt=longest)
        return how.has_graphs, how.captured_prompt

    for pattern, dtype in (("M*-M", "bfloat16"), ("M-M", "bfloat16"), ("M-M", "float32")):
        assert captured(pattern, dtype, "cuda", 70) == (True, 70)
        assert captured(pattern, dtype, "cuda", 0) == (True, 0)
        assert captured(pattern, dtype, "cuda", None) == captured(pattern, dtype, "cpu", 70) == (False, 0)
    assert captured("M*-M", "float32", "cuda", 70) == (True, 0)


def test_a_plan_beyond_the_memory_is_refused_with_the_numbers_before_anything_is_allocated() -> None:
    limits = EngineLimits(max_batch_size=10**6, max_input_len=9, max_seq_len=10**6, max_num_tokens=9)
    plan = plan_memory(tiny_geometry(), ReplayGeometry(), limits, Execution())
    message = r"memory of cpu: found [\d.,]+ GiB; needed [\d.,]+ GiB for max_batch_size 1000000, .*: weights .*caches "
    with pytest.raises(CapacityError, match=message) as raised:
        capacity.check_memory(plan, CPU)
    assert "A slot takes" in str(raised.value) and "Lower max_batch_size, max_seq_len or max_num" in str(raised.value)


def test_weights_beyond_the_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_memory(tiny_geometry(), REPLAY, LIMITS, Execution()).model_copy(update={"weights": 10**9})
    monkeypatch.setattr(capacity, "available_bytes", lambda device: 10**8)
    with pytest.raises(CapacityError, match="The weights are most of it"):
        capacity.check_memory(plan, CPU)


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_slots_fill_the_fraction_of_what_is_free_and_no_more(fraction: float) -> None:
    geometry = tiny_geometry("M*-M", max_position_embeddings=512)
    wish = options(kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=fraction))
    for available in (20 * 2**20, 40 * 2**20, 90 * 2**20):
        found = settings.of_model(geometry, wish, (), available)
        assert 1 < found.limits.max_batch_size < 256 and found.limits.max_seq_len == 512
        for extra, fits in ((0, True), (1, False)):
            size = found.limits.max_batch_size + extra
            limits = found.limits.model_copy(update={"max_batch_size": size})
            plan = plan_memory(geometry, found.replay, limits, Execution(has_graphs=True))
            assert (plan.states <= fraction * (available - plan.weights - plan.step)) is fits


def test_slots_leave_room_for_what_else_will_be_on_the_device() -> None:
    geometry = tiny_geometry("M*-M", max_position_embeddings=512)

    def slots(available: int, per_slot: int, fixed: int) -> int:
        found = settings.of_model(
            geometry, options(), (), available, lambda limits: fixed + per_slot * limits.max_batch_size
        )
        return found.limits.max_batch_size

    alone = slots(60 * 2**20, 0, 0)
    assert slots(60 * 2**20 + 10**7, 0, 10**7) == alone
    assert 1 < slots(60 * 2**20, 10**5, 0) < alone


def test_a_draft_model_is_planned_as_it_will_be_opened(tmp_path: Path) -> None:
    folder = make_nemotron_h(tmp_path / "hf", pattern="M*-")
    config = DraftTargetDecodingConfig(speculative_model=folder, max_draft_len=2)
    beside = factory.memory_beside(config, tmp_path, options(cuda_graph_config=None))
    assert beside is not None
    for size in (2, 5):
        limits = LIMITS.model_copy(update={"max_batch_size": size})
        wish = factory._draft_options(config, limits, None)
        executor, _ = opening.open_executor(folder, "torch", wish, "cpu", None)
        assert beside(limits) == executor.memory_plan.total
    assert factory.memory_beside(NGramDecodingConfig(), tmp_path, options()) is None
    for absent in (DraftTargetDecodingConfig(speculative_model=tmp_path / "absent"), MTPDecodingConfig()):
        beside = factory.memory_beside(absent, tmp_path / "absent", options())
        assert beside is not None and beside(LIMITS) == 0  # its error comes where it is opened


@pytest.mark.parametrize("max_draft_len", [1, 3])
def test_a_head_is_planned_as_it_will_be_opened(tmp_path: Path, max_draft_len: int) -> None:
    folder = make_with_mtp(tmp_path / "hf", "qwen3_5")
    config = MTPDecodingConfig(max_draft_len=max_draft_len)
    beside = factory.memory_beside(config, folder, options(max_draft_len=max_draft_len))
    assert beside is not None
    for size in (2, 5):
        with LLM(folder, device="cpu", max_batch_size=size, max_seq_len=40, speculative_config=config) as llm:
            head = hidden_state_drafter(llm._serving._loop._drafter)
            assert isinstance(head, MtpDrafter)
            assert (
                beside(llm.limits) == head._executor.device_bytes == llm.memory_plan.drafter - head._last_hidden.nbytes
            )


@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("kind", [NGramDecodingConfig, DraftTargetDecodingConfig, MTPDecodingConfig])
def test_the_plan_of_an_llm_counts_what_is_there_beside_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[DecodingConfig], is_adaptive: bool
) -> None:
    folder = make_with_mtp(tmp_path / "hf", "qwen3_5")
    of_kind: dict[str, Any] = {"speculative_model": folder} if kind is DraftTargetDecodingConfig else {}
    config = kind(max_draft_len=2, adaptive=is_adaptive, **of_kind)
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8, device_cache_size=3 * 2**20)
    options: dict[str, Any] = {"device": "cpu", "max_batch_size": 2, "max_seq_len": 32, "speculative_config": config}
    with caplog.at_level("INFO"), LLM(folder, kv_cache_config=cache, **options) as llm:
        plan, loop = llm.memory_plan, llm._serving._loop
        drafter = loop._drafter.drafter if isinstance(loop._drafter, AdaptiveDrafter) else loop._drafter
        assert plan.prefix_cache == 3 * 2**20
        if isinstance(drafter, DraftModelDrafter):
            assert plan.drafter == drafter._executor.memory_plan.total > 0
        elif isinstance(drafter, MtpDrafter):
            head = [state.pool for state in drafter.states], head_parameters(drafter)
            assert plan.drafter == num_bytes(tensor for tensors in head for tensor in tensors) > 0
        else:
            assert plan.drafter == 0
        assert plan.total == sum(plan.parts().values()) == llm._executor.memory_plan.total + plan.beside
    assert "prefix cache 3.0 MiB" in caplog.text and ("drafter" in caplog.text) == (plan.drafter > 0)


def test_a_model_that_is_opened_in_vain_leaves_nothing_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, closed = make_with_mtp(tmp_path / "hf", "qwen3_5"), []
    for kind in (TorchExecutor, TorchMtpExecutor):
        close = kind.close

        def noted(executor: Any, close: Any = close) -> None:
            closed.append(type(executor).__name__)
            close(executor)

        monkeypatch.setattr(kind, "close", noted)
    draft_model = make_nemotron_h(tmp_path / "other", pattern="M*-", vocab=300)
    too_little, too_much = KvCacheConfig(max_tokens=31), KvCacheConfig(enable_block_reuse=True, device_cache_size=2**62)
    for wishes, error, executors in (
        ({"kv_cache_config": too_little}, ConfigError, ["TorchExecutor"]),
        ({"kv_cache_config": too_much}, CapacityError, ["TorchExecutor"]),
        (
            {"kv_cache_config": too_little, "speculative_config": MTPDecodingConfig()},
            ConfigError,
            ["TorchMtpExecutor", "TorchExecutor"],
        ),
        (
            {"speculative_config": DraftTargetDecodingConfig(speculative_model=draft_model)},
            ConfigError,
            ["TorchExecutor", "TorchExecutor"],
        ),
    ):
        closed.clear()
        with pytest.raises(error):
            LLM(folder, device="cpu", max_batch_size=2, max_seq_len=32, **wishes)
        assert closed == executors


def test_no_more_slots_than_256_are_taken_unasked() -> None:
    geometry = tiny_geometry("M*-M", max_position_embeddings=512)
    assert settings.of_model(geometry, options(), (), 2**40).limits.max_batch_size == 256
    assert settings.of_model(geometry, options(max_batch_size=300), (), 2**40).limits.max_batch_size == 300
    assert settings.of_model(geometry, options(), (), None).limits.max_batch_size == 8


def test_sequences_get_shorter_where_the_user_leaves_it_open() -> None:
    geometry = tiny_geometry("*-*", max_position_embeddings=4096)
    available = 32 * 2**20
    asked = settings.of_model(geometry, options(max_batch_size=16), (), available).limits
    assert asked.max_batch_size == 16 and 256 <= asked.max_seq_len < 4096
    assert (asked.max_input_len, asked.max_num_tokens) == (asked.max_seq_len - 1, min(2048, asked.max_seq_len - 1))
    # What the user named stays, for the check to refuse.
    both = settings.of_model(geometry, options(max_batch_size=64, max_seq_len=4096), (), available).limits
    assert (both.max_batch_size, both.max_seq_len) == (64, 4096)
    none = settings.of_model(geometry, options(), (), 10).limits
    assert none.max_batch_size == 1 and none.max_seq_len == 256


@pytest.mark.parametrize("fraction", [0.0, 1.1, -1.0, "0.5"])
def test_a_fraction_is_one(fraction: Any) -> None:
    with pytest.raises(ConfigError, match="free_gpu_memory_fraction"):
        KvCacheConfig(free_gpu_memory_fraction=fraction)
