"""Which kernels an engine must carry: one image per plugin, since all layers of a kind have one shape."""

from collections.abc import Sequence

from trtllm_replayssm.contract.geometry import Mamba2Geometry, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2_WITH_CONV
from trtllm_replayssm.plugins.compile_image import architecture_of, capability_of, is_exact, kernel_image
from trtllm_replayssm.plugins.specializations import (
    CausalConv1dSpecialization,
    GatedDeltaNetSpecialization,
    Mamba2Specialization,
    Mamba2WithConvSpecialization,
    Specialization,
)


def specializations(geometry: ModelGeometry, replay: ReplayGeometry) -> dict[str, Specialization]:
    """Return op_type -> the constants its kernels are compiled for; empty without recurrent layers.

    Raises:
        UnsupportedError: there is no kernel for the model's shapes.
    """
    m = geometry.recurrence
    if m is None:
        return {}
    if isinstance(m, Mamba2Geometry):
        step = Mamba2Specialization.of_layer(m, replay, geometry.dtype)
        return {MAMBA2_WITH_CONV.op_type: Mamba2WithConvSpecialization(step, m.d_conv)}
    return {
        CAUSAL_CONV1D.op_type: CausalConv1dSpecialization(m.conv_dim, m.d_conv, geometry.dtype),
        GATED_DELTA_NET.op_type: GatedDeltaNetSpecialization(
            n_key_heads=m.n_key_heads,
            n_value_heads=m.n_value_heads,
            key_dim=m.key_dim,
            value_dim=m.value_dim,
            history=replay.history,
            max_draft_len=replay.max_draft_len,
            activation_dtype=geometry.dtype,
            state_dtype=replay.state_dtype,
            # The modules hand a and b on as the projection made them.
            gate_dtype=geometry.dtype,
        ),
    }


def kernel_images(
    geometry: ModelGeometry, replay: ReplayGeometry, compute_capabilities: Sequence[int]
) -> dict[str, bytes]:
    """Compile the kernels of a model.

    Args:
        geometry: of the model.
        replay: history, window and state type.
        compute_capabilities: targets as 10 * major + minor.

    Returns:
        op_type -> kernel image (``plugins.kernel_image``).

    Raises:
        UnsupportedError: there is no kernel for the model's shapes.
        BackendError: the compiler is not installed.
    """
    targets = fewest_architectures(compute_capabilities)
    return {
        op_type: kernel_image(specialization, targets)
        for op_type, specialization in specializations(geometry, replay).items()
    }


def fewest_architectures(compute_capabilities: Sequence[int]) -> list[str]:
    """Return architectures that together run on all targets: what is compiled for 8.0 serves 8.6 and 8.9 too.

    Every layer of an engine carries its image, once per profile, so each architecture spared makes the plan smaller.
    """
    chosen: list[str] = []
    for capability in sorted(compute_capabilities):
        served = any(
            capability_of(name) <= capability < capability_of(name) // 10 * 10 + 10
            for name in chosen
            if not is_exact(name)
        )
        if not served:
            chosen.append(architecture_of(capability))
    return chosen
