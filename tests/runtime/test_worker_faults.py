"""Whatever raises, wherever and whatever it raises: nobody waits for ever, and nothing stays taken."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.runtime import soak
from tests.runtime.exact_executor import MODEL, take_the_models_place
from tests.runtime.gate import Gate
from trtllm_replayssm import LLM, GuidedDecodingParams, KvCacheConfig, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.errors import CapacityError, ExecutorError, ReplaySSMError
from trtllm_replayssm.runtime import acceptance, loop, sampling, serving_loop
from trtllm_replayssm.runtime.guided import GrammarState
from trtllm_replayssm.runtime.handle import RequestHandle, wake
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.text_stream import TextStream

CACHE = KvCacheConfig(
    max_tokens=100,
    enable_block_reuse=True,
    tokens_per_block=8,
    device_cache_size=2**13,
    host_cache_size=2**14,
    reuse_generated_tokens=True,
)
PLAIN = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)

PLACES: dict[str, Callable[[LLM], tuple[object, str]]] = {
    "step": lambda llm: (llm._executor, "step"),
    "begin": lambda llm: (llm._drafter, "begin"),
    "propose": lambda llm: (llm._drafter, "propose"),
    "observe": lambda llm: (llm._drafter, "observe"),
    "end": lambda llm: (llm._drafter, "end"),
    "decode": lambda llm: (llm.tokenizer, "decode"),
    "push": lambda llm: (TextStream, "push"),
    "settled": lambda llm: (TextStream, "settled"),
    "masks": lambda llm: (GrammarState, "masks"),
    "advance": lambda llm: (GrammarState, "advance"),
    "choose": lambda llm: (acceptance, "choose_tokens"),
    "adjust": lambda llm: (sampling, "adjust_logits"),
    "restore": lambda llm: (reuse(llm)._cache, "restore"),
    "save": lambda llm: (reuse(llm)._cache, "save"),
    "keep": lambda llm: (reuse(llm), "keep"),
    "copy": lambda llm: (llm._serving._loop._sharing._states, "copy_slot"),
    "inputs": lambda llm: (loop, "build_inputs"),
    "commit": lambda llm: (loop, "commit"),
    "count_end": lambda llm: (llm._recorder, "count_end"),
    "admit": lambda llm: (llm._serving._loop._scheduler, "admit"),
    "settle": lambda llm: (llm._serving._loop._scheduler, "settle"),
    "overdue": lambda llm: (llm._serving._loop, "end_overdue"),
    "loop end": lambda llm: (llm._serving._loop, "end"),
    "request end": lambda llm: (Request, "end"),
    "output": lambda llm: (Request, "output"),
    "publish": lambda llm: (RequestHandle, "publish"),
    "wake": lambda llm: (serving_loop, "wake"),
    "close": lambda llm: (reuse(llm), "close"),
}
CALLED_ONCE = ("copy", "close")
ONE_REQUESTS_OWN = ("decode", "push", "masks", "advance", "choose", "adjust")


class MuteError(Exception):
    """One that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class PanicError(BaseException):
    """What a library in Rust raises where it panics is no ``Exception`` either."""


def reuse(llm: LLM) -> Any:
    found = llm._serving._loop.reuse
    assert found is not None
    return found


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    take_the_models_place(monkeypatch)
    speculation = NGramDecodingConfig(max_draft_len=3)
    options: dict[str, Any] = {"max_seq_len": 64, "max_num_tokens": 8, "max_batch_size": 3, "kv_cache_config": CACHE}
    with LLM(MODEL, device="cpu", dtype="float32", speculative_config=speculation, **options) as llm:
        yield llm


def ask(llm: LLM) -> list[RequestHandle]:
    """Queue requests of every kind, as far as they are taken."""
    handles = []
    for number in range(6):
        grammar = GuidedDecodingParams(regex="[a-z ]+") if number == 4 else None
        rules = {"n": 1 + number % 2, "stop": ("zz",) if number % 3 else (), "guided_decoding": grammar}
        try:
            handles.append(
                llm.generate_async(
                    [5 + number] * (3 + 4 * number),
                    PLAIN.model_copy(update=rules),
                    streaming=bool(number % 2),
                    priority=number // 3,
                    timeout_s=0.01 if number == 5 else None,
                )
            )
        except ReplaySSMError:
            break
    return handles


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize("error", [MuteError, PanicError])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_raises_nobody_waits_for_ever(
    crowded: LLM, monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException], is_lasting: bool
) -> None:
    where, name = PLACES[place](crowded)
    original, num_calls, first = getattr(where, name), 0, 1 if place in CALLED_ONCE else 2

    def raising(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == first or (is_lasting and num_calls > first):
            raise error
        return original(*args, **options)

    with monkeypatch.context() as spoilt:
        spoilt.setattr(where, name, raising)
        handles = ask(crowded)
        handles[-1].abort()
        for handle in handles:
            assert handle.wait(60), handle
            if handle.error is None:
                assert handle.result().finished
            else:
                with pytest.raises(ReplaySSMError):
                    handle.result()
        is_healthy = crowded.is_healthy
        if not is_healthy:
            with pytest.raises(ExecutorError):
                crowded.generate([5])
            if place not in ("loop end", "request end"):  # where not even an end can be noted
                assert (crowded.metrics()["num_running"], crowded.metrics()["num_waiting"]) == (0, 0)
    if place in ONE_REQUESTS_OWN:
        assert is_healthy
    if is_healthy:
        assert crowded.generate([5] * 9, PLAIN).finished
        soak.check_nothing_is_left(crowded, [])
    with monkeypatch.context() as spoilt:
        if place == "close":
            spoilt.setattr(where, name, raising)
        closing = threading.Thread(target=crowded.close)
        closing.start()
        closing.join(60)
    assert num_calls >= first, "nothing was raised"
    assert not closing.is_alive() and crowded._executor.is_closed  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", ["publish", "output", "step"])
def test_coroutines_and_iterations_end_as_well(crowded: LLM, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    where, name = PLACES[place](crowded)

    def raising(*_: object) -> None:
        raise ValueError("nothing works")

    async def wait_in_every_way() -> list[object]:
        gate = Gate(crowded, monkeypatch)
        handles = [crowded.generate_async([5], PLAIN, streaming=True) for _ in range(6)]

        async def iterate(handle: RequestHandle) -> None:
            async for output in handle:
                assert output.outputs

        waiting: list[asyncio.Future[Any]] = []
        for handle in handles:
            ways = handle.aresult(), iterate(handle), asyncio.to_thread(partial(list[Any], handle))
            waiting += map(asyncio.ensure_future, ways)
        await asyncio.sleep(0.05)
        monkeypatch.setattr(where, name, raising)
        gate.is_open.set()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)

    assert all(isinstance(result, ExecutorError) for result in asyncio.run(wait_in_every_way()))


def test_an_event_loop_that_cannot_be_woken_keeps_nobody_else_waiting() -> None:
    class Strange(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            raise OSError("not now")

    strange, usual = Strange(), asyncio.new_event_loop()
    futures = [strange.create_future(), usual.create_future()]
    wake([(strange, futures[0]), (usual, futures[1])])
    usual.run_until_complete(asyncio.wait_for(futures[1], 60))
    strange.close()
    usual.close()


def test_a_device_that_fails_within_a_step_is_no_requests_own_fault(
    crowded: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run ahead: what fails in one shows where its tokens are waited for."""

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(acceptance, "choose_tokens", fail)
    with pytest.raises(ExecutorError, match="an illegal memory access"):
        crowded.generate([5], PLAIN)
    assert not crowded.is_healthy


def test_an_error_that_is_raised_often_does_not_grow(crowded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "build_inputs", lambda *_: 1 // 0)
    handle, lengths = crowded.generate_async([5], PLAIN), set()
    for _ in range(5):
        with pytest.raises(ExecutorError) as raised:
            handle.result(60)
        lengths.add(len(raised.traceback))
    assert len(lengths) == 1


def test_without_a_thread_a_request_is_refused_and_the_next_one_tried_anew(
    crowded: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(CapacityError, match="found no thread for it"):
                crowded.generate_async([5], PLAIN)
    assert crowded.metrics()["num_waiting"] == 0
    assert crowded.generate([5], PLAIN).finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking where there are threads
@pytest.mark.parametrize("has_worker", [False, True])
def test_a_forked_process_waits_for_no_worker_that_it_has_not(
    crowded: LLM, monkeypatch: pytest.MonkeyPatch, has_worker: bool
) -> None:
    gate = Gate(crowded, monkeypatch)
    handles = [crowded.generate_async([5], PLAIN, streaming=True) for _ in range(4 * has_worker)]
    if has_worker:
        assert gate.has_met.wait(60)
    else:
        gate.is_open.set()

    def in_child() -> None:
        for wait in [*(handle.result for handle in handles), *(handle.__iter__().__next__ for handle in handles)]:
            with pytest.raises(ExecutorError, match="found a fork"):
                wait()
        if has_worker:
            with pytest.raises(ExecutorError, match="found a fork"):
                crowded.generate([5], PLAIN)
            assert not crowded.is_healthy
        else:
            torch.set_num_threads(1)
            assert crowded.generate([5], PLAIN).finished
        assert crowded.metrics()["num_requests"] == (not has_worker) and crowded.latencies()
        for handle in handles:
            handle.abort()
        crowded.close()

    child = multiprocessing.get_context("fork").Process(target=in_child)
    # Held by a thread that the child has not.
    with crowded._recorder._lock, crowded._serving._letters if has_worker else threading.Lock():
        child.start()
    child.join(60)
    assert child.exitcode == 0
    gate.is_open.set()
    assert all(handle.result(60).finished for handle in handles)
    assert crowded.generate([5], PLAIN).finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as above
def test_a_fork_forgets_no_request_that_the_worker_is_taking_in(crowded: LLM) -> None:
    is_taking, has_forked = threading.Event(), threading.Event()

    class SlowHandles(dict[int, RequestHandle]):
        def __setitem__(self, request_id: int, handle: RequestHandle) -> None:
            is_taking.set()
            assert has_forked.wait(60)
            super().__setitem__(request_id, handle)

    crowded._serving._handles = SlowHandles()
    handle = crowded.generate_async([5], PLAIN)
    assert is_taking.wait(60)

    def in_child() -> None:
        with pytest.raises(ExecutorError, match="found a fork"):
            handle.result(20)

    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join(60)
    has_forked.set()
    assert child.exitcode == 0 and handle.result(60).finished
