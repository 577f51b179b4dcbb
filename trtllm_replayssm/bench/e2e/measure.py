"""The run: every combination of state type, window, batch size and mode, by steady steps and by requests."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Final, Literal, NamedTuple

import numpy as np
import torch

from trtllm_replayssm.bench.e2e import breakdown, stepping
from trtllm_replayssm.bench.e2e.forced import ForcedAcceptance, RandomDrafter
from trtllm_replayssm.bench.e2e.modes import MODES, Mode, OpenMode, open_mode
from trtllm_replayssm.bench.e2e.report import NO_DRAFTS, Case, Failure, Measurement, ServingMeasurement, StepMeasurement
from trtllm_replayssm.bench.e2e.requests import Lengths, Mix, draw_requests
from trtllm_replayssm.bench.e2e.serving import serve
from trtllm_replayssm.config import CudaGraphConfig, NGramDecodingConfig
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry, StateDtype
from trtllm_replayssm.errors import CapacityError
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.speculative.base import Drafter, NoDrafter
from trtllm_replayssm.runtime.speculative.factory import adapted
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter

DrafterName = Literal["forced", "ngram"]

WARM_UP_STEPS: Final = 8
PROFILED_STEPS: Final = 4
_GIB: Final = 2**30


class Job(NamedTuple):
    """One mode of one case.

    Attributes:
        mode: replay or conventional.
        replay: history, window and state type.
        batch_size: rows.
    """

    mode: Mode
    replay: ReplayGeometry
    batch_size: int


class Requests(NamedTuple):
    """The requests of every batch size.

    Attributes:
        prompt_len: tokens of a prompt.
        output_len: tokens that a request generates.
        num_requests: how many there are; None for twice the batch size.
        arrival_rate: as in ``Mix``.
    """

    prompt_len: Lengths
    output_len: Lengths
    num_requests: int | None = None
    arrival_rate: float | None = None

    def mix(self, batch_size: int) -> Mix:
        """Return the mix of a batch size."""
        return Mix(
            prompt_len=self.prompt_len,
            output_len=self.output_len,
            num_requests=self.num_requests or 2 * batch_size,
            arrival_rate=self.arrival_rate,
        )


class Options(NamedTuple):
    """What is the same for all cases of a run.

    Attributes:
        geometry: the model.
        requests: None leaves the serving level out.
        context: committed tokens of steady steps; None leaves that level out.
        num_steps: steady steps that are timed.
        acceptance: probability that a forced draft is kept.
        drafter: where drafts come from at the serving level.
        max_num_tokens: tokens of the longest prompt piece.
        with_breakdown: profile a few steady steps.
        with_graphs: replay steps as CUDA graphs.
        device: where.
        seed: of all random numbers.
    """

    geometry: ModelGeometry
    requests: Requests | None
    context: int | None
    num_steps: int
    acceptance: float
    drafter: DrafterName
    max_num_tokens: int
    with_breakdown: bool
    device: torch.device
    with_graphs: bool = True
    seed: int = 0


def plan(
    state_dtypes: Sequence[StateDtype],
    max_draft_lens: Sequence[int],
    batch_sizes: Sequence[int],
    *,
    history: int,
    modes: Sequence[Mode] = MODES,
) -> list[Job]:
    """List what is measured; the modes of a case run one after the other."""
    combined = product(dict.fromkeys(state_dtypes), dict.fromkeys(max_draft_lens), dict.fromkeys(batch_sizes))
    return [
        Job(mode, ReplayGeometry(history=history, max_draft_len=drafts, state_dtype=state_dtype), batch_size)
        for state_dtype, drafts, batch_size in combined
        for mode in dict.fromkeys(modes)
    ]


def measure(jobs: Sequence[Job], options: Options) -> Iterator[tuple[Measurement, ...] | Failure]:
    """Measure one job after the other.

    Yields:
        The measurements of a job, or why it has none: its states do not fit the device.
    """
    for job in jobs:
        try:
            yield _measure(job, options)
        except (CapacityError, torch.cuda.OutOfMemoryError) as error:
            yield Failure(
                mode=job.mode,
                state_dtype=job.replay.state_dtype,
                window=job.replay.window,
                batch_size=job.batch_size,
                reason=str(error).splitlines()[0],
            )


def limits_of(options: Options, replay: ReplayGeometry, batch_size: int) -> EngineLimits:
    """Return the smallest limits that hold the requests and the steady steps."""
    lengths = [2]
    if options.requests is not None:
        lengths.append(options.requests.mix(batch_size).max_seq_len)
    if options.context is not None:
        lengths.append(options.context + replay.window * (_num_steps(options) + 1))
    longest = max(lengths)
    return EngineLimits(
        max_batch_size=batch_size,
        max_input_len=longest,
        max_seq_len=longest,
        max_num_tokens=min(longest, options.max_num_tokens),
    )


def _graph_sizes(batch_size: int) -> tuple[int, ...]:
    """Return a batch size, for steps without padding, and the powers of two below it, for when requests begin and end.

    An ``LLM`` captures more sizes, and would take its time here.
    """
    return (*(2**k for k in range((batch_size - 1).bit_length())), batch_size)


def _num_steps(options: Options) -> int:
    return WARM_UP_STEPS + options.num_steps + (PROFILED_STEPS if options.with_breakdown else 0)


def _measure(job: Job, options: Options) -> tuple[Measurement, ...]:
    limits = limits_of(options, job.replay, job.batch_size)
    measured: list[Measurement] = []
    if options.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(options.device)
    # Requests meet every size at a moment of their own; steady steps have a single one.
    sizes, warms_up = _graph_sizes(job.batch_size), options.requests is not None
    graphs = CudaGraphConfig(batch_sizes=sizes, warm_up=warms_up) if options.with_graphs else None
    with open_mode(job.mode, options.geometry, job.replay, limits, options.device, graphs) as opened:
        if options.context is not None:
            measured.append(_measure_steps(job, opened, options, options.context))
        if options.requests is not None:
            measured.append(_measure_serving(job, opened, options, options.requests.mix(job.batch_size)))
    return tuple(measured)


def _measure_steps(job: Job, opened: OpenMode, options: Options, context: int) -> StepMeasurement:
    stepping.fill_states(opened.executor.states, options.seed)
    trajectory = stepping.draw_trajectory(
        job.replay,
        job.batch_size,
        _num_steps(options),
        context=context,
        acceptance=options.acceptance,
        seed=options.seed,
    )
    steps = stepping.make_inputs(trajectory, job.replay, options.geometry.vocab_size, options.device, options.seed)
    timed = WARM_UP_STEPS + options.num_steps
    times = stepping.time_steps(opened.executor, steps[:timed], WARM_UP_STEPS)
    found = None
    if options.with_breakdown:
        run = partial(stepping.run_steps, opened.executor, steps[timed:])
        found = breakdown.profile(run, PROFILED_STEPS, options.device)
    tokens_per_step = float(trajectory.accepted[WARM_UP_STEPS:timed].mean())
    mean = float(times.seconds.mean())
    return StepMeasurement(
        case=_case(job, opened.kernels, forced_name(options.acceptance)),
        context=context,
        num_steps=options.num_steps,
        step_ms=1e3 * float(np.median(times.seconds)),
        mean_step_ms=1e3 * mean,
        p90_step_ms=1e3 * float(np.percentile(times.seconds, 90)),
        host_ms=1e3 * times.host_seconds,
        tokens_per_step=tokens_per_step,
        tokens_per_s=job.batch_size * tokens_per_step / mean,
        memory_gib=_memory_gib(options.device),
        breakdown=found,
    )


def _measure_serving(job: Job, opened: OpenMode, options: Options, mix: Mix) -> ServingMeasurement:
    executor, drafter, drafts = _speculation(job, opened.executor, options)
    served = serve(executor, drafter, draw_requests(mix, options.geometry.vocab_size, options.seed))
    metrics = served.metrics
    rows = metrics["num_decode_rows"]
    # A request's first token comes from its prompt's last step.
    after_first = served.output_tokens - mix.num_requests
    return ServingMeasurement(
        case=_case(job, opened.kernels, drafts),
        mix=mix,
        seconds=served.seconds,
        output_tokens=served.output_tokens,
        tokens_per_s=served.output_tokens / served.seconds,
        first_token=served.first_token,
        inter_token=served.inter_token,
        prompt_steps=metrics["num_prompt_steps"],
        decode_steps=metrics["num_decode_steps"],
        tokens_per_step=after_first / rows if rows else 0.0,
        acceptance_rate=metrics["acceptance_rate"],
        memory_gib=_memory_gib(options.device),
    )


def _speculation(job: Job, executor: Executor, options: Options) -> tuple[Executor, Drafter, str]:
    drafts = job.replay.max_draft_len
    if drafts == 0:
        return executor, NoDrafter(), NO_DRAFTS
    if options.drafter == "ngram":
        config = NGramDecodingConfig(max_draft_len=drafts)
        return executor, adapted(NGramDrafter(config), config), "n-gram, as many as pay, acceptance as it comes"
    drafter = RandomDrafter(drafts, options.geometry.vocab_size, options.seed)
    return ForcedAcceptance(executor, options.acceptance, options.seed), drafter, forced_name(options.acceptance)


def forced_name(acceptance: float) -> str:
    """Name drafts of forced acceptance, so that nobody takes them for a drafter's success."""
    return f"random, acceptance of each forced with probability {acceptance:g}"


def _case(job: Job, kernels: str, drafts: str) -> Case:
    return Case(
        mode=job.mode,
        kernels=kernels,
        state_dtype=job.replay.state_dtype,
        history=job.replay.history,
        window=job.replay.window,
        batch_size=job.batch_size,
        drafts=drafts if job.replay.max_draft_len else NO_DRAFTS,
    )


def _memory_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else None
