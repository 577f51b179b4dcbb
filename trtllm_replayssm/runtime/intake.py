"""The way in: prompts become numbered requests, which reach the worker with a handle each, all of a call or none."""

import threading
import time
from collections.abc import Sequence

from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.runtime.handle import RequestHandle
from trtllm_replayssm.runtime.prompts import PlainPrompt, PromptDesk, schedule
from trtllm_replayssm.runtime.serving_loop import ServingLoop


class Intake:
    """Takes requests in, from any thread.

    Args:
        desk: makes requests, or refuses them.
        serving: runs them.
    """

    def __init__(self, desk: PromptDesk, serving: ServingLoop) -> None:
        self._desk = desk
        self._serving = serving
        self._next_id = 0
        self._lock = threading.Lock()

    def queue(
        self,
        prompts: Sequence[PlainPrompt],
        params: Sequence[SamplingParams],
        owner: object,
        *,
        streaming: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[RequestHandle]:
        """Queue prompts and return a handle for each.

        Args:
            prompts: as ``prompts.as_list`` gives them.
            params: one for each prompt.
            owner: kept alive until the requests have ended.
            streaming: as for ``LLM.generate_async``, whose errors are raised; the rest likewise.
            priority: higher ones run first.
            timeout_s: seconds from now after which the requests end.
        """
        priority, timeout_s = schedule(priority, timeout_s)
        count = sum(rules.n for rules in params)
        self._serving.check_room(count)  # before so many are made
        now = time.perf_counter()
        with self._lock:  # of the numbers alone: tokenising takes its time
            first_id = self._next_id
            self._next_id += count
        handles = []
        for sequences in self._desk.requests(prompts, params, first_id):
            for request in sequences:
                request.priority, request.arrived_s = priority, now
                request.deadline_s = None if timeout_s is None else now + timeout_s
            # The worker has the handle and this its owner, which is therefore not collected before the request has
            # ended.
            handles.append(RequestHandle(sequences, is_streaming=streaming, abort=self._serving.abort, owner=owner))
        self._serving.submit(handles)
        return handles
