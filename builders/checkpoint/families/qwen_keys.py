"""Every key of a ``qwen3_next`` or ``qwen3_5_text`` config, and of the multimodal config around the latter."""

from typing import Any, Final

from trtllm_replayssm.builders.checkpoint.families import reasons
from trtllm_replayssm.builders.checkpoint.hf_reader import KeyTable

_SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    "architectures": ("architectures",),
    "model_type": ("model_type",),
    "dtype": ("dtype", "torch_dtype"),
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size",),
    "layer_types": ("layer_types",),
    "full_attention_interval": ("full_attention_interval",),
    "num_layers": ("num_hidden_layers",),
    "norm_eps": ("rms_norm_eps",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "max_position_embeddings": ("max_position_embeddings",),
    "n_key_heads": ("linear_num_key_heads",),
    "n_value_heads": ("linear_num_value_heads",),
    "key_dim": ("linear_key_head_dim",),
    "value_dim": ("linear_value_head_dim",),
    "d_conv": ("linear_conv_kernel_dim",),
    "n_query_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "rope": ("rope_parameters", "rope_scaling"),
    "rope_theta": ("rope_theta",),
    "partial_rotary_factor": ("partial_rotary_factor",),
    "d_ff": ("intermediate_size",),
    "num_experts": ("num_experts",),
    "decoder_sparse_step": ("decoder_sparse_step",),
    "mlp_only_layers": ("mlp_only_layers",),
    "eos_token_id": ("eos_token_id",),
    "mtp_layers": ("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    "mtp_use_dedicated_embeddings": ("mtp_use_dedicated_embeddings",),
}

_FULL_ATTENTION = "attention over the whole text"
_FIXED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "attention_bias": ((False,), "linear layers without bias"),
    "hidden_act": (("silu", "swish"), "the silu convolution, gate and MLP"),
    "attn_output_gate": ((True,), "attention with an output gate"),
    "output_gate_type": (("swish", "silu"), "the silu gate behind the recurrence"),
    "sliding_window": ((None,), _FULL_ATTENTION),
    "use_sliding_window": ((False,), _FULL_ATTENTION),
    "quantization_config": ((None,), "weights that are not quantised"),
}

_IGNORED: Final[dict[str, str]] = {
    **dict.fromkeys(("_name_or_path", "_commit_hash", "auto_map", "transformers_version"), reasons.BOOKKEEPING),
    **dict.fromkeys(("attention_dropout", "router_aux_loss_coef"), reasons.TRAINING),
    "initializer_range": reasons.INITIALISATION,
    **dict.fromkeys(("bos_token_id", "pad_token_id"), reasons.TOKENIZER),
    "mamba_ssm_dtype": reasons.STATE_DTYPE,
    **dict.fromkeys(("use_cache", "output_router_logits", "output_attentions", "output_hidden_states"), reasons.API),
    **dict.fromkeys(("return_dict", "use_return_dict", "is_decoder"), reasons.API),
    **dict.fromkeys(("_attn_implementation", "_attn_implementation_autoset"), reasons.API),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), reasons.EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "norm_topk_prob"), reasons.EXPERTS),
    "max_window_layers": "describes sliding windows, of which there are none",
    **dict.fromkeys(("text_config", "vision_config", "language_model_only"), reasons.VISION),
    **dict.fromkeys(("image_token_id", "video_token_id"), reasons.VISION),
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), reasons.VISION),
}

KEYS: Final = KeyTable(_SPELLINGS, _FIXED, _IGNORED)

_NOT_SCALED = (("default", None), "positions that are not scaled")
ROPE_KEYS: Final = KeyTable(
    spellings={"rope_theta": ("rope_theta",), "partial_rotary_factor": ("partial_rotary_factor",)},
    fixed={"rope_type": _NOT_SCALED, "type": _NOT_SCALED},
    ignored=dict.fromkeys(("mrope_section", "mrope_interleaved"), reasons.TEXT_POSITIONS),
)
"""What may be in ``rope_parameters``."""
