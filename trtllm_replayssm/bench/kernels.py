"""The run: every case is compared with the CPU, then timed, then held to its bytes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.registry import Peer, peers_of
from trtllm_replayssm.bench.phases import StepOfFlushes, StepWithoutFlush
from trtllm_replayssm.bench.prefill import ReplayPrefill
from trtllm_replayssm.bench.report import Measurement, PeerFailure
from trtllm_replayssm.bench.timing import Timing, time_graph
from trtllm_replayssm.bench.tuning import Choices, Tunable, setting_name, tune
from trtllm_replayssm.bench.with_convolution import StepAfterConvolution, StepWithConvolution
from trtllm_replayssm.bench.workloads import CausalConv1dStep, ReplayStep, Workload
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.contract.geometry import Mamba2Geometry
from trtllm_replayssm.errors import CapacityError

_RUNS_OF_A_SETTING = 3
_LEAST_LAUNCHES_OF_A_SETTING = 128


class Job(NamedTuple):
    """One implementation of one case.

    Attributes:
        case: what to run.
        make: prepares our implementation, or
        peer: another library's.
    """

    case: KernelCase
    make: Callable[[KernelCase, torch.device], Workload] | None = None
    peer: Peer | None = None


def plan(
    steps: Sequence[KernelCase],
    prefills: Sequence[KernelCase] = (),
    *,
    with_peers: bool = True,
    with_phases: bool = False,
) -> list[Job]:
    """List what is measured: every case, its peers that can be imported right after it, and each convolution once.

    The steps of Mamba-2 are measured with their convolution, too; with phases all steps where no row flushes and where
    all do.
    """
    jobs: list[Job] = []
    for case in (*steps, *prefills):
        jobs.append(Job(case, ReplayStep if case.prefill_tokens is None else ReplayPrefill))
        jobs += [Job(case, peer=peer) for peer in peers_of(case)] if with_peers else []
    convolutions = {(case.geometry, case.replay.max_draft_len, case.batch_size): case for case in steps}
    jobs += [Job(case, CausalConv1dStep) for case in convolutions.values()]
    with_convolution = [case for case in steps if isinstance(case.geometry, Mamba2Geometry)]
    jobs += [Job(case, make) for case in with_convolution for make in (StepWithConvolution, StepAfterConvolution)]
    in_phases = steps if with_phases else ()
    return jobs + [Job(case, make) for case in in_phases for make in (StepWithoutFlush, StepOfFlushes)]


def measure(
    jobs: Sequence[Job], device: torch.device, *, copy_bandwidth: float, choices: Choices
) -> Iterator[Measurement | PeerFailure]:
    """Measure one job after the other.

    Args:
        jobs: what to measure.
        device: a CUDA device.
        copy_bandwidth: of the device, bytes per second, read plus written.
        choices: the launch settings of peers.

    Yields:
        One measurement per job, or why a peer has none; after a peer that the device does not survive, nothing more.

    Raises:
        NumericsError: outputs of ours differ from the CPU's; that case is not timed, nor are those after it.
        CapacityError: a case of ours does not fit the device.
    """
    for job in jobs:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            if job.peer is not None:
                measured = _measure_peer(job.case, job.peer, device, copy_bandwidth, choices)
            else:
                assert job.make is not None, "a job is ours or a peer's"
                measured = _measure_ours(job.case, job.make, device, copy_bandwidth)
        yield measured
        if isinstance(measured, PeerFailure) and not _is_usable(device):
            reason = f"not measured: no kernel runs on {device} since {measured.implementation} failed"
            yield PeerFailure(implementation="everything after it", case=measured.case, reason=reason)
            return


def _measure_ours(
    case: KernelCase, make: Callable[[KernelCase, torch.device], Workload], device: torch.device, copy_bandwidth: float
) -> Measurement:
    """Measure one job; its memory is released on return, before the next one takes its own."""
    torch.manual_seed(0)
    try:
        workload = make(case, device)
        output_error = workload.check()
        return summarize(case, workload, _time(workload), output_error, copy_bandwidth)
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(f"{case}: found too little free memory on {device}. Lower batch_sizes.") from error


def _measure_peer(
    case: KernelCase, peer: Peer, device: torch.device, copy_bandwidth: float, choices: Choices
) -> Measurement | PeerFailure:
    """Measure a peer in its fastest setting; whatever goes wrong in its code is reported, and the run goes on."""
    torch.manual_seed(0)
    try:
        workload: Tunable = peer(case, device)
        tune(workload, case, time_briefly, choices)
        output_error = workload.check()
        return summarize(case, workload, _time(workload), output_error, copy_bandwidth, setting_name(workload.setting))
    except Exception as error:  # noqa: BLE001 - another library's code may raise anything
        _is_usable(device)  # has CUDA forget a launch that it saw fail: the next one of anybody would be blamed for it
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return PeerFailure(implementation=peer.implementation, case=str(case), reason=reason)


def _is_usable(device: torch.device) -> bool:
    """Say whether a kernel runs on a device; after an access to foreign memory none does until the process ends."""
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError:
        return False
    return True


def _time(workload: Workload) -> Timing:
    num_steps = workload.num_steps
    return time_graph(partial(_launch_all, workload, num_steps), workload.num_sets * num_steps)


def time_briefly(workload: Workload) -> Timing:
    """Time a few steps of all sets: enough to tell one launch setting from another, since rows are out of step."""
    num_steps = min(workload.num_steps, -(-_LEAST_LAUNCHES_OF_A_SETTING // workload.num_sets))
    launches = workload.num_sets * num_steps
    return time_graph(partial(_launch_all, workload, num_steps), launches, runs=_RUNS_OF_A_SETTING)


def _launch_all(workload: Workload, num_steps: int) -> None:
    """Launch some steps of every set; outputs rotate as the sets do, for each is kept until the set's next one."""
    outputs: dict[int, Tensor] = {}
    for step in range(num_steps):
        for index in range(workload.num_sets):
            outputs[index] = workload.launch(step, index)


def summarize(
    case: KernelCase,
    workload: Workload,
    timing: Timing,
    output_error: float,
    copy_bandwidth: float,
    launch_settings: str | None = None,
) -> Measurement:
    """Hold a time to the bytes that had to move and to the bandwidth of a copy."""
    m, replay, num_bytes = case.geometry, case.replay, workload.traffic
    is_step = workload.kind in ("replay", "conventional", "with convolution", "one phase")
    has_conventional = workload.kind in ("replay", "conventional")
    conventional = traffic.conventional_bytes(m, replay, cases.ACTIVATION_DTYPE, batch_size=case.batch_size)
    limit = num_bytes.total / copy_bandwidth
    return Measurement(
        implementation=workload.implementation,
        kind=workload.kind,
        launch_settings=launch_settings,
        shape=case.shape,
        geometry=m,
        activation_dtype=cases.ACTIVATION_DTYPE,
        state_dtype=None if workload.kind == "convolution" else replay.state_dtype,
        history=replay.history if is_step else None,
        window=case.tokens,
        batch_size=case.batch_size,
        sets=workload.num_sets,
        launches=workload.num_sets * workload.num_steps,
        flush_fraction=workload.flush_fraction,
        mean_pending=workload.mean_pending,
        bytes=num_bytes._asdict(),
        us=1e6 * timing.seconds,
        spread=timing.spread,
        gigabytes_per_s=num_bytes.total / timing.seconds / 1e9,
        share_of_copy=num_bytes.total / timing.seconds / copy_bandwidth,
        limit_us=1e6 * limit,
        time_over_limit=timing.seconds / limit,
        conventional_limit_us=1e6 * conventional.total / copy_bandwidth if has_conventional else None,
        output_error=output_error,
    )
