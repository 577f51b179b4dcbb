"""Which module runs which architecture."""

from trtllm_replayssm.builders.models.hybrid import HybridModel
from trtllm_replayssm.builders.models.mtp import MtpHead
from trtllm_replayssm.contract.geometry import Architecture, ModelGeometry, ReplayGeometry

# What tells the three apart is their geometry: which layers, and which parts these have.
MODELS: dict[Architecture, type[HybridModel]] = {
    "NemotronHForCausalLM": HybridModel,
    "Qwen3NextForCausalLM": HybridModel,
    "Qwen3_5ForCausalLM": HybridModel,
}


def create_mtp_head(geometry: ModelGeometry, replay: ReplayGeometry) -> MtpHead:
    """Make the multi-token prediction head of a model that has one, its weights uninitialised; as ``create_model``."""
    return MtpHead(geometry, replay)


def create_model(geometry: ModelGeometry, replay: ReplayGeometry, *, conventional: bool = False) -> HybridModel:
    """Make the module of a model, its weights uninitialised.

    Args:
        geometry: of the model; its ``dtype`` is that of weights and activations.
        replay: history, window and state type.
        conventional: rewrite the recurrent state for every token, for comparison.

    Returns:
        A module whose parameter names are ``contract.tensors.weight_specs``; on the meta device inside
        ``with torch.device("meta")``. Its ``forward`` is documented at ``HybridModel.forward``.
    """
    return MODELS[geometry.architecture](geometry, replay, conventional=conventional)
