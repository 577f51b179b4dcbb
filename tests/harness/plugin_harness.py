"""Drives plugin objects of the built library through TensorRT's public interfaces, without TensorRT.

``HarnessPlugin`` goes the way of an engine's plugin: created from fields (build phase), configured, serialised,
created again from what was serialised (runtime phase), attached to a context, told its shapes, enqueued.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_replayssm.contract.plugin_io import PluginIO
from trtllm_replayssm.plugins.library import compile_library

HARNESS_DIR = Path(__file__).resolve().parent
BUILD, RUNTIME = 0, 1
# nvinfer1::DataType and nvinfer1::PluginFieldType.
DATA_TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bfloat16": 7, "int64": 8}
FIELD_TYPES = {"float32": 1, "int8": 3, "int32": 5, "char": 6, "int64": 10}
_FIELD_CTYPES: dict[str, Any] = {"float32": ctypes.c_float, "int32": ctypes.c_int32, "int64": ctypes.c_int64}
_TEXT_BYTES = 1 << 16
_MAX_DIMS = 8


class _Field(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * _MAX_DIMS),
    ]


@dataclass(frozen=True)
class TensorDesc:
    """One tensor as TensorRT describes it to a plugin; a size of -1 is unknown, format 0 is the linear one."""

    shape: tuple[int, ...]
    dtype: str
    format: int = 0


@dataclass(frozen=True)
class Field:
    """One plugin field; ints and floats are lists, int8 and char are bytes."""

    name: str
    type: str
    value: Sequence[int] | Sequence[float] | bytes


class PluginRefusedError(Exception):
    """The plugin refused; the message is what it logged."""


def harness_library(prebuilt: Path | None = None) -> Path:
    """Return the harness's shared library, compiled when no prebuilt one is given."""
    return prebuilt or compile_library("libplugin_harness.so", [HARNESS_DIR / "plugin_harness.cpp"])


class Harness:
    """A plugin library opened by the harness.

    Args:
        library: the plugin library.
        prebuilt: the harness's own library, when it is not to be compiled here.
    """

    def __init__(self, library: Path, prebuilt: Path | None = None) -> None:
        self.c = ctypes.CDLL(str(harness_library(prebuilt)))
        for name in ("open", "create", "clone", "attach"):
            getattr(self.c, f"harness_{name}").restype = ctypes.c_void_p
        self.c.harness_workspace_bytes.restype = ctypes.c_int64
        self.handle = ctypes.c_void_p(self.c.harness_open(str(library).encode()))
        if not self.handle:
            raise PluginRefusedError(self.messages())

    def messages(self) -> str:
        """Return what was logged since the last call."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.c.harness_messages(buffer, _TEXT_BYTES)
        return buffer.value.decode()

    def creators(self) -> dict[str, list[tuple[str, int]]]:
        """Return "interface/name/namespace/version" -> (field name, field type) of every creator."""
        found: dict[str, list[tuple[str, int]]] = {}
        while True:
            text, fields = ctypes.create_string_buffer(256), ctypes.POINTER(_Field)()
            count = self.c.harness_creator(self.handle, len(found), text, 256, ctypes.byref(fields))
            if count < 0:
                return found
            found[text.value.decode()] = [(fields[i].name.decode(), fields[i].type) for i in range(count)]

    def create(self, op_type: str, fields: Sequence[Field], phase: int, layer: str = "layer") -> ctypes.c_void_p:
        """Create a plugin object.

        Raises:
            PluginRefusedError: the creator returned nothing.
        """
        buffers = [_field_buffer(field) for field in fields]
        array = (_Field * max(len(fields), 1))(
            *(
                _Field(f.name.encode(), ctypes.cast(b, ctypes.c_void_p).value, FIELD_TYPES[f.type], len(f.value))
                for f, b in zip(fields, buffers, strict=True)
            )
        )
        created = self.c.harness_create(self.handle, op_type.encode(), layer.encode(), phase, array, len(fields))
        return self.require(created)

    def require(self, created: int | None) -> ctypes.c_void_p:
        """Return a plugin object that was just made; raise when there is none."""
        if not created:
            raise PluginRefusedError(self.messages())
        return ctypes.c_void_p(created)


def _field_buffer(field: Field) -> Any:
    if isinstance(field.value, bytes):
        return ctypes.create_string_buffer(field.value, max(len(field.value), 1))
    return (_FIELD_CTYPES[field.type] * len(field.value))(*field.value)


def _tensors(descs: Sequence[TensorDesc]) -> Any:
    return (_Tensor * len(descs))(
        *(_Tensor(DATA_TYPES[d.dtype], d.format, len(d.shape), (ctypes.c_int64 * _MAX_DIMS)(*d.shape)) for d in descs)
    )


class HarnessPlugin:
    """One plugin object.

    Args:
        harness: the opened library.
        io: which plugin, and its tensors in order.
        fields: what it is created from.
        phase: BUILD or RUNTIME.
        pointer: an object that exists already; then ``fields`` are not used.
    """

    def __init__(
        self,
        harness: Harness,
        io: PluginIO,
        fields: Sequence[Field] = (),
        phase: int = BUILD,
        pointer: ctypes.c_void_p | None = None,
    ) -> None:
        self.harness, self.io = harness, io
        self.pointer = pointer or harness.create(io.op_type, fields, phase)
        self.c = harness.c

    @classmethod
    def of(cls, harness: Harness, io: PluginIO, ints: Mapping[str, int], kernels: bytes) -> "HarnessPlugin":
        """Create a plugin for the build phase from its fields' values."""
        fields = [Field(name, "int32", [value]) for name, value in ints.items()]
        return cls(harness, io, [*fields, Field("kernels", "int8", kernels)])

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.c.harness_destroy(self.pointer)

    def serialized(self) -> list[Field]:
        """Return the fields that would be stored in an engine."""
        fields = ctypes.POINTER(_Field)()
        count = self.c.harness_fields(self.pointer, ctypes.byref(fields))
        names = {number: name for name, number in FIELD_TYPES.items()}
        return [_read_field(fields[i], names[fields[i].type]) for i in range(count)]

    def deserialized(self) -> "HarnessPlugin":
        """Return the object that an engine would create again from what this one stores."""
        return HarnessPlugin(self.harness, self.io, self.serialized(), RUNTIME)

    def clone(self) -> "HarnessPlugin":
        """Return IPluginV3::clone's object."""
        return self._wrap(self.c.harness_clone(self.pointer))

    def attached(self) -> "HarnessPlugin":
        """Return IPluginV3OneRuntime::attachToContext's object."""
        return self._wrap(self.c.harness_attach(self.pointer))

    def _wrap(self, pointer: int | None) -> "HarnessPlugin":
        return HarnessPlugin(self.harness, self.io, pointer=self.harness.require(pointer))

    def identity(self) -> str:
        """Return "name/namespace/version"."""
        text = ctypes.create_string_buffer(256)
        self.c.harness_identity(self.pointer, text, 256)
        return text.value.decode()

    def aliases(self) -> dict[int, int]:
        """Return output index -> index of the input that it is written over."""
        count = self.c.harness_output_count(self.pointer)
        found = {k: self.c.harness_aliased_input(self.pointer, k) for k in range(count)}
        return {output: source for output, source in found.items() if source >= 0}

    def output_types(self, input_types: Sequence[str]) -> list[str]:
        """Return the outputs' types.

        Raises:
            PluginRefusedError: a type or the number of inputs is wrong.
        """
        given = (ctypes.c_int32 * len(input_types))(*(DATA_TYPES[name] for name in input_types))
        taken = (ctypes.c_int32 * len(self.io.outputs))()
        self._require_zero(
            self.c.harness_output_types(self.pointer, given, len(given), taken, len(taken)),
        )
        names = {number: name for name, number in DATA_TYPES.items()}
        return [names[number] for number in taken]

    def output_axes(self, input_ranks: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
        """Return, per output, the input and its axis that each of its dimensions is."""
        ranks = (ctypes.c_int32 * len(input_ranks))(*input_ranks)
        axes = (ctypes.c_int32 * (len(self.io.outputs) * (1 + _MAX_DIMS)))()
        count = len(self.io.outputs)
        self._require_zero(self.c.harness_output_axes(self.pointer, ranks, len(ranks), axes, count))
        found = [axes[k * (1 + _MAX_DIMS) : (k + 1) * (1 + _MAX_DIMS)] for k in range(count)]
        return [tuple(divmod(place, _MAX_DIMS) for place in places[:rank]) for rank, *places in found]

    def supports(self, position: int, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> bool:
        """Return supportsFormatCombination's answer."""
        tensors = _tensors([*inputs, *outputs])
        return bool(self.c.harness_supports(self.pointer, position, tensors, len(inputs), len(outputs)))

    def configure(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        """Call configurePlugin.

        Raises:
            PluginRefusedError: it returned non-zero.
        """
        tensors = _tensors([*inputs, *outputs])
        self._require_zero(self.c.harness_configure(self.pointer, tensors, len(inputs), len(outputs)))

    def workspace_bytes(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> int:
        """Return getWorkspaceSize's answer."""
        tensors = _tensors([*inputs, *outputs])
        return int(self.c.harness_workspace_bytes(self.pointer, tensors, len(inputs), len(outputs)))

    def on_shape_change(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        """Call onShapeChange.

        Raises:
            PluginRefusedError: it returned non-zero.
        """
        tensors = _tensors([*inputs, *outputs])
        self._require_zero(self.c.harness_on_shape_change(self.pointer, tensors, len(inputs), len(outputs)))

    def enqueue(
        self,
        inputs: Sequence[TensorDesc],
        outputs: Sequence[TensorDesc],
        addresses: Sequence[int],
        stream: int = 0,
        workspace: int = 0,
    ) -> None:
        """Call enqueue with device addresses, of the inputs and then of the outputs, and of the workspace.

        Raises:
            PluginRefusedError: it returned non-zero.
        """
        tensors, pointers = _tensors([*inputs, *outputs]), (ctypes.c_void_p * len(addresses))(*addresses)
        last = (ctypes.c_void_p(workspace), ctypes.c_void_p(stream))
        self._require_zero(
            self.c.harness_enqueue(self.pointer, tensors, len(inputs), len(outputs), pointers, *last),
        )

    def _require_zero(self, result: int) -> None:
        if result:
            raise PluginRefusedError(self.harness.messages())


def _read_field(field: _Field, type_name: str) -> Field:
    if type_name in ("int8", "char"):
        return Field(field.name.decode(), type_name, ctypes.string_at(field.data, field.length))
    array = ctypes.cast(field.data, ctypes.POINTER(_FIELD_CTYPES[type_name]))
    return Field(field.name.decode(), type_name, [array[i] for i in range(field.length)])


def shapes_of(io: PluginIO, inputs: Mapping[str, TensorDesc]) -> tuple[list[TensorDesc], list[TensorDesc]]:
    """Return the descriptions in the plugin's order: the inputs, and the outputs as the contract has them."""
    ordered = [inputs[name] for name in io.inputs]
    shapes = [desc.shape for desc in ordered]
    return ordered, [
        TensorDesc(io.output_shape(k, shapes), ordered[io.source(k)].dtype) for k in range(len(io.outputs))
    ]
