"""The layers that are measured: shapes of real models by name, and others by their numbers, of either family."""

import re
from collections.abc import Mapping
from typing import Final, Literal

from trtllm_replayssm.contract.geometry import (
    ActivationDtype,
    GatedDeltaNetGeometry,
    Mamba2Geometry,
    RecurrenceGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.plugins.specializations import (
    CausalConv1dSpecialization,
    GatedDeltaNetSpecialization,
    Mamba2Specialization,
)

Family = Literal["mamba2", "gdn"]

_D_CONV: Final = 4
_NEMOTRON: Final = {"d_state": 128, "n_groups": 8, "d_conv": _D_CONV}
_QWEN: Final = {"n_key_heads": 16, "key_dim": 128, "value_dim": 128, "d_conv": _D_CONV}
MAMBA2: Final = {
    "nano9b": Mamba2Geometry(n_heads=128, head_dim=80, **_NEMOTRON),
    "nano30b": Mamba2Geometry(n_heads=64, head_dim=64, **_NEMOTRON),
    "super120b": Mamba2Geometry(n_heads=128, head_dim=64, **_NEMOTRON),
}
"""The Mamba-2 layers of Nemotron-Nano-9B-v2, Nemotron-3-Nano-30B-A3B and Nemotron-3-Super-120B."""
GATED_DELTA_NET: Final = {
    "qwen9b": GatedDeltaNetGeometry(n_value_heads=32, **_QWEN),
    "qwen27b": GatedDeltaNetGeometry(n_value_heads=48, **_QWEN),
    "qwen122b": GatedDeltaNetGeometry(n_value_heads=64, **_QWEN),
}
"""The Gated DeltaNet layers of Qwen3.5-9B (of 4B, 35B-A3B and Qwen3-Next-80B, too), 27B and 122B-A10B."""
SHAPES: Final[Mapping[Family, Mapping[str, RecurrenceGeometry]]] = {"mamba2": MAMBA2, "gdn": GATED_DELTA_NET}
SYNTAX: Final[Mapping[Family, str]] = {
    "mamba2": "HEADSxHEAD_DIMxD_STATExGROUPS, such as 128x80x128x8",
    "gdn": "KEY_HEADSxVALUE_HEADSxKEY_DIMxVALUE_DIM, such as 16x32x128x128",
}


def parse_shape(text: str, family: Family = "mamba2") -> RecurrenceGeometry:
    """Read the name of a shape, or its four numbers as ``SYNTAX`` has them.

    Raises:
        ConfigError: neither of them.
    """
    named = SHAPES[family]
    if text in named:
        return named[text]
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){3}", text):
        raise ConfigError(f"shape: found {text!r}; needed {', '.join(named)} or {SYNTAX[family]}.")
    first, second, third, fourth = map(int, text.split("x"))
    if family == "mamba2":
        return Mamba2Geometry(n_heads=first, head_dim=second, d_state=third, n_groups=fourth, d_conv=_D_CONV)
    return GatedDeltaNetGeometry(
        n_key_heads=first, n_value_heads=second, key_dim=third, value_dim=fourth, d_conv=_D_CONV
    )


def family_of(m: RecurrenceGeometry) -> Family:
    """Return the family of a layer."""
    return "mamba2" if isinstance(m, Mamba2Geometry) else "gdn"


def check_kernels(m: RecurrenceGeometry, replay: ReplayGeometry, dtype: ActivationDtype) -> None:
    """Refuse a layer that no kernels exist for.

    Raises:
        UnsupportedError: the message lists what is supported.
    """
    if isinstance(m, Mamba2Geometry):
        Mamba2Specialization.of_layer(m, replay, dtype)
    else:
        GatedDeltaNetSpecialization.of_layer(m, replay, dtype)
    CausalConv1dSpecialization(m.conv_dim, m.d_conv, dtype)
