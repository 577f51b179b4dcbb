"""Launch the kernels on torch CUDA tensors: check the layouts, pack ``Params``, run on torch's current stream.

The arguments' shapes, types and devices are checked by ``ops.checks`` before. Nothing here reads device memory or waits
for the device, so launches are captured by CUDA graphs; the first launch of a kernel compiles and loads it and must be
outside of a capture.
"""

from functools import cache
from typing import cast

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import ActivationDtype, StateDtype
from trtllm_replayssm.plugins.layouts import require_contiguous, require_innermost_contiguous, require_slot_layout
from trtllm_replayssm.plugins.loader import LoadedKernel, launch, load
from trtllm_replayssm.plugins.params import causal_conv1d_params, mamba2_params
from trtllm_replayssm.plugins.specialize import CausalConv1dSpecialization, Mamba2Specialization, Role

_VECTOR_BYTES = 16
# As in the TensorRT plugin: the longest window that the convolution's "step" role is launched for.
_MAX_STEP_TOKENS = 8


def mamba2(  # noqa: PLR0913 - the tensors of the published formula, by name
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    x_ring: Tensor,
    B_ring: Tensor,
    dt_ring: Tensor,
    past_lengths: Tensor,
    checkpoint_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    history: int,
    max_draft_len: int,
) -> Tensor:
    """Run a step (S <= 1 + max_draft_len) or a prefill of Mamba-2; pool and rings are updated in place.

    Arguments are those of ``ops.mamba2``, on one CUDA device.

    Returns:
        y, [B, S, H, P] of the activation type, contiguous.

    Raises:
        OpArgumentError: a layout that the kernels do not read: the innermost axis of x, dt, B or C is not contiguous, a
            slot of a pool is not contiguous or not 16-byte aligned, or a vector argument is not contiguous.
        UnsupportedError: no kernel for these shapes or this device.
        BackendError: cuda-core or NVRTC is not installed, or the driver refuses the launch.
    """
    for name, tensor in (("x", x), ("dt", dt), ("B", B), ("C", C)):
        require_innermost_contiguous("mamba2", name, tensor)
    for name, tensor in (("ssm_state", ssm_state), ("x_ring", x_ring), ("B_ring", B_ring), ("dt_ring", dt_ring)):
        # dt is read number by number; the others 16 bytes at a time.
        require_slot_layout("mamba2", name, tensor, 4 if name == "dt_ring" else _VECTOR_BYTES)
    vectors = (A, D, dt_bias, past_lengths, checkpoint_lengths, num_tokens, slot_ids)
    names = ("A", "D", "dt_bias", "past_lengths", "checkpoint_lengths", "num_tokens", "slot_ids")
    for name, tensor in zip(names, vectors, strict=True):
        require_contiguous("mamba2", name, tensor)

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, seq_len, n_heads, head_dim = x.shape
    if n_rows == 0 or seq_len == 0:
        return y
    kernel = _mamba2_kernel(
        (n_heads, head_dim, B.shape[3], B.shape[2], history, max_draft_len),
        (x.dtype, ssm_state.dtype, dt.dtype),
        "step" if seq_len <= protocol.window_length(max_draft_len) else "prefill",
        x.device.index,
    )
    inputs = (x, dt, B, C, A, D, dt_bias, ssm_state, x_ring, B_ring, dt_ring, *vectors[3:])
    launch(kernel, mamba2_params(inputs, y), n_rows, x.device)
    return y


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_ring: Tensor,
    past_lengths: Tensor,
    num_tokens: Tensor,
    slot_ids: Tensor,
    *,
    activation: str | None,
) -> Tensor:
    """Run the causal convolution of a window of any length; the ring is updated in place.

    Arguments are those of ``ops.causal_conv1d``, on one CUDA device; activation is "silu" or None.

    Returns:
        y, [B, S, D] of the activation type, contiguous.

    Raises:
        OpArgumentError: a layout that the kernels do not read: the channels of x are not contiguous, a slot of
            conv_ring is not contiguous or not aligned, or weight, bias, lengths or ids are not contiguous.
        UnsupportedError: no kernel for these shapes or this device.
        BackendError: cuda-core or NVRTC is not installed, or the driver refuses the launch.
    """
    require_innermost_contiguous("causal_conv1d", "x", x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, seq_len, conv_dim = x.shape
    if n_rows == 0 or seq_len == 0:
        return y
    # Both roles are right for any window; the split one pays when a thread would run many tokens in a row.
    role: Role = "step" if seq_len <= _MAX_STEP_TOKENS else "prefill"
    kernel, vector_bytes = _causal_conv1d_kernel(conv_dim, weight.shape[1], x.dtype, role, x.device.index)
    require_slot_layout("causal_conv1d", "conv_ring", conv_ring, vector_bytes)
    vectors = (past_lengths, num_tokens, slot_ids)
    require_contiguous("causal_conv1d", "weight", weight)
    if bias is not None:
        require_contiguous("causal_conv1d", "bias", bias)
    for name, tensor in zip(("past_lengths", "num_tokens", "slot_ids"), vectors, strict=True):
        require_contiguous("causal_conv1d", name, tensor)
    params = causal_conv1d_params((x, weight, bias, conv_ring, *vectors), y, is_silu=activation == "silu")
    launch(kernel, params, n_rows, x.device)
    return y


@cache
def _mamba2_kernel(
    sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], role: Role, device_index: int
) -> LoadedKernel:
    activation, state, dt = (_dtype_name(dtype) for dtype in dtypes)
    n_heads, head_dim, d_state, n_groups, history, max_draft_len = sizes
    specialization = Mamba2Specialization(
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
    return load(specialization, role, device_index)


@cache
def _causal_conv1d_kernel(
    conv_dim: int, d_conv: int, dtype: torch.dtype, role: Role, device_index: int
) -> tuple[LoadedKernel, int]:
    specialization = CausalConv1dSpecialization(conv_dim, d_conv, cast(ActivationDtype, _dtype_name(dtype)))
    return load(specialization, role, device_index), specialization.channels_per_thread * dtype.itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
