"""Requests through ``LLM``: what its users get, the host's work included."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from trtllm_replayssm.bench.e2e.latency import Percentiles, Stopwatch, first_token_times, inter_token_times
from trtllm_replayssm.bench.e2e.requests import DrawnRequest
from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.speculative.base import Drafter


class Served(NamedTuple):
    """What became of some requests.

    Attributes:
        seconds: from the first arrival to the last token.
        output_tokens: tokens generated.
        first_token: from a request's arrival to its first token.
        inter_token: between a request's tokens.
        metrics: of the ``LLM``.
    """

    seconds: float
    output_tokens: int
    first_token: Percentiles
    inter_token: Percentiles
    metrics: dict[str, Any]


def serve(executor: Executor, drafter: Drafter, requests: Sequence[DrawnRequest]) -> Served:
    """Run requests greedily to their full lengths, each from the moment on at which it comes.

    Args:
        executor: runs the steps; closed at the end.
        drafter: proposes drafts.
        requests: in the order in which they come.
    """
    stopwatch = Stopwatch(drafter)
    with LLM.from_executor(executor, drafter=stopwatch) as llm:
        _warm_up(llm, requests)
        stopwatch.readings.clear()
        llm.reset_metrics()
        started = time.perf_counter()
        arrivals, handles = [], []
        for request in requests:
            time.sleep(max(0.0, started + request.arrival - time.perf_counter()))
            arrivals.append(time.perf_counter())
            handles.append(llm.generate_async(request.prompt_token_ids, _params(request.output_len)))
        for handle in handles:
            handle.result()
        metrics = llm.metrics()
    readings = [stopwatch.readings[handle.request_id] for handle in handles]
    last = max(moment for of_request in readings for moment, _ in of_request)
    return Served(
        seconds=last - arrivals[0],
        output_tokens=sum(tokens for of_request in readings for _, tokens in of_request),
        first_token=Percentiles.of(first_token_times(readings, arrivals)),
        inter_token=Percentiles.of(inter_token_times(readings)),
        metrics=metrics,
    )


def _warm_up(llm: LLM, requests: Sequence[DrawnRequest]) -> None:
    """Run all requests once: kernels are compiled and memory is taken then."""
    llm.generate(
        [request.prompt_token_ids for request in requests],
        [_params(request.output_len) for request in requests],
        use_tqdm=False,
    )


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
