"""The torch ops, on CPU and CUDA tensors; state pools and rings are updated in place."""

from trtllm_replayssm.ops.advance import advance
from trtllm_replayssm.ops.causal_conv1d import causal_conv1d
from trtllm_replayssm.ops.conventional import mamba2_conventional
from trtllm_replayssm.ops.mamba2 import mamba2

__all__ = ["advance", "causal_conv1d", "mamba2", "mamba2_conventional"]
