"""Launch Mamba-2 and the convolution before it on torch CUDA tensors: in one kernel where that is faster, else in two.

As in ``plugins.launch``: layouts are checked, nothing waits for the device, launches are captured by CUDA graphs.
"""

from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.plugin_io import MAMBA2
from trtllm_replayssm.plugins import layouts
from trtllm_replayssm.plugins.counters import counter_of_launch
from trtllm_replayssm.plugins.launch import MAMBA2_SLOTS, causal_conv1d, mamba2, mamba2_constants
from trtllm_replayssm.plugins.loader import device_architecture, launch, load
from trtllm_replayssm.plugins.params import mamba2_with_conv_params
from trtllm_replayssm.plugins.specializations import VECTOR_BYTES, Mamba2Specialization, Mamba2WithConvSpecialization

_CONVOLUTION = ("xBC", "conv_weight", "conv_bias", "conv_ring")


def mamba2_with_conv(tensors: Mapping[str, Tensor | None], *, history: int, max_draft_len: int) -> Tensor:
    """Run the convolution and Mamba-2: a step in one launch where that is faster, else in two.

    Args:
        tensors: by name, the tensors of ``ops.mamba2_with_conv``, on one CUDA device; the bias may be None.
        history: most pending rows W.
        max_draft_len: most draft tokens of a window, T - 1.

    Returns:
        y, [B, S, H, P] of the activation type, contiguous.

    Raises:
        OpArgumentError: a layout that the kernels do not read (``plugins.layouts``): xBC and dt may be strided but for
            their innermost axis, pools between their slots, and nothing else. Nothing has been written then.
        UnsupportedError: no kernel for these shapes or this device.
        BackendError: cuda-core or NVRTC is not installed, or the driver refuses the launch.
    """
    _check(tensors)
    kernel = find_kernel(tensors, history=history, max_draft_len=max_draft_len)
    if kernel is not None:
        xBC = _given(tensors)["xBC"]
        num_multiprocessors = torch.cuda.get_device_properties(xBC.device).multi_processor_count
        if kernel.launch_shape("step_with_conv").is_faster(xBC.shape[0], num_multiprocessors):
            return launch_step(kernel, tensors)
    return mamba2_after_conv(tensors, history=history, max_draft_len=max_draft_len)


def mamba2_after_conv(tensors: Mapping[str, Tensor | None], *, history: int, max_draft_len: int) -> Tensor:
    """Run the convolution and Mamba-2 in two launches; see ``mamba2_with_conv``."""
    _check(tensors)
    given = _given(tensors)
    lengths = {name: given[name] for name in ("past_lengths", "num_tokens", "slot_ids")}
    weight, bias, ring = given["conv_weight"], given.get("conv_bias"), given["conv_ring"]
    convolution = {"x": given["xBC"], "weight": weight, "bias": bias, "conv_ring": ring, **lengths}
    inputs = _split(given, causal_conv1d(convolution, activation="silu"))
    recurrence = {name: tensor for name, tensor in given.items() if name not in _CONVOLUTION}
    return mamba2(recurrence | inputs, history=history, max_draft_len=max_draft_len)


def launch_step(kernel: Mamba2WithConvSpecialization, tensors: Mapping[str, Tensor | None]) -> Tensor:
    """Run a step in one launch, by a kernel that ``find_kernel`` has found; see ``mamba2_with_conv``."""
    given = _given(tensors)
    given |= _split(given, given["xBC"])
    x = given["x"]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    params = mamba2_with_conv_params(
        tuple(given[name] for name in MAMBA2.inputs),
        (given["conv_weight"], given.get("conv_bias"), given["conv_ring"]),
        y,
        counter_of_launch(x.device),
    )
    launch(load(kernel, "step_with_conv", x.device.index), params, x.shape[0], x.device)
    return y


def find_kernel(
    tensors: Mapping[str, Tensor | None], *, history: int, max_draft_len: int
) -> Mamba2WithConvSpecialization | None:
    """Return the kernel that runs a window in one launch, or None; decided from shapes, addresses and strides alone."""
    given = _given(tensors)
    xBC, d_conv = given["xBC"], given["conv_weight"].shape[1]
    num_rows, seq_len = xBC.shape[:2]
    if num_rows == 0 or seq_len == 0 or protocol.is_prefill(seq_len, max_draft_len):
        return None
    (n_heads, head_dim), (n_groups, d_state) = given["x_ring"].shape[2:], given["B_ring"].shape[2:]
    sizes = (n_heads, head_dim, d_state, n_groups, history, max_draft_len)
    kernel = _kernel(mamba2_constants(sizes, (xBC.dtype, given["ssm_state"].dtype, given["dt"].dtype)), d_conv)
    contiguous = [given[name] for name in ("conv_weight", "conv_bias") if name in given]
    is_readable = layouts.is_in_pieces(xBC, VECTOR_BYTES) and all(t.data_ptr() % VECTOR_BYTES == 0 for t in contiguous)
    is_there = "step_with_conv" in kernel.roles(device_architecture(xBC.device.index))
    return kernel if is_there and is_readable else None


@cache
def _kernel(step: Mamba2Specialization, d_conv: int) -> Mamba2WithConvSpecialization:
    return Mamba2WithConvSpecialization(step, d_conv)


def _check(tensors: Mapping[str, Tensor | None]) -> None:
    slots = {**MAMBA2_SLOTS, "conv_ring": VECTOR_BYTES}
    layouts.check("ops.mamba2_with_conv", tensors, strided=("xBC", "dt"), slots=slots)


def _given(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _split(given: Mapping[str, Tensor], channels: Tensor) -> dict[str, Tensor]:
    """Return x, B and C, views of channels that lie side by side."""
    (n_heads, head_dim), (n_groups, d_state) = given["x_ring"].shape[2:], given["B_ring"].shape[2:]
    split = partial(layouts.split_projection, n_heads=n_heads, head_dim=head_dim, n_groups=n_groups, d_state=d_state)
    return dict(zip("xBC", split(channels), strict=True))
