"""Which kernels an engine must carry: one image per plugin, since all layers of a kind have one shape."""

from collections.abc import Sequence

from trtllm_replayssm.contract.geometry import LayerType, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.plugins.compile_image import architecture_of, capability_of, is_exact, kernel_image
from trtllm_replayssm.plugins.specialize import (
    CausalConv1dSpecialization,
    Mamba2Specialization,
    Specialization,
)


def specializations(geometry: ModelGeometry, replay: ReplayGeometry) -> dict[str, Specialization]:
    """Return op_type -> the constants its kernels are compiled for; empty without recurrent layers.

    Raises:
        UnsupportedError: there is no kernel for the model's layers or shapes.
    """
    if geometry.gated_delta_net is not None:
        raise UnsupportedError(
            f"Gated DeltaNet: found {len(geometry.layers_of(LayerType.GATED_DELTA_NET))} layers; needed the plugin "
            f"{GATED_DELTA_NET.op_type} and its kernels, which this version does not have: no engine can be built and "
            'no GPU used. Run the model on the CPU with executor="torch", device="cpu" (--executor torch --device cpu).'
        )
    m = geometry.mamba2
    if m is None:
        return {}
    return {
        CAUSAL_CONV1D.op_type: CausalConv1dSpecialization(
            conv_dim=m.conv_dim, d_conv=m.d_conv, activation_dtype=geometry.dtype
        ),
        MAMBA2.op_type: Mamba2Specialization.of_layer(m, replay, geometry.dtype),
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
