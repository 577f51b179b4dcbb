"""Ours beside the peers: which of them is the fastest for a case, and how ours stands to it."""

from collections.abc import Iterable

from trtllm_replayssm.bench.report import OURS, Comparison, Kind, Measurement


def compare(measurements: Iterable[Measurement]) -> tuple[Comparison, ...]:
    """Hold each measurement of ours to those of the peers for the same case; cases without a peer are left out."""
    by_case: dict[tuple[object, ...], list[Measurement]] = {}
    for m in measurements:
        if m.kind in ("with convolution", "one phase"):
            continue
        key = (m.shape, m.state_dtype, m.kind == "prefill", m.window, m.batch_size)
        by_case.setdefault(key, []).append(m)
    return tuple(_compared(of_case) for of_case in by_case.values() if len(of_case) > 1)


def _compared(of_case: list[Measurement]) -> Comparison:
    (ours,) = (m for m in of_case if m.implementation in OURS)
    peers = [m for m in of_case if m.implementation not in OURS]
    best: dict[Kind, str] = {}
    ratios: dict[Kind, float] = {}
    for kind in dict.fromkeys(m.kind for m in peers):
        fastest = min((m for m in peers if m.kind == kind), key=lambda m: m.us)
        best[kind], ratios[kind] = fastest.implementation, ours.us / fastest.us
    return Comparison(
        implementation=ours.implementation,
        shape=ours.shape,
        state_dtype=ours.state_dtype,
        window=ours.window,
        batch_size=ours.batch_size,
        us=ours.us,
        limit_us=ours.limit_us,
        peers={m.implementation: m.us for m in peers},
        best=best,
        time_over_best=ratios,
    )
