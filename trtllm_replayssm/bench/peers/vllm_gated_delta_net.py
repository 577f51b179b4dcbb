"""vLLM's kernels of Gated DeltaNet: one token on packed inputs, windows with a snapshot per token, and replay."""

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.common import History, bare, load
from trtllm_replayssm.bench.peers.gated_delta_net import (
    COLUMNS,
    WINDOW_BOUND,
    GaplessInputs,
    GatedDeltaNetPeerStep,
    with_columns,
)
from trtllm_replayssm.bench.peers.vllm_slots import (
    CONFIG,
    SlottedStep,
    Snapshots,
    TokenReplay,
    WindowReplay,
    configured,
)
from trtllm_replayssm.bench.recurrences import ACTIVATION, normal
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED

_OPS = "vllm.model_executor.layers.fla.ops"


class PackedDecode(GatedDeltaNetPeerStep, SlottedStep):
    """``fused_recurrent_gated_delta_rule_packed_decode``: one token, the state rewritten."""

    implementation = "vllm packed_decode"
    kind: Kind = "conventional"
    module = f"{_OPS}.fused_recurrent"
    settings = (SHIPPED, *COLUMNS[:-1])  # as shipped it has the last

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._states, self._ids = self.slotted_states(), self.slot_ids()

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of one token."""
        return case.replay.window == 1

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs, out = self.packed.inputs(index), self.output()
        with with_columns(self.library, "fused_recurrent_gated_delta_rule_packed_decode_kernel", self.setting, axis=0):
            self.library.fused_recurrent_gated_delta_rule_packed_decode(
                self.packed.conv_output(index)[:, 0],
                inputs["a"][:, 0],
                inputs["b"][:, 0],
                **self.packed.weights,
                scale=self.scale,
                initial_state=self._states,
                out=out,
                ssm_state_indices=self._ids[index],
                use_qk_l2norm_in_kernel=True,
            )
        return out

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states."""
        states = self._states[self._ids[index][rows].long()]
        return bare(states.transpose(-1, -2), self.packed.recurrence)


class SigmoidGating(GatedDeltaNetPeerStep, Snapshots):
    """``fused_sigmoid_gating_delta_rule_update``: a window, one state written for every token."""

    implementation = "vllm fused_sigmoid_gating"
    kind: Kind = "conventional"
    module = f"{_OPS}.fused_sigmoid_gating"
    settings = (SHIPPED, *COLUMNS)

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self.keep_snapshots()
        self._inputs = GaplessInputs(self.packed, self.num_sets)

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of several tokens."""
        return case.replay.window > 1

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        # All rows are one sequence of windows.
        inputs = {name: tensor.flatten(0, 1)[None] for name, tensor in self._inputs[index].items()}
        y: Tensor
        with with_columns(self.library, "fused_sigmoid_gating_delta_rule_update_kernel", self.setting, axis=1):
            y, _ = self.library.fused_sigmoid_gating_delta_rule_update(
                **inputs,
                **self.packed.weights,
                initial_state=self.snapshots,
                inplace_final_state=True,
                cu_seqlens=self.ends,
                ssm_state_indices=self.snapshot_slots[index],
                num_accepted_tokens=self.accepted,
                use_qk_l2norm_in_kernel=True,
            )
        return y

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states after the last accepted token."""
        return bare(self.last_accepted(index, rows).transpose(-1, -2), self.packed.recurrence)


class _Caches:
    """The buffers or rings of all slots: u, unit keys and g."""

    def __init__(self, step: GatedDeltaNetPeerStep, slots: int, rows: int) -> None:
        m = step.geometry
        self.u = normal((slots, m.n_value_heads, rows, m.value_dim), ACTIVATION, step.device)
        self.k = step.unit_keys(slots, m.n_key_heads, rows)
        self.g = torch.empty(slots, m.n_value_heads, rows, device=step.device).uniform_(-0.5, -0.001)

    def arguments(self) -> dict[str, Tensor]:
        """Return them by the functions' names."""
        return {"d_cache": self.u, "k_cache": self.k, "g_cache": self.g}

    def rings(self, slots: Tensor, order: Tensor) -> dict[str, Tensor]:
        """Return rows of some slots by our op's names; ``order`` is [rows, J]."""
        each = slots[:, None]
        kept = {"k_ring": self.k, "u_ring": self.u, "g_ring": self.g}
        return {name: part.transpose(1, 2)[each, order] for name, part in kept.items()}


class Replay(GatedDeltaNetPeerStep, SlottedStep, TokenReplay):
    """``fused_recurrent_gated_delta_rule_replayssm``: one token from a checkpoint and a buffer."""

    implementation = "vllm gdn replayssm"
    module = f"{_OPS}.fused_recurrent_replayssm"
    settings = (
        SHIPPED,
        *(
            {"block_v": columns, "num_warps": warps, "num_stages": 3, "nk": parts}
            for columns, warps, parts in ((32, 1, 2), (32, 1, 1))
        ),
    )

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self.count_up()
        self._states, self._ids = self.slotted_states(), self.slot_ids()
        self._caches = _Caches(self, len(self._states), case.replay.history)

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of one token."""
        return case.replay.window == 1 and load(CONFIG) is not None

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs, out = self.packed.inputs(index), self.output()
        with configured({"gdn_decode": self.setting}):
            self.library.fused_recurrent_gated_delta_rule_replayssm(
                self.packed.conv_output(index)[:, 0],
                inputs["a"][:, 0],
                inputs["b"][:, 0],
                **self.packed.weights,
                scale=self.scale,
                initial_state=self._states,
                **self._caches.arguments(),
                out=out,
                ssm_state_indices=self._ids[index],
                write_pos=self.pending[step, index],
                use_qk_l2norm_in_kernel=True,
            )
        return out

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return checkpoints and the rows of the buffers."""
        slots = self._ids[index][rows].long()
        order = torch.arange(self.case.replay.history, device=self.device).expand(len(slots), -1)
        states = self._states[slots].transpose(-1, -2)
        return History(states, self.pending[step, index][rows], self._caches.rings(slots, order))


class Speculative(GatedDeltaNetPeerStep, WindowReplay):
    """``gdn_replayssm_spec_decode``: a window of several tokens from a checkpoint and a ring."""

    implementation = "vllm gdn replayssm_spec"
    module = f"{_OPS}.gdn_replayssm_spec_decode"
    output_bound = WINDOW_BOUND
    settings = (SHIPPED, {"block_v": 32, "num_warps": 1, "nk": 2, "num_stages": 2})

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        self.follow_ours()
        self._states = self.slotted_states()
        self._caches = _Caches(self, len(self._states), self.ring_rows)

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of several tokens."""
        return case.replay.window > 1 and load(CONFIG) is not None

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs, out = self.packed.inputs(index), self.output().flatten(0, 1)
        pending, origin, is_flush = (lengths[step] for lengths in self.lengths)
        with configured({f"gdn_spec_{part}": self.setting for part in ("verify", "flush")}):
            self.library.gdn_replayssm_spec_decode(
                self.packed.conv_output(index).flatten(0, 1),
                inputs["a"].flatten(0, 1),
                inputs["b"].flatten(0, 1),
                **self.packed.weights,
                checkpoint_state=self._states,
                **self._caches.arguments(),
                out=out,
                query_start_loc=self.ends,
                ssm_state_indices=self.ids[index],
                write_pos=pending,
                cache_base=origin,
                is_flush=is_flush,
                max_cache_len=self.limit,
                max_spec_len=self.case.replay.window,
                scale=self.scale,
                use_qk_l2norm_in_kernel=True,
            )
        return out

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return checkpoints and the rings' rows, the oldest first."""
        slots, pending, order = self.live_rows(step, index, rows)
        return History(self._states[slots].transpose(-1, -2), pending, self._caches.rings(slots, order))
