"""The conventional decode with other libraries' tuned kernels, in the place of the plain torch of ``ops``.

Steps run vLLM's kernels, one state written for every token, in the launch setting that is fastest on this device for
the layer and the batch. Prompts run our own prefill kernel: it writes one state and has nothing to replay.

A slot's T + 1 snapshots are used so: the state after t tokens stands in row ``1 + t mod T``. As the kernels read a
state before they write, T rows are enough, and row 0 stays free: slot 0's would have the number that they skip.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.kernels import time_briefly
from trtllm_replayssm.bench.machine import describe
from trtllm_replayssm.bench.peers import vllm, vllm_gated_delta_net
from trtllm_replayssm.bench.peers.common import PeerStep, load
from trtllm_replayssm.bench.peers.gated_delta_net import with_columns
from trtllm_replayssm.bench.shapes import family_of
from trtllm_replayssm.bench.tuning import Choices, setting_name, tune
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import Mamba2Geometry, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.tensors import slot_states
from trtllm_replayssm.ops.conventional import stand_ins
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.plugins import launch

PLAIN: Final = "plain torch"
_SKIPPED: Final = -1


class TunedSteps:
    """Stand-ins for the conventional ops of one model.

    Args:
        geometry: of the model.
        replay: its window and state type; a history is of no use here.
        batch_size: what launch settings are chosen for.
        device: a CUDA device.
    """

    def __init__(self, geometry: ModelGeometry, replay: ReplayGeometry, batch_size: int, device: torch.device) -> None:
        m = geometry.recurrence
        assert m is not None, "a model without recurrence has no conventional decode of one"
        self._m, self._replay, self._device = m, replay, device
        self._is_mamba2 = isinstance(m, Mamba2Geometry)
        case = KernelCase(shape=family_of(m), geometry=m, replay=replay, batch_size=batch_size)
        peer = _peer(case)(case, device)
        tune(peer, case, time_briefly, Choices(describe(device).card))
        self.implementation, self.setting = f"{peer.implementation}, {setting_name(peer.setting)}", peer.setting
        self._library: Any = peer.library
        names = ("x_ring", "B_ring", "dt_ring") if self._is_mamba2 else ("k_ring", "u_ring", "g_ring")
        # A prefill without pending rows touches no ring: one slot of them is there for its address alone.
        self._no_rings = {
            name: torch.zeros((1, replay.ring_rows, *row), dtype=torch_dtype(dtype or geometry.dtype), device=device)
            for name, (_, dtype, row) in zip(names, slot_states(m).rings, strict=True)
        }
        window = replay.window
        self._offsets = torch.arange(1, window + 1, dtype=torch.int32, device=device)
        self._first_pool = 0
        self._rows = torch.empty(0)
        self._windows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def kernel(self, tensors: dict[str, Tensor], max_draft_len: int) -> Tensor:
        """Run a window of every row: a step, or a prefill."""
        pool = tensors["ssm_snapshots"].flatten(0, 1)
        seq_len = tensors["x" if self._is_mamba2 else "v"].size(1)
        if protocol.is_prefill(seq_len, max_draft_len):
            return self._prefill(tensors, pool)
        self._address(tensors, pool)
        return self._mamba2(tensors, pool) if self._is_mamba2 else self._gated_delta_net(tensors, pool)

    def _address(self, tensors: dict[str, Tensor], pool: Tensor) -> None:
        """Compute the rows of the pool that a step reads and writes: in the first layer, for all of them."""
        if self._first_pool == 0:
            self._first_pool = pool.data_ptr()
        if pool.data_ptr() != self._first_pool:
            return
        window = self._replay.window
        slots, past = tensors["slot_ids"][:, None], tensors["past_lengths"][:, None]
        rows = slots * (window + 1) + 1 + (past + self._offsets) % window
        self._rows = torch.where(slots >= 0, rows, _SKIPPED)

    def _window(self, num_rows: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return where the windows of all rows begin and end, and which of its rows a window begins from."""
        found = self._windows.get((num_rows, seq_len))
        if found is None:
            ends = torch.arange(0, num_rows * seq_len + 1, seq_len, dtype=torch.int32, device=self._device)
            # The state before a window is the one that a T-th token overwrites.
            found = ends, torch.full((num_rows,), self._replay.window, dtype=torch.int32, device=self._device)
            self._windows[num_rows, seq_len] = found
        return found

    def _mamba2(self, tensors: dict[str, Tensor], pool: Tensor) -> Tensor:
        m = self._m
        assert isinstance(m, Mamba2Geometry)
        x = tensors["x"]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        by_channel = {name: tensors[name][:, None].expand(-1, m.head_dim) for name in ("D", "dt_bias")}
        dt = tensors["dt"].flatten(0, 1)
        window: dict[str, Tensor] = {}
        if self._replay.window > 1:
            window["cu_seqlens"], window["num_accepted_tokens"] = self._window(x.size(0), x.size(1))
        with ExitStack() as stack:
            if self.setting:
                tile = (self.setting["BLOCK_SIZE_M"], self.setting["num_warps"])
                stack.enter_context(self._library.override_ssm_config(tile))
            self._library.selective_state_update(
                pool,
                x.flatten(0, 1),
                dt[..., None].expand(*dt.shape, m.head_dim),
                tensors["A"][:, None, None].expand(-1, m.head_dim, m.d_state),
                tensors["B"].flatten(0, 1),
                tensors["C"].flatten(0, 1),
                **by_channel,
                **window,
                dt_softplus=True,
                state_batch_indices=self._rows,
                null_block_id=_SKIPPED,
                out=out.flatten(0, 1),
            )
        return out

    def _gated_delta_net(self, tensors: dict[str, Tensor], pool: Tensor) -> Tensor:
        q, v, window = tensors["q"], tensors["v"], self._replay.window
        weights = {name: tensors[name] for name in ("A_log", "dt_bias")}
        if window == 1:
            out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            # q, k and v lie side by side in the convolution's output.
            mixed = q.as_strided((len(q), self._m.conv_dim), (q.stride(0), 1))
            kernel = "fused_recurrent_gated_delta_rule_packed_decode_kernel"
            with with_columns(self._library, kernel, self.setting, axis=0):
                self._library.fused_recurrent_gated_delta_rule_packed_decode(
                    mixed,
                    tensors["a"][:, 0],
                    tensors["b"][:, 0],
                    **weights,
                    scale=q.size(-1) ** -0.5,
                    initial_state=pool,
                    out=out,
                    ssm_state_indices=self._rows[:, 0],
                    use_qk_l2norm_in_kernel=True,
                )
            return out
        inputs = {name: tensors[name].flatten(0, 1)[None] for name in ("q", "k", "v", "a", "b")}
        ends, last = self._window(v.size(0), v.size(1))
        o: Tensor
        with with_columns(self._library, "fused_sigmoid_gating_delta_rule_update_kernel", self.setting, axis=1):
            o, _ = self._library.fused_sigmoid_gating_delta_rule_update(
                **inputs,
                **weights,
                initial_state=pool,
                inplace_final_state=True,
                cu_seqlens=ends,
                ssm_state_indices=self._rows,
                num_accepted_tokens=last,
                use_qk_l2norm_in_kernel=True,
            )
        return o.view(v.shape)

    def _prefill(self, tensors: dict[str, Tensor], pool: Tensor) -> Tensor:
        """Run our prefill on the snapshot row of the state after the window; the libraries' states have V before K."""
        window, replay = self._replay.window, self._replay
        past = tensors["past_lengths"]
        first = tensors["slot_ids"].clamp(min=0) * (window + 1) + 1
        source = (first + past % window).long()
        target = first + (past + tensors["num_tokens"]) % window
        states = pool[source]
        pool[target.long()] = states if self._is_mamba2 else states.transpose(-1, -2)
        run: Callable[..., Tensor] = launch.mamba2 if self._is_mamba2 else launch.gated_delta_net
        passed = {name: tensor for name, tensor in tensors.items() if name != "ssm_snapshots"}
        passed |= {"ssm_state": pool, "checkpoint_lengths": past, "slot_ids": target, **self._no_rings}
        out = run(passed, history=replay.history, max_draft_len=replay.max_draft_len)
        if not self._is_mamba2:
            pool[target.long()] = pool[target.long()].transpose(-1, -2)
        return out


def _peer(case: KernelCase) -> type[PeerStep]:
    if isinstance(case.geometry, Mamba2Geometry):
        return vllm.SelectiveStateUpdate
    return vllm_gated_delta_net.PackedDecode if case.replay.window == 1 else vllm_gated_delta_net.SigmoidGating


@contextmanager
def tuned_conventional(
    geometry: ModelGeometry, replay: ReplayGeometry, batch_size: int, device: torch.device
) -> Iterator[str]:
    """Run the conventional ops of a model with tuned kernels where they can be imported; yield whose they are."""
    m = geometry.recurrence
    if device.type != "cuda" or m is None:
        yield PLAIN
        return
    case = KernelCase(shape=family_of(m), geometry=m, replay=replay, batch_size=batch_size)
    if load(_peer(case).module) is None:
        yield f"{PLAIN}: vllm not installed"
        return
    tuned = TunedSteps(geometry, replay, batch_size, device)
    with stand_ins({"mamba2" if isinstance(m, Mamba2Geometry) else "gated_delta_net": tuned.kernel}):
        yield tuned.implementation
