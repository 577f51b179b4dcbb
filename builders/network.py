"""The network as a file for the parser: graph, kernels and, on request, weights.

It is written by a process of its own: tracing leaves some hundred megabytes behind in it, which the parent's TensorRT
needs next. So a true-size model builds within one gigabyte. For the same reason ``engine`` and all that it imports
leave torch alone until a tensor is touched: torch with CUDA's libraries takes half a gigabyte.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from trtllm_replayssm import errors
from trtllm_replayssm.builders.kernels import kernel_images
from trtllm_replayssm.contract.geometry import EngineLimits, Frozen, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.manifest import PluginRecord
from trtllm_replayssm.contract.plugin_io import PLUGIN_NAMESPACE, PLUGIN_VERSION
from trtllm_replayssm.contract.tensors import mtp_weight_specs, weight_specs
from trtllm_replayssm.errors import BuildError, ReplaySSMError


class NetworkTask(Frozen):
    """What to write.

    Attributes:
        geometry: of the model.
        replay: history, window and state type.
        limits: of the engine.
        compute_capabilities: targets of the kernels, as 10 * major + minor.
        onnx_file: where to write.
        weights_file: weights to refer to from the graph, in the folder of onnx_file; None leaves them inputs.
        mtp_onnx_file: where to write the multi-token prediction head, too, whose inputs are then among the model's
            outputs; None for no head.
    """

    geometry: ModelGeometry
    replay: ReplayGeometry
    limits: EngineLimits
    compute_capabilities: tuple[int, ...]
    onnx_file: Path
    weights_file: Path | None = None
    mtp_onnx_file: Path | None = None


class NetworkRecord(Frozen):
    """What was written, or why not.

    Attributes:
        plugins: the plugins of the graph and the kernels they carry.
        seconds: step -> time it took.
        error_class: name of one of this package's errors; None when all went well.
        error_message: its message.
    """

    plugins: tuple[PluginRecord, ...] = ()
    seconds: dict[str, float] = {}
    error_class: str | None = None
    error_message: str = ""


def require_packages() -> None:
    """Raise ModuleNotFoundError for a package that ``write_network`` would miss; nothing is imported."""
    for name in ("torch", "onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def write_network(task: NetworkTask) -> NetworkRecord:
    """Export the model and write the graph with its kernels, all in this process.

    Raises:
        UnsupportedError: there is no kernel for the model's shapes.
        BackendError: the kernel compiler is not installed.
        BuildError: a compiler refused, or the graph is not the contract's.
    """
    import onnx

    from trtllm_replayssm.builders.export import embed_weights, export, export_mtp_head, set_kernels

    started = time.perf_counter()
    has_head = task.mtp_onnx_file is not None
    model = export(task.geometry, task.replay, task.limits, returns_hidden_states=has_head)
    images = kernel_images(task.geometry, task.replay, task.compute_capabilities)
    set_kernels(model, images)
    if task.weights_file is not None:
        embed_weights(model, task.weights_file, weight_specs(task.geometry))
    onnx.save(model, task.onnx_file)
    seconds = {"export": time.perf_counter() - started}
    if task.mtp_onnx_file is not None:
        started = time.perf_counter()
        head = export_mtp_head(task.geometry, task.replay, task.limits)
        if task.weights_file is not None:
            embed_weights(head, task.weights_file, mtp_weight_specs(task.geometry))
        onnx.save(head, task.mtp_onnx_file)
        seconds["export mtp"] = time.perf_counter() - started
    nodes = Counter(node.op_type for node in model.graph.node if node.domain == PLUGIN_NAMESPACE)
    return NetworkRecord(
        plugins=tuple(_plugin_record(op_type, nodes[op_type], image) for op_type, image in images.items()),
        seconds=seconds,
    )


def write_network_apart(task: NetworkTask) -> NetworkRecord:
    """Do what ``write_network`` does in a new process; its errors are raised here."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory() as folder:  # tracing makes a compiler's cache, which nothing comes to use
        finished = subprocess.run(
            [sys.executable, "-m", __name__],
            input=task.model_dump_json(),
            # One heap for all threads: 70 MB less at the peak of a true-size export.
            env=environment | {"TORCHINDUCTOR_CACHE_DIR": folder, "MALLOC_ARENA_MAX": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode != 0:
        last_lines = "\n".join(f"  {line}" for line in finished.stderr.splitlines()[-8:])
        raise BuildError(f"network process: ended with exit code {finished.returncode}. Its last words:\n{last_lines}")
    record = NetworkRecord.model_validate_json(finished.stdout.splitlines()[-1])
    if record.error_class is not None:
        raise getattr(errors, record.error_class)(record.error_message)
    return record


def main() -> None:
    """Read a task from stdin, do it, and write the record to stdout as its last line."""
    task = NetworkTask.model_validate_json(sys.stdin.read())
    try:
        record = write_network(task)
    except ReplaySSMError as error:
        record = NetworkRecord(error_class=type(error).__name__, error_message=error.message)
    sys.stdout.write("\n" + record.model_dump_json() + "\n")


def _plugin_record(op_type: str, nodes: int, image: bytes) -> PluginRecord:
    return PluginRecord(
        op_type=op_type,
        version=PLUGIN_VERSION,
        namespace=PLUGIN_NAMESPACE,
        nodes=nodes,
        kernels_sha256=hashlib.sha256(image).hexdigest(),
        kernels_bytes=len(image),
    )


if __name__ == "__main__":
    main()
