"""Soak: whatever befalls requests, those that reach their ends get the tokens of their solo runs, and nothing leaks.

Once with an executor whose logits are exact, so that a token too many or too few anywhere shows, and once with the
shipped model. ``--soak_requests`` makes it longer.
"""

from typing import Any

import pytest
import torch

from tests.runtime import soak
from tests.runtime.exact_executor import MODEL, take_the_models_place
from trtllm_replayssm import LLM, KvCacheConfig, NGramDecodingConfig

LIMITS: dict[str, Any] = {"max_seq_len": 128, "max_num_tokens": 16}
CROWDED: dict[str, Any] = LIMITS | {"max_batch_size": 6, "kv_cache_config": KvCacheConfig(max_tokens=200)}
SPECULATION = [None, NGramDecodingConfig(max_draft_len=3, adaptive=False)]
TEXTS = ("e", "in", "\n", "self", "  ", "re", "a", "x=")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    take_the_models_place(monkeypatch, lambda state: state % 499 == 0)


def open_llm(speculative: NGramDecodingConfig | None, device: str = "cpu", **options: Any) -> LLM:
    torch.set_num_threads(1)
    return LLM(MODEL, device=device, dtype="float32", speculative_config=speculative, **options)


@pytest.mark.parametrize("speculative", SPECULATION, ids=["plain", "ngram"])
@pytest.mark.usefixtures("exact")
def test_every_output_is_that_of_its_solo_run(
    speculative: NGramDecodingConfig | None, pytestconfig: pytest.Config
) -> None:
    count = pytestconfig.getoption("soak_requests")
    with open_llm(None, max_batch_size=1, **LIMITS) as alone:
        jobs = soak.draw_jobs(alone, 200, 1, TEXTS)
    assert {"length", "stop", "error"} <= {str(o.finish_reason) for job in jobs for o in job.alone.outputs}
    with open_llm(speculative, **CROWDED) as llm:
        tally = soak.soak(llm, jobs, count, 2)
    for ending in ("length", "stop", "cancelled", "timeout", "error"):
        assert tally.endings[ending] >= count // 200, tally
    assert tally.metrics["num_preemptions"] >= count // 20, tally
    assert tally.metrics["num_recomputed_tokens"] > 0
    if speculative is not None:
        assert 0 < tally.metrics["num_accepted_drafts"] < tally.metrics["num_draft_tokens"]


@pytest.mark.parametrize("speculative", SPECULATION, ids=["plain", "ngram"])
@pytest.mark.usefixtures("exact")
def test_every_output_is_that_of_its_solo_run_with_prefixes_reused(
    speculative: NGramDecodingConfig | None, pytestconfig: pytest.Config
) -> None:
    count = max(pytestconfig.getoption("soak_requests") // 2, 1)
    with open_llm(None, max_batch_size=1, **LIMITS) as alone:
        jobs = soak.draw_jobs(alone, 100, 5, TEXTS)
    cache = KvCacheConfig(
        max_tokens=200,
        enable_block_reuse=True,
        tokens_per_block=8,
        device_cache_size=2**13,
        host_cache_size=2**14,
        reuse_generated_tokens=True,
    )
    with open_llm(speculative, **CROWDED | {"kv_cache_config": cache}) as llm:
        tally = soak.soak(llm, jobs, count, 6)
        assert llm._serving._loop.reuse is not None and not llm._serving._loop.reuse._to_save
    assert tally.metrics["num_preemptions"] >= count // 20, tally
    assert tally.metrics["num_prefix_hits"] >= count // 10, tally
    assert 0 < tally.metrics["prefix_device_bytes"] <= cache.device_cache_size
    assert 0 < tally.metrics["prefix_host_bytes"] <= cache.host_cache_size


@pytest.mark.parametrize("speculative", SPECULATION, ids=["plain", "ngram"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_output_of_a_real_model_is_that_of_its_solo_run(
    speculative: NGramDecodingConfig | None, device: str, pytestconfig: pytest.Config
) -> None:
    count = max(pytestconfig.getoption("soak_requests") // 5, 1)
    with open_llm(None, device=device, max_batch_size=1, **LIMITS) as alone:
        jobs = soak.draw_jobs(alone, 30, 3, TEXTS)
    with open_llm(speculative, device=device, **CROWDED) as llm:
        tally = soak.soak(llm, jobs, count, 4)
    assert tally.metrics["num_preemptions"] >= count // 20, tally
