"""FlashInfer's kernels of Gated DeltaNet: one token, windows with a snapshot per token, and ``ucache_flush``."""

from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.common import History, ReplayedPeerStep, bare, load
from trtllm_replayssm.bench.peers.gated_delta_net import WINDOW_BOUND, GaplessInputs, GatedDeltaNetPeerStep, geometry_of
from trtllm_replayssm.bench.recurrences import ACTIVATION, normal
from trtllm_replayssm.bench.report import Kind

_KERNELS = "flashinfer.gdn_kernels"
_HEAD_DIM = 128


class _Step(GatedDeltaNetPeerStep):
    """The kernels know heads of 128 x 128 alone; the inputs have no gaps, as they read them by default."""

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._inputs = GaplessInputs(self.packed, self.num_sets)
        self._states = self.states()
        self._rows = torch.arange(case.batch_size, dtype=torch.int32, device=device)

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether the heads have the one size."""
        m = geometry_of(case.geometry)
        return m.key_dim == m.value_dim == _HEAD_DIM

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states."""
        return bare(self._states[index][rows].transpose(-1, -2), self.packed.recurrence)


class Decode(_Step):
    """``gated_delta_rule_decode_pretranspose``: one token, the state rewritten."""

    implementation = "flashinfer gated_delta_rule_decode"
    kind: Kind = "conventional"
    module = "flashinfer.gdn_decode"

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of one token on a state that there is a kernel for."""
        kernels = {"float32": "gdn_decode_pretranspose", "bfloat16": "gdn_decode_bf16_state"}
        kernel = kernels.get(case.replay.state_dtype)
        is_there = kernel is not None and load(f"{_KERNELS}.{kernel}") is not None
        return super().supports(case) and case.replay.window == 1 and is_there

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        states = self._states[index]
        y: Tensor
        y, _ = self.library.gated_delta_rule_decode_pretranspose(
            **self._inputs[index],
            **self.packed.weights,
            state=None,
            initial_state=states,
            initial_state_indices=self._rows,
            output=self.output(),
            use_qk_l2norm=True,
        )
        return y


class Snapshots(_Step):
    """The multi-token kernels: a window, one state written for every token."""

    implementation = "flashinfer gated_delta_rule_mtp"
    kind: Kind = "conventional"
    module = _KERNELS

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        of_sets = self.states(per_row=case.replay.window)
        self._snapshots = of_sets.view(self.num_sets, case.batch_size, case.replay.window, *self.state_shape)
        self._fp32: Any = load("flashinfer.gdn_decode")

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of several tokens on a state that there is a kernel for."""
        kernels = {"float32": "gdn_decode_mtp", "bfloat16": "gdn_decode_bf16_state"}
        kernel = kernels.get(case.replay.state_dtype)
        is_there = kernel is not None and load(f"{_KERNELS}.{kernel}") is not None
        return super().supports(case) and case.replay.window > 1 and is_there

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        arguments = {
            **self._inputs[index],
            **self.packed.weights,
            "initial_state_indices": self._rows,
            "intermediate_states_buffer": self._snapshots[index],
            "disable_state_update": True,
            "output": self.output(),
        }
        y: Tensor
        if self.case.replay.state_dtype == "float32":
            y, _ = self._fp32.gated_delta_rule_mtp(**arguments, initial_state=self._states[index])
        else:
            y = self.library.gated_delta_rule_mtp(**arguments, initial_state_source=self._states[index])
        return y


class UCacheFlush(_Step, ReplayedPeerStep):
    """``gated_delta_rule_mtp_ucache_flush``: a window from a checkpoint and a ring, with the flush rule of ours.

    States and rings are bfloat16; the ring has 32 rows and keeps the sums of g from the checkpoint on. A_log and
    dt_bias are rounded to bfloat16; the CPU op gets the rounded numbers, too.
    """

    implementation = "flashinfer ucache_flush"
    module = f"{_KERNELS}.gdn_decode_bf16_wy_ucache_flush"
    output_bound = WINDOW_BOUND
    _RING_ROWS = 32
    _HISTORY = 16

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        m, replay, sets, batch = self.geometry, case.replay, self.num_sets, case.batch_size
        self.packed.weights = {name: weight.to(ACTIVATION).float() for name, weight in self.packed.weights.items()}
        self._rounded = {name: weight.to(ACTIVATION) for name, weight in self.packed.weights.items()}
        cursors = cases.draw_cursors(replay, sets * batch, self.num_steps)
        self.follow(cursors.flushes(replay), cursors.mean_pending())
        past, checkpoint = cursors
        self._pending, self._origin = self.on_device(past - checkpoint), self.on_device(checkpoint % self._RING_ROWS)
        rows = self._RING_ROWS
        self._u = normal((sets, batch, m.n_value_heads, rows, m.value_dim), ACTIVATION, device)
        self._k = self.unit_keys(sets, batch, m.n_key_heads, rows)
        # A ring is entered anywhere, so that its sums neither rise nor fall for long.
        self._sums = torch.empty(sets, batch, m.n_value_heads, rows, device=device).uniform_(-0.5, -0.001)

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether types, history and window are those that it is made for."""
        replay = case.replay
        is_made_for = (replay.state_dtype, replay.history) == ("bfloat16", cls._HISTORY) and replay.window in (4, 8)
        return super().supports(case) and is_made_for

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        y: Tensor = self.library.gated_delta_rule_mtp_ucache_flush(
            **self._inputs[index],
            **self._rounded,
            initial_state_source=self._states[index],
            initial_state_indices=self._rows,
            k_cache=self._k[index],
            u_cache=self._u[index],
            g_cache=self._sums[index],
            hist_len=self._pending[step, index],
            cache_base=self._origin[step, index],
            restart_hist_on_flush=False,
            output=self.output(),
        )
        return y

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return checkpoints and the rings' rows, the oldest first; g is what the sums grow by."""
        origin = self._origin[step, index][rows].long()
        order = (origin[:, None] + torch.arange(self.case.replay.history, device=self.device)) % self._RING_ROWS
        each = torch.arange(len(rows), device=self.device)[:, None]
        kept = {"k_ring": self._k, "u_ring": self._u, "g_ring": self._sums}
        rings = {name: part[index][rows].transpose(1, 2)[each, order] for name, part in kept.items()}
        sums = rings["g_ring"]
        rings["g_ring"] = torch.cat([sums[:, :1], sums[:, 1:] - sums[:, :-1]], 1)
        states = self._states[index][rows].transpose(-1, -2)
        return History(states, self._pending[step, index][rows], rings)
