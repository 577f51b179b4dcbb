"""Small frozen descriptions of a model's shapes, and of how an engine replays it."""

from enum import StrEnum
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, StrictInt, model_validator

from trtllm_replayssm.contract import defaults, protocol

ActivationDtype = Literal["float32", "float16", "bfloat16"]
StateDtype = Literal["float32", "float16", "bfloat16"]
AUTO: Final = "auto"
History = int | Literal["auto"]
"""Most pending rows as a user names them; "auto" becomes a number before a ``ReplayGeometry`` is made."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int8": 1}


class Frozen(BaseModel):
    """A value: immutable, compared by content, an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerType(StrEnum):
    """What a residual layer holds; the value is what a rank checkpoint's ``layer_types`` lists."""

    MAMBA2 = "mamba2"
    GATED_DELTA_NET = "gated_delta_net"
    ATTENTION = "attention"
    MLP = "mlp"


LAYER_LETTERS = {
    LayerType.MAMBA2: "M",
    LayerType.GATED_DELTA_NET: "G",
    LayerType.ATTENTION: "*",
    LayerType.MLP: "-",
}
"""Layer type -> its letter: those of ``hybrid_override_pattern``, and G."""

Architecture = Literal["NemotronHForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"]


class Mamba2Geometry(Frozen):
    """A Mamba-2 mixer: ``in_proj`` packs [z, x, B, C, dt]; the convolution runs over x|B|C."""

    n_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    d_conv: int

    @property
    def d_inner(self) -> int:
        """Width of x, y and the gate z."""
        return self.n_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C side by side."""
        return self.d_inner + 2 * self.n_groups * self.d_state

    @property
    def d_in_proj(self) -> int:
        """Rows of ``in_proj.weight``."""
        return self.d_inner + self.conv_dim + self.n_heads


class GatedDeltaNetGeometry(Frozen):
    """A Gated DeltaNet mixer: value head h uses key head h // (n_value_heads / n_key_heads); convolution over q|k|v."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    d_conv: int

    @property
    def d_key(self) -> int:
        """Width of q, and of k."""
        return self.n_key_heads * self.key_dim

    @property
    def d_value(self) -> int:
        """Width of v, o and the gate z."""
        return self.n_value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return 2 * self.d_key + self.d_value

    @property
    def d_in_proj(self) -> int:
        """Rows of ``in_proj.weight``: q, k, v, z, b and a side by side."""
        return self.conv_dim + self.d_value + 2 * self.n_value_heads


RecurrenceGeometry = Mamba2Geometry | GatedDeltaNetGeometry


class AttentionGeometry(Frozen):
    """Grouped-query attention.

    Attributes:
        n_query_heads: query heads.
        n_kv_heads: key/value heads.
        head_dim: width of a head.
        rotary_dim: leading channels of a query or key head that are rotated by their position; 0 without positional
            encoding.
        rope_theta: base of the rotation's frequencies.
        has_qk_norm: whether every query and key head is normalised before it is rotated.
        has_output_gate: whether the output is multiplied by the sigmoid of a projection as wide as the queries.
    """

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    rope_theta: float | None = None
    has_qk_norm: bool = False
    has_output_gate: bool = False

    @model_validator(mode="after")
    def _check(self) -> "AttentionGeometry":
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim: found {self.rotary_dim}; needed an even number up to head_dim ({self.head_dim})"
            )
        if bool(self.rotary_dim) != (self.rope_theta is not None):
            raise ValueError(
                f"rope_theta: found {self.rope_theta} with rotary_dim={self.rotary_dim}; needed both or none"
            )
        return self

    @property
    def is_flash_width(self) -> bool:
        """Whether torch's flash attention kernel has this head width."""
        return self.head_dim % 8 == 0 and self.head_dim <= 256

    @property
    def d_query(self) -> int:
        """Width of the queries, of the output and of its gate."""
        return self.n_query_heads * self.head_dim

    @property
    def d_qkv(self) -> int:
        """Rows of ``qkv.weight``: queries, keys, values and, where the output is gated, the gate."""
        return self.d_query * (1 + self.has_output_gate) + 2 * self.n_kv_heads * self.head_dim


class MlpGeometry(Frozen):
    """An MLP: ``down(relu(up(x)) ** 2)`` with relu2, ``down(silu(gate(x)) * up(x))`` with swiglu."""

    d_ff: int
    activation: Literal["relu2", "swiglu"]


class MtpGeometry(Frozen):
    """A multi-token prediction head: one block of layers that predicts the token after the next.

    Its layers are shaped as the model's own of the same type; embedding and output matrix are the model's.

    Attributes:
        layer_types: attention and MLP layers, in order.
    """

    layer_types: tuple[LayerType, ...]

    @model_validator(mode="after")
    def _check(self) -> "MtpGeometry":
        others = sorted(set(self.layer_types) - {LayerType.ATTENTION, LayerType.MLP})
        if others or not self.layer_types:
            raise ValueError(f"layer_types: found {', '.join(others) or 'none'}; needed attention and mlp alone")
        return self


class ModelGeometry(Frozen):
    """Everything about a model's shape that builders and runtime need; ``mtp`` where the weights have that head."""

    architecture: Architecture
    dtype: ActivationDtype
    vocab_size: int
    d_model: int
    layer_types: tuple[LayerType, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    mamba2: Mamba2Geometry | None
    gated_delta_net: GatedDeltaNetGeometry | None = None
    attention: AttentionGeometry | None
    mlp: MlpGeometry | None
    eos_token_ids: tuple[StrictInt, ...]
    mtp: MtpGeometry | None = None

    @model_validator(mode="after")
    def _check(self) -> "ModelGeometry":
        for kind in LayerType:
            if self.layers_of(kind) and getattr(self, kind.value) is None:
                raise ValueError(f"{kind.value}: found nothing; needed the shape of layers {self.layers_of(kind)}")
        for kind in () if self.mtp is None else self.mtp.layer_types:
            if getattr(self, kind.value) is None:
                raise ValueError(f"{kind.value}: found nothing; needed the shape of the multi-token prediction head's")
        if not set(self.layer_types) - {LayerType.MLP}:
            raise ValueError("layer_types: found no recurrent and no attention layer; needed one at least")
        if self.mamba2 and self.gated_delta_net:
            raise ValueError("mamba2, gated_delta_net: found both; needed one kind of recurrence")
        return self

    @property
    def recurrence(self) -> RecurrenceGeometry | None:
        """The shape of the recurrent layers; None without any."""
        return self.mamba2 or self.gated_delta_net

    @property
    def n_recurrent_layers(self) -> int:
        """How many layers have a recurrence."""
        return len(self.layers_of(LayerType.MAMBA2)) + len(self.layers_of(LayerType.GATED_DELTA_NET))

    @property
    def norm_dtype(self) -> str:
        """Type of the norms' weights: fp32 where Qwen's ``1 + weight`` is folded in, which 16 bits would round."""
        return self.dtype if self.architecture == "NemotronHForCausalLM" else "float32"

    def layers_of(self, layer_type: LayerType) -> tuple[int, ...]:
        """Return the indices of the layers of one type, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind is layer_type)


class ReplayGeometry(Frozen):
    """How recurrent layers are replayed: the constants an engine is built with.

    Attributes:
        history: most pending rows W.
        max_draft_len: most draft tokens of a window, T - 1.
        state_dtype: type of the checkpoint in memory.
    """

    history: int = defaults.HISTORY
    max_draft_len: int = 0
    state_dtype: StateDtype = defaults.STATE_DTYPE

    @model_validator(mode="after")
    def _check(self) -> "ReplayGeometry":
        protocol.check_history(self.history, self.max_draft_len)
        return self

    @property
    def window(self) -> int:
        """T, the most tokens of a decode or verification window."""
        return protocol.window_length(self.max_draft_len)

    @property
    def ring_rows(self) -> int:
        """R, the rows of every ring but the convolution's."""
        return protocol.min_ring_rows(self.history, self.max_draft_len)

    def conv_ring_rows(self, d_conv: int) -> int:
        """Rows of the convolution ring."""
        return protocol.min_conv_ring_rows(d_conv, self.max_draft_len)


class EngineLimits(Frozen):
    """What an engine accepts, in TensorRT-LLM's words.

    Attributes:
        max_batch_size: slots, and rows of a decode step.
        max_input_len: tokens of the longest prompt.
        max_seq_len: tokens of the longest sequence, prompt and generation together.
        max_num_tokens: tokens of the longest prefill window; longer prompts run in several.
    """

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int

    @model_validator(mode="after")
    def _check(self) -> "EngineLimits":
        for name, value in self.model_dump().items():
            if value < 1:
                raise ValueError(f"{name}: found {value}; needed 1 or more")
        if self.max_input_len > self.max_seq_len:
            raise ValueError(
                f"max_input_len: found {self.max_input_len}; needed at most max_seq_len ({self.max_seq_len})"
            )
        if self.max_num_tokens > self.max_input_len:
            raise ValueError(
                f"max_num_tokens: found {self.max_num_tokens}; needed at most max_input_len ({self.max_input_len})"
            )
        return self

    def kv_capacity(self, window: int) -> int:
        """Rows of a key/value cache: the last window may reach past max_seq_len, and its rejected rows are written."""
        return self.max_seq_len + window - 1
