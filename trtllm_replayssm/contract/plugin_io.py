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
        outputs: names of the outputs, in order: the result, and the states, each named as its input.
        result_source: index of the input whose type output 0 has, the only one that is no state.
        result_axes: of each dimension of output 0, an input and its axis that have the same size; empty where the shape
            is that of result_source.
        int_fields: names of the kINT32 fields (one value each). Every plugin also has ``kernels``, kINT8: a
            kernel image (``plugins.kernel_image``).
    """

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    int_fields: tuple[str, ...]
    result_source: int = 0
    result_axes: tuple[tuple[int, int], ...] = ()

    @property
    def aliases(self) -> dict[int, int]:
        """Output index -> index of the input that it shares an address with: of every state."""
        return {k: self.inputs.index(name) for k, name in enumerate(self.outputs) if k > 0}

    def source(self, output: int) -> int:
        """Return the index of the input that an output has its type from; a state has its shape, too."""
        return self.aliases.get(output, self.result_source)

    def output_shape(self, output: int, input_shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
        """Return an output's shape, given those of the inputs in order."""
        if output in self.aliases or not self.result_axes:
            return input_shapes[self.source(output)]
        return tuple(input_shapes[source][axis] for source, axis in self.result_axes)


_LENGTHS = ("past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids")
_MAMBA2_CONSTANTS = ("A", "D", "dt_bias")
_MAMBA2_STATES = ("ssm_state", "x_ring", "B_ring", "dt_ring")
_GATED_DELTA_NET_STATES = ("ssm_state", "k_ring", "u_ring", "g_ring")

CAUSAL_CONV1D = PluginIO(
    op_type="ReplayCausalConv1d",
    inputs=("x", "weight", "bias", "conv_ring", "past_lengths", "num_tokens", "slot_ids"),
    outputs=("y", "conv_ring"),
    int_fields=("activation",),
)
"""x [B,S,D]; weight [D,K]; bias [D]; conv_ring [slots,R_conv,D]; lengths and ids int32 [B].
activation: 0 none, 1 silu."""

MAMBA2 = PluginIO(
    op_type="ReplayMamba2",
    inputs=("x", "dt", "B", "C", *_MAMBA2_CONSTANTS, *_MAMBA2_STATES, *_LENGTHS),
    outputs=("y", *_MAMBA2_STATES),
    int_fields=("history", "max_draft_len"),
)
"""x, y [B,S,H,P]; dt [B,S,H]; B, C [B,S,G,N]; A, D, dt_bias [H] fp32; ssm_state [slots,H,P,N]; x_ring [slots,R,H,P];
B_ring [slots,R,G,N]; dt_ring [slots,R,H] fp32; lengths and ids int32 [B]. x, dt, B, C, y and the x and B rings have the
activation type."""

GATED_DELTA_NET = PluginIO(
    op_type="ReplayGatedDeltaNet",
    inputs=("q", "k", "v", "a", "b", "A_log", "dt_bias", *_GATED_DELTA_NET_STATES, *_LENGTHS),
    outputs=("o", *_GATED_DELTA_NET_STATES),
    int_fields=("history", "max_draft_len"),
    result_source=2,
)
"""q, k [B,S,Hk,K]; v, o [B,S,Hv,V]; a, b [B,S,Hv]; A_log, dt_bias [Hv] fp32; ssm_state [slots,Hv,K,V]; k_ring
[slots,R,Hk,K]; u_ring [slots,R,Hv,V] fp32; g_ring [slots,R,Hv] fp32; lengths and ids int32 [B]. q, k, v, a, b, o and
the k ring have the activation type."""

MAMBA2_WITH_CONV = PluginIO(
    op_type="ReplayMamba2WithConv",
    inputs=("xBC", "dt", "conv_weight", "conv_bias", "conv_ring", *_MAMBA2_CONSTANTS, *_MAMBA2_STATES, *_LENGTHS),
    outputs=("y", "conv_ring", *_MAMBA2_STATES),
    int_fields=("history", "max_draft_len"),
    result_axes=((0, 0), (0, 1), (1, 2), (8, 2)),
)
"""xBC [B,S,D], D = H P + 2 G N; conv_weight [D,K]; conv_bias [D]; conv_ring [slots,R_conv,D]; all else as for MAMBA2.
SiLU follows the convolution, whose four tensors have the activation type."""

PLUGINS = (CAUSAL_CONV1D, MAMBA2, GATED_DELTA_NET, MAMBA2_WITH_CONV)
"""All, in the order in which the plugin library gives out their creators."""
