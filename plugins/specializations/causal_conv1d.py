"""Which kernels of the causal convolution exist."""

from dataclasses import dataclass
from typing import get_args

from trtllm_replayssm.contract.geometry import DTYPE_BYTES, ActivationDtype
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.plugins.specializations.base import CPP_TYPES, ROLES, Kernel, LaunchShape, Role, require_dtype

# Of one thread of the convolution: what it must know about 16 bytes of channels would fill its registers.
_CONV_VECTOR_BYTES = 8
_CONV_BLOCK_THREADS = 128
# Rows of a thread: two share their taps; with more than one token a row each is faster. Blocks per SM bound the
# registers of a step: at 128 rows of 10240 channels all blocks of a one-token step are then on the GPU at once.
_CONV_ROWS: dict[Kernel, int] = {"one_token_step": 2, "step": 1, "prefill": 1}
_CONV_BLOCKS_PER_SM: dict[Kernel, int] = {"one_token_step": 10, "step": 8}
_CONV_FEW_TAPS, _CONV_BLOCKS_PER_SM_OF_MANY_TAPS = 4, 4
# Thread blocks that share the tokens of a long window, per block of channels: enough to fill a GPU at batch 1.
_CONV_TOKEN_SPLITS = 128


@dataclass(frozen=True)
class CausalConv1dSpecialization:
    """The constants that a causal convolution kernel is compiled for; either role is right for any window.

    Attributes:
        conv_dim: channels D.
        d_conv: taps K, 2 to 8.
        activation_dtype: of x, weight, bias, y and the ring; arithmetic is fp32.

    Raises:
        UnsupportedError: no kernel for these constants; the message lists what is supported.
    """

    conv_dim: int
    d_conv: int
    activation_dtype: ActivationDtype

    folder = "causal_conv1d"

    def __post_init__(self) -> None:
        require_dtype("activation_dtype", self.activation_dtype, get_args(ActivationDtype))
        if self.conv_dim < 1 or not 2 <= self.d_conv <= 8:
            raise UnsupportedError(
                f"causal convolution kernel: found conv_dim={self.conv_dim}, d_conv={self.d_conv}; needed conv_dim "
                'at least 1 and d_conv from 2 to 8. Other shapes run on the CPU (device="cpu").'
            )

    @property
    def channels_per_thread(self) -> int:
        """Channels of a thread: as many as 8 bytes hold, halved until they divide conv_dim."""
        channels = _CONV_VECTOR_BYTES // DTYPE_BYTES[self.activation_dtype]
        while self.conv_dim % channels:
            channels //= 2
        return channels

    def roles(self, architecture: str) -> tuple[Role, ...]:
        """Return the roles that an image carries for an architecture."""
        return (*ROLES, "one_token_step")

    def kernel(self, role: Role, architecture: str) -> Kernel:
        """Return the kernel that plays a role on an architecture."""
        return role

    def launch_shape(self, kernel: Kernel) -> LaunchShape:
        """Return how a kernel is launched."""
        blocks = -(-self.conv_dim // (self.channels_per_thread * _CONV_BLOCK_THREADS))
        splits = _CONV_TOKEN_SPLITS if kernel == "prefill" else 1
        symbol = f"replay_causal_conv1d_{kernel}"
        return LaunchShape(symbol, blocks * splits, _CONV_BLOCK_THREADS, 0, rows_per_block=_CONV_ROWS[kernel])

    def defines(self, kernel: Kernel) -> dict[str, str]:
        """Return the macros that a kernel of this specialization is compiled with."""
        defines = {
            "CONV_DIM": str(self.conv_dim),
            "D_CONV": str(self.d_conv),
            "ACTIVATION_TYPE": CPP_TYPES[self.activation_dtype],
            "CHANNELS_PER_THREAD": str(self.channels_per_thread),
            "BLOCK_THREADS": str(_CONV_BLOCK_THREADS),
        }
        if kernel == "prefill":
            return defines | {"TOKEN_SPLITS": str(_CONV_TOKEN_SPLITS)}
        is_few = self.d_conv <= _CONV_FEW_TAPS
        blocks_per_sm = _CONV_BLOCKS_PER_SM[kernel] if is_few else _CONV_BLOCKS_PER_SM_OF_MANY_TAPS
        return defines | {"ROWS_PER_BLOCK": str(_CONV_ROWS[kernel]), "BLOCKS_PER_SM": str(blocks_per_sm)}
