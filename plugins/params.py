"""The kernels' only argument, as ctypes: field by field the structs of ``kernels/*/params.h``, and how to fill them.

A test compiles the headers and compares sizes, offsets and constants; the meaning of each field stands there.
"""

import ctypes
from typing import Any

from torch import Tensor

from trtllm_replayssm.plugins.specializations import Role

LONGEST_STEP_WINDOW = 8
"""As in ``kernels/causal_conv1d/params.h``: the convolution's step kernel runs windows up to this long."""


def causal_conv1d_role(seq_len: int) -> Role:
    """Return the role of the convolution's kernel that is fastest for a window; "step" and "prefill" can run any."""
    if seq_len == 1:
        return "one_token_step"
    return "step" if seq_len <= LONGEST_STEP_WINDOW else "prefill"


def _fields(ctype: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, ctype) for name in names.split()]


class Mamba2Params(ctypes.Structure):
    """``Mamba2Params`` of ``kernels/mamba2/params.h``; strides are in elements."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            "x dt B C A D dt_bias ssm_state x_ring B_ring dt_ring "
            "past_lengths checkpoint_lengths num_tokens slot_ids y num_taken",
        ),
        *_fields(ctypes.c_int64, "x_stride_batch x_stride_token x_stride_head dt_stride_batch dt_stride_token"),
        *_fields(ctypes.c_int64, "B_stride_batch B_stride_token B_stride_group"),
        *_fields(ctypes.c_int64, "C_stride_batch C_stride_token C_stride_group"),
        *_fields(ctypes.c_int64, "ssm_state_stride_slot x_ring_stride_slot B_ring_stride_slot dt_ring_stride_slot"),
        *_fields(ctypes.c_int32, "seq_len ring_rows num_rows num_slots"),
    ]


class Mamba2WithConvParams(ctypes.Structure):
    """``Mamba2WithConvParams`` of ``kernels/mamba2/params_with_conv.h``; strides are in elements."""

    _fields_ = [
        ("step", Mamba2Params),
        *_fields(ctypes.c_void_p, "conv_weight conv_bias conv_ring"),
        *_fields(ctypes.c_int64, "conv_ring_stride_slot"),
        *_fields(ctypes.c_int32, "conv_ring_rows"),
    ]


class GatedDeltaNetParams(ctypes.Structure):
    """``GatedDeltaNetParams`` of ``kernels/gated_delta_net/params.h``; strides are in elements."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            "q k v a b A_log dt_bias ssm_state k_ring u_ring g_ring "
            "past_lengths checkpoint_lengths num_tokens slot_ids o num_taken",
        ),
        *_fields(ctypes.c_int64, "q_stride_batch q_stride_token q_stride_head"),
        *_fields(ctypes.c_int64, "k_stride_batch k_stride_token k_stride_head"),
        *_fields(ctypes.c_int64, "v_stride_batch v_stride_token v_stride_head"),
        *_fields(ctypes.c_int64, "a_stride_batch a_stride_token b_stride_batch b_stride_token"),
        *_fields(ctypes.c_int64, "ssm_state_stride_slot k_ring_stride_slot u_ring_stride_slot g_ring_stride_slot"),
        *_fields(ctypes.c_int32, "seq_len ring_rows num_rows num_slots"),
    ]


class CausalConv1dParams(ctypes.Structure):
    """``CausalConv1dParams`` of ``kernels/causal_conv1d/params.h``; strides are in elements."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "x weight bias conv_ring past_lengths num_tokens slot_ids y"),
        *_fields(ctypes.c_int64, "x_stride_batch x_stride_token conv_ring_stride_slot"),
        *_fields(ctypes.c_int32, "seq_len ring_rows activation num_rows"),
    ]


def mamba2_params(tensors: tuple[Tensor, ...], y: Tensor, num_taken: int) -> Mamba2Params:
    """Pack addresses and strides.

    Args:
        tensors: the inputs in the order of ``contract.plugin_io.MAMBA2.inputs``.
        y: the output.
        num_taken: the address of a counter (``plugins.counters``); 0 for a kernel that is not persistent.
    """
    x, dt, B, C = tensors[:4]
    pools = tensors[7:11]
    return Mamba2Params(
        *[tensor.data_ptr() for tensor in tensors],
        y.data_ptr(),
        num_taken,
        *x.stride()[:3],
        *dt.stride()[:2],
        *B.stride()[:3],
        *C.stride()[:3],
        *[pool.stride(0) for pool in pools],
        x.shape[1],
        pools[1].shape[1],
        x.shape[0],
        pools[0].shape[0],
    )


def mamba2_with_conv_params(
    tensors: tuple[Tensor, ...],
    convolution: tuple[Tensor, Tensor | None, Tensor],
    y: Tensor,
    num_taken: int,
) -> Mamba2WithConvParams:
    """Pack addresses and strides.

    Args:
        tensors: as for ``mamba2_params``, with x, B and C as they were before the convolution.
        convolution: its weight, bias and ring.
        y: the output.
        num_taken: the address of a counter (``plugins.counters``).
    """
    weight, bias, ring = convolution
    return Mamba2WithConvParams(
        mamba2_params(tensors, y, num_taken),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        ring.data_ptr(),
        ring.stride(0),
        ring.shape[1],
    )


def gated_delta_net_params(tensors: tuple[Tensor, ...], o: Tensor, num_taken: int) -> GatedDeltaNetParams:
    """Pack addresses and strides.

    Args:
        tensors: the inputs in the order of ``contract.plugin_io.GATED_DELTA_NET.inputs``.
        o: the output.
        num_taken: the address of a counter (``plugins.counters``); 0 for a kernel that is not persistent.
    """
    vectors, gates, pools = tensors[:3], tensors[3:5], tensors[7:11]
    return GatedDeltaNetParams(
        *[tensor.data_ptr() for tensor in tensors],
        o.data_ptr(),
        num_taken,
        *[stride for tensor in vectors for stride in tensor.stride()[:3]],
        *[stride for tensor in gates for stride in tensor.stride()[:2]],
        *[pool.stride(0) for pool in pools],
        o.shape[1],
        pools[1].shape[1],
        o.shape[0],
        pools[0].shape[0],
    )


def causal_conv1d_params(tensors: tuple[Tensor | None, ...], y: Tensor, *, is_silu: bool) -> CausalConv1dParams:
    """Pack addresses and strides.

    Args:
        tensors: the inputs in the order of ``contract.plugin_io.CAUSAL_CONV1D.inputs``; the bias may be None.
        y: the output.
        is_silu: apply SiLU.
    """
    x, conv_ring = tensors[0], tensors[3]
    assert x is not None and conv_ring is not None, "the bias alone is optional"
    return CausalConv1dParams(
        *[0 if tensor is None else tensor.data_ptr() for tensor in tensors],
        y.data_ptr(),
        *x.stride()[:2],
        conv_ring.stride(0),
        x.shape[1],
        conv_ring.shape[1],
        int(is_silu),
        x.shape[0],
    )
