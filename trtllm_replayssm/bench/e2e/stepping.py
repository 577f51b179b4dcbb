"""Steady decode steps without a serving loop: their inputs lie on the device before the first one runs.

All rows stand at about one context length, out of step with their neighbours, as the rows of a busy server are; each
step runs once and the lengths advance between steps as the protocol has it. What is left out is the host's work for
requests: planning, drafting, verdicts, text.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_replayssm.bench.cases import Cursors
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.pools import State
from trtllm_replayssm.runtime.step import StepInputs

# From any start the pending counts of a window of several tokens have mixed long before.
_BURN_IN_STEPS = 64
# What uninitialised memory must not be: numbers of a live model's size, so that nothing overflows.
_RANGES = {"dt_ring": (0.001, 0.1), "g_ring": (-0.5, -0.001)}
_STATE_SCALE = 0.05


class Trajectory(NamedTuple):
    """The lengths of all rows over consecutive steps.

    Attributes:
        cursors: lengths before every step, [steps, rows].
        accepted: tokens that every step keeps, [steps, rows].
    """

    cursors: Cursors
    accepted: NDArray[np.int64]


def draw_accepted(rng: np.random.Generator, max_draft_len: int, acceptance: float, num_rows: int) -> NDArray[np.int64]:
    """Draw how many tokens a window keeps, the bonus token counted.

    A draft is kept with the probability ``acceptance`` where those before it are.
    """
    is_kept = rng.random((num_rows, max_draft_len)) < acceptance
    accepted: NDArray[np.int64] = 1 + is_kept.cumprod(axis=1).sum(axis=1)
    return accepted


def draw_trajectory(
    replay: ReplayGeometry, num_rows: int, num_steps: int, *, context: int, acceptance: float, seed: int = 0
) -> Trajectory:
    """Draw lengths that begin at ``context`` committed tokens in every row.

    Args:
        replay: history and window.
        num_rows: rows of a step.
        num_steps: steps.
        context: tokens that are committed at the beginning.
        acceptance: probability that a draft is kept, the one before it being so.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    length = {"history": replay.history, "max_draft_len": replay.max_draft_len}
    past = np.full(num_rows, _BURN_IN_STEPS * replay.window)
    checkpoint = past - 1 - np.arange(num_rows) % replay.history
    for _ in range(_BURN_IN_STEPS if replay.max_draft_len else 0):
        accepted = draw_accepted(rng, replay.max_draft_len, acceptance, num_rows)
        past, checkpoint = protocol.advance(past, checkpoint, accepted, **length)
    # A checkpoint at position 0 would not be read.
    past, checkpoint = np.full(num_rows, context), np.maximum(context - (past - checkpoint), min(context, 1))
    drawn = []
    for _ in range(num_steps):
        accepted = draw_accepted(rng, replay.max_draft_len, acceptance, num_rows)
        drawn.append((past, checkpoint, accepted))
        past, checkpoint = protocol.advance(past, checkpoint, accepted, **length)
    pasts, checkpoints, kept = (np.stack(values) for values in zip(*drawn, strict=True))
    return Trajectory(Cursors(pasts.astype(np.int32), checkpoints.astype(np.int32)), kept)


def make_inputs(
    trajectory: Trajectory, replay: ReplayGeometry, vocab_size: int, device: torch.device, seed: int = 0
) -> list[StepInputs]:
    """Lay out all steps of a trajectory on a device: full windows of random tokens, row i in slot i."""
    past, checkpoint = trajectory.cursors
    num_steps, num_rows = past.shape
    window = replay.window
    ids = np.random.default_rng(seed).integers(0, vocab_size, (num_steps, num_rows, window), dtype=np.int32)
    on_device = [torch.from_numpy(values).to(device) for values in (ids, past, checkpoint)]
    num_tokens = torch.full((num_rows,), window, dtype=torch.int32, device=device)
    slot_ids = torch.arange(num_rows, dtype=torch.int32, device=device)
    positions = torch.arange(window, dtype=torch.int32, device=device).repeat(num_rows, 1)
    return [
        StepInputs(
            input_ids=step_ids,
            past_lengths=step_past,
            checkpoint_lengths=step_checkpoint,
            num_tokens=num_tokens,
            slot_ids=slot_ids,
            logits_indices=positions,
            first_slot=0,
            max_past_length=int(past[index].max()),
        )
        for index, (step_ids, step_past, step_checkpoint) in enumerate(zip(*on_device, strict=True))
    ]


def fill_states(states: Sequence[State], seed: int = 0) -> None:
    """Write random numbers of a live model's size into all pools and caches, as if every slot had run a prompt."""
    for index, (spec, pool) in enumerate(states):
        generator = torch.Generator(pool.device).manual_seed(seed + index)
        kind = spec.name.rpartition("_")[0]
        if kind in _RANGES:
            pool.uniform_(*_RANGES[kind], generator=generator)
        else:
            pool.normal_(0.0, _STATE_SCALE if kind.startswith("ssm_") else 1.0, generator=generator)


class StepTimes(NamedTuple):
    """Seconds of consecutive steps.

    Attributes:
        seconds: of each step, its greedy choice of tokens included, on the device from end to end.
        host_seconds: the mean time that the host took to queue one; above the device's, the host is what limits.
    """

    seconds: NDArray[np.float64]
    host_seconds: float


def run_steps(executor: Executor, steps: Sequence[StepInputs]) -> None:
    """Run steps and choose tokens greedily, as a decode without sampling does; nothing is read back."""
    for inputs in steps:
        _run(executor, inputs)


def time_steps(executor: Executor, steps: Sequence[StepInputs], num_warm_up: int) -> StepTimes:
    """Time every step after the first ``num_warm_up``."""
    # Without slots, for steps of its size to be captured: the last one's keys are the longest.
    _run(executor, _without_slots(steps[-1]))
    run_steps(executor, steps[:num_warm_up])
    marks, elapsed = _clock(executor.device)
    marks()
    started = time.perf_counter()
    for inputs in steps[num_warm_up:]:
        _run(executor, inputs)
        marks()
    host = time.perf_counter() - started
    return StepTimes(elapsed(), host / len(steps[num_warm_up:]))


def _run(executor: Executor, inputs: StepInputs) -> None:
    outputs = executor.step(inputs)
    with torch.profiler.record_function(CHOICE):
        outputs.logits.argmax(dim=-1)


def _without_slots(inputs: StepInputs) -> StepInputs:
    slot_ids = torch.full_like(inputs.slot_ids, -1)
    return replace(inputs, slot_ids=slot_ids, num_tokens=torch.zeros_like(inputs.num_tokens))


CHOICE = "choice of tokens"
"""Name of a range in a profile."""


def _clock(device: torch.device) -> tuple[Callable[[], None], Callable[[], NDArray[np.float64]]]:
    """Return what marks a moment in a device's work, and what gives the seconds between the marks."""
    if device.type != "cuda":
        moments: list[float] = []
        return lambda: moments.append(time.perf_counter()), lambda: np.diff(np.array(moments))
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    def elapsed() -> NDArray[np.float64]:
        events[-1].synchronize()
        return np.array([first.elapsed_time(second) / 1e3 for first, second in zip(events, events[1:], strict=False)])

    return mark, elapsed
