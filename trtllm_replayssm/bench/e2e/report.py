"""What a run found, as one JSON document."""

from collections.abc import Sequence
from typing import Final, Literal

from trtllm_replayssm.bench.e2e.breakdown import Breakdown
from trtllm_replayssm.bench.e2e.latency import Percentiles
from trtllm_replayssm.bench.e2e.modes import Mode
from trtllm_replayssm.bench.e2e.requests import Mix
from trtllm_replayssm.bench.machine import Machine
from trtllm_replayssm.contract.geometry import Frozen, ModelGeometry, StateDtype

Level = Literal["steps", "serving"]
NO_DRAFTS: Final = "none"


class Case(Frozen):
    """What one measurement ran.

    Attributes:
        mode: replay, or the conventional decode of the same runtime.
        kernels: whose kernels ran the recurrence of a step.
        state_dtype: of the recurrent state.
        history: most pending rows; of no use without replay.
        window: T, the tokens of a step's window.
        batch_size: rows of a step, requests that run at a time.
        drafts: where drafts come from, and how their acceptance comes about.
    """

    mode: Mode
    kernels: str
    state_dtype: StateDtype
    history: int
    window: int
    batch_size: int
    drafts: str


class StepMeasurement(Frozen):
    """Steady decode steps without a serving loop.

    Attributes:
        case: what ran.
        context: committed tokens of every row at the beginning.
        num_steps: timed ones.
        step_ms: median time of a step, the greedy choice of tokens included.
        mean_step_ms: mean over whole flush cycles.
        p90_step_ms: 90th percentile.
        host_ms: mean time in which the host queues a step.
        tokens_per_step: mean tokens that a row keeps of a step.
        tokens_per_s: batch_size * tokens_per_step over the mean time.
        memory_gib: most device memory in use; None on the CPU.
        breakdown: of a step's time on the device; None where it was not asked for.
    """

    case: Case
    context: int
    num_steps: int
    step_ms: float
    mean_step_ms: float
    p90_step_ms: float
    host_ms: float
    tokens_per_step: float
    tokens_per_s: float
    memory_gib: float | None
    breakdown: Breakdown | None


class ServingMeasurement(Frozen):
    """Requests through ``LLM``: scheduling, prompts, sampling and all.

    Attributes:
        case: what ran.
        mix: the requests.
        seconds: from the first arrival to the last token.
        output_tokens: tokens generated.
        tokens_per_s: output tokens over seconds.
        first_token: milliseconds from a request's arrival to its first token.
        inter_token: milliseconds between a request's tokens; those of one step share the time since the one before.
        prompt_steps: steps that ran a piece of a prompt.
        decode_steps: steps that ran windows.
        tokens_per_step: mean tokens that a row kept of a decode step.
        acceptance_rate: drafts that entered a sequence, of all; None without drafts.
        memory_gib: most device memory in use; None on the CPU.
    """

    case: Case
    mix: Mix
    seconds: float
    output_tokens: int
    tokens_per_s: float
    first_token: Percentiles
    inter_token: Percentiles
    prompt_steps: int
    decode_steps: int
    tokens_per_step: float
    acceptance_rate: float | None
    memory_gib: float | None


Measurement = StepMeasurement | ServingMeasurement


class Comparison(Frozen):
    """Output tokens per second with replay beside the other ways to decode, at one batch size.

    Attributes:
        level: steady steps, or requests through ``LLM``.
        state_dtype: of the recurrent state.
        window: T of the replayed steps.
        batch_size: rows.
        tokens_per_s: of replay.
        over_conventional: over the conventional decode of the same window: without drafts, or with a state snapshot
            for every token of it.
        over_plain: over replay without drafts; None for a window of one token, or where that was not measured.
        over_plain_conventional: over the conventional decode without drafts; idem.
    """

    level: Level
    state_dtype: StateDtype
    window: int
    batch_size: int
    tokens_per_s: float
    over_conventional: float | None
    over_plain: float | None
    over_plain_conventional: float | None


class Failure(Frozen):
    """A case that could not be measured.

    Attributes:
        mode: of it.
        state_dtype: of it.
        window: of it.
        batch_size: of it.
        reason: why, such as that its states do not fit the device.
    """

    mode: Mode
    state_dtype: StateDtype
    window: int
    batch_size: int
    reason: str


class EndToEndReport(Frozen):
    """A whole run.

    Attributes:
        format: of this document.
        command: the command line, every option written out.
        machine: device, versions, clocks.
        model: name or folder.
        geometry: what ran, its layers cut where that was asked for.
        weights: where they come from.
        steps: steady steps, in the order of the run.
        serving: requests, in the order of the run.
        comparisons: replay beside the conventional decode.
        failures: cases without a measurement.
    """

    format: Literal["trtllm-replayssm bench e2e 1"] = "trtllm-replayssm bench e2e 1"
    command: str
    machine: Machine
    model: str
    geometry: ModelGeometry
    weights: Literal["random"] = "random"
    steps: tuple[StepMeasurement, ...] = ()
    serving: tuple[ServingMeasurement, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    failures: tuple[Failure, ...] = ()


_Key = tuple[Level, Mode, str, int, int]


def compare(measurements: Sequence[Measurement]) -> tuple[Comparison, ...]:
    """Hold every measurement of replay to the others of its level, state type and batch size."""
    rates: dict[_Key, float] = {_key(m): m.tokens_per_s for m in measurements}

    def over(m: Measurement, mode: Mode, window: int) -> float | None:
        level, _, state_dtype, _, batch_size = _key(m)
        rate = rates.get((level, mode, state_dtype, window, batch_size))
        return m.tokens_per_s / rate if rate else None

    return tuple(
        Comparison(
            level=_level(m),
            state_dtype=m.case.state_dtype,
            window=m.case.window,
            batch_size=m.case.batch_size,
            tokens_per_s=m.tokens_per_s,
            over_conventional=over(m, "conventional", m.case.window),
            over_plain=over(m, "replay", 1) if m.case.window > 1 else None,
            over_plain_conventional=over(m, "conventional", 1) if m.case.window > 1 else None,
        )
        for m in measurements
        if m.case.mode == "replay"
    )


def _level(m: Measurement) -> Level:
    return "steps" if isinstance(m, StepMeasurement) else "serving"


def _key(m: Measurement) -> _Key:
    return _level(m), m.case.mode, m.case.state_dtype, m.case.window, m.case.batch_size
