"""vLLM: the conventional step with a snapshot per token, and the Triton kernels that replay."""

from contextlib import ExitStack

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers.common import History, bare, load
from trtllm_replayssm.bench.peers.mamba2 import Mamba2PeerStep
from trtllm_replayssm.bench.peers.mamba_ssm import TILES
from trtllm_replayssm.bench.peers.vllm_slots import CONFIG, Snapshots, TokenReplay, WindowReplay, configured
from trtllm_replayssm.bench.recurrences import ACTIVATION, normal
from trtllm_replayssm.bench.report import Kind
from trtllm_replayssm.bench.tuning import SHIPPED, Setting

_OPS = "vllm.model_executor.layers.mamba.ops"


class SelectiveStateUpdate(Mamba2PeerStep, Snapshots):
    """``selective_state_update`` as vLLM's Mamba-2 layer calls it: one state written for every token."""

    implementation = "vllm selective_state_update"
    kind: Kind = "conventional"
    module = f"{_OPS}.mamba_ssm"
    settings = (SHIPPED, *TILES)

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        batch, window, m = case.batch_size, case.replay.window, self.geometry
        self.keep_snapshots()
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
        window = {} if is_one else {"num_accepted_tokens": self.accepted, "cu_seqlens": self.ends}
        with ExitStack() as stack:
            if self.setting:
                tile = (self.setting["BLOCK_SIZE_M"], self.setting["num_warps"])
                stack.enter_context(self.library.override_ssm_config(tile))
            self.library.selective_state_update(
                self.snapshots,
                **inputs,
                **self._weights,
                **window,
                dt_softplus=True,
                state_batch_indices=self.snapshot_slots[index],
                out=out,
            )
        return out

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return the states after the last accepted token."""
        return bare(self.last_accepted(index, rows), self.packed.recurrence)


class _TokenReplay(Mamba2PeerStep, TokenReplay):
    function: str
    config: str

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        m, batch, history = self.geometry, case.batch_size, case.replay.history
        sets = self.num_sets
        self.count_up()
        self._state = self.states()
        self._x = normal((sets, batch, m.n_heads, history, m.head_dim), ACTIVATION, device)
        self._B = normal((sets, batch, m.n_groups, history, m.d_state), ACTIVATION, device)
        self._dt = torch.empty(sets, batch, m.n_heads, history, device=device).uniform_(0.001, 0.1)
        self._weights = self.expanded_weights()

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of one token."""
        return case.replay.window == 1 and load(CONFIG) is not None

    def scratch(self) -> dict[str, Tensor]:
        """Return the scratch tensors of a launch by name."""
        return {}

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        inputs = {name: tensor[:, 0] for name, tensor in self.packed.inputs(index).items()}
        inputs["dt"] = self.by_channel(inputs["dt"])
        out = torch.empty(inputs["x"].shape, dtype=ACTIVATION, device=self.device)
        with configured({self.config: self.setting}):
            getattr(self.library, self.function)(
                self._state[index],
                **inputs,
                **self._weights,
                **self.scratch(),
                dt_softplus=True,
                x_cache=self._x[index],
                dt_cache=self._dt[index],
                B_cache=self._B[index],
                write_pos=self.pending[step, index],
                is_flush=self.is_flush[step, index],
                max_cache_len=self.case.replay.history,
                out=out,
            )
        return out

    def before(self, step: int, index: int, rows: Tensor) -> History:
        """Return checkpoints and the rows of the buffers."""
        return History(
            self._state[index][rows],
            self.pending[step, index][rows],
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


class Speculative(Mamba2PeerStep, WindowReplay):
    """``selective_state_update_replayssm_spec``: a window of several tokens from a checkpoint and a ring."""

    implementation = "vllm replayssm_spec"
    module = f"{_OPS}.selective_state_update_replayssm_spec"
    settings = (
        SHIPPED,
        *(
            {"BLOCK_SIZE_M": rows, "num_warps": warps, "DSTATE_TILE": tile, "num_stages": 2}
            for rows, warps, tile in ((64, 2, 64), (32, 2, 128), (16, 1, 128), (64, 4, 128))
        ),
    )

    def __init__(self, case: KernelCase, device: torch.device) -> None:
        super().__init__(case, device)
        m, slots = self.geometry, 1 + self.num_sets * case.batch_size
        self.follow_ours()
        self._state = self.slotted_states()
        self._conv = normal((slots, self.ring_rows, m.d_inner + m.n_groups * m.d_state), ACTIVATION, device)
        self._dt = normal((slots, m.n_heads, self.ring_rows), ACTIVATION, device)
        self._weights = self.expanded_weights()

    @classmethod
    def supports(cls, case: KernelCase) -> bool:
        """Say whether it is a step of several tokens."""
        return case.replay.window > 1 and load(CONFIG) is not None

    def launch(self, step: int, index: int) -> Tensor:
        """Launch one step of one set."""
        m, window = self.geometry, self.case.replay.window
        pending, origin, is_flush = (lengths[step] for lengths in self.lengths)
        rows, batch = self.ring_rows, self.case.batch_size
        # The library's own builder makes this too small for several groups of heads.
        products = torch.empty(
            batch, m.n_groups, rows, 1 << (window - 1).bit_length(), dtype=ACTIVATION, device=self.device
        )
        with configured({f"mamba2_spec_{part}": self.setting for part in ("verify", "flush")}):
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
                query_start_loc=self.ends,
                state_batch_indices=self.ids[index],
                max_cache_len=self.limit,
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
        slots, pending, order = self.live_rows(step, index, rows)
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
