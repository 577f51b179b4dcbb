"""The worker between its users and the model: preemption, budgets, what is counted, and what goes wrong."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.exact_executor import MODEL, take_the_models_place
from tests.runtime.gate import Gate
from tests.runtime.helpers import ScriptedDrafter
from trtllm_replayssm import LLM, KvCacheConfig, NGramDecodingConfig, RequestOutput, SamplingParams, SchedulerConfig
from trtllm_replayssm.errors import ConfigError, ExecutorError, RequestError, ShutdownError
from trtllm_replayssm.runtime.handle import RequestHandle
from trtllm_replayssm.runtime.histogram import BOUNDS_S, Histogram
from trtllm_replayssm.runtime.text_stream import TextStream

RULES = SamplingParams(max_tokens=20, temperature=0.8, seed=4, ignore_eos=True)
DRAFTS = NGramDecodingConfig(max_draft_len=3, adaptive=False)


@pytest.fixture
def open_llm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    take_the_models_place(monkeypatch)

    def make(**options: Any) -> LLM:
        return LLM(MODEL, device="cpu", dtype="float32", **{"max_seq_len": 64, "max_num_tokens": 8, **options})

    return make


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(("num_steps", "recomputed"), [(1, 0), (2, 8), (4, 13), (9, None)])
@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "ngram"])
def test_a_higher_priority_takes_the_slot_of_the_youngest_of_the_lowest(
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    recomputed: int | None,
    speculative: NGramDecodingConfig | None,
) -> None:
    prompts = [[5] * 11, [6, 7] * 6, [8]]
    with open_llm(max_batch_size=2, speculative_config=speculative) as llm:
        alone = [tokens(llm.generate(prompt, RULES)) for prompt in prompts]
        llm.reset_metrics()
        gate = Gate(llm, monkeypatch)
        first, second = (llm.generate_async(prompt, RULES, priority=-1) for prompt in prompts[:2])
        gate.let_through(num_steps)
        wait_until(lambda: gate.num_met == num_steps + 1)  # the next step is planned, too
        urgent = llm.generate_async(prompts[2], RULES)
        equal = llm.generate_async(prompts[2], RULES, priority=-1)
        gate.is_open.set()
        assert [tokens(handle.result(30)) for handle in (first, second, urgent, equal)] == [*alone, alone[2]]
        counted = llm.metrics()
        assert counted["num_preemptions"] == 1
        # Of the second request the step at the gate has run, too; its newest token runs with the others.
        assert recomputed in (counted["num_recomputed_tokens"], None)
        assert counted["num_prompt_tokens"] == 11 + 12 + 1 + 1


def test_waiting_counts_as_priority_where_that_is_asked_for(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for aging_s, expected in ((None, ["high", "low"]), (1e-9, ["low", "high"])):
        scheduling = SchedulerConfig(priority_aging_s=aging_s)
        with open_llm(max_batch_size=1, scheduler_config=scheduling) as llm:
            gate = Gate(llm, monkeypatch)
            running = llm.generate_async([5] * 3, RULES, priority=10**400)
            wait_until(lambda gate=gate: gate.num_met == 1)  # type: ignore[misc]
            handles = {"low": llm.generate_async([6], RULES), "high": llm.generate_async([7], RULES, priority=3)}
            gate.is_open.set()
            running.result(30)
            assert all(handle.result(30).finished for handle in handles.values())
            ended = {name: handle.sequences[0].last_token_s or 0.0 for name, handle in handles.items()}
            assert sorted(ended, key=lambda name: ended[name]) == expected


def test_sequences_that_outgrow_the_budget_take_turns(open_llm: Callable[..., LLM]) -> None:
    rules = RULES.model_copy(update={"max_tokens": 40})
    prompts = [[5 + i, 9] for i in range(6)]
    with open_llm(max_batch_size=6, kv_cache_config=KvCacheConfig(max_tokens=80)) as llm:
        alone = [tokens(llm.generate(prompt, rules)) for prompt in prompts]
        assert llm.metrics()["num_preemptions"] == 0
        assert [tokens(output) for output in llm.generate(prompts, rules)] == alone
        assert llm.metrics()["num_preemptions"] > 3
    with open_llm(max_batch_size=6) as llm:
        assert [tokens(output) for output in llm.generate(prompts, rules)] == alone
        assert llm.metrics()["num_preemptions"] == 0


def test_a_budget_that_one_sequence_may_outgrow_is_refused(open_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens: found 63; needed at least max_seq_len \(64\)"):
        open_llm(kv_cache_config=KvCacheConfig(max_tokens=63))
    for options in ({"max_queue_size": -1}, {"max_prompt_steps": 0}, {"priority_aging_s": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            SchedulerConfig(**options)


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "ngram"])
def test_every_token_has_a_latency(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, speculative: NGramDecodingConfig | None
) -> None:
    with open_llm(max_batch_size=2, speculative_config=speculative) as llm:
        gate = Gate(llm, monkeypatch)
        handles = [llm.generate_async([5, 6], RULES) for _ in range(3)]
        time.sleep(0.25)
        gate.is_open.set()
        assert all(len(tokens(handle.result(30))) == 20 for handle in handles)
        latencies = llm.latencies()
        assert (latencies.time_to_first_token.num, latencies.inter_token.num) == (3, 3 * 19)
        assert latencies.time_to_first_token.sum_s > 3 * 0.2 > latencies.inter_token.sum_s / 10
        assert sum(latencies.time_to_first_token.counts[: BOUNDS_S.index(0.2)]) == 0
        llm.reset_metrics()
        assert llm.latencies().inter_token == Histogram() and latencies.inter_token.num == 57


def test_a_histogram_counts_what_numpy_counts() -> None:
    durations = np.random.default_rng(1).lognormal(-4, 3, 500)
    durations[:2] = BOUNDS_S[0], BOUNDS_S[-1]
    histogram = Histogram()
    for duration in durations:
        histogram.add(float(duration), 2)
    upper = np.searchsorted(BOUNDS_S, durations)
    assert histogram.counts == (2 * np.bincount(upper, minlength=len(BOUNDS_S) + 1)).tolist()
    assert histogram.num == 1000 and histogram.sum_s == pytest.approx(2 * durations.sum())


def test_a_tokenizer_that_fails_ends_its_request_alone(open_llm: Callable[..., LLM]) -> None:
    with open_llm(max_batch_size=2) as llm:
        expected = tokens(llm.generate([5], RULES))
        assert llm.tokenizer is not None

        def decode(ids: Sequence[int]) -> str:
            if len(ids) > 2:
                raise UnicodeError("no such token")
            return ""

        streams = iter([TextStream(decode), TextStream(lambda ids: "")])
        llm.tokenizer.stream = lambda **_: next(streams)  # type: ignore[method-assign]
        failing, other = (llm.generate_async([5], RULES, streaming=True) for _ in range(2))
        with pytest.raises(RequestError, match="request 1: its text failed: UnicodeError"):
            failing.result(30)
        assert tokens(other.result(30)) == expected
        outputs = []
        with pytest.raises(RequestError):
            for output in failing:
                outputs.append(output)
        assert outputs[-1].finished and outputs[-1].error is not None and tokens(outputs[-1]) == expected[:3]
        assert llm.is_healthy and llm.metrics()["num_failed"] == 1


def test_other_prompts_of_a_call_run_to_their_ends_before_its_error_is_raised(open_llm: Callable[..., LLM]) -> None:
    with open_llm(max_batch_size=2) as llm:
        step = llm._executor.step

        def spoilt(inputs: Any) -> Any:
            outputs = step(inputs)
            outputs.logits[inputs.slot_ids == 0] = float("nan")
            return outputs

        llm._executor.step = spoilt  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="request 0: found logits that are not finite at position 1"):
            llm.generate([[5], [6]], RULES)
        # Slot 0 is the first request's, and free when the second one has come to an end.
        assert (llm.metrics()["num_failed"], llm.metrics()["num_requests"]) == (1, 1)


@pytest.mark.parametrize("ends_before", [False, True], ids=["error", "stop"])
def test_a_window_that_reaches_beyond_what_can_be_chosen_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, ends_before: bool
) -> None:
    """What precedes the place where no token can be chosen is kept, and may end the request before it."""
    take_the_models_place(monkeypatch, lambda state: state % 11 == 0)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 64}
    rules = RULES.model_copy(update={"temperature": 0.0})
    outputs, num_drafted = [], 0
    with LLM(MODEL, max_batch_size=1, **options) as llm:
        for prompt in range(5, 45):
            handle = llm.generate_async([prompt], rules)
            assert handle.wait(60) and handle.output is not None
            outputs.append(handle.output)
    failed = [o for o in outputs if o.error is not None and 2 <= len(o.outputs[0].token_ids)]
    assert len(failed) > 5
    # It proposes the right tokens and goes on where there are none.
    script = {tuple(o.prompt_token_ids): [*tokens(o), 1, 1, 1, 1] for o in failed}
    with LLM(MODEL, drafter=ScriptedDrafter(script, 3), **options) as llm:
        for output in failed:
            stop = tuple(tokens(output)[-1:] if ends_before else ())
            handle = llm.generate_async(output.prompt_token_ids, rules.model_copy(update={"stop_token_ids": stop}))
            assert handle.wait(60) and handle.output is not None
            if ends_before:
                at = tokens(output).index(stop[0]) + 1
                assert (tokens(handle.output), handle.output.outputs[0].stop_reason) == (tokens(output)[:at], stop[0])
                assert handle.error is None
            else:
                assert (tokens(handle.output), handle.output.outputs[0].finish_reason) == (tokens(output), "error")
                num_drafted += len(tokens(output)) - 1
        if not ends_before:
            assert llm.metrics()["num_accepted_drafts"] >= num_drafted // 2


def test_an_interrupted_call_leaves_free_slots_and_no_trace(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    abort, aborted, are_aborted = RequestHandle.abort, [], threading.Event()

    def noted(handle: RequestHandle) -> None:
        abort(handle)
        aborted.append(handle)
        if len(aborted) == 50:
            are_aborted.set()

    with open_llm(max_batch_size=2, speculative_config=DRAFTS) as llm:
        expected = [tokens(output) for output in llm.generate([[5], [6, 7], [8]], RULES)]
        step, calls, main_thread = llm._executor.step, [], threading.get_ident()

        def interrupted(inputs: Any) -> Any:
            calls.append(inputs)
            if len(calls) == 6:
                signal.pthread_kill(main_thread, signal.SIGINT)  # as Control-C does, while the main thread waits
                assert are_aborted.wait(60)
            return step(inputs)

        monkeypatch.setattr(RequestHandle, "abort", noted)
        llm._executor.step = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6]] * 50, RULES)
        llm._executor.step = step  # type: ignore[method-assign]
        assert [tokens(output) for output in llm.generate([[5], [6, 7], [8]], RULES)] == expected
        assert len(calls) == 6, "the rest ran although nobody wanted it"
        assert llm.metrics()["num_cancelled"] > 40


class FailingDrafter:
    max_draft_len = 2

    def begin(self, request_id: int, prompt_token_ids: Any) -> None: ...
    def observe(self, request_id: int, token_ids: Any) -> None: ...
    def end(self, request_id: int) -> None:
        raise OSError("the draft model is gone")

    def propose(self, limits: Any) -> Any:
        raise OSError("the draft model is gone")


def test_a_drafter_that_fails_ends_all_requests(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(max_batch_size=2, drafter=FailingDrafter())
    gate = Gate(llm, monkeypatch)
    handles = [llm.generate_async([5], RULES) for _ in range(3)]
    gate.is_open.set()
    for handle in handles:
        with pytest.raises(ExecutorError, match="OSError in a step: the draft model is gone"):
            handle.result(30)
    assert not llm.is_healthy
    llm.close()
    assert llm._executor.is_closed  # type: ignore[attr-defined]


def test_requests_that_the_loop_did_not_take_in_end_with_the_error(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the worker fails at, nobody waits for ever: neither for the request at hand nor for those behind it."""
    with open_llm() as llm:
        gate = Gate(llm, monkeypatch)
        handles = [llm.generate_async([5], RULES)]
        assert gate.has_met.wait(120)
        monkeypatch.setattr(llm._serving._loop, "add", lambda request: 1 // 0)
        handles += [llm.generate_async([prompt], RULES.model_copy(update={"n": 2})) for prompt in (6, 7)]
        gate.is_open.set()
        for handle in handles:
            with pytest.raises(ExecutorError, match="ZeroDivisionError"):
                handle.result(timeout=60)
        assert llm.metrics()["num_failed"] == 5


def test_a_worker_that_cannot_begin_ends_its_requests(open_llm: Callable[..., LLM]) -> None:
    with open_llm() as llm:
        llm._executor.device = torch.device("cuda")  # without an index: no thread can take it
        with pytest.raises(ExecutorError, match="ValueError in a step"):
            llm.generate_async([5], RULES).result(timeout=60)
        assert not llm.is_healthy


def test_who_stops_waiting_aborts_nothing_and_leaves_nothing(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm() as llm:
        gate = Gate(llm, monkeypatch)
        handle = llm.generate_async([5], RULES)

        async def impatient() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle.aresult(), 0.05)

        asyncio.run(impatient())
        assert not handle._waiters
        abandoned = asyncio.new_event_loop()
        abandoned.run_until_complete(asyncio.sleep(0))
        waiting = abandoned.create_task(handle.aresult())
        abandoned.run_until_complete(asyncio.sleep(0.01))
        abandoned.close()  # with a coroutine that still waits
        gate.is_open.set()
        assert len(tokens(handle.result(30))) == 20
        assert llm.generate([5], RULES).finished and llm.is_healthy
        assert not waiting.done()
        waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_closing_from_several_threads_waits_in_each(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(max_batch_size=1)
    gate = Gate(llm, monkeypatch)
    handles = [llm.generate_async([5], RULES) for _ in range(2)]
    assert gate.has_met.wait(30)
    threads = [threading.Thread(target=llm.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: not llm.is_healthy)
    with pytest.raises(ShutdownError, match="found an LLM that was closed"):
        llm.generate_async([5])
    assert all(thread.is_alive() for thread in threads) and not handles[0].finished
    gate.is_open.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for handle in handles:
        with pytest.raises(ShutdownError, match="found its LLM closed"):
            handle.result(0)
    assert llm._executor.is_closed  # type: ignore[attr-defined]


def test_python_ends_with_requests_running() -> None:
    code = f"""
        from trtllm_replayssm import LLM, SamplingParams
        llm = LLM({str(MODEL)!r}, device="cpu", max_seq_len=2000)
        handles = [llm.generate_async([5, 6], SamplingParams(max_tokens=1900), streaming=True) for _ in range(12)]
        print(len(next(iter(handles[0])).outputs[0].token_ids), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120, capture_output=True, text=True
    )
    assert int(done.stdout) >= 1 and not done.stderr
