"""Random requests, thousands of them, against an ``LLM`` that has too little of everything: who is served what."""

import gc
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_replayssm import LLM, RequestHandle, SamplingParams
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.outputs import CompletionOutput, RequestOutput

Open = Callable[..., LLM]


@dataclass(frozen=True)
class Job:
    """A prompt, its rules, and what comes of them when nothing else runs."""

    prompt: tuple[int, ...]
    params: SamplingParams
    alone: RequestOutput


@dataclass
class Tally:
    """How the requests ended, and what the ``LLM`` counted."""

    endings: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, Any] = field(default_factory=dict)


def draw_params(rng: random.Random, vocab_size: int, texts: Sequence[str]) -> SamplingParams:
    """Draw rules; texts: strings that may stop a generation."""
    is_greedy = rng.random() < 0.4
    return SamplingParams(
        max_tokens=rng.choice((1, 2, 5, 12, 24, 40)),
        temperature=0.0 if is_greedy else rng.uniform(0.3, 1.2),
        top_k=0 if is_greedy else rng.choice((0, 5, 20)),
        top_p=1.0 if is_greedy else rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
        n=1 if is_greedy else rng.choice((1, 1, 1, 3)),
        seed=rng.getrandbits(40),
        stop=tuple(rng.sample(texts, 2)) if rng.random() < 0.3 else (),
        stop_token_ids=tuple(rng.sample(range(vocab_size), 40)) if rng.random() < 0.3 else (),
        min_tokens=rng.choice((0, 0, 1)),
        ignore_eos=rng.random() < 0.5,
    )


def draw_jobs(llm: LLM, count: int, seed: int, texts: Sequence[str]) -> list[Job]:
    """Draw jobs and run each by itself.

    Args:
        llm: runs one request at a time.
        count: jobs.
        seed: of all choices.
        texts: strings that may stop a generation.
    """
    rng = random.Random(seed)
    vocab_size = llm.geometry.vocab_size
    jobs = []
    for _ in range(count):
        length = rng.choice((1, 2, 3, 7, 8, 9, 20, 33, 60))
        alphabet = range(vocab_size) if rng.random() < 0.5 else rng.sample(range(vocab_size), 3)
        prompt = tuple(rng.choice(alphabet) for _ in range(length))
        params = draw_params(rng, vocab_size, texts)
        handle = llm.generate_async(prompt, params)
        assert handle.wait(timeout=120) and handle.output is not None
        jobs.append(Job(prompt, params, handle.output))
    return jobs


def soak(llm: LLM, jobs: Sequence[Job], count: int, seed: int, *, most_at_once: int = 60) -> Tally:
    """Run ``count`` requests drawn from the jobs, disturb them, and hold each output to that of its solo run."""
    rng = random.Random(seed)
    tally = Tally()
    pending: list[tuple[Job, RequestHandle]] = []
    references: list[weakref.ref[Any]] = []
    for _ in range(count):
        job = rng.choice(jobs)
        handle = llm.generate_async(
            job.prompt,
            job.params,
            streaming=rng.random() < 0.2,
            priority=rng.choice((0, 0, 0, 1, 1, 2)),
            timeout_s=rng.uniform(1e-4, 0.1) if rng.random() < 0.1 else None,
        )
        references += map(weakref.ref, (handle, *handle.sequences))
        pending.append((job, handle))
        if rng.random() < 0.15:
            rng.choice(pending[-8:])[1].abort()
        if rng.random() < 0.05:
            time.sleep(rng.uniform(0.0, 0.01))
        while len(pending) >= most_at_once:
            check(*pending.pop(rng.randrange(len(pending))), tally)
    while pending:
        check(*pending.pop(), tally)
    del job, handle
    tally.metrics = llm.metrics()
    check_nothing_is_left(llm, references)
    return tally


def check(job: Job, handle: RequestHandle, tally: Tally) -> None:
    """Hold a request's output to that of its solo run."""
    try:
        output = handle.result(timeout=120)
    except RequestError:
        output = handle.output  # type: ignore[assignment]
        assert output is not None and output.error is not None and job.alone.error is not None
    assert output.prompt_token_ids == list(job.prompt) and output.finished
    for found, alone in zip(output.outputs, job.alone.outputs, strict=True):
        tally.endings[str(found.finish_reason)] += 1
        if found.finish_reason in ("cancelled", "timeout"):
            # An aborted n > 1 may have sequences that had ended.
            assert found.token_ids == alone.token_ids[: len(found.token_ids)]
            assert len(found.token_ids) < len(alone.token_ids) or alone.finish_reason == "error"
        else:
            assert seen(found) == seen(alone)


def seen(completion: CompletionOutput) -> tuple[object, ...]:
    """Return all but the log-probability, which rounds otherwise in another batch."""
    return (
        *(completion.index, completion.text, completion.token_ids),
        *(completion.finish_reason, completion.stop_reason),
    )


def check_nothing_is_left(llm: LLM, references: Sequence["weakref.ref[Any]"]) -> None:
    """Find slots, queue entries, drafter entries, handles or requests that are still there."""
    serving = llm._serving
    loop = serving._loop
    scheduler, slots = loop._scheduler, loop._slots
    assert (llm.metrics()["num_running"], llm.metrics()["num_waiting"]) == (0, 0)
    assert slots.num_free == len(slots.past_lengths) and not scheduler._running
    for heap in (scheduler._waiting, loop._deadlines):
        assert len(heap) == 0 and len(heap._heap) <= 64
    assert not getattr(loop._drafter, "_indices", {})
    for heap in (scheduler._waiting, loop._deadlines):
        heap.first()  # drops what is stale
    assert not serving._handles and not serving._arrivals and serving._num_unfinished == 0
    # The worker may still be about to lay down what it has published last.
    deadline = time.monotonic() + 20
    while any(reference() is not None for reference in references):
        assert time.monotonic() < deadline, "handles or requests are still there"
        gc.collect()
