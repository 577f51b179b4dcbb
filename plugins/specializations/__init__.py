"""Which kernels exist: the compile-time constants of each, what is supported, and the launch table.

Everything that the sources are compiled with (``-D``) and launched with is computed in this package, and nowhere else;
the sources assert at compile time that their own layout needs the threads and the shared bytes that are counted for
them.
"""

from dataclasses import asdict

from trtllm_replayssm.plugins.specializations.base import (
    CONV_PREFIX,
    MAX_ROWS,
    ROLES,
    SHARED_BYTES,
    VECTOR_BYTES,
    Kernel,
    LaunchShape,
    Role,
)
from trtllm_replayssm.plugins.specializations.causal_conv1d import CausalConv1dSpecialization
from trtllm_replayssm.plugins.specializations.gated_delta_net import GatedDeltaNetSpecialization
from trtllm_replayssm.plugins.specializations.mamba2 import Mamba2Specialization
from trtllm_replayssm.plugins.specializations.mamba2_with_conv import Mamba2WithConvSpecialization
from trtllm_replayssm.plugins.specializations.pipeline import ARCHITECTURES as PIPELINE_ARCHITECTURES

__all__ = [
    "CONV_PREFIX",
    "MAX_ROWS",
    "PIPELINE_ARCHITECTURES",
    "ROLES",
    "SHARED_BYTES",
    "VECTOR_BYTES",
    "CausalConv1dSpecialization",
    "GatedDeltaNetSpecialization",
    "Kernel",
    "LaunchShape",
    "Mamba2Specialization",
    "Mamba2WithConvSpecialization",
    "Role",
    "Specialization",
    "constants_of",
]

Specialization = (
    Mamba2Specialization | CausalConv1dSpecialization | Mamba2WithConvSpecialization | GatedDeltaNetSpecialization
)


def constants_of(specialization: Specialization) -> str:
    """Return a specialization as one line; the C++ plugins write the same line from their tensors and fields."""
    values = asdict(specialization)
    # Those of a step stand side by side with what a convolution before it adds.
    values = values.pop("step", {}) | values
    return " ".join([specialization.folder, *(f"{name}={value}" for name, value in values.items())])
