"""Argument checks shared by all ops: symbolic shapes declared once, one style of message.

A table of ``Argument`` says what an op takes; ``check_tensors`` compares a call with it before anything is computed or
written. Checks of *values* (lengths, slots) read memory and run on the CPU alone: a device is never waited for. What a
CUDA kernel asks of strides and addresses is checked at its launch (``plugins.layouts``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trtllm_replayssm.contract import protocol
from trtllm_replayssm.errors import ConfigError, OpArgumentError

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)

_MOST_TOKENS = 2**31 - 1  # lengths are int32

TypeRule = Literal["activation", "activation or float32", "state", "float32", "int32"]


@dataclass(frozen=True)
class Argument:
    """One tensor argument of an op.

    Attributes:
        name: as in the signature.
        symbols: its symbolic shape; a symbol has one value in a call.
        type_rule: "activation": the type of the op's first argument; "state": any float type of its own.
        is_written: updated in place, so that no two of its elements may share memory.
        is_optional: may be None.
    """

    name: str
    symbols: tuple[str, ...]
    type_rule: TypeRule
    is_written: bool = False
    is_optional: bool = False


@dataclass(frozen=True)
class _Bound:
    value: int
    source: str


def per_row(*names: str) -> tuple[Argument, ...]:
    """Return the arguments that have one number per row of the step: lengths and slots."""
    return tuple(Argument(name, ("batch",), "int32") for name in names)


def check_tensors(op: str, table: tuple[Argument, ...], tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Compare a call's tensors with the table of the op.

    Args:
        op: name for messages, for example "ops.mamba2".
        table: the arguments; the first one gives the activation type and the device.
        tensors: name -> tensor, or None for an optional argument that is absent.

    Returns:
        The value of every symbol.

    Raises:
        OpArgumentError: something is not a dense tensor, has another shape, type or device, or is to be written and
            overlaps with itself.
    """
    bound: dict[str, _Bound] = {}
    first = tensors[table[0].name]
    for argument in table:
        tensor = tensors[argument.name]
        if tensor is None and argument.is_optional:
            continue
        where = f"{op}: {argument.name}"
        if not isinstance(tensor, Tensor):
            or_none = " or None" if argument.is_optional else ""
            raise OpArgumentError(f"{where}: found {type(tensor).__name__}; needed a torch.Tensor{or_none}.")
        assert isinstance(first, Tensor), "the first argument is never optional and was checked first"
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise OpArgumentError(f"{where}: found {kind}; needed a dense tensor, of layout torch.strided.")
        _check_shape(where, argument, tensor, bound)
        _check_type(where, argument, tensor, first.dtype, table[0].name)
        if tensor.device != first.device:
            raise OpArgumentError(
                f"{where}: found device {tensor.device}; needed {first.device}, where {table[0].name} is."
            )
        if argument.is_written and _overlaps(tensor):
            raise OpArgumentError(
                f"{where}: found strides {tensor.stride()} for shape {tuple(tensor.shape)}; needed a place of its own "
                "for every element, since it is written. Expanded tensors cannot be updated in place."
            )
    return {symbol: b.value for symbol, b in bound.items()}


def _check_shape(where: str, argument: Argument, tensor: Tensor, bound: dict[str, _Bound]) -> None:
    shape, symbols = tuple(tensor.shape), argument.symbols
    needed = f"[{', '.join(symbols)}]"
    if len(shape) != len(symbols):
        raise OpArgumentError(f"{where}: found shape {shape}; needed {len(symbols)} dimensions {needed}.")
    for symbol, size in zip(symbols, shape, strict=True):
        known = bound.setdefault(symbol, _Bound(size, argument.name))
        if size != known.value:
            values = [str(bound[s].value) if s in bound else s for s in symbols]
            raise OpArgumentError(
                f"{where}: found shape {shape}; needed {needed} = ({', '.join(values)}), "
                f"where {symbol} = {known.value} comes from {known.source}."
            )


def _check_type(where: str, argument: Argument, tensor: Tensor, activation: torch.dtype, first_name: str) -> None:
    allowed: dict[TypeRule, tuple[torch.dtype, ...]] = {
        "activation": FLOAT_TYPES if argument.name == first_name else (activation,),
        "activation or float32": (activation, torch.float32),
        "state": FLOAT_TYPES,
        "float32": (torch.float32,),
        "int32": (torch.int32,),
    }
    types = allowed[argument.type_rule]
    if tensor.dtype not in types:
        names = " or ".join(dict.fromkeys(str(t) for t in types))
        like = f", the type of {first_name}" if types == (activation,) and argument.type_rule == "activation" else ""
        raise OpArgumentError(f"{where}: found {tensor.dtype}; needed {names}{like}.")


def _overlaps(tensor: Tensor) -> bool:
    """Say whether elements may share memory: sorted by stride, each dimension must step over all smaller ones."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def check_int(op: str, what: str, found: int) -> None:
    """Refuse what only resembles an int: a bool, a float, text, None.

    Raises:
        OpArgumentError: found is no int.
    """
    if type(found) is not int:
        raise OpArgumentError(f"{op}: {what}: found {found!r}; needed an int.")


def check_window(op: str, *, history: int, max_draft_len: int) -> None:
    """Refuse a history that cannot hold one window.

    Raises:
        OpArgumentError: history or max_draft_len is no int, is too small, or history < 1 + max_draft_len.
    """
    check_int(op, "history", history)
    check_int(op, "max_draft_len", max_draft_len)
    try:
        protocol.check_history(history, max_draft_len)
    except ConfigError as error:
        raise OpArgumentError(f"{op}: {error.message}") from error


def check_at_least(op: str, what: str, found: int, needed: int, rule: str) -> None:
    """Refuse a size below the least that works.

    Raises:
        OpArgumentError: found < needed.
    """
    if found < needed:
        raise OpArgumentError(f"{op}: {what}: found {found}; needed at least {needed} ({rule}).")


def check_ring(op: str, rings: str, ring_rows: int, *, history: int, max_draft_len: int) -> None:
    """Refuse a history that cannot hold one window, and rings that cannot hold the history and one window.

    Raises:
        OpArgumentError: as ``check_window``, or ring_rows < history + 1 + max_draft_len.
    """
    check_window(op, history=history, max_draft_len=max_draft_len)
    check_at_least(
        op,
        f"rows R of {rings}",
        ring_rows,
        protocol.min_ring_rows(history, max_draft_len),
        f"history + 1 + max_draft_len, with history={history} and max_draft_len={max_draft_len}",
    )


def check_equal(op: str, what: str, found: int, needed: int, rule: str) -> None:
    """Refuse a size that is not the one that works.

    Raises:
        OpArgumentError: found != needed.
    """
    if found != needed:
        raise OpArgumentError(f"{op}: {what}: found {found}; needed {needed} ({rule}).")


def check_multiple(op: str, what: str, found: int, divisor: int, rule: str) -> None:
    """Refuse a count that does not divide evenly.

    Raises:
        OpArgumentError: divisor is 0 or does not divide found.
    """
    if divisor == 0 or found % divisor != 0:
        raise OpArgumentError(f"{op}: {what}: found {found}; needed a multiple of {divisor} ({rule}).")


def check_same_type(op: str, **tensors: Tensor) -> None:
    """Refuse a tensor that has not the type of the one named last.

    Raises:
        OpArgumentError: the types differ.
    """
    *others, model = tensors
    for name in others:
        if tensors[name].dtype != tensors[model].dtype:
            raise OpArgumentError(
                f"{op}: {name}: found {tensors[name].dtype}; needed {tensors[model].dtype}, the type of {model}."
            )


def check_counters(op: str, tensors: Mapping[str, Tensor | None], size: Mapping[str, int], *, history: int = 0) -> None:
    """Refuse slots and counters that the protocol cannot produce. Reads memory on the CPU alone.

    Args:
        op: name for messages.
        tensors: with past_lengths, num_tokens and slot_ids, and checkpoint_lengths where the op has them.
        size: what ``check_tensors`` returned, with ``slots`` and ``S``.
        history: most pending rows.

    Raises:
        OpArgumentError: a slot id is below -1 (padding), at least the number of slots, or not unique; or, in a row that
            has a slot, not 0 <= num_tokens <= S, or lengths that ``check_row`` refuses.
    """
    slot_ids, past_lengths, num_tokens = (tensors[name] for name in ("slot_ids", "past_lengths", "num_tokens"))
    assert slot_ids is not None and past_lengths is not None and num_tokens is not None, "never optional"
    if slot_ids.device.type != "cpu":
        return
    ids, past, num = slot_ids.tolist(), past_lengths.tolist(), num_tokens.tolist()
    _check_slots(op, ids, size["slots"])
    checkpoint_lengths = tensors.get("checkpoint_lengths")
    checkpoint = past if checkpoint_lengths is None else checkpoint_lengths.tolist()
    for row, (slot, c, f, n) in enumerate(zip(ids, past, checkpoint, num, strict=True)):
        if slot < 0:
            continue
        if not 0 <= n <= size["S"]:
            raise OpArgumentError(f"{op}: num_tokens[{row}]: found {n}; needed 0 to {size['S']}, the window's tokens.")
        check_row(op, row, c, f, window=size["S"], history=history)


def _check_slots(op: str, ids: list[int], num_slots: int) -> None:
    used = [i for i in ids if i != -1]
    if any(not 0 <= i < num_slots for i in used):
        raise OpArgumentError(
            f"{op}: slot_ids: found {ids}; needed ids from 0 to {num_slots - 1}, or -1 in a padding row."
        )
    if len(set(used)) != len(used):
        raise OpArgumentError(f"{op}: slot_ids: found {ids}; needed every slot at most once in a call.")


def check_row(op: str, row: int, c: int, f: int, *, window: int, history: int) -> None:
    """Refuse lengths that no step can have.

    Raises:
        OpArgumentError: past_lengths c is negative, or so large that c + window leaves int32; checkpoint_lengths f is
            negative, beyond c, or leaves more pending rows than history.
    """
    if not 0 <= c <= _MOST_TOKENS - window:
        raise OpArgumentError(
            f"{op}: past_lengths[{row}]: found {c}; needed 0 to {_MOST_TOKENS - window}, so that {c} and the {window} "
            f"tokens of a window stay below 2^31."
        )
    if not max(0, c - history) <= f <= c:
        raise OpArgumentError(
            f"{op}: checkpoint_lengths[{row}]: found {f} with past_lengths[{row}] = {c}; needed "
            f"{max(0, c - history)} to {c} (at most history = {history} pending rows). Commit with ops.advance."
        )
