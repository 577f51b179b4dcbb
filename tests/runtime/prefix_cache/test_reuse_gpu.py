"""Reuse of prefixes on CUDA: device and page-locked host memory, the kernels' fold of a window without tokens."""

from pathlib import Path

import pytest
import torch

from tests.runtime.prefix_cache.test_reuse import BLOCK, CONFIG, GREEDY, SAMPLED, open_llm, reused, run, text
from tests.tiny_models import make_nemotron_h, make_qwen

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # State sizes that the kernels support.
    if request.param == "qwen3_5":
        return make_qwen(tmp_path_factory.mktemp("gpu") / "hf", pattern="GG*G", value_dim=32)
    return make_nemotron_h(tmp_path_factory.mktemp("gpu") / "hf", pattern="M-M*-M", head_dim=64, d_state=64)


@pytest.fixture(scope="module", autouse=True)
def full_fp32_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("drafts", [0, 3], ids=["plain", "drafts"])
def test_hits_from_device_and_host_memory_generate_what_no_hit_does(folder: Path, drafts: int) -> None:
    prompts = [[*text(1, 40)[:shared], *text(100 + shared, 9)] for shared in (7, 8, 9, 16, 24, 25, 40)]
    with open_llm(folder, device="cuda", drafts=drafts) as llm:
        run(llm, prompts[0])
        one_snapshot = llm.metrics()["prefix_device_bytes"]
    budgets = {"device_cache_size": 2 * one_snapshot, "host_cache_size": 8 * one_snapshot}
    with open_llm(folder, CONFIG.model_copy(update=budgets), device="cuda", drafts=drafts) as llm:
        for params in (GREEDY, SAMPLED):
            expected = [run(llm, prompt, params, reuse=False)[0] for prompt in prompts]
            for _ in range(3):
                assert [run(llm, prompt, params)[0] for prompt in prompts] == expected
        found = llm.metrics()
        assert found["num_prefix_hits"] > len(prompts)
        assert 0 < found["prefix_device_bytes"] <= budgets["device_cache_size"]
        assert 0 < found["prefix_host_bytes"] <= budgets["host_cache_size"]


@pytest.mark.parametrize("drafts", [0, 3], ids=["plain", "drafts"])
def test_a_sequence_that_ended_is_continued_from_its_folded_state(folder: Path, drafts: int) -> None:
    config = CONFIG.model_copy(update={"reuse_generated_tokens": True})
    with open_llm(folder, config, device="cuda", drafts=drafts) as llm:
        for length in (3, BLOCK, 13, 19):
            prompt = text(length, length)
            sequence = [*prompt, *run(llm, prompt)[0]]
            reused(llm)
            turn = [*sequence, *text(99, 4)]
            tokens, _ = run(llm, turn)
            assert reused(llm) == len(sequence) - 1
            assert tokens == run(llm, turn, reuse=False)[0]
