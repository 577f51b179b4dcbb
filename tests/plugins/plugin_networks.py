"""Small ONNX networks of one plugin node each, and what TensorRT makes of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from trtllm_replayssm.contract.plugin_io import (
    CAUSAL_CONV1D,
    GATED_DELTA_NET,
    MAMBA2,
    MAMBA2_WITH_CONV,
    PLUGIN_NAMESPACE,
    PluginIO,
)
from trtllm_replayssm.plugins import kernel_image
from trtllm_replayssm.plugins.specializations import (
    CONV_PREFIX,
    ROLES,
    CausalConv1dSpecialization,
    GatedDeltaNetSpecialization,
    Mamba2Specialization,
    Mamba2WithConvSpecialization,
    Specialization,
    constants_of,
)

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
Shape = tuple[int | str, ...]


def specialization_of(io: PluginIO, dtype: str = "bfloat16", state_dtype: str = "float32") -> Specialization:
    """Return what the kernels of a plugin's node, below, are compiled for."""
    if io is CAUSAL_CONV1D:
        return CausalConv1dSpecialization(conv_dim=24, d_conv=4, activation_dtype=dtype)  # type: ignore[arg-type]
    if io is GATED_DELTA_NET:
        return GatedDeltaNetSpecialization(
            n_key_heads=2,
            n_value_heads=6,
            key_dim=16,
            value_dim=32,
            history=8,
            max_draft_len=3,
            activation_dtype=dtype,  # type: ignore[arg-type]
            state_dtype=state_dtype,  # type: ignore[arg-type]
            gate_dtype=dtype,  # type: ignore[arg-type]
        )
    step = Mamba2Specialization(
        n_heads=4,
        head_dim=16,
        d_state=32,
        n_groups=2,
        history=8,
        max_draft_len=3,
        activation_dtype=dtype,  # type: ignore[arg-type]
        state_dtype=state_dtype,  # type: ignore[arg-type]
        dt_dtype=dtype,  # type: ignore[arg-type]
    )
    return Mamba2WithConvSpecialization(step, 4) if io is MAMBA2_WITH_CONV else step


def generic_roles(specialization: Specialization) -> tuple[str, ...]:
    """Return the roles that an image of these kernels has for every architecture."""
    is_both = isinstance(specialization, Mamba2WithConvSpecialization)
    return (*(CONV_PREFIX + role for role in ROLES), *ROLES) if is_both else ROLES


def placeholder_image(specialization: Specialization, cubin: bytes = b"not a cubin") -> bytes:
    """Return a sound kernel image whose cubins no test loads into a device."""
    entries = [
        kernel_image.KernelEntry(role, f"replay_{role}", capability, False, 4, 128, 0, cubin)
        for role in generic_roles(specialization)
        for capability in (80, 89)
    ]
    return kernel_image.pack(constants_of(specialization), entries)


@dataclass
class NodeCase:
    """One plugin node with the shapes, types and attributes that make it right; tests change one of them."""

    io: PluginIO
    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    attributes: dict[str, Any]
    dynamic: dict[str, tuple[int, int, int]] = field(default_factory=lambda: {"B": (1, 2, 4), "S": (1, 2, 4)})

    def model(self) -> onnx.ModelProto:
        """Return the ONNX model: every input of the node is a graph input, every output a graph output."""
        domain = PLUGIN_NAMESPACE
        sources = {
            f"present_{name}" if index else name: self.io.inputs[self.io.source(index)]
            for index, name in enumerate(self.io.outputs)
        }
        attributes = dict(self.attributes)
        image = attributes.pop("kernels", None)
        node = helper.make_node(self.io.op_type, list(self.io.inputs), list(sources), domain=domain, **attributes)
        if image is not None:
            tensor = helper.make_tensor("kernels", TensorProto.INT8, [len(image)], image, raw=True)
            node.attribute.append(helper.make_attribute("kernels", tensor))
        shapes = [self.shapes[name] for name in self.io.inputs]
        inputs = [self._value(name, name, self.shapes[name]) for name in self.io.inputs]
        outputs = [
            self._value(name, source, self.io.output_shape(index, shapes))
            for index, (name, source) in enumerate(sources.items())
        ]
        graph = helper.make_graph([node], "one_plugin", inputs, outputs)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid(domain, 1)])

    def _value(self, name: str, like: str, shape: Shape) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, ONNX_TYPES[self.dtypes[like]], list(shape))


def conv_case(dtype: str = "bfloat16", image: bytes | None = None) -> NodeCase:
    """Return a right ReplayCausalConv1d node: 24 channels, 4 taps, 3 slots of 7 ring rows."""
    shapes: dict[str, Shape] = {
        "x": ("B", "S", 24),
        "weight": (24, 4),
        "bias": (24,),
        "conv_ring": (3, 7, 24),
        "past_lengths": ("B",),
        "num_tokens": ("B",),
        "slot_ids": ("B",),
    }
    dtypes = {name: dtype if name in ("x", "weight", "bias", "conv_ring") else "int32" for name in shapes}
    image = image or placeholder_image(specialization_of(CAUSAL_CONV1D, dtype))
    return NodeCase(CAUSAL_CONV1D, shapes, dtypes, {"activation": 1, "kernels": image})


def mamba2_case(dtype: str = "bfloat16", state_dtype: str = "float32", image: bytes | None = None) -> NodeCase:
    """Return a right ReplayMamba2 node: 4 heads of 16, 2 groups of 32, history 8, windows of 4, 3 slots."""
    shapes: dict[str, Shape] = {
        "x": ("B", "S", 4, 16),
        "dt": ("B", "S", 4),
        "B": ("B", "S", 2, 32),
        "C": ("B", "S", 2, 32),
        "A": (4,),
        "D": (4,),
        "dt_bias": (4,),
        "ssm_state": (3, 4, 16, 32),
        "x_ring": (3, 12, 4, 16),
        "B_ring": (3, 12, 2, 32),
        "dt_ring": (3, 12, 4),
        "past_lengths": ("B",),
        "checkpoint_lengths": ("B",),
        "num_tokens": ("B",),
        "slot_ids": ("B",),
    }
    dtypes = dict.fromkeys(shapes, "int32")
    dtypes |= dict.fromkeys(("x", "dt", "B", "C", "x_ring", "B_ring"), dtype)
    dtypes |= dict.fromkeys(("A", "D", "dt_bias", "dt_ring"), "float32") | {"ssm_state": state_dtype}
    image = image or placeholder_image(specialization_of(MAMBA2, dtype, state_dtype))
    attributes = {"history": 8, "max_draft_len": 3, "kernels": image}
    return NodeCase(MAMBA2, shapes, dtypes, attributes)


def mamba2_with_conv_case(
    dtype: str = "bfloat16", state_dtype: str = "float32", image: bytes | None = None
) -> NodeCase:
    """Return a right ReplayMamba2WithConv node: as those of its two parts, 192 channels."""
    io, recurrence = MAMBA2_WITH_CONV, mamba2_case(dtype, state_dtype)
    of_conv: dict[str, Shape] = {
        "xBC": ("B", "S", 192),
        "conv_weight": (192, 4),
        "conv_bias": (192,),
        "conv_ring": (3, 7, 192),
    }
    shapes, dtypes = recurrence.shapes | of_conv, recurrence.dtypes | dict.fromkeys(of_conv, dtype)
    image = image or placeholder_image(specialization_of(io, dtype, state_dtype))
    return NodeCase(
        io,
        {name: shapes[name] for name in io.inputs},
        {name: dtypes[name] for name in io.inputs},
        recurrence.attributes | {"kernels": image},
    )


def gated_delta_net_case(dtype: str = "bfloat16", state_dtype: str = "float32", image: bytes | None = None) -> NodeCase:
    """Return a right ReplayGatedDeltaNet node: 2 key heads of 16, 6 value heads of 32, otherwise as Mamba-2's."""
    shapes: dict[str, Shape] = {
        "q": ("B", "S", 2, 16),
        "k": ("B", "S", 2, 16),
        "v": ("B", "S", 6, 32),
        "a": ("B", "S", 6),
        "b": ("B", "S", 6),
        "A_log": (6,),
        "dt_bias": (6,),
        "ssm_state": (3, 6, 16, 32),
        "k_ring": (3, 12, 2, 16),
        "u_ring": (3, 12, 6, 32),
        "g_ring": (3, 12, 6),
        "past_lengths": ("B",),
        "checkpoint_lengths": ("B",),
        "num_tokens": ("B",),
        "slot_ids": ("B",),
    }
    dtypes = dict.fromkeys(shapes, "int32")
    dtypes |= dict.fromkeys(("q", "k", "v", "a", "b", "k_ring"), dtype)
    dtypes |= dict.fromkeys(("A_log", "dt_bias", "u_ring", "g_ring"), "float32") | {"ssm_state": state_dtype}
    image = image or placeholder_image(specialization_of(GATED_DELTA_NET, dtype, state_dtype))
    attributes = {"history": 8, "max_draft_len": 3, "kernels": image}
    return NodeCase(GATED_DELTA_NET, shapes, dtypes, attributes)


def random_image(io: PluginIO, bytes_of_code: int) -> bytes:
    """Return a sound image with that many bytes of noise for a cubin: every byte value travels."""
    noise = np.random.default_rng(0).integers(0, 256, bytes_of_code, dtype=np.uint8).tobytes()
    return placeholder_image(specialization_of(io), noise)
