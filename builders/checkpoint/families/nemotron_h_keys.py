"""Every key of a ``nemotron_h`` config.json."""

from typing import Any, Final

from trtllm_replayssm.builders.checkpoint.families import reasons
from trtllm_replayssm.builders.checkpoint.hf_reader import KeyTable

_SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    "architectures": ("architectures",),
    "model_type": ("model_type",),
    "dtype": ("dtype", "torch_dtype"),
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size",),
    "pattern": ("hybrid_override_pattern",),
    "block_types": ("layers_block_type", "layer_types"),
    "num_layers": ("num_hidden_layers",),
    "norm_eps": ("layer_norm_epsilon", "rms_norm_eps", "norm_eps"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "max_position_embeddings": ("max_position_embeddings",),
    "n_heads": ("mamba_num_heads",),
    "head_dim": ("mamba_head_dim",),
    "d_state": ("ssm_state_size",),
    "n_groups": ("n_groups", "mamba_n_groups"),
    "d_conv": ("conv_kernel", "mamba_d_conv"),
    "use_conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "n_query_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_key_value_heads",),
    "attention_head_dim": ("head_dim", "attention_head_dim"),
    "d_ff": ("intermediate_size",),
    "eos_token_id": ("eos_token_id",),
    "mtp_layers": ("num_nextn_predict_layers",),
    "mtp_pattern": ("mtp_hybrid_override_pattern",),
    "mtp_block_types": ("mtp_layers_block_type",),
}

_NO_BIAS = ((False,), "linear layers without bias")
_UNBOUNDED = ([0.0, float("inf")],)
_FIXED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "use_bias": _NO_BIAS,
    "mlp_bias": _NO_BIAS,
    "mamba_proj_bias": _NO_BIAS,
    "attention_bias": _NO_BIAS,
    "mamba_hidden_act": (("silu", "swish"), "the silu convolution and gate"),
    "mlp_hidden_act": (("relu2",), "the squared-ReLU MLP"),
    "hidden_act": (("relu2",), "the squared-ReLU MLP"),
    "sliding_window": ((None,), "full attention"),
    # NVIDIA's published code keeps the residual stream in fp32 then; transformers 5 reads the key and ignores it.
    # The two would disagree, so neither is guessed.
    "residual_in_fp32": ((False,), "a residual stream in the activation type"),
    "time_step_limit": (_UNBOUNDED, "time steps without bounds"),
    "mamba_dt_limit": (_UNBOUNDED, "time steps without bounds"),
    "quantization_config": ((None,), "weights that are not quantised"),
    "rope_scaling": ((None,), "attention without positional encoding"),
}

_NO_POSITIONS = "the attention of this architecture has no positional encoding"

_IGNORED: Final[dict[str, str]] = {
    **dict.fromkeys(("_name_or_path", "_commit_hash", "auto_map", "transformers_version"), reasons.BOOKKEEPING),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), reasons.TRAINING),
    **dict.fromkeys(("initializer_range", "rescale_prenorm_residual", "time_step_rank"), reasons.INITIALISATION),
    # transformers also clamps a prompt's time steps from below at time_step_min, though neither its decode step nor
    # NVIDIA's published code does (there time_step_limit rules). A clamp in one of the two paths alone would make
    # generation depend on how the tokens were fed, so there is none here.
    **dict.fromkeys(("time_step_min", "time_step_max", "time_step_floor"), reasons.INITIALISATION),
    **dict.fromkeys(("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor"), reasons.INITIALISATION),
    **dict.fromkeys(("expand", "mamba_expand"), "d_inner is mamba_num_heads * mamba_head_dim"),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), "tokens per block of a prompt's scan; the result is the same"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), reasons.TOKENIZER),
    "mamba_ssm_cache_dtype": reasons.STATE_DTYPE,
    **dict.fromkeys(("use_cache", "num_logits_to_keep", "use_mamba_kernels", "output_router_logits"), reasons.API),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "return_dict", "use_return_dict"), reasons.API),
    **dict.fromkeys(("_attn_implementation", "_attn_implementation_autoset", "is_decoder"), reasons.API),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "rope_parameters"), _NO_POSITIONS),
    **dict.fromkeys(
        ("n_routed_experts", "num_local_experts", "n_shared_experts", "moe_intermediate_size"), reasons.EXPERTS
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size", "num_experts_per_tok"), reasons.EXPERTS),
    **dict.fromkeys(("moe_shared_expert_overlap", "routed_scaling_factor", "norm_topk_prob"), reasons.EXPERTS),
    **dict.fromkeys(("n_group", "topk_group"), reasons.EXPERTS),
}

KEYS: Final = KeyTable(_SPELLINGS, _FIXED, _IGNORED)
