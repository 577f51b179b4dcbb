"""A driver of the protocol: pools full of NaN, any rows in any order, acceptance, commit, and the oracle beside it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests import tolerances
from tests.cases import Mamba2Case
from tests.oracle.mamba2 import Mamba2Sequence
from trtllm_replayssm import ops

POISON = (torch.nan, torch.inf, -torch.inf)


class Row(NamedTuple):
    """One row of a step: slot (-1: padding), window tokens, and how many of them are then accepted."""

    slot: int
    num_tokens: int
    accepted: int


class Window(NamedTuple):
    """A step's inputs on the CPU: x [b, S, H, P], dt [b, S, H], B and C [b, S, G, N]."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


def relative_error(found: Tensor, expected: np.ndarray) -> float:
    """Return the largest error of any leading index, relative to the largest magnitude there; inf for non-finite."""
    if found.numel() == 0:
        return 0.0
    got = found.double().cpu().numpy().reshape(len(expected), -1)
    want = expected.reshape(len(expected), -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(got - want).max(1) / np.abs(want).max(1)
    return float(errors.max()) if np.isfinite(errors).all() else np.inf


def bits(tensor: Tensor) -> Tensor:
    """Return a CPU copy as integers, so that NaN equals NaN and -0.0 differs from 0.0."""
    copied = tensor.detach().to("cpu", copy=True).contiguous()
    return copied.view(torch.int32 if copied.element_size() == 4 else torch.int16)


def int32(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def make_pools(case: Mamba2Case, num_slots: int, device: str) -> dict[str, Tensor]:
    """Allocate the state of all slots, every byte poisoned."""
    h, p, n, g, r = case.n_heads, case.head_dim, case.d_state, case.n_groups, case.ring_rows
    shapes = {
        "ssm_state": ((num_slots, h, p, n), case.state_dtype),
        "x_ring": ((num_slots, r, h, p), case.activation_dtype),
        "B_ring": ((num_slots, r, g, n), case.activation_dtype),
        "dt_ring": ((num_slots, r, h), torch.float32),
    }
    return {name: torch.full(shape, torch.nan, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}


def make_weights(case: Mamba2Case, seed: int) -> dict[str, Tensor]:
    """Draw A, D and dt_bias as Mamba-2 is initialised: A in [-16, -1], softplus(dt_bias) in [0.001, 0.1]."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(3, case.n_heads, generator=generator)
    step_size = torch.exp(uniform[0] * np.log(100.0) + np.log(0.001))
    return {"A": -1 - 15 * uniform[1], "D": 2 * uniform[2] - 1, "dt_bias": torch.log(torch.expm1(step_size))}


@dataclass
class Mamba2Driver:
    """Runs ``ops.mamba2`` on many slots and compares every step with the oracle.

    Attributes:
        case: shapes, types and replay constants.
        device: "cpu" or "cuda".
        num_slots: slots of the pools.
        seed: of weights and inputs.
        pools: the states; replace them to test other memory layouts.
        output_error: largest error of any output so far, relative.
        checkpoint_error: largest error of any written checkpoint so far, relative.
    """

    case: Mamba2Case
    device: str = "cpu"
    num_slots: int = 4
    seed: int = 0
    pools: dict[str, Tensor] = field(default_factory=dict)
    output_error: float = 0.0
    checkpoint_error: float = 0.0
    flushes: int = 0

    def __post_init__(self) -> None:
        self.pools = self.pools or make_pools(self.case, self.num_slots, self.device)
        self.weights = make_weights(self.case, self.seed)
        self.rng = np.random.default_rng(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.past = [0] * self.num_slots
        self.checkpoint = [0] * self.num_slots
        self.sequences = [self.new_sequence() for _ in range(self.num_slots)]

    def new_sequence(self) -> Mamba2Sequence:
        A, D, dt_bias = (self.weights[name].double().numpy() for name in ("A", "D", "dt_bias"))
        return Mamba2Sequence(A, D, dt_bias, self.case.head_dim, self.case.d_state)

    def reuse(self, slot: int) -> None:
        """Start a new sequence in a slot, the way the runtime does: both lengths to 0, memory as it is."""
        self.past[slot] = self.checkpoint[slot] = 0
        self.sequences[slot] = self.new_sequence()

    def poison_unused(self) -> None:
        """Fill what no step may read: ring rows outside [f, c) and checkpoints at position 0."""
        for slot, (c, f) in enumerate(zip(self.past, self.checkpoint, strict=True)):
            live = {t % self.case.ring_rows for t in range(f, c)}
            for row in set(range(self.case.ring_rows)) - live:
                for name in ("x_ring", "B_ring", "dt_ring"):
                    self.pools[name][slot, row] = POISON[row % len(POISON)]
            if f == 0:
                self.pools["ssm_state"][slot] = torch.nan

    def make_window(self, num_tokens: Sequence[int], seq_len: int) -> Window:
        """Draw inputs: slices of packed projections as in a model; tokens beyond a row's num_tokens are NaN."""
        case, batch = self.case, len(num_tokens)
        d_inner, d_bc = case.n_heads * case.head_dim, case.n_groups * case.d_state
        packed = torch.randn(batch, seq_len, d_inner + 2 * d_bc, generator=self.generator)
        wide_dt = torch.randn(batch, seq_len, d_inner + case.n_heads, generator=self.generator)
        for row, n in enumerate(num_tokens):
            packed[row, n:] = torch.nan
            wide_dt[row, n:] = torch.nan
        x, B, C = torch.split(packed.to(case.activation_dtype), [d_inner, d_bc, d_bc], dim=-1)
        return Window(
            torch.unflatten(x, -1, (case.n_heads, case.head_dim)),
            wide_dt.to(case.dt_dtype)[..., d_inner:],
            torch.unflatten(B, -1, (case.n_groups, case.d_state)),
            torch.unflatten(C, -1, (case.n_groups, case.d_state)),
        )

    def call(self, rows: Sequence[Row], window: Window) -> Tensor:
        """Run the op, nothing else."""
        slots = [row.slot for row in rows]
        x, dt, B, C = (_like(part, self.device) for part in window)
        A, D, dt_bias = (self.weights[name].to(self.device) for name in ("A", "D", "dt_bias"))
        return ops.mamba2(
            x=x,
            dt=dt,
            B=B,
            C=C,
            A=A,
            D=D,
            dt_bias=dt_bias,
            ssm_state=self.pools["ssm_state"],
            x_ring=self.pools["x_ring"],
            B_ring=self.pools["B_ring"],
            dt_ring=self.pools["dt_ring"],
            # Padding rows carry lengths that no slot could have: they must not matter.
            past_lengths=int32([self.past[s] if s >= 0 else -7 for s in slots], self.device),
            checkpoint_lengths=int32([self.checkpoint[s] if s >= 0 else 99 for s in slots], self.device),
            num_tokens=int32([row.num_tokens for row in rows], self.device),
            slot_ids=int32(slots, self.device),
            history=self.case.history,
            max_draft_len=self.case.max_draft_len,
        )

    def run(self, rows: Sequence[Row], seq_len: int, window: Window | None = None) -> Tensor:
        """Run one step with all comparisons, then commit it; return y on the CPU."""
        if window is None:
            window = self.make_window([r.num_tokens if r.slot >= 0 else 0 for r in rows], seq_len)
        before = {name: bits(pool) for name, pool in self.pools.items()}
        y = self.call(rows, window).cpu()
        assert y.shape == window.x.shape and y.dtype == window.x.dtype
        is_prefill = seq_len > self.case.window
        self._check_memory(before, rows, is_prefill)
        for index, row in enumerate(rows):
            used = row.num_tokens if row.slot >= 0 else 0
            assert (bits(y[index, used:]) == 0).all(), f"row {index}: outputs beyond its tokens are not zero"
            if row.slot >= 0:
                self._check_row(y[index], row, [part[index] for part in window], is_prefill)
        self._commit([row for row in rows if row.slot >= 0], is_prefill)
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
        wrote = (
            self.past[row.slot] + row.num_tokens > self.checkpoint[row.slot] if is_prefill else self.is_due(row.slot)
        )
        if wrote:
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

    def _commit(self, rows: Sequence[Row], is_prefill: bool) -> None:
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


def drive(driver: Mamba2Driver, num_steps: int, *, accept: str = "random") -> None:
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


def live(driver: Mamba2Driver) -> None:
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


def assert_no_later_token_is_read(case: Mamba2Case, device: str = "cpu") -> None:
    """Spoil one token of a window or a prompt: outputs before it keep every bit, its own is no longer finite."""
    T = case.window
    for seq_len, name, value in itertools.product((T, T + 9), Window._fields, (torch.nan, torch.inf)):
        outputs, spoilt = [], seq_len // 2
        for is_spoilt in (False, True):
            driver = Mamba2Driver(case, device, num_slots=1, seed=4)
            driver.run([Row(0, T, T)], T)
            window = driver.make_window([seq_len], seq_len)
            if is_spoilt:
                getattr(window, name)[:, spoilt] = value
            outputs.append(driver.call([Row(0, seq_len, 0)], window).cpu())
        before, after = (bits(y[:, :spoilt]) for y in outputs)
        assert torch.equal(before, after), f"{name} = {value} at token {spoilt} of {seq_len} reaches an earlier output"
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
