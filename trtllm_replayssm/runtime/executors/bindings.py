"""Declared tensors become addresses: past and present on one, key/value caches on the rows of the step.

Nothing here imports TensorRT: an engine and its contexts come in as objects, whose methods are those of
``ICudaEngine`` and ``IExecutionContext``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trtllm_replayssm.contract.manifest import Manifest, TensorRecord
from trtllm_replayssm.contract.tensors import TensorSpec, state_specs
from trtllm_replayssm.errors import BackendError, ManifestError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime.executors.base import TORCH_EXECUTOR
from trtllm_replayssm.runtime.step import StepInputs

DTYPE_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32"}
"""TensorRT's type names -> the contract's."""


def check_engine(engine: Any, manifest: Manifest) -> None:
    """Compare an engine's tensors with the manifest's, and its aliases with what in-place states need.

    Args:
        engine: an ``ICudaEngine``.
        manifest: of its folder.

    Raises:
        ManifestError: the engine is not the one that the manifest describes.
        BackendError: TensorRT does not keep a state in place.
    """
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    needed = {record.name for record in manifest.tensors}
    if names != needed:
        different = ", ".join(sorted(names ^ needed)[:5])
        raise ManifestError(
            f"engine: found {len(names)} tensors; needed the manifest's {len(needed)}. Only one of the two has "
            f"{different}. Build it again."
        )
    for record in manifest.tensors:
        _check_tensor(engine, record)


def _check_tensor(engine: Any, record: TensorRecord) -> None:
    dtype = DTYPE_NAMES.get(engine.get_tensor_dtype(record.name).name, "another type")
    shape = tuple(engine.get_tensor_shape(record.name))
    needed = tuple(-1 if isinstance(dim, str) else dim for dim in record.shape)
    if dtype != record.dtype or shape != needed:
        raise ManifestError(
            f"engine: tensor {record.name}: found {dtype} {list(shape)}; needed {record.dtype} {list(needed)}. "
            f"Build it again."
        )
    if record.shares_address_with is not None:
        # TensorRT need not report a plugin's aliases; bound to one address they hold either way. Another input, though,
        # would be overwritten.
        aliased = engine.get_aliased_input_tensor(record.name) or record.shares_address_with
        if aliased != record.shares_address_with:
            raise BackendError(
                f"engine: {record.name}: found an alias of {aliased}; needed {record.shares_address_with}, since "
                f"states are updated in place. Report this with the TensorRT version, and use {TORCH_EXECUTOR}."
            )


class Bindings:
    """The tensors of an engine and where they are.

    Args:
        manifest: names and shapes.
        states: one tensor per ``contract.tensors.state_specs``, in order.
        weights: name -> tensor of the weight inputs; empty when the engine embeds them.
        logits: fp32, at least rows * positions * vocabulary values.
    """

    def __init__(
        self,
        manifest: Manifest,
        states: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        logits: torch.Tensor,
    ) -> None:
        self._step_names = [record.name for record in manifest.tensors if record.role == "step"]
        self._vocab_size = manifest.geometry.vocab_size
        self._weights = dict(weights)
        self._logits = logits
        specs = state_specs(manifest.geometry, manifest.replay, manifest.limits)
        pairs = list(zip(specs, states, strict=True))
        self._pools = [(spec, pool) for spec, pool in pairs if not spec.is_cache]
        self._caches = [(spec, cache) for spec, cache in pairs if spec.is_cache]
        self._check_weights(manifest)

    def bind_fixed(self, context: Any) -> None:
        """Give a context the addresses that never change: weights, state pools, logits."""
        for name, weight in self._weights.items():
            _set_address(context, name, weight)
        for spec, pool in self._pools:
            _set_state_address(context, spec, pool)
        _set_address(context, "logits", self._logits)

    def bind_step(self, context: Any, inputs: StepInputs) -> torch.Tensor:
        """Give a context the shapes and addresses of one step.

        Args:
            context: an ``IExecutionContext`` that ``bind_fixed`` has seen.
            inputs: must stay alive until the step has run.

        Returns:
            Where the logits will be: fp32 [B, J, V].
        """
        num_rows, positions = inputs.logits_indices.shape
        for name, tensor in zip(self._step_names, inputs.tensors(), strict=True):
            _set_shape(context, name, tensor.shape)
            _set_address(context, name, tensor)
        for spec, cache in self._caches:
            rows = cache[inputs.first_slot : inputs.first_slot + num_rows]
            _set_shape(context, spec.past_name, rows.shape)
            _set_state_address(context, spec, rows)
        size = num_rows * positions * self._vocab_size
        return self._logits.view(-1)[:size].view(num_rows, positions, self._vocab_size)

    def _check_weights(self, manifest: Manifest) -> None:
        for record in manifest.tensors:
            if record.role != "weight":
                continue
            weight = self._weights.get(record.name)
            if weight is None:
                raise ManifestError(
                    f"weights: found no {record.name}; needed it. Name another folder with the option checkpoint_dir."
                )
            if tuple(weight.shape) != record.shape or weight.dtype != torch_dtype(record.dtype):
                raise ManifestError(
                    f"weights: {record.name}: found {weight.dtype} {list(weight.shape)}; needed {record.dtype} "
                    f"{list(record.shape)}. Name the checkpoint that the engine was built from with the option "
                    f"checkpoint_dir."
                )


def _set_state_address(context: Any, spec: TensorSpec, tensor: torch.Tensor) -> None:
    _set_address(context, spec.past_name, tensor)
    _set_address(context, spec.present_name, tensor)


def _set_address(context: Any, name: str, tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous(), f"{name} is bound by its address alone"
    if not context.set_tensor_address(name, tensor.data_ptr()):
        raise BackendError(
            f"engine: {name}: found address {tensor.data_ptr():#x} refused by TensorRT; needed a tensor of the engine. "
            f"Build it again."
        )


def _set_shape(context: Any, name: str, shape: torch.Size) -> None:
    if not context.set_input_shape(name, tuple(shape)):
        raise BackendError(
            f"engine: {name}: found shape {list(shape)} refused by TensorRT; needed one within the engine's profile."
        )
