"""Log-probabilities of likely tokens: against a sort of the whole vocabulary, and through ``generate``."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.helpers import decode_plan, decoding_request
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, Logprob, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.acceptance import judge
from trtllm_replayssm.runtime.logprobs import top_logprobs

VOCAB = 9


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.permutations([0.5 * i for i in range(VOCAB)]),
            st.integers(0, VOCAB - 1),
            st.none() | st.integers(0, VOCAB),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_likeliest_tokens_come_in_order_and_the_chosen_one_is_among_them(
    rows: list[tuple[list[float], int, int | None]],
) -> None:
    found = top_logprobs(torch.tensor([row[0] for row in rows]), [row[1] for row in rows], [row[2] for row in rows])
    for entries, (logits, token, count) in zip(found, rows, strict=True):
        if count is None:
            assert entries is None
            continue
        order = sorted(range(VOCAB), key=lambda i: -logits[i])
        assert entries is not None
        assert list(entries) == order[:count] + [token] * (token not in order[:count])
        expected = torch.tensor(logits).log_softmax(-1)
        for i, entry in entries.items():
            assert entry.rank == 1 + order.index(i)
            assert entry.logprob == pytest.approx(expected[i].item(), abs=1e-5)


def test_equals_share_a_rank() -> None:
    (entries,) = top_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], [3])
    assert entries is not None
    assert {token: entry.rank for token, entry in entries.items()} == {0: 3, 1: 1, 2: 1}


def test_each_kept_token_of_a_window_has_those_of_its_place() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    requests = [decoding_request(0, 0, params=params), decoding_request(1, 1)]
    logits = torch.nn.functional.one_hot(torch.tensor([[4, 5, 6], [4, 5, 6]]), 10).float()
    first, second = judge(decode_plan(requests, [(4, 9), (4, 9)]), logits)
    assert [list(entries) for entries in first.top_logprobs] == [[4], [5]]
    assert second.top_logprobs == ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("logprobs") / "hf", pattern="M*-M", tokenizer=True)


def test_a_completion_has_them_for_every_token_with_and_without_speculation(folder: Path) -> None:
    rules = SamplingParams(
        max_tokens=20, temperature=1.0, seed=4, ignore_eos=True, logprobs=3, logit_bias={5: 9.0, 7: 9.0}
    )
    with LLM(folder, device="cpu", max_seq_len=64) as llm:
        plain = llm.generate([5, 7, 5, 7], rules).outputs[0]
        without = llm.generate([5, 7, 5, 7], rules.model_copy(update={"logprobs": None})).outputs[0]
        own = llm.generate([5, 7, 5, 7], rules.model_copy(update={"logprobs": 0})).outputs[0]
        with pytest.raises(RequestError, match="prompt 0: found logprobs=321; needed at most 320"):
            llm.generate([5], SamplingParams(logprobs=321))
    with LLM(
        folder, device="cpu", max_seq_len=64, speculative_config=NGramDecodingConfig(max_draft_len=3, adaptive=False)
    ) as llm:
        speculative = llm.generate([5, 7, 5, 7], rules).outputs[0]
        assert llm.metrics()["num_accepted_drafts"] > 0
    assert without.logprobs is None and without.token_ids == plain.token_ids
    assert plain.logprobs is not None and speculative.logprobs is not None and own.logprobs is not None
    assert len(plain.logprobs) == len(plain.token_ids) == 20
    total = 0.0
    for token, entries, drafted, alone in zip(
        plain.token_ids, plain.logprobs, speculative.logprobs, own.logprobs, strict=True
    ):
        assert token in entries and len(entries) == 3 + (entries[token].rank > 3)
        assert [entries[i].rank for i in list(entries)[:3]] == [1, 2, 3]
        assert all(entries[a].logprob >= entries[b].logprob for a, b in pairwise(entries))
        assert alone == {token: entries[token]}
        assert drafted.keys() == entries.keys()
        assert all(drafted[i].logprob == pytest.approx(entries[i].logprob, abs=1e-4) for i in entries)
        total += entries[token].logprob
    assert total == pytest.approx(plain.cumulative_logprob, abs=1e-4)
    assert any(entries[token].rank > 3 for token, entries in zip(plain.token_ids, plain.logprobs, strict=True)), (
        "a bias chose tokens that the model finds unlikely, and the logprobs do not say so"
    )


def test_the_command_line_prints_them_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--prompt", "a", "--max_tokens", "2", "--ignore_eos", "--json", "--logprobs", "2"]
    assert main(["run", "--model", str(folder), *options]) == 0
    completion: dict[str, Any] = json.loads(capsys.readouterr().out)["outputs"][0]["outputs"][0]
    for token, entries in zip(completion["token_ids"], completion["logprobs"], strict=True):
        assert Logprob(**entries[str(token)]).rank == 1 and len(entries) == 2
