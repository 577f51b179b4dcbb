"""Which kernels run the convolution and Mamba-2 after it: those of each, and the one that does both in one launch."""

from dataclasses import dataclass
from functools import cached_property

from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.plugins.specializations.base import Kernel, LaunchShape, Role
from trtllm_replayssm.plugins.specializations.causal_conv1d import CausalConv1dSpecialization
from trtllm_replayssm.plugins.specializations.mamba2 import Mamba2Specialization
from trtllm_replayssm.plugins.specializations.pipeline import ARCHITECTURES, PipelineShape

# The taps of two neighbouring channels are then 16 bytes.
_TAPS_OF_STEP = 4
# Of windows of several tokens, for each multiprocessor. Measured (docs/kernels.md): long windows give the coefficient
# warps so much to convolve that the states wait for them, unless chunks are so few that latencies are what counts.
_MOST_CHUNKS_OF_WINDOWS = 2


@dataclass(frozen=True)
class Mamba2WithConvSpecialization:
    """The constants of a convolution of x, B and C, and of Mamba-2 on what it makes.

    The convolution and Mamba-2 have kernels of their own; the one that is told here convolves and runs the step.

    Attributes:
        step: of Mamba-2.
        d_conv: taps K, 2 to 8.

    Raises:
        UnsupportedError: no kernel for the convolution's constants.
    """

    step: Mamba2Specialization
    d_conv: int

    folder = "mamba2"

    def __post_init__(self) -> None:
        _ = self.convolution  # refuses what it does not support

    @cached_property
    def convolution(self) -> CausalConv1dSpecialization:
        """The constants of the convolution's own kernels."""
        step = self.step
        conv_dim = step.n_heads * step.head_dim + 2 * step.n_groups * step.d_state
        return CausalConv1dSpecialization(conv_dim, self.d_conv, step.activation_dtype)

    @cached_property
    def pipeline(self) -> PipelineShape | None:
        """The make-up of the step that convolves; None where there is none for these constants."""
        return self.step.pipeline_shape(is_raw=True) if self.d_conv == _TAPS_OF_STEP else None

    def roles(self, architecture: str) -> tuple[Role, ...]:
        """Return the roles that are neither the convolution's nor Mamba-2's, for an architecture."""
        is_there = architecture in ARCHITECTURES and self.pipeline is not None
        return ("step_with_conv",) if is_there else ()

    def kernel(self, role: Role, architecture: str) -> Kernel:
        """Return the kernel that plays a role on an architecture."""
        return role

    def launch_shape(self, kernel: Kernel) -> LaunchShape:
        """Return how the kernel is launched."""
        pipeline = self._require_pipeline()
        most_blocks = 0 if self.step.window == 1 else _MOST_CHUNKS_OF_WINDOWS * pipeline.chunk_heads
        return LaunchShape(
            f"replay_mamba2_{kernel}",
            self.step.n_heads,
            pipeline.block_threads,
            pipeline.shared_bytes,
            is_persistent=True,
            most_blocks_per_multiprocessor=most_blocks,
        )

    def defines(self, kernel: Kernel) -> dict[str, str]:
        """Return the macros that the kernel is compiled with."""
        pipeline = self._require_pipeline()
        return (
            self.step.defines("pipelined_step")
            | pipeline.defines()
            | {
                "BLOCK_THREADS": str(pipeline.block_threads),
                "DYNAMIC_SHARED_BYTES": str(pipeline.shared_bytes),
                "D_CONV": str(self.d_conv),
            }
        )

    def _require_pipeline(self) -> PipelineShape:
        if self.pipeline is None:
            raise UnsupportedError(
                f"{self}: found no step that convolves for these constants; needed d_conv {_TAPS_OF_STEP} and a "
                "pipelined step. Run the convolution and the step one after the other."
            )
        return self.pipeline
