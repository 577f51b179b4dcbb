"""The driver of a case: replayed, or conventional."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.cases import GatedDeltaNetCase, Mamba2Case, ReplayCase
from tests.ops.driver import Driver, Row, bits
from tests.ops.gated_delta_net_driver import GatedDeltaNetDriver
from tests.ops.mamba2_driver import Mamba2Driver
from trtllm_replayssm import ops


class ConventionalDriver(Driver):
    """The same life of slots with snapshots in place of checkpoint and rings."""

    rings: ClassVar[tuple[str, ...]] = ()

    def make_pools(self) -> dict[str, Tensor]:
        state = super().make_pools()["ssm_state"]  # type: ignore[safe-super]
        return {"ssm_snapshots": torch.stack([state] * (self.case.window + 1), dim=1)}

    def poison_unused(self) -> None:
        for slot, c in enumerate(self.past):
            for row in range(self.case.window + 1):
                if c == 0 or row != c % (self.case.window + 1):
                    self.pools["ssm_snapshots"][slot, row] = torch.nan

    def call(self, rows: Sequence[Row], window: Any) -> Tensor:
        tensors = self.tensors(rows, window)
        del tensors["checkpoint_lengths"]
        y = getattr(ops, f"{self.op_name}_conventional")(**tensors, max_draft_len=self.case.max_draft_len)
        assert isinstance(y, Tensor)
        return y

    def is_due(self, slot: int) -> bool:
        return False

    def _check_memory(self, before: dict[str, Tensor], rows: Sequence[Row], is_prefill: bool) -> None:
        may_change = torch.zeros(self.num_slots, self.case.window + 1, dtype=torch.bool)
        for slot, n, _ in rows:
            if slot >= 0:
                written = range(n, n + 1) if is_prefill and n > 0 else range(1, n + 1)
                may_change[slot, [(self.past[slot] + t) % (self.case.window + 1) for t in written]] = True
        changed = (bits(self.pools["ssm_snapshots"]) != before["ssm_snapshots"]).flatten(2).any(-1)
        assert not (changed & ~may_change).any(), "snapshots changed that belong to no token"

    def _check_row(self, y: Tensor, row: Row, inputs: list[Tensor], is_prefill: bool) -> None:
        self.checkpoint[row.slot] = self.past[row.slot]  # so that the base class never looks for a checkpoint
        tokens = [part[: row.num_tokens] for part in inputs]
        super()._check_row(y, row, tokens, is_prefill=False)
        if is_prefill:
            assert row.accepted == row.num_tokens

    def commit(self, rows: Sequence[Row], *, is_prefill: bool) -> None:
        for row in rows:
            self.past[row.slot] += row.accepted


class ConventionalMamba2Driver(ConventionalDriver, Mamba2Driver):
    """Runs ``ops.mamba2_conventional``."""


class ConventionalGatedDeltaNetDriver(ConventionalDriver, GatedDeltaNetDriver):
    """Runs ``ops.gated_delta_net_conventional``."""


_REPLAYED: dict[type[ReplayCase], type[Driver]] = {Mamba2Case: Mamba2Driver, GatedDeltaNetCase: GatedDeltaNetDriver}
_CONVENTIONAL: dict[type[ReplayCase], type[Driver]] = {
    Mamba2Case: ConventionalMamba2Driver,
    GatedDeltaNetCase: ConventionalGatedDeltaNetDriver,
}


def replayed(case: ReplayCase, device: str = "cpu", **options: Any) -> Driver:
    """Return a driver of the op that replays."""
    return _REPLAYED[type(case)](case, device, **options)


def conventional(case: ReplayCase, device: str = "cpu", **options: Any) -> Driver:
    """Return a driver of the op that rewrites the state for every token."""
    return _CONVENTIONAL[type(case)](case, device, **options)
