"""TensorRT's engine and context, as far as a machine without a GPU can take them.

They know addresses and shapes alone, as TensorRT does, run the model's modules on the memory behind them, and write
cache rows as TensorRT's linear cache update does. No engine runs here; that needs a supported GPU.
"""

import ctypes
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trtllm_replayssm.backend import LogLines
from trtllm_replayssm.builders.models.registry import create_model, create_mtp_head
from trtllm_replayssm.contract.manifest import (
    ENGINE_FILE,
    MTP_ENGINE_FILE,
    WEIGHTS_FILE,
    Manifest,
    TensorRecord,
    read_manifest,
)
from trtllm_replayssm.contract.tensors import MTP_PREFIX, TensorSpec, mtp_state_specs, mtp_step_specs
from trtllm_replayssm.contract.tensors import state_specs as model_state_specs
from trtllm_replayssm.contract.tensors import step_specs as model_step_specs
from trtllm_replayssm.runtime.executors import bindings, tensorrt_executor

LEFT_IN_CACHES = float("nan")
Tensors = tuple[torch.Tensor, ...]


class EngineStandIn:
    """What TensorRT's engine says about its tensors; with ``make_context``, also what runs."""

    def __init__(self, records: Sequence[TensorRecord], make_context: Callable[[], "ContextStandIn"] | None = None):
        names = {ours: theirs for theirs, ours in bindings.DTYPE_NAMES.items()}
        self.records = {record.name: record for record in records}
        self.dtypes = {name: names[record.dtype] for name, record in self.records.items()}
        self.aliases = {name: record.shares_address_with for name, record in self.records.items()}
        self.num_io_tensors = len(self.records)
        self.make_context = make_context

    def get_tensor_name(self, index: int) -> str:
        return list(self.records)[index]

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=self.dtypes[name])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(dim, str) else dim for dim in self.records[name].shape)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases[name]

    def create_execution_context(self) -> "ContextStandIn":
        assert self.make_context is not None
        return self.make_context()


class ContextStandIn(ABC):
    """TensorRT's context of one profile: addresses and shapes in, a step of a module on the memory behind them.

    Args:
        manifest: of the engine.
        records: the engine's bindings.
        specs: of its step inputs and of its states.
        left_in_caches: what the cache update leaves in rows of padding and beyond a window's tokens.
    """

    def __init__(
        self,
        manifest: Manifest,
        records: Sequence[TensorRecord],
        specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
        left_in_caches: float,
    ) -> None:
        self.manifest = manifest
        self.step_specs, self.state_specs = specs
        self.left_in_caches = left_in_caches
        self.profile = manifest.profiles[0]
        self.records = {record.name: record for record in records}
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.runs = 0
        self.embedded: dict[str, torch.Tensor] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = self.manifest.profiles[profile]
        return stream >= 0

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.records and address > 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.profile.shapes(self.records[name].shape)
        self.shapes[name] = shape
        return all(low <= dim <= high for low, dim, high in zip(least, shape, most, strict=True))

    def execute_async_v3(self, stream: int) -> bool:
        self.execute()
        return stream >= 0

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        record = self.records[name]
        shape = shape or self.shapes.get(name) or tuple(int(dim) for dim in record.shape)
        dtype = getattr(torch, record.dtype)
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(self.addresses[name])
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def weights(self) -> dict[str, torch.Tensor]:
        bound = {record.name: self.tensor(record.name) for record in self.records.values() if record.role == "weight"}
        return self.embedded | bound

    def execute(self) -> None:
        assert self.addresses.keys() == self.records.keys(), "a tensor has no address"
        for spec in self.state_specs:
            assert self.addresses[spec.past_name] == self.addresses[spec.present_name], "a state is not in place"
        self._check_results()
        self.runs += 1
        step = tuple(self.tensor(spec.name) for spec in self.step_specs)
        states = tuple(self.tensor(spec.past_name) for spec in self.state_specs)
        named = dict(zip((spec.name for spec in self.step_specs), step, strict=True))
        self._write_cache_rows(named["past_lengths"], step[0].shape[1], states)
        with torch.no_grad():
            results = self.run(step, states)
        for name, result in results.items():
            self.tensor(name, tuple(result.shape)).copy_(result)

    @abstractmethod
    def run(self, step: Tensors, states: Tensors) -> dict[str, torch.Tensor]:
        """Do the module's step: the results by their names; states are updated in place."""

    def _check_results(self) -> None:
        # An engine may write a result before it has read its inputs to the end.
        inputs = {self.addresses[record.name] for record in self.records.values() if record.is_input}
        results = {self.addresses[record.name] for record in self.records.values() if record.role == "result"}
        assert not inputs & results, "a result is written over an input"

    def _write_cache_rows(self, past_lengths: torch.Tensor, window: int, states: Tensors) -> None:
        # TensorRT writes S cache rows at past_lengths for every row of the batch, padding included. The module then
        # writes the valid ones; the rest keeps what is left in the caches here, by default poison.
        for spec, cache in zip(self.state_specs, states, strict=True):
            if spec.is_cache:
                for row, past in enumerate(past_lengths.tolist()):
                    assert past + window <= cache.shape[2], "a window reaches beyond the cache"
                    cache[row, :, past : past + window] = self.left_in_caches


class ModelContext(ContextStandIn):
    """A context of a model's engine."""

    def __init__(self, manifest: Manifest, left_in_caches: float = LEFT_IN_CACHES) -> None:
        specs = (model_step_specs(), model_state_specs(manifest.geometry, manifest.replay, manifest.limits))
        super().__init__(manifest, manifest.tensors, specs, left_in_caches)
        with torch.device("meta"):
            self.module = create_model(manifest.geometry, manifest.replay)

    def run(self, step: Tensors, states: Tensors) -> dict[str, torch.Tensor]:
        self.module.load_state_dict(self.weights(), assign=True, strict=True)
        if "hidden_states" not in self.records:
            return {"logits": self.module(*step, states)[0]}
        logits, hidden, _ = self.module.forward_with_hidden_states(step, states)
        return {"logits": logits, "hidden_states": hidden}


class HeadContext(ContextStandIn):
    """A context of a multi-token prediction head's engine: it takes every row and all of a window for valid."""

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.mtp is not None
        geometry, replay = manifest.geometry, manifest.replay
        specs = (mtp_step_specs(geometry), mtp_state_specs(geometry, replay, manifest.limits))
        super().__init__(manifest, manifest.mtp.tensors, specs, LEFT_IN_CACHES)
        with torch.device("meta"):
            self.module = create_mtp_head(geometry, replay)

    def run(self, step: Tensors, states: Tensors) -> dict[str, torch.Tensor]:
        weights = {name.removeprefix(MTP_PREFIX): weight for name, weight in self.weights().items()}
        self.module.load_state_dict(weights, assign=True, strict=True)
        rows, window = step[0].shape[:2]
        every = torch.full((rows,), window, dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
        capacity = states[0].shape[2] if states else 0
        return {"next_hidden_states": self.module(*step, *every, states, capacity)[0]}


class _Stream:
    cuda_stream = 0

    def __init__(self, device: object = None) -> None:
        del device

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class BackendStandIn:
    """TensorRT on the CPU: a plan is known by its bytes.

    Attributes:
        contexts: every context that was made, by its engine's file name.
    """

    name, version, logger = "tensorrt_rtx", "0", None

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        self.contexts: dict[str, list[ContextStandIn]] = {ENGINE_FILE: [], MTP_ENGINE_FILE: []}
        self._engines = {}
        embedded = load_file(folder / WEIGHTS_FILE) if manifest.weights == "embedded" else {}
        self._embedded = {
            ENGINE_FILE: {name: w for name, w in embedded.items() if not name.startswith(MTP_PREFIX)},
            MTP_ENGINE_FILE: {name: w for name, w in embedded.items() if name.startswith(MTP_PREFIX)},
        }
        for file, record, kind in (
            (ENGINE_FILE, manifest, ModelContext),
            (MTP_ENGINE_FILE, manifest.mtp, HeadContext),
        ):
            if record is not None:
                made = EngineStandIn(record.tensors, self._maker(file, kind, manifest))
                self._engines[hashlib.sha256((folder / file).read_bytes()).hexdigest()] = made
        runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: self._engines[hashlib.sha256(plan).hexdigest()])
        self.trt = SimpleNamespace(Runtime=lambda logger: runtime)

    def _maker(self, file: str, kind: Any, manifest: Manifest) -> Callable[[], ContextStandIn]:
        def make() -> ContextStandIn:
            context: ContextStandIn = kind(manifest)
            context.embedded = self._embedded[file]
            self.contexts[file].append(context)
            return context

        return make

    def load_plugins(self) -> None:
        pass

    @contextmanager
    def recording(self) -> Iterator[LogLines]:
        yield LogLines([])


def stand_in_for_tensorrt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BackendStandIn:
    """Let the executors of an engine folder run on the CPU's memory, with a stand-in behind TensorRT's objects."""
    backend = BackendStandIn(folder)
    monkeypatch.setattr(tensorrt_executor, "_enter", lambda manifest, device: backend)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return backend
