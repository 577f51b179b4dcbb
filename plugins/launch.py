"""Launch the kernels on torch CUDA tensors: check the layouts, pack ``Params``, run on torch's current stream.

The arguments' shapes, types and devices are checked by ``ops.checks`` before. Nothing here reads device memory or waits
for the device, so launches are captured by CUDA graphs; the first launch of a kernel compiles and loads it and must be
outside of a capture.
"""

from collections.abc import Mapping
from functools import cache
from typing import cast

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import ActivationDtype, StateDtype
from trtllm_replayssm.contract.plugin_io import CAUSAL_CONV1D, GATED_DELTA_NET, MAMBA2
from trtllm_replayssm.plugins import layouts
from trtllm_replayssm.plugins.counters import counter_of_launch
from trtllm_replayssm.plugins.loader import device_architecture, launch, load
from trtllm_replayssm.plugins.params import (
    causal_conv1d_params,
    causal_conv1d_role,
    gated_delta_net_params,
    mamba2_params,
)
from trtllm_replayssm.plugins.specializations import (
    VECTOR_BYTES,
    CausalConv1dSpecialization,
    GatedDeltaNetSpecialization,
    Mamba2Specialization,
    Role,
)

# dt and g are read number by number; the other pools 16 bytes at a time.
MAMBA2_SLOTS = {"ssm_state": VECTOR_BYTES, "x_ring": VECTOR_BYTES, "B_ring": VECTOR_BYTES, "dt_ring": 4}
_GATED_DELTA_NET_SLOTS = {"ssm_state": VECTOR_BYTES, "k_ring": VECTOR_BYTES, "u_ring": VECTOR_BYTES, "g_ring": 4}


def mamba2(tensors: Mapping[str, Tensor], *, history: int, max_draft_len: int) -> Tensor:
    """Run a step (S <= 1 + max_draft_len) or a prefill of Mamba-2; pool and rings are updated in place.

    Args:
        tensors: by name, the tensors of ``ops.mamba2``, on one CUDA device.
        history: most pending rows W.
        max_draft_len: most draft tokens of a window, T - 1.

    Returns:
        y, [B, S, H, P] of the activation type, contiguous.

    Raises:
        OpArgumentError: a layout that the kernels do not read (``plugins.layouts``): x, dt, B and C may be strided but
            for their innermost axis, pools between their slots, and nothing else. Nothing has been written then.
        UnsupportedError: no kernel for these shapes or this device.
        BackendError: cuda-core or NVRTC is not installed, or the driver refuses the launch.
    """
    layouts.check("ops.mamba2", tensors, strided=("x", "dt", "B", "C"), slots=MAMBA2_SLOTS)
    x, B = tensors["x"], tensors["B"]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, seq_len, n_heads, head_dim = x.shape
    if num_rows == 0 or seq_len == 0:
        return y
    specialization = mamba2_constants(
        (n_heads, head_dim, B.shape[3], B.shape[2], history, max_draft_len),
        (x.dtype, tensors["ssm_state"].dtype, tensors["dt"].dtype),
    )
    role: Role = "prefill"
    if not protocol.is_prefill(seq_len, max_draft_len):
        role = _step_role(specialization, x.device.index, by_heads=x, in_pieces=(x, B, tensors["C"]))
    kernel = load(specialization, role, x.device.index)
    num_taken = counter_of_launch(x.device) if role == "pipelined_step" else 0
    params = mamba2_params(tuple(tensors[name] for name in MAMBA2.inputs), y, num_taken)
    launch(kernel, params, num_rows, x.device)
    return y


def gated_delta_net(tensors: Mapping[str, Tensor], *, history: int, max_draft_len: int) -> Tensor:
    """Run a step (S <= 1 + max_draft_len) or a prefill of Gated DeltaNet; pool and rings are updated in place.

    Args:
        tensors: by name, the tensors of ``ops.gated_delta_net``, on one CUDA device.
        history: most pending rows W.
        max_draft_len: most draft tokens of a window, T - 1.

    Returns:
        o, [B, S, Hv, V] of the activation type, contiguous.

    Raises:
        OpArgumentError: a layout that the kernels do not read (``plugins.layouts``): q, k, v, a and b may be strided
            but for their innermost axis, pools between their slots, and nothing else. Nothing has been written then.
        UnsupportedError: no kernel for these shapes or this device.
        BackendError: cuda-core or NVRTC is not installed, or the driver refuses the launch.
    """
    layouts.check("ops.gated_delta_net", tensors, strided=("q", "k", "v", "a", "b"), slots=_GATED_DELTA_NET_SLOTS)
    k, v = tensors["k"], tensors["v"]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    num_rows, seq_len, n_value_heads, value_dim = v.shape
    if num_rows == 0 or seq_len == 0:
        return o
    specialization = _gated_delta_net(
        (k.shape[2], n_value_heads, k.shape[3], value_dim, history, max_draft_len),
        (v.dtype, tensors["ssm_state"].dtype, tensors["a"].dtype),
    )
    role: Role = "prefill"
    if not protocol.is_prefill(seq_len, max_draft_len):
        role = _step_role(specialization, v.device.index, by_heads=v, in_pieces=(tensors["q"], k, v))
    kernel = load(specialization, role, v.device.index)
    num_taken = counter_of_launch(v.device) if role == "pipelined_step" else 0
    params = gated_delta_net_params(tuple(tensors[name] for name in GATED_DELTA_NET.inputs), o, num_taken)
    launch(kernel, params, num_rows, v.device)
    return o


def causal_conv1d(tensors: Mapping[str, Tensor | None], *, activation: str | None) -> Tensor:
    """Run the causal convolution of a window of any length; the ring is updated in place.

    Args:
        tensors: by name, the tensors of ``ops.causal_conv1d``, on one CUDA device; the bias may be None.
        activation: "silu" or None.

    Returns:
        y, [B, S, D] of the activation type, contiguous.

    Raises:
        OpArgumentError: a layout that the kernels do not read (``plugins.layouts``): x may be strided but for its
            channels, conv_ring between its slots, and nothing else. Nothing has been written then.
        UnsupportedError: no kernel for these shapes or this device.
        BackendError: cuda-core or NVRTC is not installed, or the driver refuses the launch.
    """
    x, weight = tensors["x"], tensors["weight"]
    assert x is not None and weight is not None, "the bias alone is optional"
    num_rows, seq_len, conv_dim = x.shape
    specialization = _causal_conv1d(conv_dim, weight.shape[1], x.dtype)
    ring_alignment = specialization.channels_per_thread * x.element_size()
    layouts.check("ops.causal_conv1d", tensors, strided=("x",), slots={"conv_ring": ring_alignment})
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0 or seq_len == 0:
        return y
    inputs = tuple(tensors[name] for name in CAUSAL_CONV1D.inputs)
    params = causal_conv1d_params(inputs, y, is_silu=activation == "silu")
    launch(load(specialization, causal_conv1d_role(seq_len), x.device.index), params, num_rows, x.device)
    return y


def _step_role(
    specialization: Mamba2Specialization | GatedDeltaNetSpecialization,
    device_index: int,
    *,
    by_heads: Tensor,
    in_pieces: tuple[Tensor, ...],
) -> Role:
    """Choose between the kernels of a step: the pipelined one reads inputs in 16-byte pieces, one by chunks of heads.

    The pools are in such pieces always (``MAMBA2_SLOTS``). Decided from addresses and strides alone.
    """
    is_readable = layouts.are_heads_neighbours(by_heads) and all(
        layouts.is_in_pieces(tensor, VECTOR_BYTES) for tensor in in_pieces
    )
    roles = specialization.roles(device_architecture(device_index))
    return "pipelined_step" if is_readable and "pipelined_step" in roles else "step"


@cache
def mamba2_constants(sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Mamba2Specialization:
    """Return the specialization for (n_heads, head_dim, d_state, n_groups, history, max_draft_len) and three types.

    The types are those of the activations, of the state and of dt.
    """
    activation, state, dt = (_dtype_name(dtype) for dtype in dtypes)
    n_heads, head_dim, d_state, n_groups, history, max_draft_len = sizes
    return Mamba2Specialization(
        n_heads=n_heads,
        head_dim=head_dim,
        d_state=d_state,
        n_groups=n_groups,
        history=history,
        max_draft_len=max_draft_len,
        activation_dtype=cast(ActivationDtype, activation),
        state_dtype=cast(StateDtype, state),
        dt_dtype=cast(ActivationDtype, dt),
    )


@cache
def _gated_delta_net(sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> GatedDeltaNetSpecialization:
    activation, state, gate = (_dtype_name(dtype) for dtype in dtypes)
    n_key_heads, n_value_heads, key_dim, value_dim, history, max_draft_len = sizes
    return GatedDeltaNetSpecialization(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        history=history,
        max_draft_len=max_draft_len,
        activation_dtype=cast(ActivationDtype, activation),
        state_dtype=cast(StateDtype, state),
        gate_dtype=cast(ActivationDtype, gate),
    )


@cache
def _causal_conv1d(conv_dim: int, d_conv: int, dtype: torch.dtype) -> CausalConv1dSpecialization:
    return CausalConv1dSpecialization(conv_dim, d_conv, cast(ActivationDtype, _dtype_name(dtype)))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
