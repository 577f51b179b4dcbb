"""Chains of small operations that a GPU runs as one kernel: compiled by torch when they are first called there.

Each of these operations takes a few microseconds, mostly of starting and of reading what the one before it wrote; a
decode step has hundreds. The functions are plain torch, which the CPU, the export and narrow models run as they are.
"""

import logging
import os
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar, cast

import torch

_LOGGER = logging.getLogger(__name__)
# Whether a compilation has failed: the others would, too.
_is_failing = False
# Fewer numbers a token are not worth the seconds of a compilation.
_NARROWEST = 1024

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function of tokens run as one kernel on CUDA, compiled for their width and for any number of them.

    Args:
        function: what it computes for a token must depend on that token alone. Tensors of three or more dimensions
            are [B, S, ...], tokens first, and so is what it returns, a tensor or a tuple; others belong to all tokens.
            The first argument is of the former kind.

    Returns:
        The same function.
    """
    compiled = _compiled_at_call(function)

    def run_compiled(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        batch, seq_len = cast(torch.Tensor, arguments[0]).shape[:2]
        found = compiled(*(_flat(argument) for argument in arguments), **options)
        shaped = (
            tuple(torch.unflatten(tensor, 0, (batch, seq_len)) for tensor in found)
            if isinstance(found, tuple)
            else torch.unflatten(cast(torch.Tensor, found), 0, (batch, seq_len))
        )
        return cast(Result, shaped)

    return _where_worthwhile(function, run_compiled)


def fused_windows(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function of whole windows run as one or two kernels on CUDA, compiled for any number of rows and tokens.

    Args:
        function: its tensors are [B] or [B, S, ...], the first argument the latter.

    Returns:
        The same function.
    """
    compiled = _compiled_at_call(function)

    def run_compiled(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                _mark_dynamic(argument, 2)
        return compiled(*arguments, **options)

    return _where_worthwhile(function, run_compiled)


def _where_worthwhile(
    function: Callable[Arguments, Result], run_compiled: Callable[Arguments, Result]
) -> Callable[Arguments, Result]:
    """Return the function, which its compiled form takes the place of where that pays."""

    @wraps(function)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        first = arguments[0]
        assert isinstance(first, torch.Tensor), "the first argument says where and how much"
        return (run_compiled if is_worthwhile(first) else function)(*arguments, **options)

    return run


def _compiled_at_call(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return what compiles the function when called, and runs it as it is where that fails."""

    @cache
    def compiled() -> Callable[..., Result]:
        # Left to itself, the compiler starts a process for every CPU core: for a handful of small kernels.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        return torch.compile(function)  # which imports the compiler, for seconds

    def call(*arguments: object, **options: object) -> Result:
        global _is_failing
        if not _is_failing:
            try:
                return compiled()(*arguments, **options)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ImportError, OSError) as error:
                # A machine without a C compiler, for instance: nothing is lost but time.
                _is_failing = True
                reason = " ".join(str(error).split())[:300]
                _LOGGER.warning("torch does not compile here, steps run operation by operation: %s", reason)
        return function(*arguments, **options)

    return call


def is_worthwhile(first: torch.Tensor) -> bool:
    """Say whether a call with this first argument [B, S, ...] is compiled."""
    return first.is_cuda and first[0, 0].numel() >= _NARROWEST and _can_compile()


@cache
def _can_compile() -> bool:
    # What torch compiles with for a GPU comes with its CUDA builds for Linux.
    return find_spec("triton") is not None


def _flat(argument: object) -> object:
    """Make B and S one dimension, of any size: not one compilation for each batch."""
    if not isinstance(argument, torch.Tensor) or argument.dim() < 3:
        return argument
    flat = argument.flatten(0, 1)
    _mark_dynamic(flat, 1)
    return flat


def _mark_dynamic(tensor: torch.Tensor, count: int) -> None:
    """Have a tensor's first dimensions compiled for any size, and the others for their own."""
    for dim in range(tensor.dim()):
        if dim < count:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        else:
            torch._dynamo.mark_static(tensor, dim)
