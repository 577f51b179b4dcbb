"""Root-mean-square norms, computed in fp32 and rounded once."""

import torch
from torch import nn
from torch.nn import functional

from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.layers.fused import fused


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last axis.

    Args:
        width: length of the last axis.
        eps: added to the mean square.
        dtype: of the weight.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x [..., width]``; the result has its type."""
        return normalise(x, self.weight, self.eps)


class GatedGroupRMSNorm(nn.Module):
    """The norm behind a Mamba-2 mixer: gate with ``silu(z)``, then normalise each group of channels by itself.

    Args:
        width: channels.
        n_groups: groups, each ``width / n_groups`` channels wide.
        eps: added to the mean square.
        dtype: of the weight.
    """

    def __init__(self, width: int, n_groups: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.n_groups = n_groups
        self.eps = eps

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gate and normalise ``y`` with ``z``, both [..., width]; the result has y's type."""
        return gate_and_normalise_groups(y, z, self.weight, self.n_groups, self.eps)


class GatedRMSNorm(nn.Module):
    """The norm behind a Gated DeltaNet mixer: normalise each head by itself, then gate with ``silu(z)``.

    Args:
        width: channels of a head.
        eps: added to the mean square.
        dtype: of the weight.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Normalise ``o`` and gate it with ``z``, both [..., width]; the result has o's type."""
        return normalise_and_gate(o, z, self.weight, self.eps)


@fused
def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return what ``RMSNorm`` does."""
    return rms_norm(x.float(), weight.float(), eps).to(x.dtype)


@fused
def gate_and_normalise_groups(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, n_groups: int, eps: float
) -> torch.Tensor:
    """Return what ``GatedGroupRMSNorm`` does."""
    gated = y.float() * functional.silu(z.float())
    groups = torch.unflatten(gated, -1, (n_groups, -1))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return (groups.flatten(-2) * weight.float()).to(y.dtype)


@fused
def normalise_and_gate(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return what ``GatedRMSNorm`` does."""
    return (rms_norm(o.float(), weight.float(), eps) * functional.silu(z.float())).to(o.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight`` over the last axis, all fp32."""
    if onnx_ops.is_exporting():
        return onnx_ops.rms_normalization(x, weight, eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
