"""What is measured: one case per combination of shape, type, window and batch, and the cursors of its launches."""

from collections.abc import Sequence
from itertools import product
from typing import Final, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.bench.shapes import SHAPES, Family, check_kernels, parse_shape
from trtllm_replayssm.contract import defaults, flush_cycle, protocol, traffic
from trtllm_replayssm.contract.geometry import ActivationDtype, Frozen, RecurrenceGeometry, ReplayGeometry, StateDtype
from trtllm_replayssm.contract.memory import layer_checkpoint_bytes
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.plugins.specializations import MAX_ROWS

BATCH_SIZES: Final = (1, 8, 32, 128, 512)
STATE_DTYPES: Final[tuple[StateDtype, ...]] = ("float32", "bfloat16")
MAX_DRAFT_LENS: Final = (0, 3)
PREFILL_BATCH_SIZES: Final = (1, 8)
ACTIVATION_DTYPE: Final[ActivationDtype] = "bfloat16"

SEED: Final = 0
"""Of the lengths of all that is measured, so that ours and the peers' have the same."""

BYTES_BETWEEN_USES: Final = 256 * 2**20
"""What other launches touch between two uses of one state: several times the L2 cache of any GPU of today."""
# From any start the pending counts of a window of several tokens have mixed long before.
_BURN_IN_STEPS: Final = 64
_DRAWN_STEPS: Final = 16
# Fewer are a step's window.
_LEAST_PREFILL_TOKENS: Final = 16
# Each takes some tens of microseconds to capture.
_MOST_LAUNCHES: Final = 65536


class KernelCase(Frozen):
    """One shape, type, window and batch.

    Attributes:
        shape: the name that the user gave it.
        geometry: of the layer.
        replay: history, window and state type.
        batch_size: rows of a step.
        prefill_tokens: tokens of every row's prompt; None for a step.
    """

    shape: str
    geometry: RecurrenceGeometry
    replay: ReplayGeometry
    batch_size: int
    prefill_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of every row: of its prompt, or of a step's window."""
        return self.prefill_tokens or self.replay.window

    def __str__(self) -> str:
        window = f"T = {self.replay.window}" if self.prefill_tokens is None else f"prefill of {self.prefill_tokens}"
        return f"{self.shape}, {self.replay.state_dtype} state, {window}, batch {self.batch_size}"


class Cursors(NamedTuple):
    """Lengths of many slots over consecutive steps, int32 [steps, slots]."""

    past_lengths: NDArray[np.int32]
    checkpoint_lengths: NDArray[np.int32]

    def flushes(self, replay: ReplayGeometry) -> NDArray[np.bool_]:
        """Return [steps, slots]: whether the step folds the slot's pending rows."""
        past, checkpoint = self
        flushes = protocol.needs_flush(past, checkpoint, history=replay.history, max_draft_len=replay.max_draft_len)
        return flushes.astype(np.bool_)

    def mean_pending(self) -> float:
        """Return the pending rows of a slot, averaged over slots and steps."""
        return float((self.past_lengths - self.checkpoint_lengths).mean())


def make_cases(
    shapes: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    state_dtypes: Sequence[str] = STATE_DTYPES,
    max_draft_lens: Sequence[int] = MAX_DRAFT_LENS,
    *,
    history: int,
    family: Family = "mamba2",
) -> tuple[KernelCase, ...]:
    """Combine shapes, state types, windows and batch sizes, in this order; each combination once.

    Args:
        shapes: names or numbers; None for all that the family has names for.
        batch_sizes: rows of a step.
        state_dtypes: of the states in memory.
        max_draft_lens: draft tokens of a step.
        history: most pending rows.
        family: which recurrence.

    Raises:
        ConfigError: a shape or type that cannot be read, a batch size or window out of range, or too small a shape.
        UnsupportedError: a shape or window for which there is no kernel.
    """
    made = _combine(shapes, batch_sizes, state_dtypes, max_draft_lens, history=history, family=family)
    for case in made:  # now, not when the cases before it have been measured
        check_launches(case, step_sets(case) * num_steps(case.replay))
        check_launches(case, conv_sets(case))
    return made


def make_prefill_cases(
    shapes: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = PREFILL_BATCH_SIZES,
    state_dtypes: Sequence[str] = STATE_DTYPES,
    tokens: int = defaults.PREFILL_TOKENS,
    *,
    history: int,
    family: Family = "mamba2",
) -> tuple[KernelCase, ...]:
    """Combine shapes, state types and batch sizes of a prefill; none where there are no tokens.

    Raises:
        ConfigError: as ``make_cases``, or as many tokens as a step may have.
        UnsupportedError: as ``make_cases``.
    """
    if tokens == 0:
        return ()
    if tokens < _LEAST_PREFILL_TOKENS:
        raise ConfigError(
            f"prefill_tokens: found {tokens}; needed {_LEAST_PREFILL_TOKENS} or more, or 0 to leave the prefill out."
        )
    made = _combine(shapes, batch_sizes, state_dtypes, (0,), history=history, family=family)
    return tuple(case.model_copy(update={"prefill_tokens": tokens}) for case in made)


def _combine(
    shapes: Sequence[str] | None,
    batch_sizes: Sequence[int],
    state_dtypes: Sequence[str],
    max_draft_lens: Sequence[int],
    *,
    history: int,
    family: Family,
) -> tuple[KernelCase, ...]:
    combined = product(SHAPES[family] if shapes is None else shapes, state_dtypes, max_draft_lens, batch_sizes)
    return tuple(_make_case(*values, history=history, family=family) for values in dict.fromkeys(combined))


def _make_case(
    shape: str, state_dtype: str, max_draft_len: int, batch_size: int, *, history: int, family: Family
) -> KernelCase:
    if state_dtype not in (types := get_args(StateDtype)):
        raise ConfigError(f"state_dtype: found {state_dtype!r}; needed one of {', '.join(types)}.")
    protocol.check_history(history, max_draft_len)
    replay = ReplayGeometry(history=history, max_draft_len=max_draft_len, state_dtype=cast(StateDtype, state_dtype))
    geometry = parse_shape(shape, family)
    if not 1 <= batch_size <= MAX_ROWS:
        raise ConfigError(f"batch_sizes: found {batch_size}; needed 1 to {MAX_ROWS}.")
    check_kernels(geometry, replay, ACTIVATION_DTYPE)
    return KernelCase(shape=shape, geometry=geometry, replay=replay, batch_size=batch_size)


def num_sets(bytes_per_set: int) -> int:
    """Return over how many disjoint sets launches rotate: the others hold at least ``BYTES_BETWEEN_USES``."""
    return 1 + -(-BYTES_BETWEEN_USES // bytes_per_set)


def step_sets(case: KernelCase) -> int:
    """Return the sets of a step, in which the states are what is large."""
    return num_sets(case.batch_size * layer_checkpoint_bytes(case.geometry, case.replay.state_dtype))


def conv_sets(case: KernelCase) -> int:
    """Return the sets of a step of the convolution: no state is large there, all that a launch touches counts."""
    moved = traffic.conv_bytes(case.geometry, case.replay.window, ACTIVATION_DTYPE, batch_size=case.batch_size)
    return num_sets(int(moved.total))


def num_steps(replay: ReplayGeometry) -> int:
    """Return the consecutive steps of every set: a whole flush cycle, or as many as are drawn for a longer window."""
    return replay.history if replay.window == 1 else _DRAWN_STEPS


def check_launches(case: KernelCase, launches: int) -> None:
    """Refuse a case whose states are so small that too many launches would lie between two uses.

    Raises:
        ConfigError: more launches than a graph should hold.
    """
    if launches > _MOST_LAUNCHES:
        raise ConfigError(
            f"{case}: found {launches} launches in whole cycles over states that are not in the cache; needed at most "
            f"{_MOST_LAUNCHES}. Raise batch_sizes or take a larger shape."
        )


def draw_cursors(replay: ReplayGeometry, num_slots: int, num_steps: int, *, seed: int = SEED) -> Cursors:
    """Draw the lengths of desynchronised slots over consecutive steps, as the protocol's ``advance`` moves them.

    With T = 1 slot r begins with 1 + (r mod history) pending rows, and every step adds one: over ``history`` steps each
    slot is once at every count from 1 to history. With T > 1 the slots run until their counts have mixed; how many
    tokens a step keeps is drawn from ``flush_cycle.accepted_probabilities``. Ring positions are random, and no
    checkpoint stands at position 0.

    Args:
        replay: history and window.
        num_slots: slots, each with a trajectory of its own.
        num_steps: steps to return.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    checkpoint = rng.integers(1, 1 + 4 * replay.ring_rows, num_slots)
    past = checkpoint + 1 + np.arange(num_slots) % replay.history
    drawn: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    probabilities = flush_cycle.accepted_probabilities(replay.max_draft_len)
    burn_in = 0 if replay.window == 1 else _BURN_IN_STEPS
    for _ in range(burn_in + num_steps):
        drawn.append((past, checkpoint))
        accepted = 1 + rng.choice(replay.window, num_slots, p=probabilities)
        past, checkpoint = protocol.advance(
            past, checkpoint, accepted, history=replay.history, max_draft_len=replay.max_draft_len
        )
    return Cursors(*(np.stack(lengths).astype(np.int32) for lengths in zip(*drawn[burn_in:], strict=True)))
