"""Run an exported graph on the CPU, where no GPU can run the engine: the very bytes that TensorRT's parser gets.

Standard ops are those of ``onnx.reference``; the nodes of this package go through ``trtllm_replayssm.ops`` on copies,
as ONNX has no in-place tensors.
"""

from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from trtllm_replayssm import ops
from trtllm_replayssm.builders.onnx_ops import TENSORRT_HINT
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE

Arrays = tuple[np.ndarray, ...]


class ReplayCausalConv1d(OpRun):
    op_domain = PLUGIN_NAMESPACE

    def _run(self, *inputs: np.ndarray, activation: int, kernels: Any = None) -> Arrays:
        x, weight, bias, conv_ring, past_lengths, num_tokens, slot_ids = _tensors(inputs)
        y = ops.causal_conv1d(
            x, weight, bias, conv_ring, past_lengths, num_tokens, slot_ids, activation="silu" if activation else None
        )
        return y.numpy(), conv_ring.numpy()


class ReplayMamba2WithConv(OpRun):
    op_domain = PLUGIN_NAMESPACE

    def _run(self, *inputs: np.ndarray, history: int, max_draft_len: int, kernels: Any = None) -> Arrays:
        tensors = _tensors(inputs)
        y = ops.mamba2_with_conv(*tensors, history=history, max_draft_len=max_draft_len)
        return tuple(tensor.numpy() for tensor in (y, tensors[4], *tensors[8:12]))


class ReplayGatedDeltaNet(OpRun):
    op_domain = PLUGIN_NAMESPACE

    def _run(self, *inputs: np.ndarray, history: int, max_draft_len: int, kernels: Any = None) -> Arrays:
        tensors = _tensors(inputs)
        o = ops.gated_delta_net(*tensors, history=history, max_draft_len=max_draft_len)
        return tuple(tensor.numpy() for tensor in (o, *tensors[7:11]))


class Evaluator:
    """An exported graph that can be stepped.

    Args:
        model: the graph.
        weights: its weight inputs, by name.
    """

    def __init__(self, model: onnx.ModelProto, weights: dict[str, torch.Tensor]) -> None:
        model = _without_hints(model)
        self._session = ReferenceEvaluator(
            model, new_ops=[ReplayCausalConv1d, ReplayMamba2WithConv, ReplayGatedDeltaNet]
        )
        self._weights = {name: tensor.numpy() for name, tensor in weights.items()}

    def step(
        self, step: dict[str, torch.Tensor], states: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run one step. ``states`` are by name without prefix and stay untouched; returns (logits, present states)."""
        results, present = self.results(step, states)
        return results["logits"], present

    def results(
        self, step: dict[str, torch.Tensor], states: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Run one step as ``step`` does; returns (all results by name, present states)."""
        feeds = {name: tensor.numpy() for name, tensor in step.items()}
        feeds |= {f"past_{name}": tensor.numpy() for name, tensor in states.items()}
        outputs = self._session.run(None, feeds | self._weights)
        named = dict(zip(self._session.output_names, outputs, strict=True))
        present = {name: torch.from_numpy(np.array(named.pop(f"present_{name}"))) for name in states}
        return {name: torch.from_numpy(np.array(value)) for name, value in named.items()}, present


def _without_hints(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop TensorRT's hint from the attention nodes: the reference refuses attributes that ONNX does not define."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != TENSORRT_HINT]
        del node.attribute[:]
        node.attribute.extend(kept)
    return plain


def _tensors(arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(array)) for array in arrays]
