"""What the pipelined steps of both recurrences have in common: where they run, their warps, stages and buffers."""

from dataclasses import dataclass

from trtllm_replayssm.plugins.specializations.base import WARP

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
"""With bulk copies and 227 KiB of shared memory for a thread block; sm_120 has the copies, but too little memory."""
_SHARED_BYTES = 227 * 1024
BARRIER_BYTES = 8
_CHUNK_DESCRIPTION_BYTES = 36
CONSUMERS = 8
# A team shares a chunk, a half warp having one head; the other team has the next chunk meanwhile.
_TEAMS, _TEAM_WARPS = 2, 2
# As many warps as in the layout.cuh of each recurrence.
LOADERS = 3
# So many chunks' worth for each thread block are cut into the first number of parts that fits, to end together.
_TAIL_CHUNKS, _TAIL_PARTS = 3, (2, 3, 1)


@dataclass(frozen=True)
class PipelineShape:
    """How a thread block of a pipelined step is made up; the words are those of ``common/pipeline``.

    Attributes:
        num_stages: tiles that shared memory holds, a multiple of the consumer warps.
        chunk_heads: most heads of a chunk; divides the heads of a group, or of a key head.
        chunk_buffers: chunks whose token rows shared memory holds.
        shared_bytes: all of it.
        team_warps: coefficient warps that share a chunk.
        is_raw: whether x, B and C come before their convolution.
    """

    num_stages: int
    chunk_heads: int
    chunk_buffers: int
    shared_bytes: int
    team_warps: int = _TEAM_WARPS
    is_raw: bool = False

    @property
    def block_threads(self) -> int:
        """Threads of a block: consumer, coefficient and loader warps and the producer's warp."""
        return (CONSUMERS + _TEAMS * self.team_warps + LOADERS + 1) * WARP

    def defines(self) -> dict[str, str]:
        """Return the macros that tell the sources."""
        return {
            "NUM_CONSUMERS": str(CONSUMERS),
            "COEFFICIENT_TEAMS": str(_TEAMS),
            "TEAM_WARPS": str(self.team_warps),
            "IS_RAW": str(int(self.is_raw)),
            "NUM_STAGES": str(self.num_stages),
            "CHUNK_HEADS": str(self.chunk_heads),
            "CHUNK_BUFFERS": str(self.chunk_buffers),
            "TAIL_CHUNKS": str(_TAIL_CHUNKS),
            "TAIL_PARTS": str(next(parts for parts in _TAIL_PARTS if self.chunk_heads % parts == 0)),
        }


def buffer_bytes(payload_bytes: int) -> int:
    """Count a chunk buffer and its barriers.

    In whole 128 bytes what a recurrence keeps there, then the description, which begins at a multiple of 16.
    """
    described_bytes = -(-payload_bytes // 16) * 16 + _CHUNK_DESCRIPTION_BYTES
    return -(-described_bytes // 128) * 128 + (3 + LOADERS) * BARRIER_BYTES


def shared_bytes(num_stages: int, stage_bytes: int, fixed_bytes: int) -> int:
    """Count stages with their barriers, and what is fixed, in whole 16 bytes."""
    return -(-(num_stages * (stage_bytes + 2 * BARRIER_BYTES) + fixed_bytes) // 16) * 16


def stages_that_fit(stage_bytes: int, fixed_bytes: int, *, multiple_of: int) -> int:
    """Count the stages that shared memory has room for beside what is fixed."""
    stages = (_SHARED_BYTES - fixed_bytes - 15) // (stage_bytes + 2 * BARRIER_BYTES)
    return stages // multiple_of * multiple_of
