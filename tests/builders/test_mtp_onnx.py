"""The graphs of a model with a multi-token prediction head compute what the modules compute: hidden states, drafts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.builders.tiny_geometry import (
    poisoned_states,
    random_model,
    random_weights,
    tiny_geometry,
    tiny_qwen_geometry,
)
from tests.onnx_evaluator import Evaluator
from trtllm_replayssm.builders.export import export, export_mtp_head, set_kernels
from trtllm_replayssm.builders.models.hybrid import HybridModel
from trtllm_replayssm.builders.models.mtp import MtpHead
from trtllm_replayssm.builders.models.registry import create_mtp_head
from trtllm_replayssm.contract.geometry import EngineLimits, LayerType, ModelGeometry, MtpGeometry, ReplayGeometry
from trtllm_replayssm.contract.plugin_io import PLUGINS
from trtllm_replayssm.contract.tensors import (
    MTP_PREFIX,
    mtp_network_inputs,
    mtp_network_outputs,
    mtp_state_specs,
    mtp_weight_specs,
    network_outputs,
)

LIMITS = EngineLimits(max_batch_size=3, max_input_len=24, max_seq_len=40, max_num_tokens=12)
REPLAY = ReplayGeometry(history=8, max_draft_len=3)
HEAD = MtpGeometry(layer_types=(LayerType.ATTENTION, LayerType.MLP))
Make = Callable[..., ModelGeometry]
MAKES = pytest.mark.parametrize(
    ("make", "pattern"), [(tiny_geometry, "M-*"), (tiny_qwen_geometry, "G-*-")], ids=["nemotron_h", "qwen"]
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def head_of(geometry: ModelGeometry) -> tuple[MtpHead, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        head = create_mtp_head(geometry, REPLAY)
    weights = random_weights(geometry, 5, mtp_weight_specs(geometry))
    head.load_state_dict({name.removeprefix(MTP_PREFIX): weight for name, weight in weights.items()}, assign=True)
    return head, weights


def check_io(found: Any, needed: Any) -> None:
    assert [value.name for value in found] == [name for name, _ in needed]
    for value, (name, spec) in zip(found, needed, strict=True):
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        assert tuple(dims) == spec.shape, name


@pytest.mark.parametrize("layers", ["*-", "*", "-", "-**"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_graph_of_a_head_has_the_contracts_inputs_and_outputs(layers: str, dtype: str) -> None:
    kinds = {"*": LayerType.ATTENTION, "-": LayerType.MLP}
    mtp = MtpGeometry(layer_types=tuple(kinds[letter] for letter in layers))
    geometry = tiny_qwen_geometry(dtype=dtype, mtp=mtp)
    graph = export_mtp_head(geometry, REPLAY, LIMITS).graph
    check_io(graph.input, mtp_network_inputs(geometry, REPLAY, LIMITS))
    check_io(graph.output, mtp_network_outputs(geometry, REPLAY, LIMITS))
    assert not any(node.domain == "trtllm_replayssm" for node in graph.node)
    assert sum(node.op_type == "TensorScatter" for node in graph.node) == 2 * layers.count("*")


@MAKES
def test_the_models_graph_returns_the_hidden_states_of_the_module(make: Make, pattern: str) -> None:
    geometry = make(pattern, mtp=HEAD)
    graph = export(geometry, REPLAY, LIMITS, returns_hidden_states=True)
    check_io(graph.graph.output, network_outputs(geometry, REPLAY, LIMITS, returns_hidden_states=True))
    set_kernels(graph, {io.op_type: b"any kernels" for io in PLUGINS})
    evaluator, model = Evaluator(graph, random_weights(geometry)), random_model(geometry, REPLAY)
    assert isinstance(model, HybridModel)
    held = {name: poisoned_states(geometry, REPLAY, LIMITS) for name in ("graph", "module")}
    for states in held.values():
        for name, state in states.items():
            if "_cache_" in name:
                state.zero_()
    past = torch.zeros(3, dtype=torch.int32)
    generator = torch.Generator().manual_seed(2)
    for window in (12, 4, 1, 3):
        step = {
            "input_ids": torch.randint(0, 97, (3, window), generator=generator, dtype=torch.int32),
            "past_lengths": past.clone(),
            "checkpoint_lengths": past.clone(),
            "num_tokens": torch.full((3,), window, dtype=torch.int32),
            "slot_ids": torch.arange(3, dtype=torch.int32),
            "logits_indices": torch.full((3, 1), window - 1, dtype=torch.int32),
        }
        # A decode step leaves its tokens pending; here each is followed by one that is run at the same place again.
        results, present = evaluator.results(step, held["graph"])
        logits, hidden, _ = model.forward_with_hidden_states(tuple(step.values()), tuple(held["module"].values()))
        torch.testing.assert_close(results["hidden_states"], hidden, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(results["logits"], logits, rtol=1e-5, atol=2e-4)
        assert torch.isfinite(hidden).all() and hidden.std() > 0.1
        held["graph"] = present
        if window > REPLAY.window:
            past += window


@MAKES
def test_the_heads_graph_computes_what_the_module_computes(make: Make, pattern: str) -> None:
    """A prompt in two pieces, windows of which parts stay, and chains on the head's own result."""
    geometry = make(pattern, mtp=HEAD)
    head, weights = head_of(geometry)
    evaluator = Evaluator(export_mtp_head(geometry, REPLAY, LIMITS), weights)
    specs = mtp_state_specs(geometry, REPLAY, LIMITS)
    shapes = [[LIMITS.max_batch_size if dim == "B" else int(dim) for dim in spec.shape] for spec in specs]
    ours = tuple(torch.zeros(shape) for shape in shapes)
    graphs = {spec.name: torch.zeros(shape) for spec, shape in zip(specs, shapes, strict=True)}
    past = torch.tensor([0, 2, 5], dtype=torch.int32)
    generator = torch.Generator().manual_seed(4)
    out = torch.zeros(3, 1, geometry.d_model)
    # Window, and how many of its tokens stay: none where the next step runs on this one's result.
    for window, kept in ((12, 12), (5, 5), (4, 2), (4, 1), (1, 0), (1, 0), (4, 4), (1, 1)):
        embedded, hidden = (torch.randn(3, window, geometry.d_model, generator=generator) for _ in range(2))
        if window == 1:
            hidden = out[:, -1:].clone()
        step = {"inputs_embeds": embedded, "hidden_states": hidden, "past_lengths": past.clone()}
        results, graphs = evaluator.results(step, graphs)
        counters = torch.full((3,), window, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
        with torch.no_grad():
            out, present = head(embedded, hidden, past, *counters, ours)
        assert all(given is returned for given, returned in zip(ours, present, strict=True))
        torch.testing.assert_close(results["next_hidden_states"], out, rtol=1e-5, atol=2e-5)
        assert out.std() > 0.1
        past += kept
    for state, (name, other) in zip(ours, graphs.items(), strict=True):
        torch.testing.assert_close(other, state, rtol=1e-5, atol=2e-5, msg=name)


def test_a_head_that_reads_its_inputs_in_another_order_is_noticed() -> None:
    """Teeth: hidden states and embeddings have one shape, and the graph tells them apart by name."""
    geometry = tiny_geometry("M-*", mtp=HEAD)
    head, weights = head_of(geometry)
    graph = export_mtp_head(geometry, REPLAY, LIMITS)
    first, second = graph.graph.input[0].name, graph.graph.input[1].name
    for node in graph.graph.node:
        swapped = {first: second, second: first}
        node.input[:] = [swapped.get(name, name) for name in node.input]
    shape = (1, 2, geometry.d_model)
    embedded, hidden = torch.randn(shape), torch.randn(shape)
    zero, states = torch.zeros(1, dtype=torch.int32), mtp_state_specs(geometry, REPLAY, LIMITS)
    caches = {spec.name: torch.zeros([1, *map(int, spec.shape[1:])]) for spec in states}
    step = {"inputs_embeds": embedded, "hidden_states": hidden, "past_lengths": zero}
    results, _ = Evaluator(graph, weights).results(step, caches)
    with torch.no_grad():
        out, _ = head(embedded, hidden, zero, zero + 2, zero, tuple(caches.values()))
    assert (results["next_hidden_states"] - out).abs().max() > 0.1
