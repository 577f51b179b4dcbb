"""The comparison with the CPU that every implementation passes before it is timed."""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm.bench.recurrences import ACTIVATION
from trtllm_replayssm.errors import NumericsError

OUTPUT_BOUND = 4e-3
"""Largest error of an output, relative to the largest magnitude of its token: one rounding to bfloat16."""
STATE_BOUNDS = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of a written checkpoint, likewise: fp32 arithmetic, or one unit in the last place where two roundings may differ."""
ROUNDED_BOUND = 1e-2
"""Of an output or a state where products are rounded to bfloat16, too: by a prefill, or by a peer."""
PEER_PREFILL_BOUND = 5e-2
"""Of a peer's prefill, which may round products of products on the way: enough to find a call that is wrong. How exact
it is the report says."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error along the first axis, relative to the largest magnitude there; inf when not finite."""
    got, want = (t.detach().cpu().float().flatten(1) for t in (found, expected))
    if not bool(got.isfinite().all()):
        return float("inf")
    return float(((got - want).abs().amax(1) / want.abs().amax(1)).max())


def require(what: str, error: float, bound: float = OUTPUT_BOUND) -> float:
    """Return an error that is within its bound.

    Raises:
        NumericsError: it is not.
    """
    if not error <= bound:
        raise NumericsError(
            f"{what}: found an error of {error:.2g} against the CPU; needed at most {bound:.2g}. It was not timed."
        )
    return error


def telling_launches(flushes: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Choose launches (step, set) that have rows with a flush and without: one that has both, or one of each kind.

    Args:
        flushes: [steps, sets, batch]
    """
    both = np.argwhere(flushes.any(-1) & ~flushes.all(-1))[:1]
    first = flushes[..., 0]
    chosen = both if len(both) else [np.argwhere(kind)[0] for kind in (first, ~first) if kind.any()]
    return [(int(step), int(index)) for step, index in chosen]


def telling_rows(is_flush: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return a few rows: of those with a flush and of those without, the first and the last."""
    kinds = (np.flatnonzero(is_flush), np.flatnonzero(~is_flush))
    return np.unique(np.concatenate([rows[[0, -1]] for rows in kinds if rows.size]))


def rows_on_cpu(
    tensors: dict[str, Tensor], rows: Tensor, *, pools: Collection[str], weights: Collection[str]
) -> dict[str, Tensor]:
    """Copy some rows and their slots, with activations in fp32, so that the expected output is not rounded.

    Args:
        tensors: an op's, by name.
        rows: which.
        pools: names of the tensors with a row for every slot.
        weights: names of those that all rows share. Whatever is neither has a row for every row of the step.
    """
    slots = tensors["slot_ids"][rows.to(tensors["slot_ids"].device)].long()
    copied: dict[str, Tensor] = {"slot_ids": torch.arange(len(rows), dtype=torch.int32)}
    for name, tensor in tensors.items():
        if name == "slot_ids":
            continue
        if name not in weights:
            tensor = tensor[(slots if name in pools else rows).to(tensor.device)]
        is_activation = tensor.dtype == ACTIVATION and name != "ssm_state"
        copied[name] = tensor.cpu().float() if is_activation else tensor.cpu().clone()
    return copied
