"""A model as an ONNX graph: standard ops at opset 24, and our nodes in the domain ``trtllm_replayssm``.

Weights are graph inputs and nothing is computed, so a model of any size is exported from its geometry alone. For an
engine that holds its weights the same graph refers to the tensors of the rank checkpoint, which the parser reads from
there: no copy of the weights is made.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from trtllm_replayssm.builders import onnx_ops
from trtllm_replayssm.builders.models.registry import create_model, create_mtp_head
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE
from trtllm_replayssm.contract.safetensors_header import DTYPE_NAMES, read_entries
from trtllm_replayssm.contract.tensors import (
    MTP_PREFIX,
    TensorSpec,
    mtp_network_inputs,
    mtp_network_outputs,
    mtp_weight_specs,
    network_inputs,
    network_outputs,
    weight_specs,
)
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


class _Model(nn.Module):
    """A model's step with its results in the order of ``network_outputs``."""

    def __init__(self, module: nn.Module, *, returns_hidden_states: bool) -> None:
        super().__init__()
        self.module = module
        self._returns_hidden_states = returns_hidden_states

    def forward(self, step: tuple[torch.Tensor, ...], states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._returns_hidden_states:
            logits, hidden, present = self.module.forward_with_hidden_states(step, states)  # type: ignore[operator]
            return logits, hidden, *present
        logits, present = self.module(*step, states)
        return logits, *present


class _Head(nn.Module):
    """A multi-token prediction head's step with its results in the order of ``mtp_network_outputs``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: tuple[torch.Tensor, ...], states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        embedded, hidden, past_lengths = step
        # A cache update of TensorRT's writes all rows of the window: of a graph's attention nobody asks for num_tokens
        # or slots.
        unread = past_lengths
        out, present = self.module(embedded, hidden, past_lengths, unread, unread, states)
        return out, *present


class _Network(nn.Module):
    """A step whose states and weights are its last argument: a head of MLPs has no states, and none may lack."""

    def __init__(self, step: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        # Hidden from nn.Module: parameters of the traced module itself would become initialisers.
        self.__dict__["step"] = step
        self.names = [f"module.{name}" for name in names]

    def forward(
        self,
        step: tuple[torch.Tensor, ...],
        states_and_weights: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        num_states = len(states_and_weights) - len(self.names)
        states, weights = states_and_weights[:num_states], states_and_weights[num_states:]
        named = dict(zip(self.names, weights, strict=True))
        results: tuple[torch.Tensor, ...] = torch.func.functional_call(self.__dict__["step"], named, (step, states))
        return results


def export(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, *, returns_hidden_states: bool = False
) -> onnx.ModelProto:
    """Trace a model of the given geometry.

    Args:
        geometry: of the model.
        replay: history, window and state type.
        limits: of the engine; slots and cache capacity become constants of the graph.
        returns_hidden_states: give the graph these as an output, too.

    Returns:
        The graph, its inputs and outputs named as ``contract.tensors`` says, with B, S and J dynamic.

    Raises:
        BuildError: the traced graph's inputs or outputs are not those of the contract.
    """
    with FakeTensorMode():
        model = _Model(create_model(geometry, replay), returns_hidden_states=returns_hidden_states)
    network = _Network(model, [spec.name for spec in weight_specs(geometry)])
    outputs = network_outputs(geometry, replay, limits, returns_hidden_states=returns_hidden_states)
    return _traced(network, network_inputs(geometry, replay, limits), outputs)


def export_mtp_head(geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits) -> onnx.ModelProto:
    """Trace the multi-token prediction head of a model that has one, as ``export``."""
    with FakeTensorMode():
        head = _Head(create_mtp_head(geometry, replay))
    network = _Network(head, [spec.name.removeprefix(MTP_PREFIX) for spec in mtp_weight_specs(geometry)])
    inputs = mtp_network_inputs(geometry, replay, limits)
    return _traced(network, inputs, mtp_network_outputs(geometry, replay, limits))


def _traced(
    network: _Network, inputs: Sequence[tuple[str, TensorSpec]], outputs: Sequence[tuple[str, TensorSpec]]
) -> onnx.ModelProto:
    arguments: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    dynamic: tuple[list[dict[int, Dim]], list[dict[int, Dim]]] = ([], [])
    dims = {symbol: Dim(symbol, min=1) for symbol in _TRACED}
    # Fake tensors have shapes and no memory. (Meta tensors do not mix with what torch's symbolic ops return.)
    with FakeTensorMode():
        for _, spec in inputs:
            place = int(spec.role != "step")
            arguments[place].append(_traced_tensor(spec))
            dynamic[place].append({axis: dims[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)})
    with _quiet(), onnx_ops.exporting():
        program = torch.onnx.export(
            network,
            tuple(map(tuple, arguments)),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=tuple(map(tuple, dynamic)),
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


def set_kernels(model: onnx.ModelProto, images: Mapping[str, bytes]) -> None:
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


def embed_weights(model: onnx.ModelProto, weights_file: Path, weights: Sequence[TensorSpec]) -> None:
    """Turn the weight inputs into initialisers that refer to the bytes of a rank checkpoint.

    Args:
        model: changed in place; it must be saved in the folder of ``weights_file``.
        weights_file: a safetensors file.
        weights: the weight inputs.

    Raises:
        CheckpointError: the file is damaged, lacks a tensor, or has it in another type or shape.
    """
    entries = read_entries(weights_file)
    specs = {spec.name: spec for spec in weights}
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
