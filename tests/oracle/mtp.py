"""Multi-token prediction heads, plainly: whole sequences without caches, in fp64, from the stored tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What the tensors do not tell.

    Attributes:
        n_query_heads: of the attention.
        n_kv_heads: idem.
        head_dim: idem.
        eps: of the norms.
        rotary_dim: rotated channels of a head; 0 for none.
        theta: base of the rotation.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    rotary_dim: int = 0
    theta: float = 10000.0


class Head:
    """A head and the matrices that it shares with its model.

    Args:
        tensors: of the whole checkpoint, under their stored names.
        shape: of the head.
    """

    def __init__(self, tensors: Tensors, shape: Shape) -> None:
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self._shape = shape
        self._is_qwen = "mtp.fc.weight" in tensors
        names = ("model.embed_tokens.weight", "backbone.embeddings.weight")
        self._embedding = next(self._tensors[name] for name in names if name in self._tensors)
        self._matrix = self._tensors.get("lm_head.weight", self._embedding)

    def drafts(self, tokens: list[int], hidden: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the logits of ``count`` greedy drafts.

        Args:
            tokens: the sequence, its newest token included.
            hidden: [len(tokens) - 1, d], the model's hidden states of all tokens but the newest.
            count: of the drafts.
        """
        tokens, hidden, logits = list(tokens), hidden.double(), []
        for _ in range(count):
            out = self._run(self._embedding[torch.tensor(tokens[1:])], hidden)
            logits.append(out[-1] @ self._matrix.T)
            tokens.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, out[-1:]))
        return logits

    def _run(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._is_qwen:
            x = torch.cat(
                (self._norm(embedded, "mtp.pre_fc_norm_embedding"), self._norm(hidden, "mtp.pre_fc_norm_hidden")), -1
            )
            x = x @ self._tensors["mtp.fc.weight"].T
            layer = "mtp.layers.0."
            x = x + self._qwen_attention(self._norm(x, layer + "input_layernorm"), layer + "self_attn.")
            y = self._norm(x, layer + "post_attention_layernorm")
            gate, up = self._linear(y, layer + "mlp.gate_proj"), self._linear(y, layer + "mlp.up_proj")
            x = x + self._linear(functional.silu(gate) * up, layer + "mlp.down_proj")
            return self._norm(x, "mtp.norm")
        x = torch.cat((self._norm(embedded, "mtp.layers.0.enorm"), self._norm(hidden, "mtp.layers.0.hnorm")), -1)
        x = self._linear(x, "mtp.layers.0.eh_proj")
        y = self._norm(x, "mtp.layers.0.norm")
        query, key, value = (self._heads(self._linear(y, f"mtp.layers.0.mixer.{part}_proj")) for part in "qkv")
        x = x + self._linear(self._attend(query, key, value), "mtp.layers.0.mixer.o_proj")
        y = self._linear(self._norm(x, "mtp.layers.1.norm"), "mtp.layers.1.mixer.up_proj")
        x = x + self._linear(functional.relu(y) ** 2, "mtp.layers.1.mixer.down_proj")
        return self._norm(x, "mtp.layers.1.final_layernorm")

    def _qwen_attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        s = self._shape
        packed = torch.unflatten(self._linear(x, prefix + "q_proj"), -1, (s.n_query_heads, 2, s.head_dim))
        query, gate = packed[:, :, 0].transpose(0, 1), packed[:, :, 1].flatten(-2)
        key, value = (self._heads(self._linear(x, f"{prefix}{part}_proj")) for part in "kv")
        query = self._rotate(self._norm(query, prefix + "q_norm"))
        key = self._rotate(self._norm(key, prefix + "k_norm"))
        return self._linear(self._attend(query, key, value) * gate.sigmoid(), prefix + "o_proj")

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Let each position see itself and those before: [H, L, hd] -> [L, H hd]."""
        repeats = self._shape.n_query_heads // self._shape.n_kv_heads
        key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        scores = query @ key.transpose(1, 2) / self._shape.head_dim**0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        out: torch.Tensor = (weights @ value).transpose(0, 1).flatten(-2)
        return out

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self._shape.rotary_dim // 2
        frequencies = self._shape.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest), -1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(x, -1, (-1, self._shape.head_dim)).transpose(0, 1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._tensors[name + ".weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors[name + ".weight"] + (1.0 if self._is_qwen else 0.0)
        return x / (x.square().mean(-1, keepdim=True) + self._shape.eps).sqrt() * weight
