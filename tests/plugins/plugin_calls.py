"""Right arguments of one plugin call, for tests that then spoil one of them."""

from collections.abc import Callable

from tests.harness.plugin_harness import TensorDesc
from tests.plugins.plugin_networks import (
    NodeCase,
    conv_case,
    gated_delta_net_case,
    mamba2_case,
    mamba2_with_conv_case,
)
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2, MAMBA2_WITH_CONV, PluginIO

INTS = {
    CAUSAL_CONV1D.op_type: {"activation": 1},
    MAMBA2.op_type: {"history": 8, "max_draft_len": 3},
    GATED_DELTA_NET.op_type: {"history": 8, "max_draft_len": 3},
    MAMBA2_WITH_CONV.op_type: {"history": 8, "max_draft_len": 3},
}
_NODES: dict[str, Callable[[str], NodeCase]] = {
    CAUSAL_CONV1D.op_type: conv_case,
    MAMBA2.op_type: mamba2_case,
    GATED_DELTA_NET.op_type: gated_delta_net_case,
    MAMBA2_WITH_CONV.op_type: mamba2_with_conv_case,
}


def network_tensors(case: NodeCase, batch: int, seq_len: int) -> dict[str, TensorDesc]:
    """Return the inputs' descriptions; -1 for batch or seq_len leaves the size unknown, as the builder does."""
    sizes = {"B": batch, "S": seq_len}
    return {
        name: TensorDesc(tuple(sizes[d] if isinstance(d, str) else d for d in shape), case.dtypes[name])
        for name, shape in case.shapes.items()
    }


def right_tensors(io: PluginIO, batch: int = 2, seq_len: int = 4, dtype: str = "bfloat16") -> dict[str, TensorDesc]:
    """Return the inputs of the networks' node, described for one call."""
    return network_tensors(_NODES[io.op_type](dtype), batch, seq_len)
