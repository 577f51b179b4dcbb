"""What peers of Mamba-2 share: per-head constants expanded over channels and states, as their kernels take them."""

from torch import Tensor

from trtllm_replayssm.bench.peers.common import PeerStep
from trtllm_replayssm.contract.geometry import Mamba2Geometry


class Mamba2PeerStep(PeerStep):
    """Another library's step of Mamba-2."""

    @property
    def geometry(self) -> Mamba2Geometry:
        """The layer."""
        m = self.case.geometry
        assert isinstance(m, Mamba2Geometry), "the registry asks for peers of the case's family"
        return m

    def by_channel(self, per_head: Tensor) -> Tensor:
        """Expand a per-head constant over head_dim without a copy: by the stride 0 kernels know that it is one."""
        return per_head[..., None].expand(*per_head.shape, self.geometry.head_dim)

    def by_state(self, per_head: Tensor) -> Tensor:
        """Expand a per-head constant over head_dim and d_state without a copy."""
        return per_head[:, None, None].expand(-1, self.geometry.head_dim, self.geometry.d_state)

    def expanded_weights(self) -> dict[str, Tensor]:
        """Return A, D and dt_bias expanded."""
        weights = self.packed.weights
        return {
            "A": self.by_state(weights["A"]),
            "D": self.by_channel(weights["D"]),
            "dt_bias": self.by_channel(weights["dt_bias"]),
        }
