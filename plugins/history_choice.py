"""``history="auto"``: the history whose steps cost least, from the bytes that they move and from what kernels reach.

A long history writes the state seldom and reads many ring rows; a short one the other way round. How often and how
many is the protocol's (``contract.flush_cycle``), how many bytes that are the layer's (``contract.traffic``), and which
kernel serves a history on a device is known here.
"""

from collections.abc import Sequence
from typing import Final

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.flush_cycle import flush_cycle
from trtllm_replayssm.contract.geometry import (
    AUTO,
    DTYPE_BYTES,
    ActivationDtype,
    History,
    Mamba2Geometry,
    ModelGeometry,
    RecurrenceGeometry,
    ReplayGeometry,
    StateDtype,
)
from trtllm_replayssm.contract.traffic import replay_bytes
from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.plugins.build import check_architecture
from trtllm_replayssm.plugins.compile_image import architecture_of
from trtllm_replayssm.plugins.specializations import GatedDeltaNetSpecialization, Mamba2Specialization, Role

CANDIDATES: Final = (8, 16, 32)
"""What "auto" chooses from, ascending."""

TIME_OVER_LIMIT: Final[dict[tuple[Role, int, int, int], float]] = {
    ("step", 4, 1, 16): 1.36,
    ("step", 4, 4, 16): 1.69,
    ("step", 2, 1, 16): 1.86,
    ("step", 2, 4, 16): 2.63,
    ("pipelined_step", 4, 1, 8): 0.97,
    ("pipelined_step", 4, 4, 8): 1.02,
    ("pipelined_step", 2, 1, 8): 1.01,
    ("pipelined_step", 2, 4, 8): 1.05,
    ("pipelined_step", 4, 1, 16): 0.98,
    ("pipelined_step", 4, 4, 16): 1.00,
    ("pipelined_step", 2, 1, 16): 1.01,
    ("pipelined_step", 2, 4, 16): 1.03,
    ("pipelined_step", 4, 1, 32): 0.98,
    ("pipelined_step", 4, 4, 32): 0.99,
    ("pipelined_step", 2, 1, 32): 1.02,
    ("pipelined_step", 2, 4, 32): 1.04,
}
"""(role, bytes of a state's element, T, history) -> measured time of a step over that of its bytes.

By ``bench kernels`` on an H200, bfloat16 activations, batch 128: of the generic step the mean of the three shapes, in
a run before there was another step; of the pipelined one with a history of 16 the mean of the three, with 8 that mean
times what super120b, measured alone, takes more of its bytes with 8 than with 16 (docs/performance.md); with 32 the
mean of nano9b and super120b by the functions behind the command (docs/kernels.md). What is not in the table counts as
its nearest neighbour in T, then in history.
"""

GATED_DELTA_NET_TIME_OVER_LIMIT: Final[dict[Role, float]] = {"step": 4.0, "pipelined_step": 1.04}
"""The same of Gated DeltaNet, by role alone: scratch measurements (docs/kernels.md), of the generic step at batch 8."""


def longest_history(history: History, max_draft_len: int) -> int:
    """Return the most that a history may become: itself, or the longest candidate.

    Raises:
        ConfigError: "auto", with windows longer than every candidate.
    """
    if history != AUTO:
        return history
    longest = max(CANDIDATES)
    if protocol.window_length(max_draft_len) > longest:
        raise ConfigError(
            f"history: found {AUTO!r} with max_draft_len={max_draft_len}; needed max_draft_len at most {longest - 1}. "
            f"Give history a number, {protocol.window_length(max_draft_len)} or more."
        )
    return longest


def resolve_history(
    history: History,
    geometry: ModelGeometry,
    *,
    max_draft_len: int,
    state_dtype: StateDtype,
    compute_capabilities: Sequence[int],
) -> int:
    """Return a history as a number: a number is itself, "auto" the cheapest candidate, of equal ones the shortest.

    Args:
        history: most pending rows W, or "auto".
        geometry: of the model.
        max_draft_len: most draft tokens of a step.
        state_dtype: type of the checkpoint in memory.
        compute_capabilities: devices that it must run on, as 10 * major + minor; their times add up. Without one, on
            the CPU, bytes alone decide.

    Raises:
        ConfigError: "auto", with windows longer than every candidate.
        UnsupportedError: "auto", and no candidate has kernels for all of the devices.
    """
    if history != AUTO:
        return history
    longest_history(history, max_draft_len)
    architectures = [architecture_of(capability) for capability in compute_capabilities]
    costs: dict[int, float] = {}
    refusals: list[UnsupportedError] = []
    for candidate in CANDIDATES:
        if candidate < protocol.window_length(max_draft_len):
            continue
        replay = ReplayGeometry(history=candidate, max_draft_len=max_draft_len, state_dtype=state_dtype)
        try:
            costs[candidate] = _cost(geometry, replay, architectures)
        except UnsupportedError as error:
            refusals.append(error)
    if not costs:
        raise refusals[0]
    return min(costs, key=lambda candidate: costs[candidate])


def bytes_per_step(m: RecurrenceGeometry, replay: ReplayGeometry, dtype: str) -> float:
    """Return what one row's step of a layer moves on average in the long run.

    Args:
        m: shape of the layer.
        replay: history, window and state type.
        dtype: activation type.
    """
    cycle = flush_cycle(replay.history, replay.max_draft_len)
    moved = replay_bytes(
        m, replay, dtype, batch_size=1, flush_fraction=cycle.flush_fraction, mean_pending=cycle.mean_pending
    )
    return moved.total


def time_over_limit(role: Role, replay: ReplayGeometry) -> float:
    """Return by how much a kernel's step takes longer than its bytes, as measured (``TIME_OVER_LIMIT``)."""
    element_bytes = DTYPE_BYTES[replay.state_dtype]
    return min(
        (abs(replay.window - window), abs(replay.history - history), ratio)
        for (measured, size, window, history), ratio in TIME_OVER_LIMIT.items()
        if (measured, size) == (role, element_bytes)
    )[2]


def _cost(geometry: ModelGeometry, replay: ReplayGeometry, architectures: Sequence[str]) -> float:
    m = geometry.recurrence
    if m is None:
        return 0.0
    return _slowness(m, replay, geometry.dtype, architectures) * bytes_per_step(m, replay, geometry.dtype)


def _slowness(
    m: RecurrenceGeometry, replay: ReplayGeometry, dtype: ActivationDtype, architectures: Sequence[str]
) -> float:
    """Return by how much longer than its bytes a step takes, summed over devices that have kernels; 1 without any."""
    if not architectures:
        return 1.0
    if isinstance(m, Mamba2Geometry):
        roles = _step_roles(Mamba2Specialization.of_layer(m, replay, dtype), architectures)
        return sum(time_over_limit(role, replay) for role in roles)
    roles = _step_roles(GatedDeltaNetSpecialization.of_layer(m, replay, dtype), architectures)
    return sum(GATED_DELTA_NET_TIME_OVER_LIMIT[role] for role in roles)


def _step_roles(
    specialization: Mamba2Specialization | GatedDeltaNetSpecialization, architectures: Sequence[str]
) -> tuple[Role, ...]:
    """Return the kernel that runs a step on each architecture, where an image has all its kernels."""
    chosen: list[Role] = []
    for architecture in architectures:
        roles = specialization.roles(architecture)
        for role in roles:
            check_architecture(specialization, role, architecture)
        chosen.append("pipelined_step" if "pipelined_step" in roles else "step")
    return tuple(chosen)
