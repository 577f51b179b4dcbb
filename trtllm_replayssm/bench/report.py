"""What a run found, as one JSON document."""

from typing import Final, Literal

from trtllm_replayssm.bench.machine import Machine
from trtllm_replayssm.contract.geometry import ActivationDtype, Frozen, RecurrenceGeometry, StateDtype

REPLAY: Final = {op: f"replay {op}" for op in ("mamba2", "gated_delta_net")}
PREFILL: Final = {op: f"prefill {op}" for op in REPLAY}
"""Name of an op -> that of our implementation of its steps, and of its prefills."""
OURS: Final = (*REPLAY.values(), *PREFILL.values())
"""Our implementations that have peers."""


Kind = Literal["replay", "conventional", "prefill", "convolution", "with convolution", "one phase"]


class Measurement(Frozen):
    """One implementation of one case.

    Attributes:
        implementation: what was launched.
        kind: of the work: a replayed step, a step that writes a state per token, a prefill, the convolution, a
            replayed step and the convolution before it, replayed steps in which no row flushes or all do.
        launch_settings: those of a peer, the fastest of what was tried; None where nothing is to choose.
        shape: name of the shape.
        geometry: the shape.
        activation_dtype: of inputs, outputs and rings.
        state_dtype: of the state in memory; None for the convolution.
        history: most pending rows; None for the convolution.
        window: tokens per row: T of a step, or the prompt of a prefill.
        batch_size: rows of a step.
        sets: disjoint sets of slots that the launches rotate over.
        launches: in the graph that was timed.
        flush_fraction: rows that wrote their checkpoint, of all rows; None without replay.
        mean_pending: pending rows that a row read; None without replay.
        bytes: of a launch, by kind.
        us: median time of a launch in microseconds.
        spread: slowest replay of the graph minus the fastest, as a share of the median.
        gigabytes_per_s: bytes over time.
        share_of_copy: the same, as a share of the copy bandwidth.
        limit_us: bytes over the copy bandwidth.
        time_over_limit: us over limit_us.
        conventional_limit_us: the same limit for a step without replay, one state written per token.
        output_error: largest error in the comparison with the CPU, relative to the token's largest output.
    """

    implementation: str
    kind: Kind
    launch_settings: str | None
    shape: str
    geometry: RecurrenceGeometry
    activation_dtype: ActivationDtype
    state_dtype: StateDtype | None
    history: int | None
    window: int
    batch_size: int
    sets: int
    launches: int
    flush_fraction: float | None
    mean_pending: float | None
    bytes: dict[str, float]
    us: float
    spread: float
    gigabytes_per_s: float
    share_of_copy: float
    limit_us: float
    time_over_limit: float
    conventional_limit_us: float | None
    output_error: float


class Comparison(Frozen):
    """Our time for a case beside the peers'.

    Attributes:
        implementation: ours.
        shape: name of the shape.
        state_dtype: of the state in memory.
        window: tokens per row, T or the prompt.
        batch_size: rows.
        us: our time in microseconds.
        limit_us: the bytes that ours must move over the copy bandwidth.
        peers: implementation -> microseconds, each in its fastest setting.
        best: kind of work -> the fastest peer.
        time_over_best: kind of work -> our time over that peer's; below 1 ours is faster.
    """

    implementation: str
    shape: str
    state_dtype: StateDtype | None
    window: int
    batch_size: int
    us: float
    limit_us: float
    peers: dict[str, float]
    best: dict[Kind, str]
    time_over_best: dict[Kind, float]


class PeerFailure(Frozen):
    """A peer that has no time.

    Attributes:
        implementation: what was launched.
        case: shape, state type, window and batch.
        reason: the first line of what its code raised, or what was wrong with its output.
    """

    implementation: str
    case: str
    reason: str


class KernelReport(Frozen):
    """A whole run.

    Attributes:
        format: of this document.
        command: the command line, every option written out.
        machine: device, versions, clocks.
        copy_gigabytes_per_s: torch's copy within the device in this run, read plus written.
        peers: library -> version, or "not installed"; empty where they were not asked for.
        measurements: in the order of the run.
        comparisons: ours beside the peers.
        failures: peers that were left out.
    """

    format: Literal["trtllm-replayssm bench kernels 4"] = "trtllm-replayssm bench kernels 4"
    command: str
    machine: Machine
    copy_gigabytes_per_s: float
    peers: dict[str, str]
    measurements: tuple[Measurement, ...]
    comparisons: tuple[Comparison, ...] = ()
    failures: tuple[PeerFailure, ...] = ()
