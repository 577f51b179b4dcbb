"""What a model takes on its device, worked out before anything is allocated: weights, states, the largest step.

States and weights are exact. The largest step is an estimate from above of what the torch modules hold at a time,
counted from their operations: the widest layer's intermediate tensors, and the logits with what sampling makes of them.
"""

from collections.abc import Callable
from math import prod
from typing import Final

from trtllm_replayssm.contract.geometry import (
    DTYPE_BYTES,
    EngineLimits,
    Frozen,
    LayerType,
    Mamba2Geometry,
    ModelGeometry,
    ReplayGeometry,
)
from trtllm_replayssm.contract.memory import tensor_bytes
from trtllm_replayssm.contract.tensors import (
    TensorSpec,
    mtp_state_specs,
    mtp_weight_specs,
    shared_matrix_specs,
    state_specs,
    weight_specs,
)

SAMPLED_LOGITS: Final = 2**25
"""Most logits that ``runtime.sampling`` samples from at a time."""
# What it holds for one of them: the logits three times in fp32, their order in int64, probabilities, sums and masks in
# fp64, and the sort's own copies.
_SAMPLING_BYTES = 64
# What `runtime.logit_rules` holds for every logit of a step: copies in fp32 with bias, penalties and bans.
_RULES_BYTES = 24
# fp32 tensors that a norm holds at a time: its input and its output; a gated one's also the gate and their product.
_NORM_COPIES, _GATED_NORM_COPIES = 2, 4
_FP32 = DTYPE_BYTES["float32"]


Beside = Callable[[EngineLimits], int]
"""Limits of a model -> bytes of what is on the device beside it: a prefix cache, a draft model for as many requests."""


class MemoryPlan(Frozen):
    """Bytes on the device.

    Attributes:
        limits: what they suffice for.
        weights: of the model.
        checkpoints: recurrent states, or their snapshots in the conventional mode; all slots, all layers.
        rings: of the recurrences' inputs.
        conv_rings: of the convolutions' inputs.
        kv_caches: keys and values.
        activations: what the layers of the largest step hold at a time.
        logits: of the largest step, and what sampling makes of them.
        prefix_cache: snapshots of prompts on the device.
        drafter: a draft model, or a multi-token prediction head and its caches.
    """

    limits: EngineLimits
    weights: int
    checkpoints: int
    rings: int
    conv_rings: int
    kv_caches: int
    activations: int
    logits: int
    prefix_cache: int = 0
    drafter: int = 0

    @property
    def states(self) -> int:
        """All that belongs to slots."""
        return self.checkpoints + self.rings + self.conv_rings + self.kv_caches

    @property
    def step(self) -> int:
        """All that a step needs for itself."""
        return self.activations + self.logits

    @property
    def beside(self) -> int:
        """All that is not the model's."""
        return self.prefix_cache + self.drafter

    @property
    def total(self) -> int:
        """The whole plan."""
        return self.weights + self.states + self.step + self.beside

    def parts(self) -> dict[str, int]:
        """Return name -> bytes, in the words of messages and tables."""
        return {
            "weights": self.weights,
            "recurrent states": self.checkpoints,
            "rings": self.rings,
            "convolution rings": self.conv_rings,
            "key/value caches": self.kv_caches,
            "activations": self.activations,
            "logits and sampling": self.logits,
            "prefix cache": self.prefix_cache,
            "drafter": self.drafter,
        }

    def summary(self) -> str:
        """Return the plan in one line."""
        limits = self.limits
        parts = ", ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in self.parts().items() if num_bytes)
        return (
            f"{size_text(self.total)} for max_batch_size {limits.max_batch_size}, max_seq_len {limits.max_seq_len}, "
            f"max_num_tokens {limits.max_num_tokens}: {parts}"
        )


class Execution(Frozen):
    """How a model is run, as far as its memory depends on it.

    Attributes:
        is_conventional: the states are those of the conventional decode.
        has_weights: the weights are allocated beside the rest; an engine may embed them.
        has_activations: so are the layers' tensors; TensorRT has its own.
        has_graphs: decode steps are captured, so that their memory is kept beside that of prompts.
        captured_prompt: tokens of the longest piece of a prompt that is captured, in the same memory; 0 where none is.
        is_flash: attention runs in blocks on the caches as they are, without tensors of the keys' length.
        has_hidden_states: those of the largest step are kept beside the rest, for a multi-token prediction head.
    """

    is_conventional: bool = False
    has_weights: bool = True
    has_activations: bool = True
    has_graphs: bool = False
    captured_prompt: int = 0
    is_flash: bool = False
    has_hidden_states: bool = False

    @classmethod
    def of_engine(cls, *, has_weights: bool, returns_hidden_states: bool) -> "Execution":
        """Return how an engine runs, as far as it is known before it is loaded."""
        return cls(has_weights=has_weights, has_activations=False, has_hidden_states=returns_hidden_states)

    @classmethod
    def of_modules(
        cls, geometry: ModelGeometry, device_type: str, *, is_conventional: bool, captured_prompt: int | None
    ) -> "Execution":
        """Return how the torch modules run on "cpu" or "cuda"; steps are captured on the latter alone.

        Args:
            geometry: of the model.
            device_type: "cpu" or "cuda".
            is_conventional: whether the states are those of the conventional decode.
            captured_prompt: as the attribute, where the model's prompts can be captured; None captures no step at all.
        """
        a, is_cuda = geometry.attention, device_type == "cuda"
        is_flash = is_cuda and geometry.dtype != "float32" and a is not None and a.is_flash_width
        has_graphs = is_cuda and captured_prompt is not None
        # A prompt runs in any slot, and only flash attention finds a slot's cache on the device.
        can_move = is_flash or not geometry.layers_of(LayerType.ATTENTION)
        return cls(
            is_conventional=is_conventional,
            has_graphs=has_graphs,
            captured_prompt=(captured_prompt or 0) if has_graphs and can_move else 0,
            is_flash=is_flash,
        )


def plan_memory(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, execution: Execution
) -> MemoryPlan:
    """Add up what a model takes with so many slots, such lengths and such a longest prompt piece."""
    by_kind: dict[str, int] = {}
    for spec in state_specs(geometry, replay, limits, conventional=execution.is_conventional):
        kind = _state_kind(spec)
        by_kind[kind] = by_kind.get(kind, 0) + tensor_bytes(spec, B=limits.max_batch_size)
    capacity = limits.kv_capacity(replay.window)

    def activations(num_rows: int, window: int) -> int:
        key_length = 0 if execution.is_flash else capacity
        return execution.has_activations * _activation_bytes(geometry, num_rows, window, key_length)

    longest = max(limits.max_num_tokens, replay.window)
    prompt = activations(1, longest)
    decode = activations(limits.max_batch_size, replay.window)
    # What graphs run in, one after the other; pieces that none is for run beside it.
    captured = max(decode, activations(1, min(longest, execution.captured_prompt)))
    window_tokens = limits.max_batch_size * replay.window
    hidden_states = 0
    if execution.has_hidden_states:
        hidden_states = max(longest, window_tokens) * geometry.d_model * DTYPE_BYTES[geometry.dtype]
    logits = window_tokens * geometry.vocab_size
    logit_bytes = DTYPE_BYTES[geometry.dtype] + _FP32 + _RULES_BYTES
    return MemoryPlan(
        limits=limits,
        weights=sum(tensor_bytes(spec) for spec in weight_specs(geometry)) if execution.has_weights else 0,
        checkpoints=by_kind.get("checkpoints", 0),
        rings=by_kind.get("rings", 0),
        conv_rings=by_kind.get("conv_rings", 0),
        kv_caches=by_kind.get("kv_caches", 0),
        activations=hidden_states + (prompt + captured if execution.has_graphs else max(prompt, decode)),
        logits=logits * logit_bytes + min(logits, max(SAMPLED_LOGITS, geometry.vocab_size)) * _SAMPLING_BYTES,
    )


def mtp_head_bytes(
    geometry: ModelGeometry, replay: ReplayGeometry, limits: EngineLimits, *, embeds_weights: bool = False
) -> int:
    """Return what the weights and caches of a multi-token prediction head take; 0 for a model without one.

    Args:
        geometry: of the model.
        replay: history and window.
        limits: slots and lengths.
        embeds_weights: the engines of model and head have their weights inside: the head's own do not count, but a
            further copy of the matrices that it shares with the model.
    """
    if geometry.mtp is None:
        return 0
    weights = shared_matrix_specs(geometry) if embeds_weights else mtp_weight_specs(geometry)
    specs = (*weights, *mtp_state_specs(geometry, replay, limits))
    return sum(tensor_bytes(spec, B=limits.max_batch_size) for spec in specs)


def largest_batch_size(
    geometry: ModelGeometry,
    replay: ReplayGeometry,
    limits: EngineLimits,
    execution: Execution,
    *,
    available: int,
    fraction: float,
    beside: Beside | None = None,
) -> int:
    """Return the most slots, up to limits.max_batch_size, whose states fit; 0 where not even one does.

    Args:
        geometry: of the model.
        replay: history, window and state type.
        limits: with the most slots that are wanted.
        execution: how it is run.
        available: bytes that are free on the device before the weights are there.
        fraction: the part of what weights and the largest step leave that states may take.
        beside: what else will be on the device; None for nothing.
    """

    def fits(num_slots: int) -> bool:
        tried = limits.model_copy(update={"max_batch_size": num_slots})
        plan = plan_memory(geometry, replay, tried, execution)
        others = 0 if beside is None else beside(tried)
        return plan.states <= fraction * (available - plan.weights - plan.step - others)

    least, most = 0, limits.max_batch_size
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def size_text(num_bytes: int) -> str:
    """Write a number of bytes in the unit that suits it."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def _state_kind(spec: TensorSpec) -> str:
    if spec.is_cache:
        return "kv_caches"
    name = spec.name.rpartition("_")[0]
    if name == "conv_ring":
        return "conv_rings"
    return "rings" if name.endswith("_ring") else "checkpoints"


def _activation_bytes(geometry: ModelGeometry, num_rows: int, window: int, key_length: int) -> int:
    """Return what the layers hold at a time: the residual stream, a norm, and the widest mixer's tensors."""
    size, num_tokens = DTYPE_BYTES[geometry.dtype], num_rows * window
    # The stream before and after the layer and the normed one in the activations' type; the norm's own in fp32.
    per_token = geometry.d_model * (3 * size + _NORM_COPIES * _FP32)
    mixers = {kind: _mixer_bytes(geometry, kind, size) for kind in set(geometry.layer_types)}
    keys = 0
    if LayerType.ATTENTION in mixers and key_length:
        keys = _keys_bytes(geometry, num_rows, window, key_length, size)
    return num_tokens * (per_token + max(mixers.values())) + keys


def _mixer_bytes(geometry: ModelGeometry, kind: LayerType, size: int) -> int:
    """Return what one token takes in a mixer."""
    if kind in (LayerType.MAMBA2, LayerType.GATED_DELTA_NET):
        m = geometry.recurrence
        assert m is not None, "a geometry with recurrent layers describes them"
        width = m.d_inner if isinstance(m, Mamba2Geometry) else m.d_value
        return size * (m.d_in_proj + m.conv_dim + 2 * width) + _GATED_NORM_COPIES * _FP32 * width
    if kind is LayerType.ATTENTION:
        a = geometry.attention
        assert a is not None, "a geometry with attention layers describes them"
        # The projection, its parts normed and rotated (in fp32), the output and its gated form.
        return size * (2 * a.d_qkv + 3 * a.d_query) + 2 * _FP32 * a.d_qkv * (a.has_qk_norm or bool(a.rotary_dim))
    p = geometry.mlp
    assert p is not None, "a geometry with MLPs describes them"
    return size * p.d_ff * (4 if p.activation == "swiglu" else 3)


def _keys_bytes(geometry: ModelGeometry, num_rows: int, window: int, key_length: int, size: int) -> int:
    """Return what attention holds that is as long as the keys: masked keys and values, expanded ones, and weights."""
    a = geometry.attention
    assert a is not None, "called for models with attention"
    cached = 2 * prod((num_rows, a.n_kv_heads, key_length, a.head_dim)) * size
    expanded = cached * (a.n_query_heads // a.n_kv_heads)
    weights = 2 * prod((num_rows, a.n_query_heads, window, key_length)) * _FP32
    return cached + expanded + weights
