"""Real engines of one plugin node each, built by TensorRT for RTX through its ONNX parser, on any machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.plugins.plugin_networks import (
    NodeCase,
    conv_case,
    gated_delta_net_case,
    mamba2_case,
    mamba2_with_conv_case,
    random_image,
)
from trtllm_replayssm import backend
from trtllm_replayssm.contract.plugin_io import GATED_DELTA_NET, MAMBA2, MAMBA2_WITH_CONV, PluginIO


@dataclass
class Built:
    """What became of a network.

    Attributes:
        plan: the engine's bytes; None when the parser or the builder refused.
        problems: errors and warnings that TensorRT and the plugin logged, one text.
        report: the builder's list of layers.
        layers: (type, input names, output names) of the parsed network.
    """

    plan: bytes | None
    problems: str
    report: str
    layers: list[tuple[str, list[str], list[str]]]


@pytest.fixture(scope="module")
def rtx() -> backend.Backend:
    loaded = backend.load("tensorrt_rtx")
    loaded.load_plugins()
    return loaded


def build(rtx: backend.Backend, case: NodeCase, is_aliasing: bool = True) -> Built:
    """Parse and build a network for compute capability 8.9."""
    trt: Any = rtx.trt
    with rtx.recording() as lines:
        builder = trt.Builder(rtx.logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, rtx.logger)
        plan = None
        if parser.parse(case.model().SerializeToString()):
            plan = builder.build_serialized_network(network, _config(trt, builder, case, is_aliasing))
        layers = [_layer(network.get_layer(i)) for i in range(network.num_layers)]
    return Built(
        None if plan is None else bytes(plan), "\n".join(lines.problems), "\n".join(lines.layer_reports), layers
    )


def _config(trt: Any, builder: Any, case: NodeCase, is_aliasing: bool) -> Any:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, is_aliasing)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    for name, shape in case.shapes.items():
        if any(isinstance(d, str) for d in shape):
            ranges = [[case.dynamic[d][k] if isinstance(d, str) else d for d in shape] for k in range(3)]
            profile.set_shape(name, *ranges)
    config.add_optimization_profile(profile)
    return config


def _layer(layer: Any) -> tuple[str, list[str], list[str]]:
    inputs = [layer.get_input(i).name for i in range(layer.num_inputs)]
    return layer.type.name, inputs, [layer.get_output(i).name for i in range(layer.num_outputs)]


CASES = {
    "conv-bfloat16": conv_case(),
    "conv-float32": conv_case("float32"),
    "mamba2-bfloat16": mamba2_case(),
    "mamba2-float16-state_bfloat16": mamba2_case("float16", "bfloat16"),
    "gated_delta_net-bfloat16": gated_delta_net_case(),
    "gated_delta_net-float32-state_float16": gated_delta_net_case("float32", "float16"),
    "mamba2_with_conv-bfloat16": mamba2_with_conv_case(),
    "mamba2_with_conv-float16-state_bfloat16": mamba2_with_conv_case("float16", "bfloat16"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_an_engine_of_one_plugin_builds_with_the_states_as_inputs_and_outputs(
    rtx: backend.Backend, case: NodeCase
) -> None:
    built = build(rtx, case)
    assert built.plan is not None, built.problems
    assert built.problems == ""
    outputs = [case.io.outputs[0], *(f"present_{name}" for name in case.io.outputs[1:])]
    assert built.layers == [("PLUGIN_V3", list(case.io.inputs), outputs)]
    # One layer and nothing else: no copy of a state, no conversion of a type.
    assert built.report.count("Layer(") == 1
    assert "Layer(PluginV3)" in built.report


@pytest.mark.parametrize(
    "case",
    [conv_case(), mamba2_case(), gated_delta_net_case(), mamba2_with_conv_case()],
    ids=["conv", "mamba2", "gated_delta_net", "mamba2_with_conv"],
)
def test_tensorrt_sees_the_aliases(rtx: backend.Backend, case: NodeCase) -> None:
    built = build(rtx, case, is_aliasing=False)
    assert built.plan is None
    assert "Aliased I/O used by plugin" in built.problems


@pytest.mark.parametrize(
    ("io", "case_of"),
    [(MAMBA2, mamba2_case), (GATED_DELTA_NET, gated_delta_net_case), (MAMBA2_WITH_CONV, mamba2_with_conv_case)],
    ids=["mamba2", "gated_delta_net", "mamba2_with_conv"],
)
def test_the_kernels_travel_in_the_engine(rtx: backend.Backend, io: PluginIO, case_of: Callable[..., NodeCase]) -> None:
    image = random_image(io, 300_000)
    built = build(rtx, case_of(image=image))
    assert built.plan is not None, built.problems
    assert image in built.plan


def spoilt_by(case_of: Callable[..., NodeCase] = mamba2_case, /, **changes: Any) -> NodeCase:
    case = case_of()
    case.shapes |= changes.get("shapes", {})
    case.dtypes |= changes.get("dtypes", {})
    case.attributes |= changes.get("attributes", {})
    for name in changes.get("without", ()):
        del case.attributes[name]
    return case


SHORT_RINGS = {"x_ring": (3, 11, 4, 16), "B_ring": (3, 11, 2, 32), "dt_ring": (3, 11, 4)}
CHANNELS = {
    "xBC": ("B", "S", 200),
    "conv_weight": (200, 4),
    "conv_bias": (200,),
    "conv_ring": (3, 7, 200),
}
GDN_SHORT_RINGS = {"k_ring": (3, 11, 2, 16), "u_ring": (3, 11, 6, 32), "g_ring": (3, 11, 6)}
REFUSED = {
    "heads": (spoilt_by(shapes={"dt": ("B", "S", 5)}), "dt: found [?, ?, 5]; needed [B, S, H] with H = 4, as x"),
    "ring_rows": (
        spoilt_by(shapes=SHORT_RINGS),
        "x_ring: found 11 rows with history = 8 and max_draft_len = 3; needed",
    ),
    "dt_ring_type": (spoilt_by(dtypes={"dt_ring": "bfloat16"}), "dt_ring: found type bfloat16; needed float32"),
    "group_type": (spoilt_by(dtypes={"B": "float16"}), "B: found type float16; needed bfloat16, as x"),
    "ids_type": (spoilt_by(dtypes={"slot_ids": "int64"}), "slot_ids: found type int64; needed int32"),
    "no_history": (spoilt_by(without=["history"]), "field history: missing; needed history, max_draft_len, kernels"),
    "no_kernels": (spoilt_by(without=["kernels"]), "field kernels: missing; needed"),
    "two_histories": (spoilt_by(attributes={"history": [8, 9]}), "field history: found 2 x int32; needed one int32"),
    "float_history": (spoilt_by(attributes={"history": 8.0}), "field history: found 1 x float32; needed one int32"),
    "short_history": (spoilt_by(attributes={"history": 3}), "field history: found 3 with max_draft_len = 3; needed"),
    "no_image": (spoilt_by(attributes={"kernels": b"zeros" * 99}), "field kernels: found 495 bytes that are no kernel"),
    "with_conv-channels": (
        spoilt_by(mamba2_with_conv_case, shapes=CHANNELS),
        "xBC: found 200 channels; needed 192 (H P + 2 G N)",
    ),
    "with_conv-conv_ring_rows": (
        spoilt_by(mamba2_with_conv_case, shapes={"conv_ring": (3, 6, 192)}),
        "conv_ring: found 6 rows with d_conv = 4; needed at least 7 (d_conv - 1 + 1 + max_draft_len)",
    ),
    "with_conv-ring_rows": (
        spoilt_by(mamba2_with_conv_case, shapes=SHORT_RINGS),
        "x_ring: found 11 rows with history = 8 and max_draft_len = 3; needed",
    ),
    "with_conv-weight_type": (
        spoilt_by(mamba2_with_conv_case, dtypes={"conv_weight": "float32"}),
        "conv_weight: found type float32; needed bfloat16, as xBC",
    ),
    "with_conv-image": (
        spoilt_by(mamba2_with_conv_case, attributes={"kernels": random_image(MAMBA2, 99)}),
        'dt_dtype=bfloat16 d_conv=4"',
    ),
    "gdn-heads": (
        spoilt_by(gated_delta_net_case, shapes={"a": ("B", "S", 2)}),
        "a: found [?, ?, 2]; needed [B, S, Hv] with Hv = 6, as v",
    ),
    "gdn-ring_rows": (
        spoilt_by(gated_delta_net_case, shapes=GDN_SHORT_RINGS),
        "k_ring: found 11 rows with history = 8 and max_draft_len = 3; needed",
    ),
    "gdn-u_ring_type": (
        spoilt_by(gated_delta_net_case, dtypes={"u_ring": "bfloat16"}),
        "u_ring: found type bfloat16; needed float32",
    ),
    "gdn-gate_type": (
        spoilt_by(gated_delta_net_case, dtypes={"b": "float32"}),
        "b: found type float32; needed bfloat16",
    ),
    "gdn-no_history": (spoilt_by(gated_delta_net_case, without=["history"]), "field history: missing; needed history"),
    "gdn-image": (
        spoilt_by(gated_delta_net_case, attributes={"kernels": random_image(MAMBA2, 99)}),
        'found kernels compiled for "mamba2 n_heads=4',
    ),
}


@pytest.mark.parametrize(("case", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_network_is_refused_at_build_with_the_reason_in_the_log(
    rtx: backend.Backend, case: NodeCase, reason: str
) -> None:
    built = build(rtx, case)
    assert built.plan is None
    assert reason in built.problems
    assert f"[trtllm_replayssm] {case.io.op_type}" in built.problems
