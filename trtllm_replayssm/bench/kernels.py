"""The run: every case is compared with the CPU, then timed, then held to its bytes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from trtllm_replayssm.bench import cases, peers
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.report import Measurement
from trtllm_replayssm.bench.timing import Timing, time_graph
from trtllm_replayssm.bench.workloads import CausalConv1dStep, Mamba2Step, Workload
from trtllm_replayssm.contract import traffic
from trtllm_replayssm.errors import CapacityError

Job = tuple[KernelCase, Callable[[KernelCase, torch.device], Workload]]


def plan(kernel_cases: Sequence[KernelCase]) -> list[Job]:
    """List what is measured: every case, each convolution once, and the peers that can be imported."""
    jobs: list[Job] = [(case, Mamba2Step) for case in kernel_cases]
    jobs += [(case, peers.MambaSsmStep) for case in kernel_cases if peers.has_mamba_ssm(case)]
    convolutions = {(case.geometry, case.replay.max_draft_len, case.batch_size): case for case in kernel_cases}
    return jobs + [(case, CausalConv1dStep) for case in convolutions.values()]


def measure(jobs: Sequence[Job], device: torch.device, *, copy_bandwidth: float) -> Iterator[Measurement]:
    """Measure one job after the other.

    Args:
        jobs: what to measure.
        device: a CUDA device.
        copy_bandwidth: of the device, bytes per second, read plus written.

    Yields:
        One measurement per job.

    Raises:
        NumericsError: outputs differ from the CPU's; that case is not timed, nor are those after it.
        CapacityError: a case does not fit the device.
    """
    for job in jobs:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            try:
                measurement = _measure(job, device, copy_bandwidth)
            except torch.cuda.OutOfMemoryError as error:
                raise CapacityError(
                    f"{job[0]}: found too little free memory on {device}. Lower batch_sizes."
                ) from error
        yield measurement


def _measure(job: Job, device: torch.device, copy_bandwidth: float) -> Measurement:
    """Measure one job; its memory is released on return, before the next one takes its own."""
    case, make_workload = job
    torch.manual_seed(0)
    workload = make_workload(case, device)
    output_error = workload.check()
    timing = time_graph(partial(_launch_all, workload), workload.num_sets * workload.num_steps)
    return summarize(case, workload, timing, output_error, copy_bandwidth)


def _launch_all(workload: Workload) -> None:
    """Launch every step of every set; outputs rotate as the sets do, for each is kept until the set's next one."""
    outputs: dict[int, Tensor] = {}
    for step in range(workload.num_steps):
        for index in range(workload.num_sets):
            outputs[index] = workload.launch(step, index)


def summarize(
    case: KernelCase, workload: Workload, timing: Timing, output_error: float, copy_bandwidth: float
) -> Measurement:
    """Hold a time to the bytes that had to move and to the bandwidth of a copy."""
    m, replay, num_bytes = case.geometry, case.replay, workload.traffic
    is_conv = workload.implementation == CausalConv1dStep.implementation
    conventional = traffic.conventional_bytes(m, replay, cases.ACTIVATION_DTYPE, batch_size=case.batch_size)
    limit = num_bytes.total / copy_bandwidth
    return Measurement(
        implementation=workload.implementation,
        shape=case.shape,
        geometry=m,
        activation_dtype=cases.ACTIVATION_DTYPE,
        state_dtype=None if is_conv else replay.state_dtype,
        history=None if is_conv else replay.history,
        window=replay.window,
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
        conventional_limit_us=None if is_conv else 1e6 * conventional.total / copy_bandwidth,
        output_error=output_error,
    )
