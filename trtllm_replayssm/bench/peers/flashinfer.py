"""FlashInfer: the conventional step, and ``checkpointing_ssu``, which replays."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.common import History, ReplayedPeerStep, bare
from trtllm_replayssm.bench.peers.mamba2 import Mamba2PeerStep
from trtllm_replayssm.bench.recurrences import ACTIVATION, normal
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED, Setting
from trtllm_replayssm.contract.geometry import Mamba2Geometry

_MODULE = "flashinfer.mamba"
_LONGEST_HISTORY = 16
_HEAD_DIM = 64


class _WithRoundedWeights(Mamba2PeerStep):
    """D and dt_bias have the type of dt here; the CPU op gets the rounded numbers, too."""

    module = _MODULE

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        rounded = {name: self.packed.weights[name].to(ACTIVATION) for name in ("D", "dt_bias")}
        self.packed.weights |= {name: weight.float() for name, weight in rounded.items()}
        self._weights = self.expanded_weights()
        self._weights |= {name: self.by_channel(weight) for name, weight in rounded.items()}
        self._rows = torch.arange(case.batch_size, dtype=torch.int32, device=device)

    def _inputs(self, index: int) -> dict[str, Tensor]:
        inputs = self.packed.inputs(index)
        return {**inputs, "dt": self.by_channel(inputs["dt"])}


class SelectiveStateUpdate(_WithRoundedWeights):
    """``selective_state_update``: the state is rewritten, or a buffer takes that after every token of a window."""

    implementation = "flashinfer selective_state_update"
    kind: Kind = "conventional"
    settings = tuple({"algorithm": name} for name in ("auto", "simple", "vertical", "horizontal"))

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._state = self.states()
        window = case.replay.window
        self._snapshots = None
        if window > 1:
            of_sets = self.states(per_row=window)
            self._snapshots = of_sets.view(self.num_sets, case.batch_size, window, *of_sets.shape[2:])

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say yes: it takes any window."""
        return True

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs, window = self._inputs(index), {}
        if self._snapshots is None:
            inputs = {name: tensor[:, 0] for name, tensor in inputs.items()}
        else:
            window = {
                "intermediate_states_buffer": self._snapshots[index],
                "intermediate_state_indices": self._rows,
                "cache_steps": self.case.replay.window,
                "disable_state_update": True,
            }
        out = torch.empty(inputs["x"].shape, dtype=ACTIVATION, device=self.device)
        y: Tensor = self.library.selective_state_update(
            self._state[index],
            **inputs,
            **self._weights,
            **window,
            dt_softplus=True,
            state_batch_indices=self._rows,
            out=out,
            **self.setting,
        )
        return y

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states."""
        return bare(self._state[index][rows], self.packed.recurrence)


class Checkpointing(_WithRoundedWeights, ReplayedPeerStep):
    """``checkpointing_ssu``: one token or several from a checkpoint and a ring, with the flush rule of ours.

    A setting's names in lower case are arguments. Stages and blocks by multiprocessor of its second kernel have no
    argument: the library reads them from the environment at every launch.
    """

    implementation = "flashinfer checkpointing_ssu"

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        m, replay, batch = self.geometry, case.replay, case.batch_size
        slots = self.num_sets * batch
        cursors = cases.draw_cursors(replay, slots, self.num_steps)
        self.follow(cursors.flushes(replay), cursors.mean_pending())
        rows = replay.ring_rows
        past, checkpoint = cursors
        self._pending, self._origin = self.on_device(past - checkpoint), self.on_device(checkpoint % rows)
        self._state = self.states()
        sets = self.num_sets
        self._x = normal((sets, batch, m.n_heads, rows, m.head_dim), ACTIVATION, device)
        self._B = normal((sets, batch, m.n_groups, rows, m.d_state), ACTIVATION, device)
        self._dt = torch.empty(sets, batch, m.n_heads, rows, device=device).uniform_(0.001, 0.1)
        self.settings = _launches(batch * m.n_heads, device)

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is compiled for the head size and history."""
        m = case.geometry
        return isinstance(m, Mamba2Geometry) and m.head_dim == _HEAD_DIM and case.replay.history <= _LONGEST_HISTORY

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs = self._inputs(index)
        arguments = {name: value for name, value in self.setting.items() if name.islower()}
        with _environment(self.setting):
            y: Tensor = self.library.checkpointing_ssu(
                self._state[index],
                self._x[index],
                self._B[index],
                self._dt[index],
                self._origin[step, index],
                self._pending[step, index],
                **inputs,
                **self._weights,
                **self._scratch(),
                out=torch.empty(inputs["x"].shape, dtype=ACTIVATION, device=self.device),
                dt_softplus=True,
                state_batch_indices=self._rows,
                **arguments,
            )
        return y

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return checkpoints and the rings' rows, the oldest first."""
        origin = self._origin[step, index][rows].long()
        order = (origin[:, None] + torch.arange(self.case.replay.history, device=self.device)) % self._x.size(3)
        each = torch.arange(len(rows), device=self.device)[:, None]
        kept = {"x_ring": self._x, "B_ring": self._B, "dt_ring": self._dt}
        rings = {name: part[index][rows].transpose(1, 2)[each, order] for name, part in kept.items()}
        return History(self._state[index][rows], self._pending[step, index][rows], rings)

    def _scratch(self) -> dict[str, Tensor]:
        """Return what the first of its two kernels leaves to the second: fragments of products, and decays."""
        m, replay = self.geometry, self.case.replay
        new, old = -(-replay.window // 16) * 16, -(-replay.history // 8) * 8
        by_head = (self.case.batch_size, m.n_heads)
        return {
            "cb_scaled": torch.empty(*by_head, 32, new // 2, dtype=ACTIVATION, device=self.device),
            "cumAdt_vec": torch.empty(*by_head, new, dtype=torch.float32, device=self.device),
            "cb_old": torch.empty(*by_head, 32, old // 2, dtype=ACTIVATION, device=self.device),
        }


_STAGES = "FLASHINFER_SSU_MAIN_PIPELINE_STAGES"
_BLOCKS = "FLASHINFER_SSU_MAIN_CTA_PER_SM"
_BLOCKS_TRIED = (2, 4, 8, 16, 32)


def _launches(work: int, device: torch.device) -> tuple[Setting, ...]:
    """Return the settings that differ for some blocks of work, one for each row and head."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    found: dict[tuple[int, int, int], Setting] = {}
    for stages in (1, 2):
        for blocks in _BLOCKS_TRIED:
            setting: Setting = {"algorithm": "two-kernel", _STAGES: stages, _BLOCKS: blocks}
            found.setdefault((stages, min(blocks * processors, work), 0), setting)
    for stages, blocks, heads in ((1, 32, 4), (2, 2, 16), (2, 4, 16)):
        setting = {"algorithm": "two-kernel", "precompute_heads_per_cta": heads, _STAGES: stages, _BLOCKS: blocks}
        found.setdefault((stages, min(blocks * processors, work), heads), setting)
    whole: tuple[Setting, ...] = tuple({"algorithm": "monolith", "d_split": parts} for parts in (1, 2))
    return (SHIPPED, *found.values(), *whole)


@contextmanager
def _environment(setting: Setting) -> Iterator[None]:
    ours = {name: str(value) for name, value in setting.items() if name.isupper()}
    before = dict(os.environ)
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name)
        os.environ.update((name, before[name]) for name in ours if name in before)
