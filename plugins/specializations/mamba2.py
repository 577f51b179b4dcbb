"""Which kernels of Mamba-2 exist."""

from dataclasses import dataclass
from typing import Self

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import DTYPE_BYTES, ActivationDtype, Mamba2Geometry, ReplayGeometry, StateDtype
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.plugins.specializations import mamba2_chunks, mamba2_pipeline
from trtllm_replayssm.plugins.specializations.base import (
    CPP_TYPES,
    ROLES,
    VECTOR_BYTES,
    WARP,
    Kernel,
    LaunchShape,
    Role,
    has_room,
    require_types,
)
from trtllm_replayssm.plugins.specializations.mamba2_chunks import ChunkShape
from trtllm_replayssm.plugins.specializations.pipeline import ARCHITECTURES, PipelineShape

# Lanes that share a state row: eight 16-byte loads are one 128-byte line, and a sum over them takes three shuffles.
_MAX_LANES_PER_ROW = 8
# fp32 values of the state that a thread holds in registers: with the rest of the kernel a step takes 111 registers and
# a prefill 128, so that three thread blocks of 160 threads fit on an SM.
_MAX_STATE_VALUES_PER_THREAD = 64
_MIN_WARPS, _MAX_WARPS = 4, 16
# The two buffers of the prefill scan: several thread blocks per SM, and within the 48 KiB that need no opt-in.
_PREFILL_BUFFER_BYTES = 48 * 1024
_CHUNK_SIZES = (32, 16, 8, 4)
# Elements (not bytes) between staged x rows beyond head_dim: rows then start in different shared-memory banks.
_X_PADDING = 8


@dataclass(frozen=True)
class Mamba2Specialization:
    """The constants that a Mamba-2 kernel is compiled for.

    Attributes:
        n_heads: heads H.
        head_dim: channels of a head P; a multiple of 8 from 16 to 128.
        d_state: state columns N; 32, 64, 128 or 256.
        n_groups: groups G of heads that share B and C; divides n_heads.
        history: most pending rows W, 1 to 64.
        max_draft_len: T - 1, 0 to 7.
        activation_dtype: of x, B, C, y and the x and B rings.
        state_dtype: of the checkpoint in memory; arithmetic is fp32.
        dt_dtype: of the raw dt input: the activation type or "float32".

    Raises:
        UnsupportedError: no kernel for these constants; the message lists what is supported.
        ConfigError: history < 1 + max_draft_len.
    """

    n_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    history: int
    max_draft_len: int
    activation_dtype: ActivationDtype
    state_dtype: StateDtype
    dt_dtype: ActivationDtype

    folder = "mamba2"

    def __post_init__(self) -> None:
        protocol.check_history(self.history, self.max_draft_len)
        require_types(self.activation_dtype, self.state_dtype, dt_dtype=self.dt_dtype)
        supported = (
            self.n_heads >= 1
            and self.n_groups >= 1
            and self.n_heads % self.n_groups == 0
            and self.head_dim in range(16, 129, 8)
            and self.d_state in (32, 64, 128, 256)
            and self.history <= 64
            and self.max_draft_len <= 7
        )
        if not supported:
            raise UnsupportedError(
                f"Mamba-2 kernel: found n_heads={self.n_heads}, head_dim={self.head_dim}, d_state={self.d_state}, "
                f"n_groups={self.n_groups}, history={self.history}, max_draft_len={self.max_draft_len}; needed "
                "head_dim a multiple of 8 from 16 to 128, d_state 32, 64, 128 or 256, n_groups dividing n_heads, "
                'history at most 64, max_draft_len at most 7. Other shapes run on the CPU (device="cpu").'
            )

    @classmethod
    def of_layer(cls, m: Mamba2Geometry, replay: ReplayGeometry, dtype: ActivationDtype) -> Self:
        """Return the constants of a model's layer: its dt comes as the projection made it, in the activation type."""
        return cls(
            n_heads=m.n_heads,
            head_dim=m.head_dim,
            d_state=m.d_state,
            n_groups=m.n_groups,
            history=replay.history,
            max_draft_len=replay.max_draft_len,
            activation_dtype=dtype,
            state_dtype=replay.state_dtype,
            dt_dtype=dtype,
        )

    @property
    def window(self) -> int:
        """T, the most tokens of a decode or verification window."""
        return protocol.window_length(self.max_draft_len)

    @property
    def lanes_per_row(self) -> int:
        """Lanes of a warp that share one state row, each with 16-byte pieces of it."""
        return min(_MAX_LANES_PER_ROW, self.d_state * DTYPE_BYTES[self.state_dtype] // VECTOR_BYTES)

    @property
    def num_warps(self) -> int:
        """Warps per thread block: the fewest, from four up, whose registers hold the head's state."""
        row_groups = self.head_dim * self.lanes_per_row // WARP
        values = self.d_state // self.lanes_per_row
        for warps in range(min(_MIN_WARPS, row_groups), _MAX_WARPS + 1):
            if row_groups % warps == 0 and row_groups // warps * values <= _MAX_STATE_VALUES_PER_THREAD:
                return warps
        raise AssertionError("every supported head_dim and d_state has a tile")

    @property
    def chunk_size(self) -> int:
        """Tokens per block of the prefill scan."""
        return next(size for size in _CHUNK_SIZES if self._prefill_shared_bytes(size) <= _PREFILL_BUFFER_BYTES)

    @property
    def pipeline(self) -> PipelineShape | None:
        """The make-up of the pipelined step; None where there is none for these constants."""
        return self.pipeline_shape(is_raw=False)

    def pipeline_shape(self, *, is_raw: bool) -> PipelineShape | None:
        """Return the make-up of the pipelined step, alone or with the convolution before it; None for none."""
        return mamba2_pipeline.pipeline_shape(
            head_dim=self.head_dim,
            d_state=self.d_state,
            heads_per_group=self.n_heads // self.n_groups,
            history=self.history,
            window=self.window,
            activation_dtype=self.activation_dtype,
            state_dtype=self.state_dtype,
            is_raw=is_raw,
        )

    @property
    def chunks(self) -> ChunkShape | None:
        """The make-up of the chunked prefill; None where there is none for these constants."""
        return mamba2_chunks.chunk_shape(
            head_dim=self.head_dim,
            d_state=self.d_state,
            activation_dtype=self.activation_dtype,
        )

    def kernel(self, role: Role, architecture: str) -> Kernel:
        """Return the kernel that plays a role on an architecture."""
        is_chunked = role == "prefill" and self.chunks is not None and has_room(architecture, self.chunks.shared_bytes)
        return "chunked_prefill" if is_chunked else role

    def roles(self, architecture: str) -> tuple[Role, ...]:
        """Return the roles that an image carries for an architecture."""
        is_pipelined = architecture in ARCHITECTURES and self.pipeline is not None
        return (*ROLES, "pipelined_step") if is_pipelined else ROLES

    def launch_shape(self, kernel: Kernel) -> LaunchShape:
        """Return how a kernel is launched."""
        symbol = f"replay_mamba2_{kernel}"
        if kernel == "pipelined_step":
            pipeline = self._require_pipeline()
            return LaunchShape(symbol, self.n_heads, pipeline.block_threads, pipeline.shared_bytes, is_persistent=True)
        if kernel == "chunked_prefill":
            chunks = self._require_chunks()
            return LaunchShape(symbol, self.n_heads * chunks.head_slices, chunks.block_threads, chunks.shared_bytes)
        shared = self._step_shared_bytes() if kernel == "step" else self._prefill_shared_bytes(self.chunk_size)
        return LaunchShape(symbol, self.n_heads, self.num_warps * WARP, shared)

    def defines(self, kernel: Kernel) -> dict[str, str]:
        """Return the macros that a kernel of this specialization is compiled with."""
        shape = self.launch_shape(kernel)
        defines = {
            "N_HEADS": str(self.n_heads),
            "HEAD_DIM": str(self.head_dim),
            "D_STATE": str(self.d_state),
            "N_GROUPS": str(self.n_groups),
            "HISTORY": str(self.history),
            "MAX_DRAFT_LEN": str(self.max_draft_len),
            "ACTIVATION_TYPE": CPP_TYPES[self.activation_dtype],
            "STATE_TYPE": CPP_TYPES[self.state_dtype],
            "DT_TYPE": CPP_TYPES[self.dt_dtype],
            "BLOCK_THREADS": str(shape.block_x),
            "DYNAMIC_SHARED_BYTES": str(shape.dynamic_shared_bytes),
        }
        if kernel == "pipelined_step":
            return defines | self._require_pipeline().defines()
        if kernel == "chunked_prefill":
            return defines | self._require_chunks().defines()
        return defines | {
            "LANES_PER_ROW": str(self.lanes_per_row),
            "CHUNK_SIZE": str(self.chunk_size),
            "X_PADDING": str(_X_PADDING),
        }

    def _require_pipeline(self) -> PipelineShape:
        if self.pipeline is None:
            raise UnsupportedError(
                f"{self}: found no pipelined step for these constants; needed bfloat16 activations, a state in float32 "
                "or bfloat16, d_state 128, head_dim a multiple of 16, history at most 32. Run the step kernel."
            )
        return self.pipeline

    def _require_chunks(self) -> ChunkShape:
        if self.chunks is None:
            raise UnsupportedError(
                f"{self}: found no chunked prefill for these constants; needed bfloat16 activations, head_dim a "
                "multiple of 16, d_state of 64 or more. Run the prefill kernel."
            )
        return self.chunks

    def _step_shared_bytes(self) -> int:
        """Count staged rows of B, C and x, then fp32 dt, window weights, fold weights and the fold's decay."""
        rows = self.history + self.window
        elements = (rows + self.window) * self.d_state + rows * (self.head_dim + _X_PADDING)
        floats = rows + self.window * (self.history + 1) + self.history + 1
        return elements * DTYPE_BYTES[self.activation_dtype] + 4 * floats

    def _prefill_shared_bytes(self, chunk_size: int) -> int:
        """Count two buffers of B, C and x rows, and of fp32 decay and dt per token."""
        elements = chunk_size * (2 * self.d_state + self.head_dim)
        return 2 * (elements * DTYPE_BYTES[self.activation_dtype] + 4 * 2 * chunk_size)
