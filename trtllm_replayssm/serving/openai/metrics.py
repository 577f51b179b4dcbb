"""What is counted, in Prometheus' text format: the ``LLM``'s counters and histograms, and HTTP requests."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trtllm_replayssm.runtime.histogram import BOUNDS_S, Histogram
from trtllm_replayssm.serving.openai.service import Service

_PREFIX: Final = "trtllm_replayssm"

_ENDS: Final = {
    "finished": "num_requests",
    "cancelled": "num_cancelled",
    "timeout": "num_timed_out",
    "error": "num_failed",
}

# Name -> key of LLM.metrics(), explanation.
_COUNTERS: Final = {
    "prompt_tokens": ("num_prompt_tokens", "Prompt tokens that ran."),
    "recomputed_tokens": ("num_recomputed_tokens", "Tokens that ran again after their sequence had lost its slot."),
    "generated_tokens": ("num_generated_tokens", "Tokens that were generated."),
    "preemptions": ("num_preemptions", "How often a sequence lost its slot to another."),
    "prompt_steps": ("num_prompt_steps", "Steps that ran a piece of a prompt."),
    "decode_steps": ("num_decode_steps", "Steps that ran one window of every decoding sequence."),
    "decode_rows": ("num_decode_rows", "Windows of all decode steps; over decode_steps, the mean batch size."),
    "draft_tokens": ("num_draft_tokens", "Draft tokens that were verified."),
    "accepted_draft_tokens": ("num_accepted_drafts", "Draft tokens that entered a sequence."),
    "flushes": ("num_flushes", "Windows that folded pending tokens into the checkpoint."),
    "state_read_bytes": ("state_bytes_read", "Bytes of recurrent state and rings that steps read."),
    "state_written_bytes": ("state_bytes_written", "Bytes of recurrent state and rings that steps wrote."),
    "busy_seconds": ("wall_time_s", "Seconds in which there were requests to run."),
}

# The same, of a model with a prefix cache.
_PREFIX_COUNTERS: Final = {
    "prefix_queries": ("num_prefix_queries", "Prompts that asked for a snapshot of their beginning."),
    "prefix_hits": ("num_prefix_hits", "Prompts that started from a snapshot."),
    "reused_tokens": ("num_reused_tokens", "Prompt tokens that did not run because a snapshot held them."),
}


class HttpCounts:
    """HTTP requests by path and status.

    Args:
        registry: what they are published in.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "http_requests", "HTTP requests.", ("path", "status"), namespace=_PREFIX, registry=registry
        )

    def add(self, path: str, status: int) -> None:
        """Count one; the path must be one of few."""
        self._counter.labels(path, str(status)).inc()


class ServiceMetrics(Collector):
    """Reads a service's numbers when they are asked for.

    Args:
        service: whose.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Return all numbers of this moment."""
        found, latencies = self._service.llm.metrics(), self._service.llm.latencies()
        sequences = CounterMetricFamily(f"{_PREFIX}_sequences", "Sequences that have ended, by how.", labels=["end"])
        for end, key in _ENDS.items():
            sequences.add_metric([end], found[key])
        yield sequences
        has_cache = "num_prefix_queries" in found
        for name, (key, text) in (_COUNTERS | (_PREFIX_COUNTERS if has_cache else {})).items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=found[key])
        yield from self._gauges(found)
        first, between = latencies.time_to_first_token, latencies.inter_token
        yield _histogram("time_to_first_token_seconds", "From a sequence's arrival to its first token.", first)
        yield _histogram("inter_token_seconds", "From a token to the next of its sequence.", between)

    def _gauges(self, found: dict[str, Any]) -> Iterator[Metric]:
        limits = self._service.llm.limits
        gauges = {
            "ready": ("1 while requests are taken.", float(self._service.obstacle is None)),
            "running_sequences": ("Sequences with a slot.", found["num_running"]),
            "waiting_sequences": ("Sequences that wait for a slot.", found["num_waiting"]),
            "slots": ("Sequences that can run at a time.", limits.max_batch_size),
        }
        if found["acceptance_rate"] is not None:
            gauges["draft_acceptance_rate"] = ("Accepted drafts over verified ones.", found["acceptance_rate"])
        if "prefix_device_bytes" in found:
            gauges["prefix_device_bytes"] = ("Bytes of snapshots on the device.", found["prefix_device_bytes"])
            gauges["prefix_host_bytes"] = ("Bytes of snapshots in host memory.", found["prefix_host_bytes"])
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)


def text(registry: CollectorRegistry) -> bytes:
    """Return all that is published."""
    return generate_latest(registry)


def _histogram(name: str, explanation: str, found: Histogram) -> Metric:
    total, buckets = 0, []
    for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], found.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(f"{_PREFIX}_{name}", explanation, buckets=buckets, sum_value=found.sum_s)
