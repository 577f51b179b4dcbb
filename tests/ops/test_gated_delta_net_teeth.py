"""The tests of ``ops.gated_delta_net`` bite: every altered copy of the reference exceeds a bound tenfold."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests import tolerances
from tests.cases import GATED_DELTA_NET_FP32_CASES
from tests.ops.driver import Row
from tests.ops.gated_delta_net_driver import GatedDeltaNetDriver
from trtllm_replayssm.ops.reference import decays, slots
from trtllm_replayssm.ops.reference import gated_delta_net as reference

T4 = GATED_DELTA_NET_FP32_CASES[1]
T = T4.window

Alter = Callable[[pytest.MonkeyPatch], None]


def as_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def round_beta(patch: pytest.MonkeyPatch) -> None:
    load = reference.load_window

    def altered(*arguments: Tensor) -> reference.Window:
        window = load(*arguments)  # type: ignore[arg-type]
        return window._replace(beta=as_bfloat16(window.beta))

    patch.setattr(reference, "load_window", altered)


def round_u_in_the_ring(patch: pytest.MonkeyPatch) -> None:
    store = slots.store_ring

    def altered(rows: Tensor, ring: Tensor, cursors: slots.Cursors) -> None:
        store(as_bfloat16(rows) if rows.shape[-1] == T4.value_dim else rows, ring, cursors)

    patch.setattr(reference, "store_ring", altered)


def round_keys_once_normalised(patch: pytest.MonkeyPatch) -> None:
    normalise = reference.normalise
    patch.setattr(reference, "normalise", lambda rows, n_heads: as_bfloat16(normalise(rows, n_heads)))


def lengthen_short_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "_NORM_EPS", 1e-12)


def share_keys_in_turn(patch: pytest.MonkeyPatch) -> None:
    def altered(rows: Tensor, n_heads: int) -> Tensor:
        unit = rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)
        return unit.repeat(1, 1, n_heads // rows.size(2), 1)

    patch.setattr(reference, "normalise", altered)


def solve_for_u_without_the_window(patch: pytest.MonkeyPatch) -> None:
    """Each token's u from the rows before the window alone: no substitution."""
    replay = reference.replay

    def altered(state: Tensor, pending: reference.Rows, window: reference.Window) -> tuple[Tensor, Tensor]:
        since_start = window.g.cumsum(1)
        alone = [
            replay(state, pending, reference.Window(*(part[:, s : s + 1] for part in window))._replace(g=now))
            for s, now in enumerate(torch.split(since_start, 1, dim=1))
        ]
        o, u = zip(*alone, strict=True)
        return torch.cat(o, 1), torch.cat(u, 1)

    patch.setattr(reference, "replay", altered)


def predict_before_the_decay(patch: pytest.MonkeyPatch) -> None:
    decay_between = decays.window_decays

    def altered(pending: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        return decay_between(pending, torch.cat([torch.zeros_like(window[:, :1]), window[:, :-1]], 1))

    patch.setattr(reference, "window_decays", altered)


def decay_a_row_by_its_own_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "sum_after", lambda log_decay: log_decay.flip(1).cumsum(1).flip(1))


def fold_one_row_less(patch: pytest.MonkeyPatch) -> None:
    load = reference.load_pending
    patch.setattr(
        reference, "load_pending", lambda pools, cursors, end, num_rows: load(pools, cursors, end - 1, num_rows)
    )


def read_the_checkpoint_at_position_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "load_checkpoint", lambda ssm_state, cursors: ssm_state[cursors.slots].float())


def weigh_dead_rows_by_zero(patch: pytest.MonkeyPatch) -> None:
    def altered(ring: Tensor, cursors: slots.Cursors, end: Tensor, num_rows: int) -> Tensor:
        positions = cursors.checkpoint_lengths[:, None] + torch.arange(num_rows)
        live = (positions < end[:, None]).float()
        rows = ring[cursors.slots[:, None], positions % ring.size(1)].float()
        return torch.mul(rows, live.view(*live.shape, *(1 for _ in rows.shape[2:])))

    patch.setattr(reference, "load_ring", altered)


def forget_to_write_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "store_checkpoint", lambda state, ssm_state, slots: state)


ALTERED: tuple[Alter, ...] = (
    round_beta,
    round_u_in_the_ring,
    round_keys_once_normalised,
    lengthen_short_keys,
    share_keys_in_turn,
    solve_for_u_without_the_window,
    predict_before_the_decay,
    decay_a_row_by_its_own_gate,
    fold_one_row_less,
    read_the_checkpoint_at_position_zero,
    weigh_dead_rows_by_zero,
    forget_to_write_the_checkpoint,
)


def worst_share_of_a_bound() -> float:
    """Run a life of two slots, some keys short; return the largest error over its bound."""
    driver = GatedDeltaNetDriver(T4, num_slots=2, seed=12)
    for step in range(24):
        seq_len = 20 if step == 12 else T
        window = driver.make_window([seq_len, seq_len], seq_len)
        window.k[:, ::3] *= 3e-4
        driver.run([Row(0, seq_len, T if step == 12 else step % (T + 1)), Row(1, seq_len, seq_len)], seq_len, window)
        driver.poison_unused()
    bound = T4.bound("cpu")
    return max(driver.output_error / bound.output, driver.checkpoint_error / bound.checkpoint)


@pytest.mark.parametrize("alter", ALTERED, ids=lambda alter: alter.__name__)
def test_an_altered_reference_is_found_out(alter: Alter, monkeypatch: pytest.MonkeyPatch) -> None:
    alter(monkeypatch)
    assert worst_share_of_a_bound() > tolerances.TOOTH


def test_the_reference_as_it_is_stays_far_below_its_bounds() -> None:
    assert worst_share_of_a_bound() < 0.2
