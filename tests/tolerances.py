"""The one table of error bounds of the ops against the fp64 oracle, each with its reason.

Errors are relative to the largest magnitude: of one token's outputs, or of one slot's checkpoint. Elementwise relative
errors would measure cancellation in ``S C + D x``, not the arithmetic.
"""

from dataclasses import dataclass

# Half a unit in the last place, relative: what one rounding to the type costs at most.
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

FP32_ARITHMETIC = 1e-5
"""Sums of up to d_state + history fp32 terms and one exp each: measured below 1e-6, held to 1e-5."""

FP32_SUBSTITUTION = 5e-5
"""Outputs of Gated DeltaNet: each u is a difference of v and what the state predicts, and the next ones build on it."""


@dataclass(frozen=True)
class Bound:
    """Greatest errors of an op.

    Attributes:
        output: of y.
        checkpoint: of the recurrent state in memory, after any number of flushes.
        reason: why no smaller bound holds.
    """

    output: float
    checkpoint: float
    reason: str


_ROUNDED_OUTPUT = {"float32": 0.0, "float16": 5e-4, "bfloat16": 4e-3}
"""One rounding of y, ``HALF_ULP`` of it at most, and what little is left for the arithmetic."""

_ROUNDED_STATE = {"float32": 0.0, "float16": 8 * HALF_ULP["float16"], "bfloat16": 8 * HALF_ULP["bfloat16"]}
"""Every flush rounds the state once more; a slowly decaying head (a = 0.999 per token) carries the errors of many
flushes, which add up as a random walk of a few half-ulps. They reach the outputs in the same proportion."""

_DEVICES = ("cpu", "cuda")
_TYPES = ("float32", "float16", "bfloat16")


def _bound(arithmetic: float, activation: str, state: str) -> Bound:
    output = max(arithmetic, _ROUNDED_OUTPUT[activation]) + _ROUNDED_STATE[state]
    reason = f"{activation} outputs are rounded once"
    if state == "float32":
        return Bound(output, FP32_ARITHMETIC, f"{reason}; the fp32 state never sees a rounded output")
    return Bound(output, _ROUNDED_STATE[state], f"{reason}; the {state} state is rounded at every flush")


MAMBA2 = {(d, a, s): _bound(FP32_ARITHMETIC, a, s) for d in _DEVICES for a in _TYPES for s in _TYPES}
"""(device, activation type, state type) -> bound. The two devices are held to the same bounds."""

GATED_DELTA_NET = {(d, a, s): _bound(FP32_SUBSTITUTION, a, s) for d in _DEVICES for a in _TYPES for s in _TYPES}
"""(device, activation type, state type) -> bound."""

CAUSAL_CONV1D = {
    (device, activation): Bound(
        max(FP32_ARITHMETIC, _ROUNDED_OUTPUT[activation]), 0.0, "d_conv fp32 terms, rounded once"
    )
    for device in _DEVICES
    for activation in _TYPES
}
"""(device, activation type) -> bound; the ring holds copies, so its error is none."""

LOGITS_FP32 = 2e-4
"""A model's logits in fp32 against ``transformers``, absolute: both round the sums of every layer, in other orders."""

TOOTH = 10.0
"""A fault that a test plants must exceed the bound by this factor, else the bound could not see it."""
