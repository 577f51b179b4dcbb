"""When tokens came: a drafter that looks at the clock, and what its readings say."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.contract.geometry import Frozen
from trtllm_replayssm.runtime.speculative.base import Drafter

PERCENTILES = (50, 90, 99)


class Percentiles(Frozen):
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float] | NDArray[np.float64]) -> "Percentiles":
        """Return the percentiles of some times; of none, zeros."""
        if len(seconds) == 0:
            return cls(p50=0.0, p90=0.0, p99=0.0)
        p50, p90, p99 = (1e3 * float(value) for value in np.percentile(seconds, PERCENTILES))
        return cls(p50=p50, p90=p90, p99=p99)


class Stopwatch:
    """A drafter around another one: the loop tells it of every token, in its own thread, at the end of a step.

    So nothing is added to a step but a look at the clock, and no consumer of streams competes with the loop.

    Args:
        drafter: the one that proposes.
        clock: seconds.

    Attributes:
        readings: request id -> (moment, tokens) of every step that appended tokens to it.
    """

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.max_draft_len = drafter.max_draft_len
        self._drafter = drafter
        self._clock = clock
        self.readings: dict[int, list[tuple[float, int]]] = {}

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Begin to read for a sequence."""
        self.readings.setdefault(request_id, [])
        self._drafter.begin(request_id, prompt_token_ids)

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Read the clock."""
        if token_ids:
            self.readings[request_id].append((self._clock(), len(token_ids)))
        self._drafter.observe(request_id, token_ids)

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Let the other one propose."""
        return self._drafter.propose(limits)

    def end(self, request_id: int) -> None:
        """Forget nothing: the readings are wanted afterwards."""
        self._drafter.end(request_id)


def first_token_times(readings: Sequence[Sequence[tuple[float, int]]], arrivals: Sequence[float]) -> list[float]:
    """Return the seconds from each request's arrival to its first token."""
    return [of_request[0][0] - arrival for of_request, arrival in zip(readings, arrivals, strict=True) if of_request]


def inter_token_times(readings: Sequence[Sequence[tuple[float, int]]]) -> NDArray[np.float64]:
    """Return the seconds between each token and the one before it, of all requests.

    Tokens that one step appends share the time since the step before equally: they come together, and their reader
    waits for the next ones.
    """
    times = [
        np.full(num_tokens, (moment - before) / num_tokens)
        for of_request in readings
        for (before, _), (moment, num_tokens) in zip(of_request, of_request[1:], strict=False)
    ]
    return np.concatenate(times) if times else np.empty(0)
