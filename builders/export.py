"""A model as an ONNX graph: standard ops at opset 24, and our nodes in the domain ``trtllm_replayssm``.

Weights are graph inputs and nothing is computed, so a model of any size is exported from its geometry alone. For an
engine that holds its weights the same graph refers to the tensors of the rank checkpoint, which the parser reads from
there: no copy of the weights is made.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.models.registry import create_model
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE
from trtllm_replayssm.contract.safetensors_header import DTYPE_NAMES, read_entries
from trtllm_replayssm.contract.tensors import TensorSpec, network_inputs, network_outputs, weight_specs
from trtllm_replayssm.errors import BuildError, CheckpointError
from trtllm_replayssm.ops.dtypes import torch_dtype

OPSET = 24
# Sizes to trace with. They differ from each other and from 1, so that the tracer does not take two symbols for one.
_TRACED = {"B": 3, "S": 5, "J": 2}
_ONNX_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int32": onnx.TensorProto.INT32,
}


class _Network(nn.Module):
    """The model with its weights as the last argument, in the order of ``weight_specs``."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        # Hidden from nn.Module: parameters of the traced module itself would become initialisers.
        self.__dict__["model"] = model
        self.names = tuple(names)

    def forward(
        self,
        input_ids: torch.Tensor,
        past_lengths: torch.Tensor,
        checkpoint_lengths: torch.Tensor,
        num_tokens: torch.Tensor,
        slot_ids: torch.Tensor,
        logits_indices: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        weights: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        step = (input_ids, past_lengths, checkpoint_lengths, num_tokens, slot_ids, logits_indices)
        named = dict(zip(self.names, weights, strict=True))
        logits, present = torch.func.functional_call(self.__dict__["model"], named, (*step, states))
        return logits, *present


def export(geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits) -> onnx.ModelProto:
    """Trace a model of the given geometry.

    Args:
        geometry: of the model.
        replay: history, window and state type.
        limits: of the engine; slots and cache capacity become constants of the graph.

    Returns:
        The graph, its inputs and outputs named as ``contract.tensors`` says, with B, S and J dynamic.

    Raises:
        BuildError: the traced graph's inputs or outputs are not those of the contract.
    """
    inputs = network_inputs(geometry, replay, limits)
    outputs = network_outputs(geometry, replay, limits)
    by_role: dict[str, list[torch.Tensor]] = {"step": [], "state": [], "weight": []}
    dynamic: dict[str, list[dict[int, Dim]]] = {"step": [], "state": [], "weight": []}
    dims = {symbol: Dim(symbol, min=1) for symbol in _TRACED}
    # Fake tensors have shapes and no memory. (Meta tensors do not mix with what torch's symbolic ops return.)
    with FakeTensorMode():
        for _, spec in inputs:
            by_role[spec.role].append(_traced_tensor(spec))
            dynamic[spec.role].append({axis: dims[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)})
        network = _Network(create_model(geometry, replay), [spec.name for spec in weight_specs(geometry)])
    with _quiet(), onnx_ops.exporting():
        program = torch.onnx.export(
            network,
            (*by_role["step"], tuple(by_role["state"]), tuple(by_role["weight"])),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(*dynamic["step"], tuple(dynamic["state"]), tuple(dynamic["weight"])),
            input_names=[name for name, _ in inputs],
            output_names=[name for name, _ in outputs],
            verbose=False,
        )
    assert program is not None, "the exporter returns a program when it is given no file"
    graph: onnx.ModelProto = program.model_proto
    _name_nodes(graph)
    _check_io("inputs", graph.graph.input, inputs)
    _check_io("outputs", graph.graph.output, outputs)
    return graph


def set_kernels(model: onnx.ModelProto, images: dict[str, bytes]) -> None:
    """Give every node of ours its kernel image as the int8 tensor attribute ``kernels``.

    Args:
        model: changed in place.
        images: op_type -> kernel image.
    """
    for node in model.graph.node:
        if node.domain != PLUGIN_NAMESPACE:
            continue
        image = images[node.op_type]
        tensor = onnx.TensorProto(name="kernels", data_type=onnx.TensorProto.INT8, dims=[len(image)], raw_data=image)
        node.attribute.append(onnx.helper.make_attribute("kernels", tensor))


def embed_weights(model: onnx.ModelProto, weights_file: Path, geometry: ModelGeometry) -> None:
    """Turn the weight inputs into initialisers that refer to the bytes of a rank checkpoint.

    Args:
        model: changed in place; it must be saved in the folder of ``weights_file``.
        weights_file: a safetensors file.
        geometry: of the model.

    Raises:
        CheckpointError: the file is damaged, lacks a tensor, or has it in another type or shape.
    """
    entries = read_entries(weights_file)
    specs = {spec.name: spec for spec in weight_specs(geometry)}
    kept = [value for value in model.graph.input if value.name not in specs]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name, spec in specs.items():
        entry = entries.get(name)
        needed = (DTYPE_NAMES[spec.dtype], spec.shape)
        if entry is None or (entry.dtype, entry.shape) != needed:
            found = "nothing" if entry is None else (entry.dtype, entry.shape)
            raise CheckpointError(f"{weights_file}: {name}: found {found}; needed {needed}. Convert the model anew.")
        tensor = onnx.TensorProto(name=name, data_type=_ONNX_TYPES[spec.dtype], dims=entry.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": weights_file.name, "offset": entry.begin, "length": entry.end - entry.begin}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        model.graph.initializer.append(tensor)


def _name_nodes(model: onnx.ModelProto) -> None:
    """Name our nodes after their layers: TensorRT reports layers by these names."""
    for node in model.graph.node:
        if node.domain == PLUGIN_NAMESPACE:
            layer = node.output[1].rpartition("_")[2]
            node.name = f"layers.{layer}.mixer.{node.op_type}"


def _traced_tensor(spec: TensorSpec) -> torch.Tensor:
    shape = [_TRACED[d] if isinstance(d, str) else d for d in spec.shape]
    return torch.empty(shape, dtype=torch_dtype(spec.dtype))


def _check_io(what: str, found: Sequence[onnx.ValueInfoProto], needed: Sequence[tuple[str, TensorSpec]]) -> None:
    def described(value: onnx.ValueInfoProto) -> tuple[str, int, tuple[int | str, ...]]:
        tensor = value.type.tensor_type
        dims = tuple(d.dim_param if d.HasField("dim_param") else d.dim_value for d in tensor.shape.dim)
        return value.name, tensor.elem_type, dims

    found_io = [described(value) for value in found]
    needed_io = [(name, _ONNX_TYPES[spec.dtype], spec.shape) for name, spec in needed]
    if found_io != needed_io:
        differing = [pair for pair in zip(found_io, needed_io, strict=False) if pair[0] != pair[1]]
        raise BuildError(
            f"exported graph {what}: found {len(found_io)}, needed {len(needed_io)}; first difference "
            f"{differing[:1]}. The installed torch {torch.__version__} exports another graph than the contract's."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks (its own deprecations, optional packages that are absent) away from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
