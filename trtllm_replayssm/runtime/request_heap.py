"""A heap of requests from which any of them may be taken out: the waiting ones by rank, the running clocks by time."""

import heapq
from collections.abc import Callable

from trtllm_replayssm.runtime.request import Request

_FEW = 64  # so many stale entries are kept without counting


class RequestHeap:
    """Requests, least key first. Adding and taking cost O(log n), removal from the middle O(1).

    A removed request's entry stays until it comes to the top, or until more than half of the entries are such.

    Args:
        key: orders the requests; read when one is added.
    """

    def __init__(self, key: Callable[[Request], tuple[float, int]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, int], int, Request]] = []
        self._live: dict[int, int] = {}  # request id -> number of its live entry
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._live

    def add(self, request: Request) -> None:
        """Add a request that is not there."""
        assert request not in self, f"request {request.request_id} is added twice"
        self._num_added += 1
        self._live[request.request_id] = self._num_added
        heapq.heappush(self._heap, (self._key(request), self._num_added, request))

    def remove(self, request: Request) -> bool:
        """Take a request out; return whether it was there."""
        found = self._live.pop(request.request_id, None) is not None
        if len(self._heap) > 2 * len(self._live) + _FEW:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return found

    def first(self) -> Request | None:
        """Return the request with the least key; None when there is none."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Take the request with the least key; there must be one."""
        request = self.first()
        assert request is not None, "the heap is empty"
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        return request

    def requests(self) -> tuple[Request, ...]:
        """Return the requests, in no particular order."""
        return tuple(entry[2] for entry in self._heap if self._is_live(entry))

    def _is_live(self, entry: tuple[tuple[float, int], int, Request]) -> bool:
        return self._live.get(entry[2].request_id) == entry[1]
