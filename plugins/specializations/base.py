"""What the specializations of all kernels have in common: roles, launches, types and a device's limits."""

from dataclasses import dataclass
from typing import Literal, get_args

from trtllm_replayssm.contract.geometry import ActivationDtype, StateDtype
from trtllm_replayssm.errors import UnsupportedError

Role = Literal["step", "prefill", "pipelined_step", "one_token_step", "step_with_conv"]
ROLES: tuple[Role, ...] = ("step", "prefill")
"""What every specialization has for every architecture. ``step`` runs windows of at most 1 + max_draft_len tokens,
``prefill`` longer ones. For some shapes, architectures and layouts ``pipelined_step`` does the work of ``step``; for
windows of one token ``one_token_step`` does that of the convolution's. ``step_with_conv`` does the work of the
convolution and of Mamba-2's step, where it is the faster way."""
CONV_PREFIX = "conv_"
"""Begins the convolution's roles in a kernel image (``plugins.kernel_image``) that is not of a convolution alone."""
Kernel = Literal[Role, "chunked_prefill", "deep_chunked_prefill"]
"""A source file of that name. A role is the kernel of its own name, but for ``kernel()`` of a specialization."""

MAX_ROWS = 65535
"""As in ``kernels/common/protocol.h``: most rows of a step."""
CPP_TYPES = {"float32": "float", "float16": "replay::float16", "bfloat16": "replay::bfloat16"}
WARP = 32
VECTOR_BYTES = 16
"""The widest access of one thread."""
SHARED_BYTES = {
    "sm_80": 99 * 1024,  # its cubins also run on 8.6 and 8.9
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_103a": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""Architecture -> shared memory that a thread block may have on every device that runs its cubins, in bytes."""


@dataclass(frozen=True)
class LaunchShape:
    """How one kernel is launched: block (block_x, 1, 1), and grid (grid_x, rows / rows_per_block, 1) unless persistent.

    A persistent kernel shares its work out by itself: grid (min(multiprocessors of the device, rows * grid_x), 1, 1).

    Attributes:
        symbol: the kernel's unmangled name.
        grid_x: thread blocks per row of the step, or per rows_per_block of them.
        block_x: threads per block.
        dynamic_shared_bytes: dynamic shared memory per block, in bytes.
        is_persistent: see above.
        rows_per_block: rows of the step that a block runs, the last block maybe fewer.
        most_blocks_per_multiprocessor: of rows * grid_x, up to which the kernel is faster than those whose work it does
            one after the other; 0: always.
    """

    symbol: str
    grid_x: int
    block_x: int
    dynamic_shared_bytes: int
    is_persistent: bool = False
    rows_per_block: int = 1
    most_blocks_per_multiprocessor: int = 0

    def is_faster(self, num_rows: int, num_multiprocessors: int) -> bool:
        """Say whether to launch the kernel rather than those whose work it does one after the other."""
        most = self.most_blocks_per_multiprocessor
        return most == 0 or num_rows * self.grid_x <= most * num_multiprocessors

    def grid(self, num_rows: int, num_multiprocessors: int) -> tuple[int, int, int]:
        """Return the grid for the rows of a step on a device with this many multiprocessors."""
        if self.is_persistent:
            return min(num_multiprocessors, num_rows * self.grid_x), 1, 1
        return self.grid_x, -(-num_rows // self.rows_per_block), 1


def require_dtype(name: str, found: str, accepted: tuple[str, ...]) -> None:
    """Refuse a type that no kernel is compiled for.

    Raises:
        UnsupportedError: found is not accepted.
    """
    if found not in accepted:
        raise UnsupportedError(f"{name}: found {found!r}; needed one of {', '.join(dict.fromkeys(accepted))}.")


def require_types(activation_dtype: str, state_dtype: str, **raw_dtypes: str) -> None:
    """Refuse types of a recurrence that no kernel is compiled for.

    Args:
        activation_dtype: of its inputs, outputs and rings.
        state_dtype: of the checkpoint.
        **raw_dtypes: of inputs that may come in fp32 as well as in the activation type.

    Raises:
        UnsupportedError: as ``require_dtype``.
    """
    require_dtype("activation_dtype", activation_dtype, get_args(ActivationDtype))
    require_dtype("state_dtype", state_dtype, get_args(StateDtype))
    for name, found in raw_dtypes.items():
        require_dtype(name, found, (activation_dtype, "float32"))


def has_room(architecture: str, shared_bytes: int) -> bool:
    """Say whether every device that runs an architecture's cubins has so much shared memory for a thread block."""
    return shared_bytes <= SHARED_BYTES.get(architecture, 0)
