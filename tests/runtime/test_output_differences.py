"""``text_diff``, ``token_ids_diff`` and ``logprobs_diff``: what each item of an iteration adds to those before it."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.runtime.gate import Gate
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, NGramDecodingConfig, RequestOutput, SamplingParams
from trtllm_replayssm.runtime.handle import RequestHandle

# A stop string whose beginnings are held back again and again: the text grows by fits and starts.
RULES = SamplingParams(max_tokens=40, n=3, seed=5, ignore_eos=True, logprobs=2, stop=("zz", "never to come"))

Items = list[RequestOutput]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    torch.set_num_threads(1)
    folder = make_nemotron_h(tmp_path_factory.mktemp("diff") / "hf", pattern="M*M", tokenizer=True)
    with LLM(folder, device="cpu", max_batch_size=2, speculative_config=NGramDecodingConfig()) as opened:
        yield opened


def check_sums(items: Sequence[RequestOutput], whole: RequestOutput) -> None:
    """Each item is the sum of the differences up to it, and the last is the whole."""
    for index, final in enumerate(whole.outputs):
        text, token_ids, logprobs = "", [], []
        for item in items:
            sequence = item.outputs[index]
            text += sequence.text_diff
            token_ids += sequence.token_ids_diff
            logprobs += sequence.logprobs_diff or []
            assert (sequence.text, sequence.token_ids, sequence.logprobs) == (text, token_ids, logprobs)
        assert (text, token_ids, len(logprobs)) == (final.text, final.token_ids, len(final.logprobs or []))


def test_they_add_up_for_every_reader_however_slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate("sum", RULES)
    gate = Gate(llm, monkeypatch)

    async def read_quickly(handle: RequestHandle, has_begun: asyncio.Event, may_go_on: asyncio.Event) -> Items:
        items = []
        gate.let_through(1)
        async for item in handle:
            items.append(item)
            await has_begun.wait()
            if len(items) == 5:
                may_go_on.set()
            gate.let_through(1)  # no step before this reader has seen what the one before it brought
        return items

    async def read_slowly(handle: RequestHandle, has_begun: asyncio.Event, may_go_on: asyncio.Event) -> Items:
        items = []
        async for item in handle:
            items.append(item)
            has_begun.set()
            await may_go_on.wait()
        return items

    async def readers() -> list[Items]:
        handle = llm.generate_async("sum", RULES, streaming=True)
        has_begun, may_go_on = asyncio.Event(), asyncio.Event()
        ways = (way(handle, has_begun, may_go_on) for way in (read_quickly, read_slowly))
        return list(await asyncio.wait_for(asyncio.gather(*ways), 60))

    quick, slow = asyncio.run(readers())
    gate.is_open.set()
    in_a_thread = list(llm.generate_async("sum", RULES, streaming=True))
    for items in (quick, slow, in_a_thread):
        check_sums(items, whole)
    assert quick[-1] == slow[-1]  # what was seen before is no part of an output's value
    assert 1 < len(slow) < len(quick)
    # While one sequence grows, another has ended or waits for a slot: nothing is new of it.
    assert any(not sequence.token_ids_diff for item in quick for sequence in item.outputs)
    assert any(sequence.token_ids_diff and not sequence.text_diff for item in quick for sequence in item.outputs)


def test_outside_of_an_iteration_all_is_new(llm: LLM) -> None:
    rules = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    handle = llm.generate_async("all", rules, streaming=True)
    items = list(handle)
    (only,) = llm.generate_async("all", rules)
    for output in (llm.generate("all", rules), handle.result(), only):
        (completion,) = output.outputs
        assert (completion.text_diff, completion.token_ids_diff) == (completion.text, completion.token_ids)
        assert completion.logprobs_diff is None
    assert len(items) > 1 and items[-1].outputs[0].token_ids_diff != handle.result().outputs[0].token_ids_diff
