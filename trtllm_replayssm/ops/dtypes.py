"""Type names of the contract and torch's types."""

import torch

from trtllm_replayssm.contract.geometry import DTYPE_BYTES


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of a contract's type name."""
    assert name in DTYPE_BYTES, f"{name} is not a type of the contract"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
