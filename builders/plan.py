"""From an ONNX file to a serialised engine, through the TensorRT at hand."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_replayssm.backend import Backend, LogLines
from trtllm_replayssm.builders.progress import BuildProgress, interruptible
from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.capability import capability_text
from trtllm_replayssm.contract.manifest import LayerRecord, ProfileRecord, TensorRecord
from trtllm_replayssm.errors import BackendError, BuildError, ConfigError
from trtllm_replayssm.plugins.cache import cache_dir, write_beside


@dataclass(frozen=True)
class Plan:
    """A built engine.

    Attributes:
        sha256: of the engine file, in hexadecimal.
        num_bytes: size of the engine file.
        network_layers: of the parsed network.
        engine_layers: of the built engine, as the builder reported them.
        warnings: of parser and builder.
    """

    sha256: str
    num_bytes: int
    network_layers: tuple[LayerRecord, ...]
    engine_layers: tuple[LayerRecord, ...]
    warnings: tuple[str, ...]


def target_capabilities(backend: Backend, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Return the compute capabilities to build for, as 10 * major + minor, ascending.

    Args:
        backend: TensorRT-RTX builds for any it knows, TensorRT for the GPU of this machine alone.
        wanted: None takes the default.

    Raises:
        ConfigError: the backend cannot build for a wanted one.
        BackendError: TensorRT on a machine without a GPU.
    """
    if backend.name == "tensorrt_rtx":
        return _rtx_capabilities(backend, wanted)
    import torch

    if not torch.cuda.is_available():
        raise BackendError(
            "backend tensorrt: found no CUDA device; needed the GPU that the engine is for. "
            "TensorRT-RTX builds without one: --backend tensorrt_rtx"
        )
    major, minor = torch.cuda.get_device_capability()
    current = 10 * major + minor
    if wanted and set(wanted) != {current}:
        raise ConfigError(
            f"compute_capability: found {capability_text(*wanted)}; needed {capability_text(current)}, this machine's "
            "GPU. TensorRT builds for the GPU it runs on; leave the option out."
        )
    return (current,)


def build_plan(
    backend: Backend,
    onnx_file: Path,
    engine_file: Path,
    tensors: Sequence[TensorRecord],
    profiles: Sequence[ProfileRecord],
    capabilities: Sequence[int],
    progress: BuildProgress,
    label: str = "",
) -> Plan:
    """Parse a graph and build its engine.

    Args:
        backend: with the plugins loaded.
        onnx_file: the graph; external data is read from beside it.
        engine_file: where to write the plan.
        tensors: the bindings that the network must have.
        profiles: optimization profiles, in the order of their indices.
        capabilities: targets as 10 * major + minor.
        progress: to show the phases in.
        label: what to add to their names.

    Raises:
        BuildError: the parser or the builder failed, with their own lines, or the bindings are others.
        KeyboardInterrupt: interrupted; TensorRT was asked to stop.
    """
    trt = backend.trt
    with backend.recording() as log, interruptible() as cancelled:
        builder = trt.Builder(backend.logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, backend.logger)
        with progress.step("parse" + label):
            if not parser.parse_from_file(str(onnx_file)):
                raise BuildError(f"ONNX parser: refused {onnx_file.name}:\n{_parser_errors(parser)}\n{log.errors()}")
        _check_bindings(network, tensors)
        layers = tuple(_network_layer(network.get_layer(index)) for index in range(network.num_layers))
        config = _make_config(backend, builder, tensors, profiles, capabilities)
        cache = _TimingCache(backend, config, capabilities)
        with progress.step("build engine" + label):
            config.progress_monitor = progress.monitor(trt, cancelled)
            written = _write_plan(builder, network, config, engine_file)
        if written is None:
            raise BuildError(f"TensorRT builder: made no engine. It said:\n{log.errors()}")
        cache.save()
    return Plan(*written, layers, _engine_layers(log), tuple(log.problems))


def _write_plan(builder: Any, network: Any, config: Any, engine_file: Path) -> tuple[str, int] | None:
    """Build and write the plan; returns (SHA-256, bytes), or None if the builder failed or was stopped."""
    # The builder's stream interface hands the plan over in one piece, as a further copy: it would take more memory.
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return None
    data = memoryview(plan)
    engine_file.write_bytes(data)
    return hashlib.sha256(data).hexdigest(), data.nbytes


def _rtx_capabilities(backend: Backend, wanted: Sequence[int] | None) -> tuple[int, ...]:
    known = {int(name[2:]) for name in backend.trt.ComputeCapability.__members__ if name[2:].isdigit()}
    if wanted is None:
        return tuple(capability for capability in defaults.RTX_CAPABILITIES if capability in known)
    unknown = sorted(set(wanted) - known)
    if unknown or not wanted:
        raise ConfigError(
            f"compute_capability: found {capability_text(*unknown) or 'none'}; needed one or more of those that "
            f"{backend.name} {backend.version} builds for: {capability_text(*sorted(known))}. For other GPUs use "
            "--backend tensorrt on such a machine."
        )
    return tuple(sorted(set(wanted)))


def _make_config(
    backend: Backend,
    builder: Any,
    tensors: Sequence[TensorRecord],
    profiles: Sequence[ProfileRecord],
    capabilities: Sequence[int],
) -> Any:
    trt = backend.trt
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    for record in profiles:
        profile = builder.create_optimization_profile()
        for tensor in tensors:
            if tensor.is_input and any(isinstance(d, str) for d in tensor.shape):
                profile.set_shape(tensor.name, *record.shapes(tensor.shape))
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(
                f"optimization profile {record.name}: found rows {record.batch} and windows {record.window}, which "
                "TensorRT refused. Lower max_batch_size or max_num_tokens."
            )
    if backend.name == "tensorrt_rtx":
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index):
                raise BuildError(
                    f"compute_capability: found {capability_text(capability)} among {capability_text(*capabilities)}, "
                    f"which TensorRT-RTX {backend.version} refused. Build an engine for it alone, or leave it out."
                )
    return config


class _TimingCache:
    """Tactic timings kept between builds. TensorRT-RTX times nothing while it builds, so it has none."""

    def __init__(self, backend: Backend, config: Any, capabilities: Sequence[int]) -> None:
        self._path: Path | None = None
        if backend.name == "tensorrt_rtx":
            return
        self._config = config
        self._path = cache_dir() / f"timing_{backend.version}_sm{capabilities[0]}.cache"
        held = self._path.read_bytes() if self._path.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(held), ignore_mismatch=False)

    def save(self) -> None:
        if self._path is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                write_beside(self._path, bytes(self._config.get_timing_cache().serialize()))


def _check_bindings(network: Any, tensors: Sequence[TensorRecord]) -> None:
    found = [network.get_input(index).name for index in range(network.num_inputs)]
    found += [network.get_output(index).name for index in range(network.num_outputs)]
    needed = [tensor.name for tensor in tensors]
    if found != needed:
        difference = sorted(set(found) ^ set(needed)) or "the same names in another order"
        raise BuildError(
            f"parsed network: found {len(found)} bindings; needed the contract's {len(needed)}; they differ in "
            f"{difference}. Report this with the TensorRT version."
        )


def _parser_errors(parser: Any) -> str:
    errors = (parser.get_error(index) for index in range(parser.num_errors))
    return "\n".join(f"  {error.node_operator()} {error.node_name()}: {error.desc()}" for error in errors)


def _network_layer(layer: Any) -> LayerRecord:
    return LayerRecord(kind=layer.type.name, name=layer.name)


def _engine_layers(log: LogLines) -> tuple[LayerRecord, ...]:
    records: list[LayerRecord] = []
    for message in log.layer_reports:
        for line in message.splitlines():
            kind, separator, rest = line.removeprefix("Layer(").partition("): ")
            if line.startswith("Layer(") and separator:
                records.append(LayerRecord(kind=kind, name=rest.partition(", Tactic")[0]))
    return tuple(records)
