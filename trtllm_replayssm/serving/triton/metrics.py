"""What the runtime counts, as Triton metrics: on the server's metrics endpoint, beside Triton's own."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trtllm_replayssm.runtime.metrics import Latencies


class _Family(NamedTuple):
    """A metric: its Triton name, the key of ``LLM.metrics()`` it shows, and its description."""

    name: str
    key: str
    description: str


_GAUGES = (
    _Family("replayssm_running_sequences", "num_running", "Sequences that have a slot: the batch size."),
    _Family("replayssm_waiting_sequences", "num_waiting", "Sequences in the queue."),
    _Family("replayssm_acceptance_rate", "acceptance_rate", "Accepted drafts per proposed one since the start."),
)
_COUNTERS = (
    _Family("replayssm_sequences_total", "num_requests", "Sequences that ran to their end."),
    _Family("replayssm_cancelled_sequences_total", "num_cancelled", "Sequences that were cancelled."),
    _Family("replayssm_timed_out_sequences_total", "num_timed_out", "Sequences whose time was over."),
    _Family("replayssm_failed_sequences_total", "num_failed", "Sequences that an error ended."),
    _Family("replayssm_preemptions_total", "num_preemptions", "How often a sequence lost its slot to another one."),
    _Family("replayssm_prompt_tokens_total", "num_prompt_tokens", "Prompt tokens that ran."),
    _Family("replayssm_generated_tokens_total", "num_generated_tokens", "Tokens generated."),
    _Family("replayssm_prompt_steps_total", "num_prompt_steps", "Steps that ran a piece of a prompt."),
    _Family("replayssm_decode_steps_total", "num_decode_steps", "Steps that ran a window of every decoding sequence."),
    _Family("replayssm_decode_rows_total", "num_decode_rows", "Windows of all decode steps; by steps, the mean batch."),
    _Family("replayssm_draft_tokens_total", "num_draft_tokens", "Drafts proposed and verified."),
    _Family("replayssm_accepted_drafts_total", "num_accepted_drafts", "Drafts that entered a sequence."),
    _Family("replayssm_flushes_total", "num_flushes", "Rows of steps that wrote a checkpoint of the state."),
    _Family("replayssm_state_read_bytes_total", "state_bytes_read", "State bytes read by the protocol."),
    _Family("replayssm_state_written_bytes_total", "state_bytes_written", "State bytes written by the protocol."),
    _Family("replayssm_busy_seconds_total", "wall_time_s", "Time in which there were requests to run."),
)
# Of a model with a prefix cache; 0 without.
_CACHE_GAUGES = (
    _Family("replayssm_prefix_device_bytes", "prefix_device_bytes", "Bytes of snapshots on the device."),
    _Family("replayssm_prefix_host_bytes", "prefix_host_bytes", "Bytes of snapshots in host memory."),
)
_CACHE_COUNTERS = (
    _Family("replayssm_prefix_queries_total", "num_prefix_queries", "Prompts that asked for a snapshot."),
    _Family("replayssm_prefix_hits_total", "num_prefix_hits", "Prompts that started from a snapshot."),
    _Family("replayssm_reused_tokens_total", "num_reused_tokens", "Prompt tokens that a snapshot held."),
)
_LATENCIES = (
    _Family("replayssm_time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token"),
    _Family("replayssm_inter_token_seconds", "inter_token", "From a token to the next of its sequence"),
)


class TritonMetrics:
    """The metrics of one model instance.

    Args:
        pb_utils: Triton's module.
        labels: of this instance.

    Attributes:
        obstacle: why there are no metrics; None where there are.
    """

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        self.obstacle: str | None = None
        self._pb_utils = pb_utils
        self._labels = dict(labels)
        self._shown: dict[str, float] = {}
        self._metrics: dict[str, Any] = {}
        # Triton holds a family only as long as its object lives.
        self._families: list[Any] = []
        try:
            self._register()
        except Exception as error:  # noqa: BLE001 - a server without metrics raises what it likes; requests run without
            self.obstacle = str(error)

    def update(self, counted: Mapping[str, Any], latencies: Latencies) -> None:
        """Show the newest numbers: those of ``LLM.metrics()`` and ``LLM.latencies()``."""
        if self.obstacle is not None:
            return
        has_cache = "num_prefix_queries" in counted
        for family in (*_GAUGES, *(_CACHE_GAUGES if has_cache else ())):
            self._metrics[family.name].set(float(counted[family.key] or 0.0))
        for family in (*_COUNTERS, *(_CACHE_COUNTERS if has_cache else ())):
            self._raise_to(family.name, float(counted[family.key]))
        for family in _LATENCIES:
            histogram = getattr(latencies, family.key)
            self._raise_to(f"{family.name}_sum", histogram.sum_s)
            self._raise_to(f"{family.name}_count", float(histogram.num))

    def _register(self) -> None:
        kinds = self._pb_utils.MetricFamily
        for family in (*_GAUGES, *_CACHE_GAUGES):
            self._add(family.name, family.description, kinds.GAUGE)
        for family in (*_COUNTERS, *_CACHE_COUNTERS):
            self._add(family.name, family.description, kinds.COUNTER)
        for family in _LATENCIES:
            self._add(f"{family.name}_sum", f"{family.description}, all of them together.", kinds.COUNTER)
            self._add(f"{family.name}_count", f"{family.description}: how many were counted.", kinds.COUNTER)

    def _add(self, name: str, description: str, kind: Any) -> None:
        family = self._pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        self._metrics[name] = family.Metric(labels=self._labels)

    def _raise_to(self, name: str, value: float) -> None:
        """Bring a counter up to a value; Triton's counters only know by how much."""
        more = value - self._shown.get(name, 0.0)
        if more > 0:
            self._metrics[name].increment(more)
            self._shown[name] = value
