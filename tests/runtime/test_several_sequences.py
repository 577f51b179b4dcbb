"""``n`` sequences of one prompt: which they are, how they are numbered and what is counted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.test_sampling import chi_square
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.cli.main import main

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
    assert (llm.metrics()["num_requests"], llm.metrics()["num_prompt_tokens"]) == (7, 5 * 2 + 2 * 1)
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
