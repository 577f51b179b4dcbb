"""vLLM: the conventional step with a snapshot per token, and the Triton kernels that replay."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtllm_replayssm.bench import cases
from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.common import (
    History,
    ReplayedPeerStep,
    aligned_rows,
    bare,
    load,
)
from trtllm_replayssm.bench.peers.mamba2 import Mamba2PeerStep
from trtllm_replayssm.bench.peers.mamba_ssm import TILES
from trtllm_replayssm.bench.recurrences import ACTIVATION, normal
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED, Setting

_OPS = "vllm.model_executor.layers.mamba.ops"
_CONFIG = f"{_OPS}.replayssm_config"


class SelectiveStateUpdate(Mamba2PeerStep):
    """``selective_state_update``: one state written for every token, each in a slot of its own.

    As vLLM's Mamba-2 layer calls it: states are found by slot (slot 0 is nobody's), and a window begins with the state
    after the last token that was accepted.
    """

    implementation = "vllm selective_state_update"
    kind: Kind = "conventional"
    module = f"{_OPS}.mamba_ssm"
    settings = (SHIPPED, *TILES)

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        batch, window, m = case.batch_size, case.replay.window, self.geometry
        of_sets = self.states(per_row=window).flatten(0, 1)
        self._states = torch.cat([of_sets.new_zeros(1, *of_sets.shape[1:]), of_sets])
        del of_sets
        slots = 1 + torch.arange(self.num_sets * batch * window, dtype=torch.int32, device=device)
        by_set = aligned_rows(slots.view(self.num_sets, batch * window))
        self._slots = [of_set.view(batch, window) for of_set in by_set]
        self._accepted = torch.randint(1, window + 1, (batch,), dtype=torch.int32, device=device)
        self._ends = torch.arange(0, batch * window + 1, window, dtype=torch.int32, device=device)
        self._weights = self.expanded_weights()
        self._shape = (batch * window, m.n_heads, m.head_dim)

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say yes: it takes any window."""
        return True

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs = {name: tensor.flatten(0, 1) for name, tensor in self.packed.inputs(index).items()}
        inputs["dt"] = self.by_channel(inputs["dt"])
        out = torch.empty(self._shape, dtype=ACTIVATION, device=self.device)
        is_one = self.case.replay.window == 1
        window = {} if is_one else {"num_accepted_tokens": self._accepted, "cu_seqlens": self._ends}
        with ExitStack() as stack:
            if self.setting:
                tile = (self.setting["BLOCK_SIZE_M"], self.setting["num_warps"])
                stack.enter_context(self.library.override_ssm_config(tile))
            self.library.selective_state_update(
                self._states,
                **inputs,
                **self._weights,
                **window,
                dt_softplus=True,
                state_batch_indices=self._slots[index],
                out=out,
            )
        return out

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states after the last accepted token."""
        last = self._accepted[rows].long() - 1
        return bare(self._states[self._slots[index][rows, last].long()], self.packed.recurrence)


class _TokenReplay(Mamba2PeerStep, ReplayedPeerStep):
    """A replayed step of one token: the token is appended to a buffer that begins at row 0, or the buffer is folded.

    The step that finds ``history - 1`` pending tokens folds them and its own.
    """

    function: str
    config: str

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        m, batch, history = self.geometry, case.batch_size, case.replay.history
        sets = self.num_sets
        rows = np.arange(sets * batch)[None] + np.arange(self.num_steps)[:, None]
        pending = (rows % history).astype(np.int32)
        flushes = pending == history - 1
        self.follow(flushes, float(pending.mean()))
        self._pending = self.on_device(pending)
        self._is_flush = self.on_device(flushes)
        self._state = self.states()
        self._x = normal((sets, batch, m.n_heads, history, m.head_dim), ACTIVATION, device)
        self._B = normal((sets, batch, m.n_groups, history, m.d_state), ACTIVATION, device)
        self._dt = torch.empty(sets, batch, m.n_heads, history, device=device).uniform_(0.001, 0.1)
        self._weights = self.expanded_weights()

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of one token."""
        return case.replay.window == 1 and load(_CONFIG) is not None

    def scratch(self) -> dict[str, Tensor]:
        """Return the scratch tensors of a launch by name."""
        return {}

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs = {name: tensor[:, 0] for name, tensor in self.packed.inputs(index).items()}
        inputs["dt"] = self.by_channel(inputs["dt"])
        out = torch.empty(inputs["x"].shape, dtype=ACTIVATION, device=self.device)
        with _configured({self.config: self.setting}):
            getattr(self.library, self.function)(
                self._state[index],
                **inputs,
                **self._weights,
                **self.scratch(),
                dt_softplus=True,
                x_cache=self._x[index],
                dt_cache=self._dt[index],
                B_cache=self._B[index],
                write_pos=self._pending[step, index],
                is_flush=self._is_flush[step, index],
                max_cache_len=self.case.replay.history,
                out=out,
            )
        return out

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return checkpoints and the rows of the buffers."""
        return History(
            self._state[index][rows],
            self._pending[step, index][rows],
            {
                "x_ring": self._x[index][rows].transpose(1, 2),
                "B_ring": self._B[index][rows].transpose(1, 2),
                "dt_ring": self._dt[index][rows].transpose(1, 2),
            },
        )


_TOKEN_TILES: tuple[Setting, ...] = tuple(
    {"BLOCK_SIZE_M": rows, "num_warps": warps} for rows, warps in ((16, 1), (32, 1), (32, 2))
)


class OutputOnly(_TokenReplay):
    """``selective_state_update_replayssm_output_only``: outputs from checkpoint and buffer, no state in between."""

    function = "selective_state_update_replayssm_output_only"
    implementation = "vllm replayssm_output_only"
    module = f"{_OPS}.{function}"
    config = "mamba2_output_only"
    settings = (SHIPPED, *_TOKEN_TILES)

    def scratch(self) -> dict[str, Tensor]:
        """Return the products of B and C."""
        sizes = (self.case.batch_size, self.geometry.n_groups, self.case.replay.history)
        return {"bc_pre": torch.empty(sizes, dtype=torch.float32, device=self.device)}


class StateAndOutput(_TokenReplay):
    """``selective_state_update_replayssm_state_and_output``: the state is rebuilt in every step, and kept in few."""

    function = "selective_state_update_replayssm_state_and_output"
    implementation = "vllm replayssm_state_and_output"
    module = f"{_OPS}.{function}"
    config = "mamba2_state_and_output"
    settings = (SHIPPED, *_TOKEN_TILES)


class Speculative(Mamba2PeerStep, ReplayedPeerStep):
    """``selective_state_update_replayssm_spec``: a window of several tokens from a checkpoint and a ring.

    The ring's rows are a power of two; a row flushes in the same step as ours.
    """

    implementation = "vllm replayssm_spec"
    module = f"{_OPS}.selective_state_update_replayssm_spec"
    settings = (
        SHIPPED,
        *(
            {"BLOCK_SIZE_M": rows, "num_warps": warps, "DSTATE_TILE": tile, "num_stages": 2}
            for rows, warps, tile in ((64, 2, 64), (32, 2, 128), (16, 1, 128), (64, 4, 128))
        ),
    )

    def __init__(self, case: KernelCase, device: torch.device, seed: int = 0) -> None:
        super().__init__(case, device)
        m, replay, batch = self.geometry, case.replay, case.batch_size
        slots = self.num_sets * batch
        cursors = cases.draw_cursors(replay, slots, self.num_steps, seed=seed)
        self.follow(cursors.flushes(replay), cursors.mean_pending())
        self._limit = replay.history + replay.window
        rows = 1 << (self._limit - 1).bit_length()
        past, checkpoint = cursors
        # Slot 0 is nobody's.
        self._lengths = [
            aligned_rows(torch.from_numpy(np.pad(values, ((0, 0), (1, 0)))).to(device))
            for values in (past - checkpoint, checkpoint % rows, cursors.flushes(replay).astype(np.int8))
        ]
        of_sets = self.states().flatten(0, 1)
        self._state = torch.cat([of_sets.new_zeros(1, *of_sets.shape[1:]), of_sets])
        del of_sets
        self._conv = normal((1 + slots, rows, m.d_inner + m.n_groups * m.d_state), ACTIVATION, device)
        self._dt = normal((1 + slots, m.n_heads, rows), ACTIVATION, device)
        ids = 1 + torch.arange(slots, dtype=torch.int32, device=device)
        self._slot_ids = aligned_rows(ids.view(self.num_sets, batch))
        self._ends = torch.arange(0, batch * replay.window + 1, replay.window, dtype=torch.int32, device=device)
        self._weights = self.expanded_weights()

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of several tokens."""
        return case.replay.window > 1 and load(_CONFIG) is not None

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        m, window = self.geometry, self.case.replay.window
        pending, origin, is_flush = (lengths[step] for lengths in self._lengths)
        rows, batch = self._conv.size(1), self.case.batch_size
        # The library's own builder makes this too small for several groups of heads.
        products = torch.empty(
            batch, m.n_groups, rows, 1 << (window - 1).bit_length(), dtype=ACTIVATION, device=self.device
        )
        with _configured({f"mamba2_spec_{part}": self.setting for part in ("verify", "flush")}):
            y: Tensor = self.library.selective_state_update_replayssm_spec(
                self._state,
                self._conv,
                self._dt,
                self.packed.conv_output(index).flatten(0, 1),
                self.packed.inputs(index)["dt"].flatten(0, 1),
                **self._weights,
                write_pos=pending,
                post_conv_state_pos=origin,
                is_flush=is_flush,
                query_start_loc=self._ends,
                state_batch_indices=self._slot_ids[index],
                max_cache_len=self._limit,
                max_spec_len=window,
                d_inner=m.d_inner,
                ngroups=m.n_groups,
                dstate=m.d_state,
                dt_softplus=True,
                bc_pre=products,
            )
        return y

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return checkpoints and the rings' rows, the oldest first."""
        m = self.geometry
        slots = self._slot_ids[index][rows].long()
        pending, origin, _ = (lengths[step][slots].long() for lengths in self._lengths)
        ring_rows = self._conv.size(1)
        order = (origin[:, None] + torch.arange(self.case.replay.history, device=self.device)) % ring_rows
        conv = self._conv[slots[:, None], order]
        x, B = torch.split(conv, [m.d_inner, m.n_groups * m.d_state], dim=-1)
        raw = self._dt[slots].transpose(1, 2).gather(1, order[..., None].expand(-1, -1, m.n_heads))
        dt = torch.nn.functional.softplus(raw.float() + self.packed.weights["dt_bias"])
        shape = order.shape
        return History(
            self._state[slots],
            pending,
            {
                "x_ring": x.reshape(*shape, m.n_heads, m.head_dim),
                "B_ring": B.reshape(*shape, m.n_groups, m.d_state),
                "dt_ring": dt,
            },
        )


def _configured(settings: dict[str, Setting]) -> AbstractContextManager[ExitStack]:
    """Pin the launch settings of kernels of the library."""
    config: Any = load(_CONFIG)
    stack = ExitStack()
    for kernel, setting in settings.items():
        if setting:
            stack.enter_context(config.override_replayssm_config(kernel, tuple(setting.values())))
    return stack
