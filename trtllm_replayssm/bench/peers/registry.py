"""The peers: what is installed, and which of them run a case."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Final

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.peers import (
    fla,
    flashinfer,
    flashinfer_gated_delta_net,
    mamba_ssm,
    vllm,
    vllm_gated_delta_net,
)
from trtllm_replayssm.bench.peers.common import PeerPrefill, PeerStep, load
from trtllm_replayssm.bench.shapes import Family, family_of

NOT_INSTALLED: Final = "not installed"


Peer = type[PeerStep] | type[PeerPrefill]

STEPS: Final[Mapping[Family, tuple[Peer, ...]]] = {
    "mamba2": (
        mamba_ssm.SelectiveStateUpdate,
        vllm.SelectiveStateUpdate,
        flashinfer.SelectiveStateUpdate,
        vllm.OutputOnly,
        vllm.StateAndOutput,
        vllm.Speculative,
        flashinfer.Checkpointing,
    ),
    "gdn": (
        fla.FusedRecurrent,
        vllm_gated_delta_net.PackedDecode,
        vllm_gated_delta_net.SigmoidGating,
        flashinfer_gated_delta_net.Decode,
        flashinfer_gated_delta_net.Snapshots,
        vllm_gated_delta_net.Replay,
        vllm_gated_delta_net.Speculative,
        flashinfer_gated_delta_net.UCacheFlush,
    ),
}
PREFILLS: Final[Mapping[Family, tuple[Peer, ...]]] = {"mamba2": (mamba_ssm.ChunkScan,), "gdn": (fla.Chunked,)}

# Name of the import -> of the distribution.
_LIBRARIES: Final = {"mamba_ssm": "mamba_ssm", "fla": "fla-core", "vllm": "vllm", "flashinfer": "flashinfer-python"}


def libraries(family: Family) -> dict[str, str]:
    """Return the version of every library with peers of a family, or that none of their kernels can be imported."""
    modules: dict[str, set[str]] = {}
    for peer in STEPS[family] + PREFILLS[family]:
        modules.setdefault(peer.module.split(".")[0], set()).add(peer.module)
    return {name: _version(name, modules[name]) for name in _LIBRARIES if name in modules}


def _version(library: str, modules: set[str]) -> str:
    if all(load(module) is None for module in modules):
        return NOT_INSTALLED
    try:
        return metadata.version(_LIBRARIES[library])
    except metadata.PackageNotFoundError:
        return "unknown version"


def peers_of(case: KernelCase) -> Sequence[Peer]:
    """Return the peers that can be imported and have a kernel for the case."""
    candidates = (STEPS if case.prefill_tokens is None else PREFILLS)[family_of(case.geometry)]
    return [peer for peer in candidates if load(peer.module) is not None and peer.supports(case)]
