"""Declared tensors become addresses: past and present on one, key/value caches on the rows of the step.

Nothing here imports TensorRT: an engine and its contexts come in as objects, whose methods are those of
``ICudaEngine`` and ``IExecutionContext``.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from trtllm_replayssm.contract.manifest import ProfileRecord, TensorRecord
from trtllm_replayssm.contract.tensors import TensorSpec
from trtllm_replayssm.errors import BackendError, ManifestError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime.executors.base import TORCH_EXECUTOR
from trtllm_replayssm.runtime.pools import State

DTYPE_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32"}
"""TensorRT's type names -> the contract's."""


def check_engine(engine: Any, tensors: Sequence[TensorRecord]) -> None:
    """Compare an engine's tensors with the manifest's, and its aliases with what in-place states need.

    Args:
        engine: an ``ICudaEngine``.
        tensors: what the manifest says of its bindings.

    Raises:
        ManifestError: the engine is not the one that the manifest describes.
        BackendError: TensorRT does not keep a state in place.
    """
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    needed = {record.name for record in tensors}
    if names != needed:
        different = ", ".join(sorted(names ^ needed)[:5])
        raise ManifestError(
            f"engine: found {len(names)} tensors; needed the manifest's {len(needed)}. Only one of the two has "
            f"{different}. Build it again."
        )
    for record in tensors:
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
        tensors: what the manifest says of the engine's bindings.
        states: every state and its pool.
        weights: name -> tensor of the weight inputs; empty when the engine embeds them.
    """

    def __init__(
        self, tensors: Sequence[TensorRecord], states: Sequence[State], weights: Mapping[str, torch.Tensor]
    ) -> None:
        self._step = [record for record in tensors if record.role == "step"]
        self._results = [record for record in tensors if record.role == "result"]
        self._weights = dict(weights)
        self._pools = [state for state in states if not state.spec.is_cache]
        self._caches = [state for state in states if state.spec.is_cache]
        self._check_weights(tensors)

    def bind_fixed(self, context: Any) -> None:
        """Give a context the addresses that never change: weights and state pools."""
        for name, weight in self._weights.items():
            _set_address(context, name, weight)
        for spec, pool in self._pools:
            _set_state_address(context, spec, pool)

    def bind_step(
        self, context: Any, inputs: Sequence[torch.Tensor], first_slot: int, buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Give a context the shapes and addresses of one step.

        Args:
            context: an ``IExecutionContext`` that ``bind_fixed`` has seen.
            inputs: the step's inputs in the order of the network; they must stay alive until the step has run.
            first_slot: row i of the step has the cache rows of slot first_slot + i.
            buffers: where the results will be; each at least as large as its result.

        Returns:
            Name -> the part of its buffer where a result will be, in its shape.
        """
        sizes: dict[str, int] = {}
        for record, tensor in zip(self._step, inputs, strict=True):
            _set_shape(context, record.name, tensor.shape)
            _set_address(context, record.name, tensor)
            sizes |= {dim: size for dim, size in zip(record.shape, tensor.shape, strict=True) if isinstance(dim, str)}
        for spec, cache in self._caches:
            rows = cache[first_slot : first_slot + sizes["B"]]
            _set_shape(context, spec.past_name, rows.shape)
            _set_state_address(context, spec, rows)
        results = {}
        for record in self._results:
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in record.shape]
            _set_address(context, record.name, buffers[record.name])
            results[record.name] = buffers[record.name].view(-1)[: prod(shape)].view(shape)
        return results

    def _check_weights(self, tensors: Sequence[TensorRecord]) -> None:
        for record in tensors:
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


def result_buffers(
    tensors: Sequence[TensorRecord], profiles: Sequence[ProfileRecord], device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate a buffer for each result, as large as the largest step of any profile makes it."""
    return {
        record.name: torch.empty(
            max(prod(profile.shapes(record.shape)[2]) for profile in profiles),
            dtype=torch_dtype(record.dtype),
            device=device,
        )
        for record in tensors
        if record.role == "result"
    }


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
