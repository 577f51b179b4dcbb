"""Prompt pieces as CUDA graphs, padded, against the same pieces run operation by operation at their own length."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.prefix_cache.test_reuse import CONFIG, GREEDY, SAMPLED, reused, run, text
from tests.runtime.test_capacity_gpu import on_device
from tests.runtime.test_prompt_graphs import generate, window_of
from tests.tiny_models import make_nemotron_h, make_qwen
from trtllm_replayssm import LLM, CudaGraphConfig, NGramDecodingConfig, ReplayConfig
from trtllm_replayssm.runtime.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.gpu

UNCAPTURED = CudaGraphConfig(max_prompt_tokens=0)
# Of the largest logit. In bf16 these models' logits are wrong by up to 5 % of it, seen on the CPU against fp32, and the
# lengths of matrix products change their rounding; a token that sees what it must not gives others altogether.
BF16_BOUND = 0.15


@pytest.fixture(scope="module", autouse=True)
def full_fp32_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def make(family: str, folder: Path, *, has_attention: bool) -> Path:
    if family == "qwen3_5":
        return make_qwen(folder, seed=3, pattern="GG*G" if has_attention else "GGG", value_dim=32)
    pattern = "M-M*-M" if has_attention else "M-M-M"
    return make_nemotron_h(folder, seed=3, pattern=pattern, n_groups=2, head_dim=64, d_state=64)


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make(request.param, tmp_path_factory.mktemp("prompt_graphs") / "hf", has_attention=True)


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def recurrent(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make(request.param, tmp_path_factory.mktemp("prompt_graphs") / "hf", has_attention=False)


def lengths_of(llm: LLM) -> set[int]:
    """Return the captured prompt lengths."""
    assert isinstance(llm._executor, TorchExecutor) and llm._executor._graphs is not None
    return {key.window for key in llm._executor._graphs.keys if key.is_prompt}


@pytest.mark.parametrize(
    ("drafts", "enabled"), [(0, True), (3, True), (0, False)], ids=["replay", "drafts", "conventional"]
)
def test_fp32_tokens_are_those_of_prompts_that_are_not_captured(recurrent: Path, drafts: int, enabled: bool) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "max_batch_size": 3,
        "max_num_tokens": 40,
        "max_seq_len": 70,
        "speculative_config": NGramDecodingConfig(max_draft_len=drafts, adaptive=False) if drafts else None,
        "replay": ReplayConfig(history=5, enabled=enabled),
    }
    with LLM(recurrent, **options, cuda_graph_config=UNCAPTURED) as llm:
        expected = generate(llm)
        assert not lengths_of(llm)
    with LLM(recurrent, **options) as llm:
        for _ in range(2):  # with captures, and with replays alone
            assert generate(llm) == expected
        assert lengths_of(llm) == {32, 40}


@pytest.mark.parametrize("enabled", [True, False], ids=["replay", "conventional"])
def test_pieces_behind_any_others_in_any_slot_have_the_logits_of_eager_ones(folder: Path, enabled: bool) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_batch_size": 4,
        "max_num_tokens": 100,
        "max_seq_len": 200,
        "replay": ReplayConfig(history=5, enabled=enabled),
    }
    with LLM(folder, **options) as llm, LLM(folder, **options, cuda_graph_config=None) as eager:
        captured, expected = llm._executor, eager._executor
        assert isinstance(captured, TorchExecutor) and isinstance(expected, TorchExecutor)
        pieces = [(3, 0, 100), (0, 0, 33), (2, 0, 64), (3, 100, 2), (0, 33, 90), (2, 64, 31), (1, 0, 9), (1, 9, 65)]
        pieces += [
            (3, 102, 95),
            (0, 123, 77),
            (2, 95, 97),
        ]  # the last two end where their padding has no room, and some
        for slot, past, count in pieces:
            windows = [window_of(slot, past, count, is_prompt=True)]
            if past + count < 200:
                windows.append(window_of(slot, past + count, 1, is_prompt=False))
            for window in windows:
                step = on_device(window, captured.device)
                found, wanted = (executor.step(step).logits[-1] for executor in (captured, expected))
                assert found.shape == wanted.shape
                error = ((found - wanted).abs().max() / wanted.abs().max()).item()
                assert error < BF16_BOUND, f"slot {slot}, {count} tokens at {past}: {error:.3f}"
        assert lengths_of(llm) == {32, 64, 100}


def test_replays_and_reused_prefixes_generate_what_captures_do_in_16_bits(folder: Path) -> None:
    config = CONFIG.model_copy(update={"tokens_per_block": 48})
    prompts = [[*text(1, 110)[:shared], *text(100 + shared, 30)] for shared in (20, 48, 49, 97)]
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_batch_size": 2, "max_seq_len": 160}
    with LLM(folder, **options, kv_cache_config=config) as llm:
        for params in (GREEDY, SAMPLED):
            expected = [run(llm, prompt, params, reuse=False)[0] for prompt in prompts]
            reused(llm)
            for _ in range(2):
                assert [run(llm, prompt, params)[0] for prompt in prompts] == expected
            assert reused(llm) > 0
        assert lengths_of(llm) >= {32, 64}


def test_warming_up_captures_every_prompt_length_and_leaves_no_trace(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_batch_size": 2, "max_num_tokens": 70}
    prompts = [text(length, length) for length in (2, 31, 40, 70, 100)]
    with LLM(folder, **options) as lazy:
        expected = [run(lazy, prompt)[0] for prompt in prompts]
    with LLM(folder, **options, cuda_graph_config=CudaGraphConfig(warm_up=True)) as llm:
        assert lengths_of(llm) == {32, 64, 70}
        assert [run(llm, prompt)[0] for prompt in prompts] == expected
        assert lengths_of(llm) == {32, 64, 70}


def test_prompts_in_fp32_with_attention_are_not_captured(folder: Path) -> None:
    with LLM(folder, device="cuda", max_batch_size=2, max_num_tokens=70) as llm:
        run(llm, text(3, 40))
        assert not lengths_of(llm)
