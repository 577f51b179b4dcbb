"""``ops.mamba2_conventional``: the decode that replay is compared with, held to the same oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.cases import FP32_CASES, Mamba2Case
from tests.ops.driver import Mamba2Driver, Row, Window, bits, int32, random_row
from tests.ops.strategies import all_types, bounded, mamba2_cases, seeds
from trtllm_replayssm import ops

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


class ConventionalDriver(Mamba2Driver):
    """The same life of slots with snapshots in place of checkpoint and rings."""

    def __post_init__(self) -> None:
        case = self.case
        shape = (self.num_slots, case.window + 1, case.n_heads, case.head_dim, case.d_state)
        self.pools = {"snapshots": torch.full(shape, torch.nan, dtype=case.state_dtype, device=self.device)}
        super().__post_init__()

    def poison_unused(self) -> None:
        for slot, c in enumerate(self.past):
            for row in range(self.case.window + 1):
                if c == 0 or row != c % (self.case.window + 1):
                    self.pools["snapshots"][slot, row] = torch.nan

    def call(self, rows: list[Row], window: Window) -> Tensor:  # type: ignore[override]
        x, dt, B, C = (part.to(self.device) for part in window)
        A, D, dt_bias = (self.weights[name].to(self.device) for name in ("A", "D", "dt_bias"))
        return ops.mamba2_conventional(
            x,
            dt,
            B,
            C,
            A,
            D,
            dt_bias,
            self.pools["snapshots"],
            int32([self.past[r.slot] if r.slot >= 0 else -7 for r in rows], self.device),
            int32([r.num_tokens for r in rows], self.device),
            int32([r.slot for r in rows], self.device),
            max_draft_len=self.case.max_draft_len,
        )

    def _check_memory(self, before: dict[str, Tensor], rows: list[Row], is_prefill: bool) -> None:  # type: ignore[override]
        may_change = torch.zeros(self.num_slots, self.case.window + 1, dtype=torch.bool)
        for slot, n, _ in rows:
            if slot >= 0:
                written = range(n, n + 1) if is_prefill and n > 0 else range(1, n + 1)
                may_change[slot, [(self.past[slot] + t) % (self.case.window + 1) for t in written]] = True
        changed = (bits(self.pools["snapshots"]) != before["snapshots"]).flatten(2).any(-1)
        assert not (changed & ~may_change).any(), "snapshots changed that belong to no token"

    def _check_row(self, y: Tensor, row: Row, inputs: list[Tensor], is_prefill: bool) -> None:
        self.checkpoint[row.slot] = self.past[row.slot]  # so that the base class never looks for a checkpoint
        tokens = [part[: row.num_tokens] for part in inputs]
        super()._check_row(y, row, tokens, is_prefill=False)
        if is_prefill:
            assert row.accepted == row.num_tokens

    def is_due(self, slot: int) -> bool:
        return False

    def _commit(self, rows: list[Row], is_prefill: bool) -> None:  # type: ignore[override]
        for row in rows:
            self.past[row.slot] += row.accepted


def drive(driver: ConventionalDriver, num_steps: int) -> None:
    rng = driver.rng
    for _ in range(num_steps):
        if rng.random() < 0.3:
            driver.poison_unused()
        if rng.random() < 0.03:
            driver.reuse(int(rng.integers(driver.num_slots)))
        is_prefill = rng.random() < 0.08
        T = driver.case.window
        seq_len = int(rng.integers(T + 1, T + 90)) if is_prefill else int(rng.integers(1, T + 1))
        slots = rng.permutation(driver.num_slots)[: rng.integers(0, driver.num_slots + 1)].tolist()
        rows = [random_row(rng, slot, seq_len, "all" if is_prefill else "random") for slot in slots]
        rows.insert(int(rng.integers(0, len(rows) + 1)), Row(-1, int(rng.integers(0, seq_len + 1)), 0))
        driver.run(rows, seq_len)
    driver.assert_within_bounds()


@bounded(25)
@given(case=mamba2_cases(), seed=seeds)
def test_any_shape_and_any_life_of_slots_follows_the_recurrence(case: Mamba2Case, seed: int) -> None:
    drive(ConventionalDriver(case, seed=seed), 30)


@bounded(10)
@given(case=mamba2_cases(all_types), seed=seeds)
def test_any_type_follows_the_recurrence_to_its_rounding(case: Mamba2Case, seed: int) -> None:
    driver = ConventionalDriver(case, seed=seed)
    for _ in range(4):  # a 16-bit state that is rounded per token drifts; few tokens keep within the flush bound
        driver.run([Row(slot, case.window, 1) for slot in range(4)], case.window)
    driver.assert_within_bounds()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: case.name)
def test_errors_do_not_grow_over_hundreds_of_steps(case: Mamba2Case, device: str) -> None:
    drive(ConventionalDriver(case, device, seed=21), 200)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_batch_of_padding_changes_no_byte(device: str) -> None:
    driver = ConventionalDriver(FP32_CASES[1], device)
    driver.pools["snapshots"][0] = torch.inf
    before = bits(driver.pools["snapshots"])
    for seq_len in (driver.case.window, 40):
        driver.run([Row(-1, 3, 0), Row(-1, 0, 0)], seq_len)
    assert torch.equal(bits(driver.pools["snapshots"]), before)


def test_replay_and_the_conventional_decode_agree_over_rejections() -> None:
    case = FP32_CASES[1]
    replayed, conventional = Mamba2Driver(case, seed=31), ConventionalDriver(case, seed=31)
    rng = np.random.default_rng(31)
    for _ in range(60):
        rows = [random_row(rng, slot, case.window, "random") for slot in rng.permutation(4).tolist()]
        window = replayed.make_window([row.num_tokens for row in rows], case.window)
        left, right = replayed.run(rows, case.window, window), conventional.run(rows, case.window, window)
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
