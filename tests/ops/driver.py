"""A driver of the protocol: pools full of NaN, any rows in any order, acceptance, commit, and the oracle beside it.

What it needs to know of a recurrence is in a subclass: ``mamba2_driver``, ``gated_delta_net_driver``.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from tests import tolerances
from tests.cases import ReplayCase
from trtllm_replayssm import ops

POISON = (torch.nan, torch.inf, -torch.inf)


class Row(NamedTuple):
    """One row of a step: slot (-1: padding), window tokens, and how many of them are then accepted."""

    slot: int
    num_tokens: int
    accepted: int


class Sequence64(Protocol):
    """What the oracles of all recurrences have in common."""

    state: np.ndarray

    def copy(self) -> Self: ...

    def run(self, *tokens: Any) -> np.ndarray: ...


def relative_error(found: Tensor, expected: np.ndarray) -> float:
    """Return the largest error of any leading index, relative to the largest magnitude there; inf for non-finite.

    Where zeros are expected, zeros have no error, and anything else an infinite one.
    """
    if found.numel() == 0:
        return 0.0
    got = found.double().cpu().numpy().reshape(len(expected), -1)
    want = expected.reshape(len(expected), -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        differences = np.abs(got - want).max(1)
        errors = np.where(differences == 0, 0.0, differences / np.abs(want).max(1))
    return float(errors.max()) if np.isfinite(errors).all() else np.inf


def bits(tensor: Tensor) -> Tensor:
    """Return a CPU copy as integers, so that NaN equals NaN and -0.0 differs from 0.0."""
    copied = tensor.detach().to("cpu", copy=True).contiguous()
    return copied.view(torch.int32 if copied.element_size() == 4 else torch.int16)


def int32(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def initial_dt_bias(uniform: Tensor) -> Tensor:
    """Return biases as the models are initialised: softplus(dt_bias) in [0.001, 0.1]."""
    return torch.log(torch.expm1(torch.exp(uniform * np.log(100.0) + np.log(0.001))))


@dataclass
class Driver(ABC):
    """Runs an op on many slots and compares every step with the oracle.

    Attributes:
        case: shapes, types and replay constants.
        device: "cpu" or "cuda".
        num_slots: slots of the pools.
        seed: of weights and inputs.
        pools: the states; replace them to test other memory layouts.
        output_error: largest error of any output so far, relative.
        checkpoint_error: largest error of any written checkpoint so far, relative.
        flushes: checkpoints written so far.
        op_name: of the op, in ``ops``.
        rings: names of its rings.
        saturating: inputs whose infinities have a limit, so that the outputs stay finite.
    """

    case: ReplayCase
    device: str = "cpu"
    num_slots: int = 4
    seed: int = 0
    pools: dict[str, Tensor] = field(default_factory=dict)
    output_error: float = 0.0
    checkpoint_error: float = 0.0
    flushes: int = 0

    op_name: ClassVar[str]
    rings: ClassVar[tuple[str, ...]]
    saturating: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.pools = self.pools or self.make_pools()
        self.weights = self.make_weights()
        self.rng = np.random.default_rng(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.past = [0] * self.num_slots
        self.checkpoint = [0] * self.num_slots
        self.sequences = [self.new_sequence() for _ in range(self.num_slots)]

    @abstractmethod
    def make_pools(self) -> dict[str, Tensor]:
        """Allocate the state of all slots, every byte poisoned."""

    @abstractmethod
    def make_weights(self) -> dict[str, Tensor]:
        """Draw the op's constants, as the models are initialised."""

    @abstractmethod
    def new_sequence(self) -> Any:
        """Return the oracle of a sequence without tokens: a ``Sequence64``."""

    @abstractmethod
    def make_window(self, num_tokens: Sequence[int], seq_len: int) -> Any:
        """Draw a step's inputs, named as the op's arguments; tokens beyond a row's num_tokens are NaN."""

    @abstractmethod
    def like_output(self, window: Any) -> Tensor:
        """Return the input that has the output's shape and type."""

    def reuse(self, slot: int) -> None:
        """Start a new sequence in a slot, the way the runtime does: both lengths to 0, memory as it is."""
        self.past[slot] = self.checkpoint[slot] = 0
        self.sequences[slot] = self.new_sequence()

    def poison_unused(self) -> None:
        """Fill what no step may read: ring rows outside [f, c) and checkpoints at position 0."""
        for slot, (c, f) in enumerate(zip(self.past, self.checkpoint, strict=True)):
            live = {t % self.case.ring_rows for t in range(f, c)}
            for row in set(range(self.case.ring_rows)) - live:
                for name in self.rings:
                    self.pools[name][slot, row] = POISON[row % len(POISON)]
            if f == 0:
                self.pools["ssm_state"][slot] = torch.nan

    def tensors(self, rows: Sequence[Row], window: Any) -> dict[str, Tensor]:
        """Return the op's tensors on the device, by name."""
        slots = [row.slot for row in rows]
        moved = {name: _like(part, self.device) for name, part in window._asdict().items()}
        moved |= {name: weight.to(self.device) for name, weight in self.weights.items()}
        # Padding rows carry lengths that no slot could have: they must not matter.
        lengths = {
            "past_lengths": [self.past[s] if s >= 0 else -7 for s in slots],
            "checkpoint_lengths": [self.checkpoint[s] if s >= 0 else 99 for s in slots],
            "num_tokens": [row.num_tokens for row in rows],
            "slot_ids": slots,
        }
        return moved | self.pools | {name: int32(values, self.device) for name, values in lengths.items()}

    def call(self, rows: Sequence[Row], window: Any) -> Tensor:
        """Run the op, nothing else."""
        op = getattr(ops, self.op_name)
        y = op(**self.tensors(rows, window), history=self.case.history, max_draft_len=self.case.max_draft_len)
        assert isinstance(y, Tensor)
        return y

    def run(self, rows: Sequence[Row], seq_len: int, window: Any = None) -> Tensor:
        """Run one step with all comparisons, then commit it; return y on the CPU."""
        if window is None:
            window = self.make_window([r.num_tokens if r.slot >= 0 else 0 for r in rows], seq_len)
        before = {name: bits(pool) for name, pool in self.pools.items()}
        y = self.call(rows, window).cpu()
        like = self.like_output(window)
        assert y.shape == like.shape and y.dtype == like.dtype
        is_prefill = seq_len > self.case.window
        self._check_memory(before, rows, is_prefill)
        for index, row in enumerate(rows):
            used = row.num_tokens if row.slot >= 0 else 0
            assert (bits(y[index, used:]) == 0).all(), f"row {index}: outputs beyond its tokens are not zero"
            if row.slot >= 0:
                self._check_row(y[index], row, [part[index] for part in window], is_prefill)
        self.commit([row for row in rows if row.slot >= 0], is_prefill=is_prefill)
        return y

    def is_due(self, slot: int) -> bool:
        """The flush rule, written out again."""
        return self.past[slot] - self.checkpoint[slot] + self.case.window > self.case.history

    def writes_checkpoint(self, slot: int, num_tokens: int, is_prefill: bool) -> bool:
        """A step folds when it is due; a prefill folds everything, if there is anything."""
        return self.past[slot] + num_tokens > self.checkpoint[slot] if is_prefill else self.is_due(slot)

    def _check_row(self, y: Tensor, row: Row, inputs: list[Tensor], is_prefill: bool) -> None:
        sequence = self.sequences[row.slot]
        tokens = [part[: row.num_tokens].double().numpy() for part in inputs]
        drafted = sequence.copy()
        expected = drafted.run(*tokens)
        self.output_error = max(self.output_error, relative_error(y[: row.num_tokens], expected))
        folded = drafted if is_prefill else sequence
        if self.writes_checkpoint(row.slot, row.num_tokens, is_prefill):
            self.flushes += 1
            error = relative_error(self.pools["ssm_state"][row.slot][None], folded.state[None])
            self.checkpoint_error = max(self.checkpoint_error, error)
        sequence.run(*(part[: row.num_tokens if is_prefill else row.accepted] for part in tokens))

    def _check_memory(self, before: dict[str, Tensor], rows: Sequence[Row], is_prefill: bool) -> None:
        """Only window rows of the rings and due checkpoints may have changed, byte for byte."""
        may_write_state = torch.zeros(self.num_slots, dtype=torch.bool)
        may_write_row = torch.zeros(self.num_slots, self.case.ring_rows, dtype=torch.bool)
        for slot, n, _ in rows:
            if slot >= 0:
                may_write_state[slot] = self.writes_checkpoint(slot, n, is_prefill)
                for t in range(0 if is_prefill else n):
                    may_write_row[slot, (self.past[slot] + t) % self.case.ring_rows] = True
        for name, pool in self.pools.items():
            allowed = may_write_state if name == "ssm_state" else may_write_row
            changed = (bits(pool) != before[name]).flatten(allowed.dim()).any(-1)
            assert not (changed & ~allowed).any(), f"{name}: bytes changed that belong to no window or flush"

    def commit(self, rows: Sequence[Row], *, is_prefill: bool) -> None:
        """Advance the lengths of the rows' slots by what they accept."""
        slots = [row.slot for row in rows]
        past, checkpoint = int32([self.past[s] for s in slots]), int32([self.checkpoint[s] for s in slots])
        if is_prefill:
            past = past + int32([row.num_tokens for row in rows])
            checkpoint = past
        else:
            past, checkpoint = ops.advance(
                past,
                checkpoint,
                int32([row.accepted for row in rows]),
                history=self.case.history,
                max_draft_len=self.case.max_draft_len,
            )
        for slot, c, f in zip(slots, past.tolist(), checkpoint.tolist(), strict=True):
            self.past[slot], self.checkpoint[slot] = c, f

    def assert_within_bounds(self) -> None:
        bound = self.case.bound(self.device)
        print(  # noqa: T201 - the share of the bound that was used; pytest shows it with -s and on failure
            f"{self.case.name} on {self.device}: output {self.output_error / bound.output:.0%} and checkpoint "
            f"{self.checkpoint_error / bound.checkpoint:.0%} of the bound, {self.flushes} folds"
        )
        assert self.output_error <= bound.output, f"output error {self.output_error:.2e}; {bound}"
        assert self.checkpoint_error <= bound.checkpoint, f"checkpoint error {self.checkpoint_error:.2e}; {bound}"

    def exceeds_bounds(self) -> bool:
        """Say whether a planted fault shows clearly."""
        bound = self.case.bound(self.device)
        return self.output_error > tolerances.TOOTH * bound.output


def drive(driver: Driver, num_steps: int, *, accept: str = "random") -> None:
    """Run random steps: any slots in any order, padding, uneven windows, prefills, poison, slots used anew.

    Args:
        driver: what to run.
        num_steps: steps.
        accept: "random", "all", "none" (every draft rejected, the first token kept).
    """
    rng, window = driver.rng, driver.case.window
    for _ in range(num_steps):
        if rng.random() < 0.3:
            driver.poison_unused()
        if rng.random() < 0.02:
            driver.reuse(int(rng.integers(driver.num_slots)))
        seq_len = window if rng.random() < 0.7 else int(rng.integers(1, window + 1))
        if rng.random() < 0.04:  # a prefill, sometimes of more than one block of the scan
            seq_len = int(rng.integers(window + 1, window + 90))
        slots = rng.permutation(driver.num_slots)[: rng.integers(1, driver.num_slots + 1)].tolist()
        rows = [random_row(rng, slot, seq_len, accept) for slot in slots]
        for _ in range(int(rng.integers(0, 3))):
            rows.insert(int(rng.integers(0, len(rows) + 1)), Row(-1, int(rng.integers(0, seq_len + 1)), 0))
        driver.run(rows, seq_len)
    driver.assert_within_bounds()


def live(driver: Driver) -> None:
    """One life of two slots: prefill, windows past a flush and a wrap, rejections, idle rows, a second chunk."""
    T, history = driver.case.window, driver.case.history
    driver.run([Row(1, 3, 3), Row(-1, 2, 0), Row(0, T + 33, T + 33)], T + 33)
    for step in range(history // T + 3):
        driver.poison_unused()
        n = step % (T + 1)
        driver.run([Row(0, T, T), Row(-1, T, 0), Row(1, n, n - n // 2)], T)
    driver.run([Row(1, 0, 0), Row(0, 0, 0)], 1)
    driver.poison_unused()
    driver.run([Row(0, 2, 2), Row(1, 0, 0)], T + 2)
    driver.reuse(1)
    driver.poison_unused()
    driver.run([Row(1, 1, 1), Row(0, T, 1)], T)


def assert_no_later_token_is_read(make: Callable[..., Driver], case: ReplayCase, device: str = "cpu") -> None:
    """Spoil one token of a window or a prompt: outputs before it keep every bit, its own is no longer finite."""
    T = case.window
    names = make(case, num_slots=1).make_window([], 1)._fields
    for seq_len, name, value in itertools.product((T, T + 9), names, (torch.nan, torch.inf)):
        outputs, spoilt = [], seq_len // 2
        for is_spoilt in (False, True):
            driver = make(case, device=device, num_slots=1, seed=4)
            driver.run([Row(0, T, T)], T)
            window = driver.make_window([seq_len], seq_len)
            if is_spoilt:
                getattr(window, name)[:, spoilt] = value
            outputs.append(driver.call([Row(0, seq_len, 0)], window).cpu())
        before, after = (bits(y[:, :spoilt]) for y in outputs)
        assert torch.equal(before, after), f"{name} = {value} at token {spoilt} of {seq_len} reaches an earlier output"
        if value is torch.inf and name in driver.saturating:
            continue
        assert not outputs[1][:, spoilt].isfinite().all(), f"{name} = {value} at token {spoilt} of {seq_len} is lost"


def random_row(rng: np.random.Generator, slot: int, seq_len: int, accept: str) -> Row:
    n = seq_len if rng.random() < 0.6 else int(rng.integers(0, seq_len + 1))
    accepted = {"random": int(rng.integers(0, n + 1)), "all": n, "none": min(n, 1)}[accept]
    return Row(slot, n, accepted)


def _like(part: Tensor, device: str) -> Tensor:
    """Move a slice to a device with its strides: the packed buffer moves, not a dense copy of the slice."""
    if device == "cpu":
        return part
    base = part._base if part._base is not None else part
    return base.to(device).as_strided(part.shape, part.stride(), part.storage_offset())
