"""The torch ops, on CPU and CUDA tensors; state pools and rings are updated in place."""

from trtllm_replayssm.ops.advance import advance
from trtllm_replayssm.ops.causal_conv1d import causal_conv1d
from trtllm_replayssm.ops.conventional import gated_delta_net_conventional, mamba2_conventional
from trtllm_replayssm.ops.gated_delta_net import gated_delta_net
from trtllm_replayssm.ops.mamba2 import mamba2
from trtllm_replayssm.ops.mamba2_with_conv import mamba2_with_conv

__all__ = [
    "advance",
    "causal_conv1d",
    "gated_delta_net",
    "gated_delta_net_conventional",
    "mamba2",
    "mamba2_conventional",
    "mamba2_with_conv",
]
