"""The exported graph: its bindings, its nodes, its kernels and its weights."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import save_file

from tests.builders.tiny_geometry import random_weights, tiny_geometry, tiny_qwen_geometry
from trtllm_replayssm.builders.export import embed_weights, export, set_kernels
from trtllm_replayssm.builders.network import NetworkTask, write_network_apart
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2_WITH_CONV, PLUGINS, PluginIO
from trtllm_replayssm.contract.tensors import network_inputs, network_outputs, weight_specs
from trtllm_replayssm.errors import CheckpointError

LIMITS = EngineLimits(max_batch_size=4, max_input_len=24, max_seq_len=48, max_num_tokens=12)
REPLAY = ReplayGeometry(history=8, max_draft_len=3, state_dtype="float32")


@pytest.fixture(scope="module")
def graph() -> onnx.ModelProto:
    return export(tiny_geometry(dtype="bfloat16"), REPLAY, LIMITS)


def test_the_process_that_exports_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    onnx_file = tmp_path / "model.onnx"
    write_network_apart(
        NetworkTask(
            geometry=tiny_geometry("*"), replay=REPLAY, limits=LIMITS, compute_capabilities=(80,), onnx_file=onnx_file
        )
    )
    assert onnx_file.is_file()
    assert not list(temporary.iterdir())


@pytest.fixture(scope="module")
def qwen_graph() -> onnx.ModelProto:
    return export(tiny_qwen_geometry(dtype="bfloat16"), REPLAY, LIMITS)


@pytest.mark.parametrize("make", [tiny_geometry, tiny_qwen_geometry])
def test_inputs_and_outputs_are_those_of_the_contract(
    make: Callable[..., ModelGeometry], request: pytest.FixtureRequest
) -> None:
    geometry = make(dtype="bfloat16")
    graph = request.getfixturevalue("graph" if make is tiny_geometry else "qwen_graph")
    for found, needed in (
        (graph.graph.input, network_inputs(geometry, REPLAY, LIMITS)),
        (graph.graph.output, network_outputs(geometry, REPLAY, LIMITS)),
    ):
        assert [value.name for value in found] == [name for name, _ in needed]
        for value, (name, spec) in zip(found, needed, strict=True):
            dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
            assert tuple(dims) == spec.shape, name


def test_a_mamba2_layer_has_one_node_with_the_inputs_outputs_and_fields_of_its_plugin(graph: onnx.ModelProto) -> None:
    check_nodes(graph, MAMBA2_WITH_CONV, layers=(0, 3))
    kinds = {node.op_type for node in graph.graph.node if node.domain == "trtllm_replayssm"}
    assert kinds == {MAMBA2_WITH_CONV.op_type}
    node = next(node for node in graph.graph.node if node.op_type == MAMBA2_WITH_CONV.op_type)
    roles = dict(zip(MAMBA2_WITH_CONV.inputs, node.input, strict=True))
    weights = {role: name.removeprefix("layers.0.mixer.") for role, name in roles.items() if "mixer" in name}
    of_conv = {"conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias"}
    assert weights == of_conv | {"A": "A", "D": "D", "dt_bias": "dt_bias"}
    # z, xBC and dt are packed in this order.
    split = next(n for n in graph.graph.node if roles["dt"] in n.output)
    assert list(split.output)[1:] == [roles["xBC"], roles["dt"]]


def test_nodes_of_a_gated_delta_net_have_those_of_its_plugin(qwen_graph: onnx.ModelProto) -> None:
    for io in (CAUSAL_CONV1D, GATED_DELTA_NET):
        check_nodes(qwen_graph, io, layers=(0,))
    (node,) = (node for node in qwen_graph.graph.node if node.op_type == GATED_DELTA_NET.op_type)
    roles = dict(zip(GATED_DELTA_NET.inputs, node.input, strict=True))
    weights = {role: name.removeprefix("layers.0.mixer.") for role, name in roles.items() if "mixer" in name}
    assert weights == {"A_log": "A_log", "dt_bias": "dt_bias"}
    # z, b and a are packed in this order: of the last two, b has the earlier rows.
    split = next(n for n in qwen_graph.graph.node if roles["a"] in n.output)
    assert list(split.output)[2:] == [roles["b"], roles["a"]]


def check_nodes(graph: onnx.ModelProto, io: PluginIO, layers: tuple[int, ...]) -> None:
    nodes = [node for node in graph.graph.node if node.op_type == io.op_type]
    assert [node.name for node in nodes] == [f"layers.{layer}.mixer.{io.op_type}" for layer in layers]
    for node in nodes:
        assert node.domain == "trtllm_replayssm"
        assert len(node.input) == len(io.inputs) and len(node.output) == len(io.outputs)
        assert {attribute.name for attribute in node.attribute} == set(io.int_fields)
        for output, source in io.aliases.items():
            assert node.output[output].removeprefix("present_") == node.input[source].removeprefix("past_")
    opsets = {entry.domain: entry.version for entry in graph.opset_import}
    assert opsets["trtllm_replayssm"] == 1 and opsets[""] == 24


def test_rotation_is_the_standard_op_on_angles_made_once(qwen_graph: onnx.ModelProto) -> None:
    nodes = qwen_graph.graph.node
    turned = [node for node in nodes if node.op_type == "RotaryEmbedding"]
    assert len(turned) == 2 and turned[0].input[1:] == turned[1].input[1:]
    for node in turned:
        assert {a.name: a.i for a in node.attribute} == {"interleaved": 0, "rotary_embedding_dim": 8}
    assert [node.op_type for node in nodes if node.op_type in ("Cos", "Sin", "Pow")] == ["Cos", "Sin"]
    (scatter, _) = (node for node in nodes if node.op_type == "TensorScatter")
    assert scatter.input[1] == turned[1].output[0], "the cache holds rotated keys"


def test_the_fields_carry_history_and_window(graph: onnx.ModelProto) -> None:
    node = next(node for node in graph.graph.node if node.op_type == "ReplayMamba2WithConv")
    assert {attribute.name: attribute.i for attribute in node.attribute} == {"history": 8, "max_draft_len": 3}


def test_nothing_is_left_that_the_parser_refuses(graph: onnx.ModelProto, qwen_graph: onnx.ModelProto) -> None:
    for model in (graph, qwen_graph):
        kinds = {node.op_type for node in model.graph.node}
        assert not kinds & {"SequenceAt", "SequenceConstruct", "SplitToSequence"}
        assert {"TensorScatter", "Attention", "RMSNormalization"} <= kinds


@pytest.mark.parametrize("name", ["graph", "qwen_graph"])
def test_kernels_become_an_int8_tensor_attribute(name: str, request: pytest.FixtureRequest) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(request.getfixturevalue(name))
    images = {io.op_type: bytes(range(256)) for io in PLUGINS}
    set_kernels(model, images)
    for node in model.graph.node:
        if node.op_type in images:
            (kernels,) = [attribute.t for attribute in node.attribute if attribute.name == "kernels"]
            assert kernels.data_type == onnx.TensorProto.INT8 and list(kernels.dims) == [256]
            assert kernels.raw_data == images[node.op_type]


def test_embedded_weights_are_the_bytes_of_the_checkpoint(tmp_path: Path, graph: onnx.ModelProto) -> None:
    geometry = tiny_geometry(dtype="bfloat16")
    weights = random_weights(geometry)
    save_file(weights, tmp_path / "rank0.safetensors")
    model = onnx.ModelProto()
    model.CopyFrom(graph)
    embed_weights(model, tmp_path / "rank0.safetensors", weight_specs(geometry))
    onnx.save(model, tmp_path / "model.onnx")
    loaded = onnx.load(tmp_path / "model.onnx")
    found = {tensor.name: tensor for tensor in loaded.graph.initializer if tensor.name in weights}
    assert set(found) == set(weights)
    assert not set(weights) & {value.name for value in loaded.graph.input}
    for name, tensor in weights.items():
        assert found[name].raw_data == tensor.view(torch.uint8).numpy().tobytes(), name


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path, graph: onnx.ModelProto) -> None:
    geometry = tiny_geometry(dtype="bfloat16")
    weights = random_weights(geometry)
    weights["final_norm.weight"] = weights["final_norm.weight"][:-1].clone()
    save_file(weights, tmp_path / "rank0.safetensors")
    model = onnx.ModelProto()
    model.CopyFrom(graph)
    with pytest.raises(CheckpointError, match=r"final_norm.weight: found .*63.*needed .*64"):
        embed_weights(model, tmp_path / "rank0.safetensors", weight_specs(geometry))
