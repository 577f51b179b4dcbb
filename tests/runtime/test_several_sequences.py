"""``n`` sequences of one prompt: which they are, how they are numbered and what is counted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.test_sampling import chi_square
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, KvCacheConfig, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.runtime.loop import DecodeLoop
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.speculative.base import NoDrafter

RULES: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "top_k": 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("several") / "hf", pattern="M*-M", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_batch_size=3, max_seq_len=64)


def test_the_sequences_are_different_numbered_and_the_same_again(folder: Path, llm: LLM) -> None:
    llm.reset_metrics()
    rules = [SamplingParams(**RULES, seed=5, n=n) for n in (1, 4, 2)]
    prompts = [[5, 6], [5, 6], [9]]
    one, four, two = outputs = llm.generate(prompts, rules)
    assert [[completion.index for completion in output.outputs] for output in outputs] == [[0], [0, 1, 2, 3], [0, 1]]
    assert [output.request_id - one.request_id for output in outputs] == [0, 1, 5]
    assert [output.prompt_token_ids for output in outputs] == prompts and all(o.finished for o in outputs)
    assert four.outputs[0] == one.outputs[0]
    assert len({tuple(completion.token_ids) for completion in four.outputs}) == 4
    assert len({tuple(completion.text) for completion in four.outputs}) == 4
    # Three sequences have slots at a time: the four run their prompt for two and two, each of the others for itself.
    assert (llm.metrics()["num_requests"], llm.metrics()["num_prompt_tokens"]) == (7, 3 * 2 + 2 * 1)
    with LLM(folder, device="cpu", max_batch_size=8, max_seq_len=64, speculative_config=NGramDecodingConfig()) as other:
        again = other.generate(prompts[::-1], rules[::-1])
    tokens = [[completion.token_ids for completion in output.outputs] for output in (one, four, two)]
    assert [[completion.token_ids for completion in output.outputs] for output in again[::-1]] == tokens


def test_without_a_seed_all_sequences_of_all_prompts_differ(llm: LLM) -> None:
    outputs = llm.generate([[5, 6], [5, 6]], SamplingParams(**RULES, n=3))
    assert len({tuple(completion.token_ids) for output in outputs for completion in output.outputs}) == 6


def test_each_sequence_ends_by_itself(llm: LLM) -> None:
    rules = SamplingParams(max_tokens=30, seed=1, n=6, stop_token_ids=tuple(range(0, 320, 8)), ignore_eos=True)
    completions = llm.generate([5, 6], rules).outputs
    assert len({len(completion.token_ids) for completion in completions}) > 1
    for completion in completions:
        assert all(token % 8 for token in completion.token_ids[:-1])
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] % 8 == 0)


def test_the_first_tokens_of_many_sequences_follow_the_model(llm: LLM) -> None:
    letters = [5, 7, 40, 41]
    rules = SamplingParams(max_tokens=1, n=400, seed=2, ignore_eos=True, logit_bias=dict.fromkeys(letters, 60.0))
    first = [letters.index(completion.token_ids[0]) for completion in llm.generate([9], rules).outputs]
    likely = llm.generate([9], SamplingParams(max_tokens=1, temperature=0.0, logprobs=320)).outputs[0].logprobs
    assert likely is not None
    expected = torch.tensor([likely[0][token].logprob for token in letters]).softmax(-1)
    statistic, bound = chi_square(torch.tensor(first).bincount(minlength=4), expected)
    assert statistic < bound


def test_the_command_line_prints_each_sequence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--prompt", "a", "--prompt", "b", "--max_tokens", "2", "--ignore_eos"]
    assert main(["run", "--model", str(folder), *options, "--n", "2", "--temperature", "1", "--seed", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- ")]
    names = [line.removeprefix("--- ").partition(",")[0] for line in lines]
    assert names == [
        *("prompt 0", "completion 0.0", "completion 0.1", "prompt 1", "completion 1.0", "completion 1.1"),
    ]


@pytest.mark.parametrize("reuse", [False, True], ids=["alone", "with_prefix_cache"])
@pytest.mark.parametrize("length", [1, 3, 8, 13, 16, 17, 19, 40])
def test_a_prompt_runs_once_for_all_its_sequences_and_leaves_each_what_running_it_does(
    folder: Path, length: int, reuse: bool
) -> None:
    # Pieces of 8 tokens: the last one may be a whole one, or so short that its rows wait in the rings.
    options: dict[str, Any] = {"device": "cpu", "max_seq_len": 64, "max_num_tokens": 8}
    prompt = [5 + (i * i) % 50 for i in range(length)]
    rules = SamplingParams(**RULES, seed=9, n=4, logprobs=1)
    config = KvCacheConfig(enable_block_reuse=reuse, tokens_per_block=8, device_cache_size=2**20)
    drafts = NGramDecodingConfig(max_draft_len=3, adaptive=False)
    with LLM(folder, **options, max_batch_size=1, speculative_config=drafts) as alone:
        expected = alone.generate(prompt, rules).outputs
        assert alone.metrics()["num_prompt_tokens"] == 4 * length
    with LLM(folder, **options, max_batch_size=6, speculative_config=drafts, kv_cache_config=config) as llm:
        for _ in range(2):
            found = llm.generate(prompt, rules).outputs
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            # The first tokens come from the very same logits.
            assert (
                len({str(c.logprobs[0]) for c in found if c.logprobs and c.token_ids[0] == found[0].token_ids[0]}) == 1
            )
        reused = (length - 1) // 8 * 8 if reuse else 0
        assert llm.metrics()["num_prompt_tokens"] == 2 * length - reused


@pytest.mark.gpu
def test_a_shared_prompt_leaves_each_sequence_what_running_it_does_on_a_gpu(
    tmp_path: Path,
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = make_nemotron_h(tmp_path / "hf", pattern="M-M*-M", head_dim=64, d_state=64)
    rules = SamplingParams(**RULES, seed=9, n=4)
    options: dict[str, Any] = {"max_seq_len": 64, "max_num_tokens": 8, "speculative_config": NGramDecodingConfig()}
    found = []
    for num_slots in (1, 6):
        with LLM(folder, device="cuda", max_batch_size=num_slots, **options) as llm:
            outputs = [llm.generate(list(range(5, 5 + length)), rules).outputs for length in (3, 8, 19)]
            found.append([completion.token_ids for output in outputs for completion in output])
            assert llm.metrics()["num_prompt_tokens"] == (3 + 8 + 19) * (4 if num_slots == 1 else 1)
    assert found[0] == found[1]


def test_when_the_first_sequence_ends_before_its_prompt_has_run_the_next_one_runs_it(folder: Path) -> None:
    prompt = [5 + (i * i) % 50 for i in range(30)]
    rules = SamplingParams(**RULES, seed=9, n=3)
    with LLM(folder, device="cpu", max_seq_len=64, max_num_tokens=8, max_batch_size=4) as llm:
        expected = [completion.token_ids for completion in llm.generate(prompt, rules).outputs]
        recorder = MetricsRecorder(llm.geometry, llm.replay, is_conventional=False)
        loop = DecodeLoop(llm._executor, NoDrafter(), llm.limits, recorder)
        (requests,) = llm._intake._desk.requests([tuple(prompt)], [rules], 0)
        for request in requests:
            loop.add(request)
        loop.step()
        assert loop.end(requests[0], "cancelled")
        while loop.has_work:
            loop.step()
        assert [request.token_ids for request in requests] == [[], *expected[1:]]
        assert recorder.snapshot()["num_prompt_tokens"] == 8 + 30
