"""How vLLM keeps the states of a step, whatever the recurrence: slots, of which slot 0 is nobody's, and cursors."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.peers.common import PeerStep, ReplayedPeerStep, aligned_rows, load
from trtllm_replayssm.bench.tuning import Setting

CONFIG = "vllm.model_executor.layers.mamba.ops.replayssm_config"


class SlottedStep(PeerStep):
    """A step whose states are found by slot."""

    def slotted_states(self, per_row: int = 1) -> Tensor:
        """Return random states, [1 + slots, *state_shape]; the first is nobody's."""
        of_sets = self.states(per_row).flatten(0, 1)
        return torch.cat([of_sets.new_zeros(1, *of_sets.shape[1:]), of_sets])

    def slot_ids(self, per_row: int = 1) -> Tensor:
        """Return the slots of every set, int32 [sets, batch * per_row]; each row is aligned."""
        sets, batch = self.num_sets, self.case.batch_size
        ids = 1 + torch.arange(sets * batch * per_row, dtype=torch.int32, device=self.device)
        return aligned_rows(ids.view(sets, batch * per_row))

    def window_ends(self) -> Tensor:
        """Return where the windows of all rows begin and end, side by side, int32 [batch + 1]."""
        batch, window = self.case.batch_size, self.case.replay.window
        return torch.arange(0, batch * window + 1, window, dtype=torch.int32, device=self.device)


class Snapshots(SlottedStep):
    """One state written for every token of a window, each in a slot of its own.

    A window begins with the state after the last token that was accepted.
    """

    def keep_snapshots(self) -> None:
        """Draw the states, and how many tokens every row accepted last."""
        batch, window = self.case.batch_size, self.case.replay.window
        self.snapshots = self.slotted_states(per_row=window)
        self.snapshot_slots = [of_set.view(batch, window) for of_set in self.slot_ids(per_row=window)]
        self.accepted = torch.randint(1, window + 1, (batch,), dtype=torch.int32, device=self.device)
        self.ends = self.window_ends()

    def last_accepted(self, index: int, rows: Tensor) -> Tensor:
        """Return the states after the last accepted token of some rows."""
        last = self.accepted[rows].long() - 1
        return self.snapshots[self.snapshot_slots[index][rows, last].long()]


class TokenReplay(ReplayedPeerStep):
    """A replayed step of one token: the token is appended to a buffer that begins at row 0, or the buffer is folded.

    The step that finds ``history - 1`` pending tokens folds them and its own.
    """

    def count_up(self) -> None:
        """Let every row be once at every count of pending tokens, out of step with its neighbours."""
        history = self.case.replay.history
        rows = np.arange(self.num_sets * self.case.batch_size)[None] + np.arange(self.num_steps)[:, None]
        pending = (rows % history).astype(np.int32)
        flushes = pending == history - 1
        self.follow(flushes, float(pending.mean()))
        self.pending = self.on_device(pending)
        self.is_flush = self.on_device(flushes)


class WindowReplay(SlottedStep, ReplayedPeerStep):
    """A replayed step of several tokens on rings whose rows are a power of two; a row flushes in the same step as ours.

    Attributes:
        limit: rows of history and window together.
        ring_rows: of a ring.
    """

    def follow_ours(self) -> None:
        """Take the cursors of our step."""
        replay = self.case.replay
        cursors = cases.draw_cursors(replay, self.num_sets * self.case.batch_size, self.num_steps)
        self.follow(cursors.flushes(replay), cursors.mean_pending())
        self.limit = replay.history + replay.window
        self.ring_rows = 1 << (self.limit - 1).bit_length()
        past, checkpoint = cursors
        self.lengths = [
            aligned_rows(torch.from_numpy(np.pad(values, ((0, 0), (1, 0)))).to(self.device))
            for values in (past - checkpoint, checkpoint % self.ring_rows, cursors.flushes(replay).astype(np.int8))
        ]
        self.ids, self.ends = self.slot_ids(), self.window_ends()

    def live_rows(self, step: int, index: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots of some rows, their pending tokens, and the ring rows of the history, oldest first."""
        slots = self.ids[index][rows].long()
        pending, origin, _ = (lengths[step][slots].long() for lengths in self.lengths)
        order = (origin[:, None] + torch.arange(self.case.replay.history, device=self.device)) % self.ring_rows
        return slots, pending, order


@contextmanager
def configured(settings: dict[str, Setting]) -> Iterator[None]:
    """Pin the launch settings of kernels that replay."""
    config: Any = load(CONFIG)
    with ExitStack() as stack:
        for kernel, setting in settings.items():
            if setting:
                stack.enter_context(config.override_replayssm_config(kernel, tuple(setting.values())))
        yield
