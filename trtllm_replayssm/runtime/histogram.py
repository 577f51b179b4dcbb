"""Durations by size, in buckets: what percentiles and Prometheus are made from."""

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = tuple(digit * 10.0**exponent for exponent in range(-4, 2) for digit in (1, 2, 5))
"""Upper bounds of the buckets in seconds, 0.1 ms to 50 s; a last bucket holds what is longer."""


@dataclass
class Histogram:
    """How many durations fell into each bucket.

    Attributes:
        counts: per bound of ``BOUNDS_S``, how many were at most so long and longer than the bound before; last, how
            many were longer than all bounds.
        sum_s: all durations together, in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    @property
    def num(self) -> int:
        """Durations that were counted."""
        return sum(self.counts)

    def add(self, duration_s: float, times: int = 1) -> None:
        """Count a duration, ``times`` times."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += times
        self.sum_s += duration_s * times
