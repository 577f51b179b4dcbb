"""Which kernels of Gated DeltaNet exist."""

from dataclasses import dataclass
from typing import Self

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    ActivationDtype,
    GatedDeltaNetGeometry,
    ReplayGeometry,
    StateDtype,
)
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.plugins.specializations import gated_delta_net_chunks, gated_delta_net_pipeline
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
from trtllm_replayssm.plugins.specializations.gated_delta_net_chunks import DeltaChunkShape
from trtllm_replayssm.plugins.specializations.gated_delta_net_pipeline import GatedDeltaNetPipelineShape
from trtllm_replayssm.plugins.specializations.pipeline import ARCHITECTURES

# Lanes that share the rows of one 16-byte vector of state columns; the lanes of a warp hold two such vectors.
_ROW_LANES = 16
# Floats between staged rows of u beyond a slice, as in kernels/gated_delta_net/unit_rows.cuh.
_U_PADDING = 4
_CHUNK_SIZE = 32
# Of the chunked prefills the first that has room runs.
_CHUNKED: tuple[Kernel, ...] = ("deep_chunked_prefill", "chunked_prefill")
# Bounds the registers: without it the compiler gives some of them up for more blocks, and keeps values on the stack.
_BLOCKS_PER_SM = 3


@dataclass(frozen=True)
class GatedDeltaNetSpecialization:
    """The constants that a Gated DeltaNet kernel is compiled for.

    Attributes:
        n_key_heads: heads Hk of q and k; divides n_value_heads.
        n_value_heads: heads Hv of v, o and the state.
        key_dim: rows of a head's state K; a multiple of 16 from 16 to 128.
        value_dim: columns of a head's state V; a multiple of 32 from 32 to 256.
        history: most pending rows W, 1 to 64.
        max_draft_len: T - 1, 0 to 7.
        activation_dtype: of q, k, v, o and the k ring.
        state_dtype: of the checkpoint in memory; arithmetic is fp32.
        gate_dtype: of the raw a and b: the activation type or "float32".

    Raises:
        UnsupportedError: no kernel for these constants; the message lists what is supported.
        ConfigError: history < 1 + max_draft_len.
    """

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    history: int
    max_draft_len: int
    activation_dtype: ActivationDtype
    state_dtype: StateDtype
    gate_dtype: ActivationDtype

    folder = "gated_delta_net"

    def __post_init__(self) -> None:
        protocol.check_history(self.history, self.max_draft_len)
        require_types(self.activation_dtype, self.state_dtype, gate_dtype=self.gate_dtype)
        supported = (
            self.n_key_heads >= 1
            and self.n_value_heads >= 1
            and self.n_value_heads % self.n_key_heads == 0
            and self.key_dim in range(16, 129, 16)
            and self.value_dim in range(32, 257, 32)
            and self.history <= 64
            and self.max_draft_len <= 7
        )
        if not supported:
            raise UnsupportedError(
                f"Gated DeltaNet kernel: found n_key_heads={self.n_key_heads}, n_value_heads={self.n_value_heads}, "
                f"key_dim={self.key_dim}, value_dim={self.value_dim}, history={self.history}, "
                f"max_draft_len={self.max_draft_len}; needed n_key_heads dividing n_value_heads, key_dim a multiple of "
                "16 from 16 to 128, value_dim a multiple of 32 from 32 to 256, history at most 64, max_draft_len at "
                'most 7. Other shapes run on the CPU (device="cpu").'
            )

    @classmethod
    def of_layer(cls, m: GatedDeltaNetGeometry, replay: ReplayGeometry, dtype: ActivationDtype) -> Self:
        """Return the constants of a model's layer: its a and b come as the projection made them."""
        return cls(
            n_key_heads=m.n_key_heads,
            n_value_heads=m.n_value_heads,
            key_dim=m.key_dim,
            value_dim=m.value_dim,
            history=replay.history,
            max_draft_len=replay.max_draft_len,
            activation_dtype=dtype,
            state_dtype=replay.state_dtype,
            gate_dtype=dtype,
        )

    @property
    def window(self) -> int:
        """T, the most tokens of a decode or verification window."""
        return protocol.window_length(self.max_draft_len)

    @property
    def num_warps(self) -> int:
        """Warps per thread block: four, or two where the columns of four would not divide a head."""
        return 4 if self.value_dim % (4 * self._columns_per_warp) == 0 else 2

    @property
    def slice_dim(self) -> int:
        """Columns of the state that a thread block holds."""
        return self.num_warps * self._columns_per_warp

    @property
    def _columns_per_warp(self) -> int:
        return WARP // _ROW_LANES * VECTOR_BYTES // DTYPE_BYTES[self.state_dtype]

    def chunks_of(self, kernel: Kernel) -> DeltaChunkShape | None:
        """Return the make-up of one of the chunked prefills; None where there is none for these constants."""
        return gated_delta_net_chunks.chunk_shape(
            n_value_heads=self.n_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            activation_dtype=self.activation_dtype,
            state_dtype=self.state_dtype,
            is_deep=kernel == "deep_chunked_prefill",
        )

    @property
    def pipeline(self) -> GatedDeltaNetPipelineShape | None:
        """The make-up of the pipelined step; None where there is none for these constants."""
        return gated_delta_net_pipeline.pipeline_shape(
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            heads_per_key=self.n_value_heads // self.n_key_heads,
            history=self.history,
            window=self.window,
            activation_dtype=self.activation_dtype,
            state_dtype=self.state_dtype,
        )

    def roles(self, architecture: str) -> tuple[Role, ...]:
        """Return the roles that an image carries for an architecture."""
        is_pipelined = architecture in ARCHITECTURES and self.pipeline is not None
        return (*ROLES, "pipelined_step") if is_pipelined else ROLES

    def kernel(self, role: Role, architecture: str) -> Kernel:
        """Return the kernel that plays a role on an architecture."""
        if role == "prefill":
            for kernel in _CHUNKED:
                chunks = self.chunks_of(kernel)
                if chunks is not None and has_room(architecture, chunks.shared_bytes):
                    return kernel
        return role

    def launch_shape(self, kernel: Kernel) -> LaunchShape:
        """Return how a kernel is launched."""
        symbol, columns = f"replay_gated_delta_net_{kernel}", self.n_value_heads * self.value_dim
        if kernel == "pipelined_step":
            shape = self._require_pipeline()
            return LaunchShape(symbol, self.n_value_heads, shape.block_threads, shape.shared_bytes, is_persistent=True)
        if kernel in _CHUNKED:
            chunks = self._require_chunks(kernel)
            return LaunchShape(symbol, columns // chunks.slice_dim, chunks.block_threads, chunks.shared_bytes)
        shared = self._step_shared_bytes() if kernel == "step" else self._prefill_shared_bytes()
        return LaunchShape(symbol, columns // self.slice_dim, self.num_warps * WARP, shared)

    def defines(self, kernel: Kernel) -> dict[str, str]:
        """Return the macros that a kernel of this specialization is compiled with."""
        shape = self.launch_shape(kernel)
        defines = {
            "N_KEY_HEADS": str(self.n_key_heads),
            "N_VALUE_HEADS": str(self.n_value_heads),
            "KEY_DIM": str(self.key_dim),
            "VALUE_DIM": str(self.value_dim),
            "HISTORY": str(self.history),
            "MAX_DRAFT_LEN": str(self.max_draft_len),
            "ACTIVATION_TYPE": CPP_TYPES[self.activation_dtype],
            "STATE_TYPE": CPP_TYPES[self.state_dtype],
            "GATE_TYPE": CPP_TYPES[self.gate_dtype],
            "BLOCK_THREADS": str(shape.block_x),
            "DYNAMIC_SHARED_BYTES": str(shape.dynamic_shared_bytes),
        }
        if kernel in _CHUNKED:
            return defines | self._require_chunks(kernel).defines()
        if kernel == "pipelined_step":
            return defines | self._require_pipeline().defines()
        return defines | {
            "SLICE_DIM": str(self.slice_dim),
            "BLOCKS_PER_SM": str(_BLOCKS_PER_SM),
            "CHUNK_SIZE": str(_CHUNK_SIZE),
        }

    def _require_pipeline(self) -> GatedDeltaNetPipelineShape:
        if self.pipeline is None:
            raise UnsupportedError(
                f"{self}: found no pipelined step for these constants; needed bfloat16 activations, a state in float32 "
                "or bfloat16, key_dim and value_dim 64 or 128, history at most 16. Run the step kernel."
            )
        return self.pipeline

    def _require_chunks(self, kernel: Kernel) -> DeltaChunkShape:
        chunks = self.chunks_of(kernel)
        if chunks is None:
            raise UnsupportedError(
                f"{self}: found no chunked prefill for these constants; needed bfloat16 activations, key_dim 64 or "
                "128. Run the prefill kernel."
            )
        return chunks

    def _step_shared_bytes(self) -> int:
        """Count fp32 rows of keys, u, g and queries, beta and decay, two weights per pair of rows, fold weights."""
        rows, window = self.history + self.window, self.window
        floats = rows * (self.key_dim + self.slice_dim + _U_PADDING + 1)
        floats += window * (self.key_dim + 2 + 2 * self.history) + 1 + self.history
        return DTYPE_BYTES["float32"] * floats

    def _prefill_shared_bytes(self) -> int:
        """Count fp32 rows of keys, queries and values, decay and beta of a chunk."""
        return DTYPE_BYTES["float32"] * _CHUNK_SIZE * (2 * self.key_dim + self.slice_dim + _U_PADDING + 2)
