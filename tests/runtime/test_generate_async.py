"""Requests that run behind their users' backs: handles, streams, several threads, the end of an ``LLM``."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.gate import Gate
from tests.tiny_models import make_nemotron_h
from trtllm_replayssm import LLM, NGramDecodingConfig, RequestOutput, SamplingParams, SchedulerConfig
from trtllm_replayssm.errors import ExecutorError, QueueFullError, RequestError, ShutdownError
from trtllm_replayssm.runtime.prompts import Prompt

RULES = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENDLESS = RULES.model_copy(update={"max_tokens": 5000})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_nemotron_h(tmp_path_factory.mktemp("async") / "hf", pattern="M*-M", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", max_batch_size=3, max_seq_len=1024) as opened:
        yield opened


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_a_handle_waits_in_a_thread_and_in_an_event_loop(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], RULES)
    handle = llm.generate_async([5, 6, 7], RULES)
    assert tokens(handle.result(timeout=30)) == tokens(expected)
    assert handle.finished and handle.error is None and handle.output is handle.result()

    async def several() -> list[RequestOutput]:
        handles = [llm.generate_async(prompt, RULES) for prompt in ([5, 6, 7], "text", {"prompt_token_ids": [5, 6, 7]})]
        return list(await asyncio.gather(*(handle.aresult() for handle in handles), handles[0]))

    outputs = asyncio.run(several())
    assert [tokens(output) == tokens(expected) for output in outputs] == [True, False, True, True]
    assert outputs[1].prompt == "text"


def test_a_stream_grows_to_the_whole_output_for_every_reader(llm: LLM) -> None:
    expected = llm.generate("stream", RULES)

    async def read(handle: Any) -> list[RequestOutput]:
        return [output async for output in handle]

    async def two_readers() -> list[list[RequestOutput]]:
        handle = llm.generate_async("stream", RULES, streaming=True)
        return list(await asyncio.gather(read(handle), read(handle)))

    streams = [*asyncio.run(two_readers()), list(llm.generate_async("stream", RULES, streaming=True))]
    for outputs in streams:
        lengths = [len(tokens(output)) for output in outputs]
        assert lengths == sorted(set(lengths)) and len(lengths) > 1
        assert all(tokens(output) == tokens(expected)[: len(tokens(output))] for output in outputs)
        assert all(expected.outputs[0].text.startswith(output.outputs[0].text) for output in outputs)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert tokens(outputs[-1]) == tokens(expected)
        assert outputs[-1].outputs[0].text == expected.outputs[0].text
    assert [tokens(output) for output in llm.generate_async("stream", RULES)] == [tokens(expected)]


def test_several_sequences_have_one_handle(llm: LLM) -> None:
    rules = SamplingParams(max_tokens=8, seed=3, n=5, ignore_eos=True)
    outputs = list(llm.generate_async([5], rules, streaming=True))
    expected = [completion.token_ids for completion in llm.generate([5], rules).outputs]
    assert [completion.token_ids for completion in outputs[-1].outputs] == expected
    assert all(len(output.outputs) == 5 for output in outputs)


def test_many_threads_get_their_own_outputs(llm: LLM) -> None:
    prompts = [[5 + i, 6, 7] for i in range(24)]
    expected = [tokens(output) for output in llm.generate(prompts, RULES)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: tokens(llm.generate(prompt, RULES)), prompts))
    assert found == expected


def test_an_aborted_request_keeps_the_tokens_it_has(llm: LLM) -> None:
    whole = tokens(llm.generate([9, 8], RULES))
    handle = llm.generate_async([9, 8], ENDLESS, streaming=True)
    for output in handle:
        if len(tokens(output)) >= 3:
            handle.abort()
    final = handle.result()
    assert final.outputs[0].finish_reason == "cancelled" and final.finished and final.error is None
    assert tokens(final)[:12] == whole[: len(tokens(final))] and 3 <= len(tokens(final)) < 1000
    handle.abort()
    assert handle.result() is final
    assert tokens(llm.generate([9, 8], RULES)) == whole


def test_waiting_requests_are_aborted_and_run_out_of_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, device="cpu", max_batch_size=1, max_seq_len=64) as llm:
        gate = Gate(llm, monkeypatch)
        first = llm.generate_async([5], RULES)
        assert gate.has_met.wait(30)
        aborted, late, last = (llm.generate_async([5], RULES, timeout_s=t) for t in (None, 1e-4, 1000.0))
        aborted.abort()
        assert (llm.metrics()["num_running"], llm.metrics()["num_waiting"]) == (1, 3)
        assert not aborted.finished
        with pytest.raises(TimeoutError, match="request 3: found no end within 0.01 s"):
            last.result(timeout=0.01)
        gate.is_open.set()
        reasons = [handle.result(30).outputs[0].finish_reason for handle in (first, aborted, late, last)]
        assert reasons == ["length", "cancelled", "timeout", "length"]
        assert tokens(aborted.result()) == tokens(late.result()) == []
        assert tokens(first.result()) == tokens(last.result())
        counted = llm.metrics()
        assert [counted[name] for name in ("num_requests", "num_cancelled", "num_timed_out")] == [2, 1, 1]
        assert (counted["num_running"], counted["num_waiting"]) == (0, 0)


def test_a_full_queue_refuses_all_of_a_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduling = SchedulerConfig(max_queue_size=2)
    with LLM(folder, device="cpu", max_batch_size=1, max_seq_len=64, scheduler_config=scheduling) as llm:
        gate = Gate(llm, monkeypatch)
        handles = [llm.generate_async([5], RULES) for _ in range(2)]
        with pytest.raises(QueueFullError, match="found 2 unfinished requests and 2 new ones; needed at most 3"):
            llm.generate([[5], [6]], RULES)
        handles.append(llm.generate_async([5], RULES))
        with pytest.raises(QueueFullError):
            llm.generate_async([5], RULES)
        gate.is_open.set()
        assert len({tuple(tokens(handle.result(30))) for handle in handles}) == 1
        assert llm.generate([5], RULES).finished


def test_prompts_that_are_queued_together_are_all_queued_or_none(llm: LLM) -> None:
    rules = [RULES, RULES.model_copy(update={"n": 2, "temperature": 1.0})]
    prompts: list[Prompt] = ["text", {"prompt_token_ids": [5, 6, 7]}]
    handles = llm.submit(prompts, rules, priority=1, timeout_s=1000.0)
    assert [len(handle.result(30).outputs) for handle in handles] == [1, 2]
    (single,) = llm.submit([5, 6, 7], RULES)
    assert tokens(single.result(30)) == tokens(llm.generate([5, 6, 7], RULES))
    llm.reset_metrics()
    wrong: list[tuple[Any, Any, dict[str, Any]]] = [
        (["a", ""], RULES, {}),
        (["a", 5.0], RULES, {}),
        (["a", "b"], [RULES], {}),
        (["a"], ["greedy"], {}),
        (["a"], RULES, {"priority": "high"}),
        (["a"], RULES, {"timeout_s": "soon"}),
        ([], RULES, {}),
    ]
    for inputs, params, options in wrong:
        with pytest.raises(RequestError):
            llm.submit(inputs, params, **options)
    assert llm.is_healthy and llm.metrics()["num_prompt_steps"] == 0


def test_a_wait_that_begins_at_the_very_end_does_not_last(llm: LLM) -> None:
    """As between the two questions of ``aresult``, whether the request has ended and what was shown of it last."""
    handle = llm.generate_async([5], RULES)
    handle.result(30)
    asyncio.run(asyncio.wait_for(handle._next_change(handle._version), 30))


@pytest.mark.parametrize("count", [4, 10**9])
def test_what_no_queue_can_ever_hold_is_refused_before_it_is_made(folder: Path, count: int) -> None:
    scheduling = SchedulerConfig(max_queue_size=2)
    rules = SamplingParams(max_tokens=1, n=count)
    with LLM(folder, device="cpu", max_batch_size=1, max_seq_len=64, scheduler_config=scheduling) as llm:
        with pytest.raises(RequestError, match=f"found {count} new requests; needed at most 3.*Ask for fewer at a"):
            llm.generate([5], rules)
        assert len(llm.generate([5], rules.model_copy(update={"n": 3})).outputs) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": [[5], [6]]}, "inputs: found a list of 2 prompts; needed one"),
        ({"inputs": []}, "found an empty list"),
        ({"inputs": [5], "priority": 0.5}, "priority: found 0.5; needed a whole number"),
        ({"inputs": [5], "timeout_s": 0}, "timeout_s: found 0; needed seconds, more than 0"),
        ({"inputs": [5], "timeout_s": "1"}, "timeout_s: found '1'"),
        ({"inputs": [5], "sampling_params": 1}, "sampling_params: found int"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate_async(**options)


def test_closing_ends_requests_with_an_error_that_says_so(folder: Path) -> None:
    with LLM(folder, device="cpu", max_batch_size=1, max_seq_len=1024) as llm:
        handles = [llm.generate_async([5], ENDLESS, streaming=True) for _ in range(3)]
        next(iter(handles[0]))
        assert llm.is_healthy
    assert not llm.is_healthy
    for handle in handles:
        with pytest.raises(ShutdownError, match="found its LLM closed before the end"):
            handle.result(timeout=30)
        assert handle.output is not None and handle.output.outputs[0].finish_reason == "error"
        assert handle.output.error is not None and "R004" in handle.output.error
    with pytest.raises(ShutdownError):
        asyncio.run(handles[1].aresult())
    with pytest.raises(ShutdownError, match="found an LLM that was closed"):
        llm.generate_async([5])
    llm.shutdown()


@pytest.mark.parametrize("speculative", [None, NGramDecodingConfig()])
def test_a_failing_step_ends_all_requests_with_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, speculative: NGramDecodingConfig | None
) -> None:
    llm = LLM(folder, device="cpu", max_batch_size=2, max_seq_len=64, speculative_config=speculative)
    gate = Gate(llm, monkeypatch)
    gated, count = llm._executor.step, iter(range(100))

    def failing(inputs: Any) -> Any:
        if next(count) == 4:
            raise RuntimeError("the device is on fire")
        return gated(inputs)

    monkeypatch.setattr(llm._executor, "step", failing)
    handles = [llm.generate_async([5, 6], RULES) for _ in range(4)]
    gate.is_open.set()
    for handle in handles:
        with pytest.raises(ExecutorError, match="RuntimeError in a step: the device is on fire") as caught:
            handle.result(timeout=30)
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert not llm.is_healthy
    with pytest.raises(ExecutorError, match="found an LLM whose executor has failed"):
        llm.generate([5], RULES)
    assert llm.metrics()["num_failed"] == 4
    llm.close()


def test_an_llm_that_nobody_closes_ends_with_its_last_request(folder: Path) -> None:
    handle = LLM(folder, device="cpu", max_batch_size=1, max_seq_len=64).generate_async([5], RULES)
    llm = weakref.ref(handle._owner)
    worker = handle._owner._serving._thread  # type: ignore[attr-defined]
    assert len(tokens(handle.result(timeout=30))) == 12
    assert handle._owner is None
    gc.collect()
    worker.join(timeout=30)
    assert llm() is None and not worker.is_alive()
