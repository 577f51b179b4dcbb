"""The peers: what is installed, and which of them run a case."""

from collections.abc import Sequence
from importlib import metadata
from typing import Final

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers import flashinfer, mamba_ssm, vllm
from trtllm_replayssm.bench.peers.common import PeerStep, load

NOT_INSTALLED: Final = "not installed"


Peer = type[PeerStep] | type[mamba_ssm.ChunkScan]

STEPS: Final[tuple[Peer, ...]] = (
    mamba_ssm.SelectiveStateUpdate,
    vllm.SelectiveStateUpdate,
    flashinfer.SelectiveStateUpdate,
    vllm.OutputOnly,
    vllm.StateAndOutput,
    vllm.Speculative,
    flashinfer.Checkpointing,
)
PREFILLS: Final[tuple[Peer, ...]] = (mamba_ssm.ChunkScan,)

# Name of the import -> of the distribution.
_LIBRARIES: Final = {"mamba_ssm": "mamba_ssm", "vllm": "vllm", "flashinfer": "flashinfer-python"}


def libraries() -> dict[str, str]:
    """Return the version of every library, or that none of its kernels can be imported."""
    return {name: _version(name) for name in _LIBRARIES}


def _version(library: str) -> str:
    modules = {peer.module for peer in STEPS + PREFILLS if peer.module.split(".")[0] == library}
    if all(load(module) is None for module in modules):
        return NOT_INSTALLED
    try:
        return metadata.version(_LIBRARIES[library])
    except metadata.PackageNotFoundError:
        return "unknown version"


def peers_of(case: KernelCase) -> Sequence[Peer]:
    """Return the peers that can be imported and have a kernel for the case."""
    candidates = STEPS if case.prefill_tokens is None else PREFILLS
    return [peer for peer in candidates if load(peer.module) is not None and peer.supports(case)]
