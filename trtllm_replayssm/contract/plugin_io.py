"""Inputs, outputs, aliases and fields of the TensorRT plugins, in order.

The C++ creators, the ONNX nodes and the tests are held to these tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Size = TypeVar("Size")

PLUGIN_NAMESPACE = "trtllm_replayssm"
PLUGIN_VERSION = "1"


@dataclass(frozen=True)
class PluginIO:
    """One plugin.

    Attributes:
        op_type: creator name and ONNX op_type.
        inputs: names of the inputs, in order.
        outputs: names of the outputs, in order.
        aliases: output index -> index of the input that it shares an address with.
        result_source: index of the input whose type output 0 has, the only one that is no state.
        result_axes: of each dimension of output 0, an input and its axis that have the same size; empty where the shape
            is that of result_source.
        int_fields: names of the kINT32 fields (one value each). Every plugin also has ``kernels``, kINT8: a
            kernel image (``plugins.kernel_image``).
    """

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: dict[int, int]
    int_fields: tuple[str, ...]
    result_source: int = 0
    result_axes: tuple[tuple[int, int], ...] = ()

    def source(self, output: int) -> int:
        """Return the index of the input that an output has its type from; a state has its shape, too."""
        return self.aliases.get(output, self.result_source)

    def output_shape(self, output: int, input_shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
        """Return an output's shape, given those of the inputs in order."""
        if output in self.aliases or not self.result_axes:
            return input_shapes[self.source(output)]
        return tuple(input_shapes[source][axis] for source, axis in self.result_axes)


CAUSAL_CONV1D = PluginIO(
    op_type="ReplayCausalConv1d",
    inputs=("x", "weight", "bias", "conv_ring", "past_lengths", "num_tokens", "slot_ids"),
    outputs=("y", "conv_ring"),
    aliases={1: 3},
    int_fields=("activation",),
)
"""x [B,S,D]; weight [D,K]; bias [D]; conv_ring [slots,R_conv,D]; lengths and ids int32 [B].
activation: 0 none, 1 silu."""

MAMBA2 = PluginIO(
    op_type="ReplayMamba2",
    inputs=(
        "x",
        "dt",
        "B",
        "C",
        "A",
        "D",
        "dt_bias",
        "ssm_state",
        "x_ring",
        "B_ring",
        "dt_ring",
        "past_lengths",
        "checkpoint_lengths",
        "num_tokens",
        "slot_ids",
    ),
    outputs=("y", "ssm_state", "x_ring", "B_ring", "dt_ring"),
    aliases={1: 7, 2: 8, 3: 9, 4: 10},
    int_fields=("history", "max_draft_len"),
)
"""x, y [B,S,H,P]; dt [B,S,H]; B, C [B,S,G,N]; A, D, dt_bias [H] fp32; ssm_state [slots,H,P,N]; x_ring [slots,R,H,P];
B_ring [slots,R,G,N]; dt_ring [slots,R,H] fp32; lengths and ids int32 [B]. x, dt, B, C, y and the x and B rings have the
activation type."""

GATED_DELTA_NET = PluginIO(
    op_type="ReplayGatedDeltaNet",
    inputs=(
        "q",
        "k",
        "v",
        "a",
        "b",
        "A_log",
        "dt_bias",
        "ssm_state",
        "k_ring",
        "u_ring",
        "g_ring",
        "past_lengths",
        "checkpoint_lengths",
        "num_tokens",
        "slot_ids",
    ),
    outputs=("o", "ssm_state", "k_ring", "u_ring", "g_ring"),
    aliases={1: 7, 2: 8, 3: 9, 4: 10},
    int_fields=("history", "max_draft_len"),
    result_source=2,
)
"""q, k [B,S,Hk,K]; v, o [B,S,Hv,V]; a, b [B,S,Hv]; A_log, dt_bias [Hv] fp32; ssm_state [slots,Hv,K,V]; k_ring
[slots,R,Hk,K]; u_ring [slots,R,Hv,V] fp32; g_ring [slots,R,Hv] fp32; lengths and ids int32 [B]. q, k, v, a, b, o and
the k ring have the activation type."""

MAMBA2_WITH_CONV = PluginIO(
    op_type="ReplayMamba2WithConv",
    inputs=(
        "xBC",
        "dt",
        "conv_weight",
        "conv_bias",
        "conv_ring",
        "A",
        "D",
        "dt_bias",
        "ssm_state",
        "x_ring",
        "B_ring",
        "dt_ring",
        "past_lengths",
        "checkpoint_lengths",
        "num_tokens",
        "slot_ids",
    ),
    outputs=("y", "conv_ring", "ssm_state", "x_ring", "B_ring", "dt_ring"),
    aliases={1: 4, 2: 8, 3: 9, 4: 10, 5: 11},
    int_fields=("history", "max_draft_len"),
    result_axes=((0, 0), (0, 1), (1, 2), (8, 2)),
)
"""xBC [B,S,D], D = H P + 2 G N; conv_weight [D,K]; conv_bias [D]; conv_ring [slots,R_conv,D]; all else as for MAMBA2.
SiLU follows the convolution, whose four tensors have the activation type."""

PLUGINS = (CAUSAL_CONV1D, MAMBA2, GATED_DELTA_NET, MAMBA2_WITH_CONV)
"""All, in the order in which the plugin library gives out their creators."""
