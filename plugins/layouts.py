"""The layouts that kernels can read: checked at the launch, since strides and addresses are the tensors' own.

Every check raises ``OpArgumentError`` with the layout found, the one needed and the way out.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from trtllm_replayssm.errors import OpArgumentError


def check(op: str, tensors: Mapping[str, Tensor | None], *, strided: Collection[str], slots: Mapping[str, int]) -> None:
    """Refuse a call whose tensors the kernels cannot read; what is named nowhere must be contiguous.

    Args:
        op: for messages.
        tensors: name -> tensor; None where an optional one is absent.
        strided: the tensors of which the innermost axis alone must be contiguous.
        slots: pool -> alignment of its slots in bytes; each slot must be contiguous.

    Raises:
        OpArgumentError: naming the first tensor with another layout.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name in strided:
            require_innermost_contiguous(op, name, tensor)
        elif name in slots:
            require_slot_layout(op, name, tensor, slots[name])
        else:
            require_contiguous(op, name, tensor)


def require_innermost_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Refuse an activation whose neighbouring channels are not neighbours in memory.

    Raises:
        OpArgumentError: the innermost stride is not 1.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise OpArgumentError(
            f"{op}: {name}: found strides {tensor.stride()} for shape {tuple(tensor.shape)}; needed the innermost axis "
            f"contiguous on CUDA. Pass {name}.contiguous()."
        )


def require_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Refuse a weight, a length or an id that is a strided view.

    Raises:
        OpArgumentError: not contiguous.
    """
    if not tensor.is_contiguous():
        raise OpArgumentError(
            f"{op}: {name}: found strides {tensor.stride()} for shape {tuple(tensor.shape)}; needed all of it "
            f"contiguous on CUDA. Pass {name}.contiguous()."
        )


def require_slot_layout(op: str, name: str, pool: Tensor, alignment: int) -> None:
    """Refuse a pool whose slots are not contiguous or not aligned; between slots any stride will do.

    Args:
        op: for the message.
        name: for the message.
        pool: [slots, ...].
        alignment: of every slot, in bytes: the kernel's widest access.

    Raises:
        OpArgumentError: the layout is another one.
    """
    expected = 1
    for size, stride in zip(reversed(pool.shape[1:]), reversed(pool.stride()[1:]), strict=True):
        if stride != expected and size > 1:
            raise OpArgumentError(
                f"{op}: {name}: found strides {pool.stride()} for shape {tuple(pool.shape)}; needed each slot "
                "contiguous on CUDA (any stride between slots). Allocate the pool with the slot axis outermost."
            )
        expected *= size
    stride_bytes = pool.stride(0) * pool.element_size() if pool.shape[0] > 1 else 0
    if (pool.data_ptr() | stride_bytes) % alignment:
        raise OpArgumentError(
            f"{op}: {name}: found address {pool.data_ptr():#x} and {stride_bytes} bytes between slots; needed "
            f"multiples of {alignment} bytes on CUDA. Start the view at an aligned element."
        )


def is_in_pieces(tensor: Tensor, alignment: int) -> bool:
    """Say whether every innermost row of an activation starts at a multiple of ``alignment`` bytes."""
    strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    return not any(offset % alignment for offset in (tensor.data_ptr(), *(s * tensor.element_size() for s in strides)))


def are_heads_neighbours(x: Tensor) -> bool:
    """Say whether the heads of a token, [..., heads, head_dim], follow each other without a gap."""
    return x.shape[-2] == 1 or x.stride(-2) == x.shape[-1]


def split_projection(
    xBC: Tensor, *, n_heads: int, head_dim: int, n_groups: int, d_state: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [B, S, H, P], B and C [B, S, G, N] as views of Mamba-2's projection, [B, S, H P + 2 G N]."""
    d_bc = n_groups * d_state
    x, B, C = torch.split(xBC, [n_heads * head_dim, d_bc, d_bc], dim=-1)
    return (
        torch.unflatten(x, -1, (n_heads, head_dim)),
        torch.unflatten(B, -1, (n_groups, d_state)),
        torch.unflatten(C, -1, (n_groups, d_state)),
    )
