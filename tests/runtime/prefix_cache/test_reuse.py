"""Prompts that begin alike: a hit generates what no hit generates, bit for bit, and the budgets hold.

The reference is the same ``LLM`` asked not to reuse: its prompts run in the same pieces. Another ``LLM`` without reuse
runs them in other pieces, whose rounding differs, and still generates the same tokens here.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mtp_models import make_with_mtp
from tests.tiny_models import make_nemotron_h, make_qwen
from trtllm_replayssm import (
    LLM,
    DraftTargetDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    ReplayConfig,
    SamplingParams,
)
from trtllm_replayssm.config import SpeculativeConfig
from trtllm_replayssm.errors import CapacityError, ConfigError

BLOCK = 8
HISTORY = 6
CONFIG = KvCacheConfig(enable_block_reuse=True, tokens_per_block=BLOCK, device_cache_size=2**24)
# What the tiny models need for a state and a block: budgets of a few of them make evictions frequent.
SNAPSHOT_BYTES = 48_000
RULES: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True, "logprobs": 1}
GREEDY = SamplingParams(**RULES, temperature=0.0)
SAMPLED = SamplingParams(**RULES, seed=3, top_k=40)
Result = tuple[list[int], object]


def make(family: str, folder: Path) -> Path:
    if family == "nemotron_h":
        return make_nemotron_h(folder, pattern="M*-M", tokenizer=True)
    return make_qwen(folder, family="qwen3_5", pattern="G*", tokenizer=True)


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make(request.param, tmp_path_factory.mktemp("reuse") / "hf")


def open_llm(
    folder: Path, config: KvCacheConfig | None = CONFIG, *, drafts: int = 0, device: str = "cpu", **options: Any
) -> LLM:
    return LLM(
        folder,
        max_batch_size=2,
        max_seq_len=96,
        device=device,
        **options,
        replay=ReplayConfig(history=HISTORY),
        speculative_config=NGramDecodingConfig(max_draft_len=drafts, adaptive=False) if drafts else None,
        kv_cache_config=config,
    )


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "drafts"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(folder, drafts=request.param) as opened:
        yield opened


def run(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY, *, reuse: bool = True) -> Result:
    completion = llm.generate(list(prompt), params.model_copy(update={"enable_block_reuse": reuse})).outputs[0]
    return completion.token_ids, completion.logprobs


def reused(llm: LLM) -> int:
    number = llm.metrics()["num_reused_tokens"]
    llm.reset_metrics()
    assert isinstance(number, int)
    return number


def text(seed: int, length: int) -> list[int]:
    # Repeats itself, so that drafts are found and some of them are right.
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 300, (5, 3), generator=generator)
    order = torch.randint(0, 5, (length,), generator=generator)
    return [int(token) for index in order for token in words[index]][:length]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_hit_of_every_prefix_length_generates_what_no_hit_does(llm: LLM, params: SamplingParams) -> None:
    base = text(1, 40)
    for shared in (1, 6, 7, 8, 9, 16, 17, 33):
        prompt = [*base[:shared], *text(100 + shared, 11)]
        expected = run(llm, prompt, params, reuse=False)
        run(llm, base, params)
        reused(llm)
        first, second, third = (run(llm, prompt, params), run(llm, prompt, params), run(llm, prompt[:-1], params))
        assert first == second == expected
        assert third == run(llm, prompt[:-1], params, reuse=False)
        assert reused(llm) >= (len(prompt) - 1) // BLOCK * BLOCK  # of the second run alone


def test_every_prompt_length_generates_what_other_pieces_do(folder: Path, llm: LLM) -> None:
    drafts = llm.replay.max_draft_len
    prompts = [text(7, length) for length in (*range(1, 28), 31, 32, 33)]
    with open_llm(folder, None, drafts=drafts, max_num_tokens=64) as other:
        expected = [completion.outputs[0].token_ids for completion in other.generate(prompts, GREEDY)]
    for _ in range(2):
        # Two at a time, each from whatever the ones before have left.
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("interval", "found"), [(None, (0, 4, 5)), (BLOCK, (0, 5, 5)), (2 * BLOCK - 1, (0, 4, 5)), (999, (0, 0, 5))]
)
@pytest.mark.parametrize("drafts", [0, 3], ids=["plain", "drafts"])
def test_what_prompts_share_serves_the_second_in_part_and_the_third_whole(
    folder: Path, drafts: int, interval: int | None, found: tuple[int, ...]
) -> None:
    system = text(20, 5 * BLOCK + 2)
    prompts = [[*system, *text(seed, 3 * BLOCK)] for seed in (21, 22, 23)]
    config = CONFIG.model_copy(update={"tokens_per_snapshot": interval})
    with open_llm(folder, config, drafts=drafts) as llm:
        for prompt, num_blocks in zip(prompts, found, strict=True):
            expected = run(llm, prompt, reuse=False)
            reused(llm)
            assert run(llm, prompt) == expected
            assert reused(llm) == num_blocks * BLOCK


def test_a_request_that_opts_out_neither_finds_nor_leaves_anything(llm: LLM) -> None:
    prompt = text(30, 30)
    llm.reset_metrics()

    def cached(*, reuse: bool = True) -> int:
        return llm.generate(prompt, GREEDY.model_copy(update={"enable_block_reuse": reuse})).cached_tokens

    expected = run(llm, prompt, reuse=False)
    assert llm.metrics()["num_prefix_queries"] == llm.metrics()["num_prefix_snapshots"] == 0
    assert run(llm, prompt) == expected and reused(llm) == 0
    assert run(llm, prompt, reuse=False) == expected and reused(llm) == 0
    assert run(llm, prompt) == expected and reused(llm) == 3 * BLOCK
    assert (cached(), cached(reuse=False)) == (3 * BLOCK, 0)


@pytest.mark.parametrize("budgets", [(0, 0), (0, 3), (2, 3)], ids=str)
def test_whatever_runs_and_leaves_the_outputs_stay_and_the_budgets_hold(folder: Path, budgets: tuple[int, int]) -> None:
    device, host = (number * SNAPSHOT_BYTES for number in budgets)
    config = CONFIG.model_copy(update={"device_cache_size": device, "host_cache_size": host})
    known: dict[tuple[int, ...], Result] = {}
    hits = 0
    with open_llm(folder, config, drafts=2) as llm:

        @settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 34), st.integers(0, 4)), min_size=4, max_size=10))
        def serve(requests: list[tuple[int, int, int]]) -> None:
            nonlocal hits
            for family, shared, tail in requests:
                prompt = [*text(family, 40)[:shared], *text(50 + family, tail)]
                result = run(llm, prompt)
                if tuple(prompt) not in known:
                    known[tuple(prompt)] = run(llm, prompt, reuse=False)
                assert result == known[tuple(prompt)]
                found = llm.metrics()
                assert found["prefix_device_bytes"] <= device and found["prefix_host_bytes"] <= host
                hits = found["num_prefix_hits"]

        serve()
        assert (hits > 0) == (sum(budgets) > 0)
        if budgets == (2, 3):
            assert llm.metrics()["prefix_host_bytes"] > 0


def test_several_at_a_time_share_and_each_ends_as_it_does_alone(llm: LLM) -> None:
    prompts = [[*text(60, shared), *text(61 + tail, 9)] for shared in (4, 17, 30) for tail in range(3)]
    rules = [GREEDY, SAMPLED, GREEDY] * 3
    expected = [run(llm, prompt, params, reuse=False)[0] for prompt, params in zip(prompts, rules, strict=True)]
    for _ in range(2):
        outputs = llm.generate(prompts, rules)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert reused(llm) > 0


@pytest.mark.parametrize("drafts", [0, 3], ids=["plain", "drafts"])
def test_the_next_turn_of_a_conversation_starts_where_the_last_one_ended(folder: Path, drafts: int) -> None:
    config = CONFIG.model_copy(update={"reuse_generated_tokens": True})
    with open_llm(folder, config, drafts=drafts) as llm:
        for length in range(3, 21, 2):
            prompt = text(length, length)
            # A stop token in the middle of what is drafted: accepted drafts behind it do not count.
            answer = llm.generate(prompt, GREEDY).outputs[0].token_ids
            stop = GREEDY.model_copy(update={"stop_token_ids": (answer[4],)})
            answer = llm.generate(prompt, stop).outputs[0].token_ids
            sequence = [*prompt, *answer]
            reused(llm)
            turn = [*sequence, *text(99, 4)]
            tokens, logprobs = run(llm, turn)
            assert reused(llm) == len(sequence) - 1
            expected, expected_logprobs = run(llm, turn, reuse=False)
            assert tokens == expected
            assert_close(logprobs, expected_logprobs)


def assert_close(found: object, expected: object) -> None:
    assert isinstance(found, list) and isinstance(expected, list)
    for ours, theirs in zip(found, expected, strict=True):
        for token, logprob in ours.items():
            # States of decode steps and of prompt pieces differ by fp32 rounding, through two or three layers.
            assert logprob.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)


def test_the_conventional_decode_reuses_prefixes_too(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_seq_len": 96, "replay": ReplayConfig(enabled=False)}
    drafter = NGramDecodingConfig(max_draft_len=2, adaptive=False)
    with LLM(folder, **options, speculative_config=drafter, kv_cache_config=CONFIG) as llm:
        prompt = text(70, 29)
        expected = run(llm, prompt, reuse=False)
        assert [run(llm, prompt), run(llm, prompt)] == [expected, expected]
        assert reused(llm) == 3 * BLOCK


@pytest.mark.parametrize("source", ["draft", "mtp"])
def test_a_hit_with_drafts_of_a_model_or_a_head_generates_what_no_hit_does(tmp_path: Path, source: str) -> None:
    target = make_with_mtp(tmp_path / "target", "qwen3_5", "copying", mixing=0.01, seed=3)
    config: SpeculativeConfig = MTPDecodingConfig(max_draft_len=3, adaptive=False)
    if source == "draft":
        draft = make_with_mtp(tmp_path / "draft", "qwen3_5", "copying", mixing=0.02, seed=3)
        config = DraftTargetDecodingConfig(speculative_model=draft, max_draft_len=3, adaptive=False)
    options: dict[str, Any] = {"device": "cpu", "max_batch_size": 2, "max_seq_len": 96}
    base = text(1, 40)
    with LLM(target, **options, speculative_config=config, kv_cache_config=CONFIG) as llm:
        for params in (GREEDY, SAMPLED):
            run(llm, base, params)
            for shared in (7, 8, 9, 16, 30, 39):
                prompt = [*base[:shared], *text(100 + shared, 11)]
                expected = run(llm, prompt, params, reuse=False)
                assert [run(llm, prompt, params) for _ in range(2)] == [expected] * 2
        metrics = llm.metrics()
    assert metrics["num_prefix_hits"] > 20 and 0.1 < metrics["acceptance_rate"] < 0.95


def test_blocks_that_are_shorter_than_a_prompt_piece_can_be_are_refused(folder: Path) -> None:
    config = KvCacheConfig(enable_block_reuse=True, tokens_per_block=4)
    with pytest.raises(ConfigError, match=r"tokens_per_block: found 4 .* more than 4 tokens"):
        open_llm(folder, config, drafts=3)
    with pytest.raises(ConfigError, match="max_num_tokens=3"):
        open_llm(folder, CONFIG, drafts=3, max_num_tokens=3)
    with pytest.raises(CapacityError, match="Lower device_cache_size"):
        open_llm(folder, CONFIG.model_copy(update={"device_cache_size": 2**60}))


@pytest.mark.parametrize(("num_bytes", "is_enough"), [(0, False), (1000, False), (SNAPSHOT_BYTES, True)])
def test_budgets_that_hold_no_snapshot_are_warned_of(
    folder: Path, num_bytes: int, is_enough: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("device_cache_size", "host_cache_size"):
        caplog.clear()
        budgets = {"device_cache_size": 0, "host_cache_size": 0, name: num_bytes}
        with open_llm(folder, CONFIG.model_copy(update=budgets)) as llm:
            for _ in range(2):
                run(llm, text(70, 30))
            assert (reused(llm) > 0) == is_enough
        assert (f"{name}={num_bytes}" in caplog.text) != is_enough


def test_without_reuse_there_are_no_such_metrics(folder: Path) -> None:
    with open_llm(folder, KvCacheConfig()) as llm:
        assert not any("prefix" in name for name in llm.metrics())
