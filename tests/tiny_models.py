"""Tiny random Nemotron-H, Qwen3-Next and Qwen3.5 checkpoints, written by ``transformers`` itself.

Every weight is random, none at an initialisation default, and scaled so that greedy text keeps changing: a wrong
layer, a swapped weight or a forgotten term shows in the tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

BLOCK_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
# Qwen's norms are stored as what is added to one, except for the one behind the recurrence.
ZERO_CENTRED_NORMS = (
    "layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
    "language_model.norm.weight",
)
QWEN_LAYER_TYPES = {"G": "linear_attention", "*": "full_attention"}
FIRST_BYTE_TOKEN = 3
MIN_TOKENIZER_VOCAB = 256 + FIRST_BYTE_TOKEN


def make_nemotron_h(
    folder: Path,
    *,
    seed: int = 0,
    pattern: str = "M-M*-M-",
    n_groups: int = 1,
    head_dim: int = 64,
    n_heads: int | None = None,
    d_state: int = 16,
    d_conv: int = 4,
    hidden: int = 64,
    vocab: int = 320,
    n_query_heads: int = 4,
    n_kv_heads: int = 2,
    attention_head_dim: int = 16,
    d_ff: int = 96,
    use_conv_bias: bool = True,
    tied: bool = False,
    dtype: str = "float32",
    max_shard_size: str | int | None = None,
    max_position_embeddings: int = 1024,
    tokenizer: bool = False,
) -> Path:
    """Write a random ``NemotronHForCausalLM`` folder and return it.

    Args:
        folder: folder to create.
        seed: of the weights; one seed gives the same values in every dtype.
        pattern: layers, M (Mamba-2), * (attention), - (MLP).
        n_groups: groups of B and C.
        head_dim: width of a Mamba-2 head.
        n_heads: Mamba-2 heads; by default 4, or n_groups when that is more.
        d_state: state columns.
        d_conv: taps of the convolution.
        hidden: width of the residual stream.
        vocab: vocabulary; at least 259 with a tokenizer.
        n_query_heads: attention's query heads.
        n_kv_heads: attention's key/value heads.
        attention_head_dim: width of an attention head.
        d_ff: MLP width.
        use_conv_bias: whether the convolution has a bias.
        tied: the output matrix equals the embedding (``transformers`` stores both).
        dtype: type of the stored weights.
        max_shard_size: most bytes of a shard ("100KB"); None writes one file.
        max_position_embeddings: longest sequence of the config.
        tokenizer: also write a byte-level tokenizer.
    """
    from transformers import NemotronHConfig, NemotronHForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = NemotronHConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers_block_type=[BLOCK_TYPES[letter] for letter in pattern],
        tie_word_embeddings=tied,
        num_attention_heads=n_query_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=attention_head_dim,
        intermediate_size=d_ff,
        ssm_state_size=d_state,
        mamba_num_heads=n_heads or max(4, n_groups),
        mamba_head_dim=head_dim,
        n_groups=n_groups,
        conv_kernel=d_conv,
        use_conv_bias=use_conv_bias,
        chunk_size=16,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # transformers clamps dt at this value in a prompt, but not in decode; out of reach, the two agree.
        time_step_min=1e-9,
    )
    model = NemotronHForCausalLM(config)
    randomise(model, seed, tied=tied)
    shards: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **shards)
    if tokenizer:
        write_byte_tokenizer(folder, vocab)
    return Path(folder)


def make_qwen(
    folder: Path,
    family: str = "qwen3_5",
    *,
    seed: int = 0,
    pattern: str = "GG*G",
    n_key_heads: int = 2,
    n_value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 16,
    d_conv: int = 4,
    hidden: int = 64,
    vocab: int = 320,
    n_query_heads: int = 4,
    n_kv_heads: int = 2,
    attention_head_dim: int = 32,
    partial_rotary_factor: float = 0.25,
    rope_theta: float = 10000.0,
    d_ff: int = 96,
    tied: bool = False,
    dtype: str = "float32",
    max_position_embeddings: int = 1024,
    tokenizer: bool = False,
) -> Path:
    """Write a random dense Qwen folder and return it.

    Args:
        folder: folder to create.
        family: "qwen3_next", "qwen3_5" (the text part alone) or "qwen3_5_multimodal" (with a vision part).
        seed: of the weights; one seed gives the same values in every dtype.
        pattern: layers, G (Gated DeltaNet), * (attention); each has an MLP behind it.
        n_key_heads: heads of the recurrence's q and k.
        n_value_heads: heads of its v and output.
        key_dim: width of a key head.
        value_dim: width of a value head.
        d_conv: taps of the convolution.
        hidden: width of the residual stream.
        vocab: vocabulary; at least 259 with a tokenizer.
        n_query_heads: attention's query heads.
        n_kv_heads: attention's key/value heads.
        attention_head_dim: width of an attention head.
        partial_rotary_factor: share of an attention head that is rotated.
        rope_theta: base of the rotation.
        d_ff: MLP width.
        tied: the embedding serves as output matrix.
        dtype: type of the stored weights.
        max_position_embeddings: longest sequence of the config.
        tokenizer: also write a byte-level tokenizer.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    text: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": len(pattern),
        "layer_types": [QWEN_LAYER_TYPES[letter] for letter in pattern],
        "tie_word_embeddings": tied,
        "num_attention_heads": n_query_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": attention_head_dim,
        "intermediate_size": d_ff,
        "linear_num_key_heads": n_key_heads,
        "linear_num_value_heads": n_value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": d_conv,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope_theta,
            "partial_rotary_factor": partial_rotary_factor,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model: Any
    if family == "qwen3_next":
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**text, num_experts=0))
    elif family == "qwen3_5":
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**text))
    else:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": hidden}
        config = transformers.Qwen3_5Config(
            text_config=text, vision_config=vision | {"num_position_embeddings": 16}, tie_word_embeddings=tied
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if tokenizer:
        write_byte_tokenizer(folder, vocab)
    return Path(folder)


@torch.no_grad()
def randomise(model: Any, seed: int, *, tied: bool = False) -> None:
    """Overwrite every parameter with a random value whose scale suits its role."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(_random_like(name, parameter, generator))
    if tied:
        model.lm_head.weight.copy_(model.model.embeddings.weight)


def _random_like(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(parameter.shape, generator=generator)
    uniform = torch.rand(parameter.shape, generator=generator)
    role = re.split(r"(?:mixer|linear_attn)\.", name)[-1]
    if role == "A_log" and "linear_attn" in name:
        # Slow decays: fast ones leave small outputs, which the norm behind the recurrence makes large again together
        # with their rounding errors, in transformers as here.
        return (0.05 + 0.8 * uniform).log()
    if role == "A_log":
        return (0.5 + 8.0 * uniform).log()
    if role == "dt_bias":
        dt = 0.01 + 0.3 * uniform
        return dt + (-(-dt).expm1()).log()  # the inverse of softplus
    if role == "D":
        return 1.0 + 0.5 * normal
    if role == "conv1d.weight":
        return 0.5 * normal
    if role == "conv1d.bias":
        return 0.2 * normal
    if name.endswith(ZERO_CENTRED_NORMS):
        return 0.2 * normal
    if name.endswith(("norm.weight", "norm_f.weight")):
        return 1.0 + 0.2 * normal
    if name.endswith(("embeddings.weight", "embed_tokens.weight")):
        return normal / 4
    gain = 4.0 if name == "lm_head.weight" else 1.5
    return gain * normal / float(parameter.shape[-1] ** 0.5)


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of one token per byte: 0 pads, 1 begins, 2 ends, byte b is one of the next 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_TOKENIZER_VOCAB:
        raise ValueError(f"vocab: found {vocab_size}; a byte-level tokenizer needs at least {MIN_TOKENIZER_VOCAB}")
    specials = ["<pad>", "<s>", "</s>"]
    tokens = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(specials)
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of a folder's config.json; the value ``...`` removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))
