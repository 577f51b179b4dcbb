"""The manifest of a small engine, as the builder writes it, without building one."""

import hashlib
from typing import Any

from tests.builders.tiny_geometry import tiny_geometry
from trtllm_replayssm.builders.profiles import bindings, profiles
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.manifest import CheckpointRecord, Manifest, PluginRecord
from trtllm_replayssm.contract.plugin_io import (
    CAUSAL_CONV1D,
    GATED_DELTA_NET,
    MAMBA2_WITH_CONV,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
)

PLAN = b"the bytes of an engine"


def tiny_manifest(**changes: Any) -> Manifest:
    geometry = changes.pop("geometry", tiny_geometry())
    replay = changes.pop("replay", ReplayGeometry(history=8, max_draft_len=2))
    limits = changes.pop("limits", EngineLimits(max_batch_size=3, max_input_len=60, max_seq_len=64, max_num_tokens=11))
    recurrences = (CAUSAL_CONV1D, GATED_DELTA_NET) if geometry.gated_delta_net is not None else (MAMBA2_WITH_CONV,)
    values: dict[str, Any] = {
        "package_version": "0.1.0",
        "backend": "tensorrt_rtx",
        "backend_version": "1.7.1.116",
        "compute_capabilities": (80, 89),
        "geometry": geometry,
        "replay": replay,
        "limits": limits,
        "tensors": bindings(geometry, replay, limits, "external"),
        "profiles": profiles(replay, limits),
        "plugins": tuple(
            PluginRecord(
                op_type=io.op_type,
                version=PLUGIN_VERSION,
                namespace=PLUGIN_NAMESPACE,
                nodes=1,
                kernels_sha256="0" * 64,
                kernels_bytes=1,
            )
            for io in recurrences
        ),
        "weights": "external",
        "checkpoint": CheckpointRecord(),
        "engine_sha256": hashlib.sha256(PLAN).hexdigest(),
        "engine_bytes": len(PLAN),
    }
    return Manifest(**(values | changes))
