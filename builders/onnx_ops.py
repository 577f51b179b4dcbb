"""What the modules emit while they are exported: our nodes, and ONNX ops that torch has no function for.

Each function returns tensors of the right type and shape for tracing; nothing is computed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch.onnx import ops as torch_onnx

from trtllm_replayssm.builders.layers.step import Step
from trtllm_replayssm.contract.geometry import ReplayGeometry
from trtllm_replayssm.contract.plugin_io import (
    CAUSAL_CONV1D,
    GATED_DELTA_NET,
    MAMBA2_WITH_CONV,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
)

Attributes = dict[str, int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]]

ACTIVATIONS = {None: 0, "silu": 1}
TENSORRT_HINT = "TRT_decomposable"


# Ours, since torch.compiler.is_exporting() is also true in what torch 2.11 compiles; of a context, since another thread
# may run a model meanwhile.
_IS_EXPORTING = ContextVar("is_exporting", default=False)


@contextmanager
def exporting() -> Iterator[None]:
    """Let the modules emit nodes for ONNX instead of running, in this thread."""
    token = _IS_EXPORTING.set(True)
    try:
        yield
    finally:
        _IS_EXPORTING.reset(token)


def is_exporting() -> bool:
    """Say whether the modules are being traced for ONNX rather than run."""
    # What torch compiles runs, and its compiler cannot follow a context variable.
    return not torch.compiler.is_dynamo_compiling() and _IS_EXPORTING.get()


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    conv_ring: torch.Tensor,
    step: Step,
    *,
    activation: Literal["silu"] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emit ReplayCausalConv1d: (y like x, conv_ring); the shapes are those of contract.plugin_io."""
    y, ring = torch_onnx.symbolic_multi_out(
        f"{PLUGIN_NAMESPACE}::{CAUSAL_CONV1D.op_type}",
        (x, weight, bias, conv_ring, step.past_lengths, step.num_tokens, step.slot_ids),
        {"activation": ACTIVATIONS[activation]},
        dtypes=(x.dtype, conv_ring.dtype),
        shapes=(x.shape, conv_ring.shape),
        version=int(PLUGIN_VERSION),
    )
    return y, ring


def mamba2_with_conv(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    convolution: tuple[torch.Tensor, torch.Tensor],
    constants: tuple[torch.Tensor, ...],
    states: tuple[torch.Tensor, ...],
    step: Step,
    replay: ReplayGeometry,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Emit ReplayMamba2WithConv: (y [B, S, H, P], present states); the shapes are those of contract.plugin_io.

    Args:
        xBC: [B, S, D], raw.
        dt: [B, S, H].
        convolution: weight and bias.
        constants: A, D, dt_bias.
        states: conv_ring, ssm_state, x_ring, B_ring, dt_ring.
        step: lengths and slots.
        replay: history and window.
    """
    lengths = (step.past_lengths, step.checkpoint_lengths, step.num_tokens, step.slot_ids)
    inputs = (xBC, dt, *convolution, states[0], *constants, *states[1:], *lengths)
    shapes = [tensor.shape for tensor in inputs]
    y, *present = torch_onnx.symbolic_multi_out(
        f"{PLUGIN_NAMESPACE}::{MAMBA2_WITH_CONV.op_type}",
        inputs,
        {"history": replay.history, "max_draft_len": replay.max_draft_len},
        dtypes=(xBC.dtype, *(state.dtype for state in states)),
        shapes=[MAMBA2_WITH_CONV.output_shape(k, shapes) for k in range(1 + len(states))],
        version=int(PLUGIN_VERSION),
    )
    return y, tuple(present)


def gated_delta_net(
    inputs: tuple[torch.Tensor, ...],
    constants: tuple[torch.Tensor, ...],
    states: tuple[torch.Tensor, ...],
    step: Step,
    replay: ReplayGeometry,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Emit ReplayGatedDeltaNet: (o like v, present states); the shapes are those of contract.plugin_io.

    Args:
        inputs: q, k, v, a, b.
        constants: A_log, dt_bias.
        states: ssm_state, k_ring, u_ring, g_ring.
        step: lengths and slots.
        replay: history and window.
    """
    lengths = (step.past_lengths, step.checkpoint_lengths, step.num_tokens, step.slot_ids)
    v = inputs[2]
    o, *present = torch_onnx.symbolic_multi_out(
        f"{PLUGIN_NAMESPACE}::{GATED_DELTA_NET.op_type}",
        (*inputs, *constants, *states, *lengths),
        {"history": replay.history, "max_draft_len": replay.max_draft_len},
        dtypes=(v.dtype, *(state.dtype for state in states)),
        shapes=(v.shape, *(state.shape for state in states)),
        version=int(PLUGIN_VERSION),
    )
    return o, tuple(present)


def tensor_scatter(cache: torch.Tensor, update: torch.Tensor, past_lengths: torch.Tensor) -> torch.Tensor:
    """Emit TensorScatter (opset 24): rows c .. c+S-1 of a linear key/value cache are replaced.

    Args:
        cache: [B, Hkv, capacity, hd].
        update: [B, Hkv, S, hd].
        past_lengths: [B] int32.

    Returns:
        The present cache; TensorRT updates it in place.
    """
    return torch_onnx.symbolic(
        "TensorScatter",
        (cache, update, past_lengths.to(torch.int64)),
        {"axis": 2, "mode": "linear"},
        dtype=cache.dtype,
        shape=cache.shape,
    )


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Emit Attention (opset 24) with grouped queries and a boolean mask: [B, Hq, S, hd]."""
    # A hint to TensorRT's parser: its fused attention has no fp32 kernel, and without leave to take the attention
    # apart it would refuse the model. It has no meaning for the values.
    attributes: Attributes = {"scale": scale, TENSORRT_HINT: 1}
    return torch_onnx.symbolic("Attention", (query, key, value, mask), attributes, dtype=query.dtype, shape=query.shape)


def rms_normalization(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Emit RMSNormalization (opset 23) over the last axis."""
    return torch_onnx.symbolic(
        "RMSNormalization", (x, weight), {"axis": -1, "epsilon": eps, "stash_type": 1}, dtype=x.dtype, shape=x.shape
    )


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Emit RotaryEmbedding (opset 23) with the halves of the rotated channels apart: as x [B, H, S, hd].

    Args:
        x: [B, H, S, hd].
        cos: [B, S, rotary_dim / 2], x's type.
        sin: as cos.
    """
    attributes: Attributes = {"interleaved": 0, "rotary_embedding_dim": 2 * cos.shape[-1]}
    return torch_onnx.symbolic("RotaryEmbedding", (x, cos, sin), attributes, dtype=x.dtype, shape=x.shape)
