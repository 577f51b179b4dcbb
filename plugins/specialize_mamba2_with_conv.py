"""Which kernels convolve and run the step of Mamba-2 in one launch: their constants and how they are launched."""

from dataclasses import dataclass
from functools import cached_property

from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.plugins import pipeline_shape
from trtllm_replayssm.plugins.pipeline_shape import PipelineShape
from trtllm_replayssm.plugins.specialize import Kernel, LaunchShape, Mamba2Specialization, Role

# The taps of two neighbouring channels are then 16 bytes.
TAPS_OF_STEP = 4
# Of windows of several tokens, for each multiprocessor.
_MOST_CHUNKS_OF_WINDOWS = 2


@dataclass(frozen=True)
class Mamba2WithConvSpecialization:
    """The constants of the kernel that convolves x, B and C and runs the step, where there is one.

    Attributes:
        step: of the step.
        d_conv: taps K; 4.

    Raises:
        UnsupportedError: no kernel for these constants.
    """

    step: Mamba2Specialization
    d_conv: int

    folder = "mamba2"

    def __post_init__(self) -> None:
        if self.d_conv != TAPS_OF_STEP or self.step.pipeline is None:
            raise UnsupportedError(
                f"{self}: found no step that convolves for these constants; needed d_conv {TAPS_OF_STEP} and a "
                "pipelined step. Run the convolution and the step one after the other."
            )

    @cached_property
    def pipeline(self) -> PipelineShape:
        """The make-up."""
        shape = self.step.pipeline_shape(is_raw=True)
        assert shape is not None, "as for the step alone"
        return shape

    def is_faster(self, num_rows: int, num_multiprocessors: int) -> bool:
        """Say whether the kernel is faster than the convolution and the step one after the other.

        Measured (docs/kernels.md): for windows of one token it is. Longer ones give the coefficient warps so much to
        convolve that the states wait for them, unless there are so few chunks that latencies are what counts.
        """
        num_chunks = num_rows * self.step.n_heads // self.pipeline.chunk_heads
        return self.step.window == 1 or num_chunks <= _MOST_CHUNKS_OF_WINDOWS * num_multiprocessors

    def roles(self, architecture: str) -> tuple[Role, ...]:
        """Return the kernels that there are for an architecture."""
        return ("step_with_conv",) if architecture in pipeline_shape.ARCHITECTURES else ()

    def kernel(self, role: Role, architecture: str) -> Kernel:
        """Return the kernel that plays a role on an architecture."""
        return role

    def launch_shape(self, kernel: Kernel) -> LaunchShape:
        """Return how the kernel is launched."""
        pipeline = self.pipeline
        return LaunchShape(
            f"replay_mamba2_{kernel}",
            self.step.n_heads,
            pipeline.block_threads,
            pipeline.shared_bytes,
            is_persistent=True,
        )

    def defines(self, kernel: Kernel) -> dict[str, str]:
        """Return the macros that the kernel is compiled with."""
        pipeline = self.pipeline
        return (
            self.step.defines("pipelined_step")
            | pipeline.defines()
            | {
                "BLOCK_THREADS": str(pipeline.block_threads),
                "DYNAMIC_SHARED_BYTES": str(pipeline.shared_bytes),
                "D_CONV": str(self.d_conv),
            }
        )
