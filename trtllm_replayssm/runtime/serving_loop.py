"""The worker thread: it owns executor, drafter and scheduler, and runs steps while there are requests.

Other threads leave requests and orders in a letter box; the worker empties it between two steps. So a request is
aborted, runs out of time or takes another's slot at the border of a step, never within one.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from trtllm_replayssm.config import KvCacheConfig, SchedulerConfig
from trtllm_replayssm.contract.geometry import EngineLimits
from trtllm_replayssm.errors import (
    CapacityError,
    ConfigError,
    ExecutorError,
    QueueFullError,
    ReplaySSMError,
    RequestError,
    ShutdownError,
    error_text,
)
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.handle import RequestHandle, Waiter, wake
from trtllm_replayssm.runtime.loop import DecodeLoop
from trtllm_replayssm.runtime.metrics import MetricsRecorder
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.speculative.base import Drafter

_LOGGER = logging.getLogger(__name__)


class ServingLoop:
    """Runs requests of any number of threads on one ``DecodeLoop``.

    Args:
        loop: runs the steps; used by the worker alone.
        executor: closed with the loop, and what its drafter holds.
        recorder: counts the time.
        max_unfinished: most requests, running or waiting; None for any number.
    """

    def __init__(
        self, loop: DecodeLoop, executor: Executor, recorder: MetricsRecorder, max_unfinished: int | None = None
    ) -> None:
        self._loop = loop
        self._executor = executor
        self._recorder = recorder
        self._max_unfinished = max_unfinished
        # Guards what follows. Reentrant, since a garbage collection within may end an ``LLM``, which calls ``close``.
        self._letters = threading.Condition(threading.RLock())
        self._arrivals: list[RequestHandle] = []
        self._aborts: list[RequestHandle] = []
        self._num_unfinished = 0
        self._is_closed = False
        self._failure: ExecutorError | None = None
        self._thread: threading.Thread | None = None
        # The worker's own.
        self._handles: dict[int, RequestHandle] = {}
        self._counted_until: float | None = None  # None while there is nothing to run
        _OF_THIS_PROCESS.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether no request is taken any more because ``close`` was called."""
        return self._is_closed

    @property
    def failure(self) -> ExecutorError | None:
        """Why no request can run any more; None while all is well."""
        return self._failure

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return self._loop.num_running

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return max(self._num_unfinished - self._loop.num_running, 0)

    def prefix_metrics(self) -> dict[str, int]:
        """Return what the prefix cache did; nothing without one."""
        return {} if self._loop.reuse is None else self._loop.reuse.metrics()

    def reset_prefix_metrics(self) -> None:
        """Count that from zero again."""
        if self._loop.reuse is not None:
            self._loop.reuse.reset_metrics()

    def check_room(self, count: int) -> None:
        """Raise what so many requests would be refused with at once.

        Raises:
            RequestError: there would be too many even in an empty queue.
            QueueFullError: there would be too many.
            ShutdownError: the loop was closed.
            ExecutorError: a step failed before.
        """
        if self._is_closed and self._failure is None:
            raise ShutdownError("generate: found an LLM that was closed; needed an open one. Make another.")
        if self._failure is not None:
            raise ExecutorError(
                f"generate: found an LLM whose executor has failed ({self._failure.message}); needed a healthy one. "
                f"Make another."
            ) from self._failure
        most = self._max_unfinished
        if most is None:
            return
        if count > most:  # there never will be
            raise RequestError(
                f"queue: found {count} new requests; needed at most {most}, max_batch_size + max_queue_size. Ask for "
                f"fewer at a time, or raise max_queue_size."
            )
        if self._num_unfinished + count > most:
            raise QueueFullError(
                f"queue: found {self._num_unfinished} unfinished requests and {count} new ones; needed at most {most}, "
                f"max_batch_size + max_queue_size. Try again later."
            )

    def submit(self, handles: Sequence[RequestHandle]) -> None:
        """Queue requests, all of them or none.

        Raises:
            RequestError: there would be too many even in an empty queue.
            QueueFullError: there would be too many.
            ShutdownError: the loop was closed.
            ExecutorError: a step failed before.
            CapacityError: the process can have no further thread.
        """
        count = sum(len(handle.sequences) for handle in handles)
        with self._letters:
            self.check_room(count)
            if self._thread is None:
                self._start_worker()
            self._num_unfinished += count
            self._arrivals.extend(handles)
            self._letters.notify_all()

    def abort(self, handle: RequestHandle) -> None:
        """End a request before the next step; one that has ended stays as it is."""
        with self._letters:
            if not handle.finished and self._thread is not None:
                self._aborts.append(handle)
                self._letters.notify_all()

    def close(self) -> None:
        """End all requests with an error, close the executor, and wait until that is done; a second call only waits."""
        with self._letters:
            is_first, self._is_closed = not self._is_closed, True
            thread = self._thread
            self._letters.notify_all()
        if thread is None:
            if is_first:
                self._close_executor()
        elif thread is not threading.current_thread():
            thread.join()

    def end_in_child(self) -> None:
        """In a process that was forked off, end what needs the worker, which is not there."""
        self._letters = threading.Condition(threading.RLock())  # somebody may have held it, who is not here
        self._recorder.unlock_in_child()
        if self._thread is None:
            return  # it can have one of its own
        self._thread, self._is_closed = None, True
        self._failure = ExecutorError(
            "process: found a fork of the process that opened the LLM; needed that one, for neither its threads nor "
            "its device are here. Open an LLM where it is used, or start processes by 'spawn'."
        )
        for handle in {*self._handles.values(), *self._arrivals}:
            handle.give_up(self._failure, is_forked=True)

    def _start_worker(self) -> None:
        self._thread = threading.Thread(target=self._run, name="trtllm_replayssm", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            raise CapacityError(
                f"worker: found no thread for it ({error}); needed one, in which the model runs. End other threads, or "
                f"let the process have more."
            ) from error

    def _run(self) -> None:
        try:
            if self._executor.device.type == "cuda":
                torch.cuda.set_device(self._executor.device)  # a setting of each thread
            while self._read_letters():
                self._step()
            self._end_all(ShutdownError("request: found its LLM closed before the end; needed an open one."))
        except BaseException as error:  # noqa: BLE001 - the requests' users must learn of it, whatever it is
            self._fail(error)
        finally:
            self._close_executor()

    def _fail(self, error: BaseException) -> None:
        failure = ExecutorError(
            f"executor: found {type(error).__name__} in a step: {error_text(error)}. What the step left on the device "
            f"is not known; make another LLM."
        )
        failure.__cause__ = error
        with self._letters:
            self._failure = failure
        try:
            self._end_all(failure)
        finally:  # last: what a program has logs do may fail, too
            _LOGGER.error("a step failed: all requests have ended, and no further one is taken", exc_info=error)

    def _read_letters(self) -> bool:
        """Wait for something to do; take in requests and orders. Return False when the loop is to end."""
        with self._letters:
            self._letters.wait_for(lambda: self._is_closed or self._arrivals or self._aborts or self._loop.has_work)
            arrivals = self._know_arrivals()
            aborts, self._aborts = self._aborts, []
            is_closed = self._is_closed
        for request in arrivals:
            self._loop.add(request)
        for handle in aborts:
            self._publish([request for request in handle.sequences if self._loop.end(request, "cancelled")])
        return not is_closed

    def _step(self) -> None:
        started = time.perf_counter() if self._counted_until is None else self._counted_until
        changed = self._loop.end_overdue() + self._loop.step()
        now = time.perf_counter()
        self._recorder.count_time(now - started)
        self._publish(changed)
        self._counted_until = now if self._loop.has_work else None

    def _publish(self, changed: Iterable[Request]) -> None:
        """Show users what became of requests; nothing is counted after its user has been told."""
        finished: list[int] = []
        handles: dict[RequestHandle, None] = {}  # a set in the order of the requests
        for request in changed:
            handle = self._handles[request.request_id]
            if request.is_finished:
                finished.append(request.request_id)
            elif not handle.is_streaming:
                continue  # it shows the end alone
            handles[handle] = None
        with self._letters:
            self._num_unfinished -= len(finished)
        waiters: list[Waiter] = []
        try:
            for handle in handles:
                waiters += handle.publish()
            for request_id in finished:
                del self._handles[request_id]
        finally:
            wake(waiters)

    def _end_all(self, error: ReplaySSMError) -> None:
        """End all requests, and let nobody wait for one, whatever else fails on the way."""
        with self._letters:
            self._know_arrivals()
        handles = {handle.request_id: handle for handle in self._handles.values()}
        for request in [request for handle in handles.values() for request in handle.sequences]:
            with suppress(BaseException):  # it may be the drafter that has failed, or the tokenizer
                self._loop.end(request, "error", error)
        with self._letters:
            self._num_unfinished = 0  # none comes after the last ones
        waiters: list[Waiter] = []
        for handle in handles.values():
            with suppress(BaseException):
                waiters += handle.publish()
            waiters += handle.give_up(error)
        self._handles.clear()
        wake(waiters)

    def _know_arrivals(self) -> list[Request]:
        """Note who is to be told of each request, of all before any is queued: whatever fails then, they are told.

        They leave the letter box last, so that a fork finds each of them in one of the two places.
        """
        requests = []
        for handle in self._arrivals:
            for request in handle.sequences:
                self._handles[request.request_id] = handle
                requests.append(request)
        self._arrivals = []
        return requests

    def _close_executor(self) -> None:
        for close in (self._loop.close, self._executor.close):
            try:
                close()
            except BaseException:  # a device that has failed may refuse that as well; nothing else is lost
                _LOGGER.exception("the executor was not closed")


_OF_THIS_PROCESS: "weakref.WeakSet[ServingLoop]" = weakref.WeakSet()


def _end_in_child() -> None:
    for loop in list(_OF_THIS_PROCESS):
        loop.end_in_child()


os.register_at_fork(after_in_child=_end_in_child)


def make_serving_loop(
    executor: Executor,
    drafter: Drafter,
    limits: EngineLimits,
    recorder: MetricsRecorder,
    scheduling: SchedulerConfig,
    cache: KvCacheConfig,
) -> ServingLoop:
    """Make the loop that serves an executor.

    Args:
        executor: runs the steps.
        drafter: proposes draft tokens.
        limits: what requests are held to.
        recorder: counts what happens.
        scheduling: how many requests may wait, and how prompts and decoding take turns.
        cache: how many tokens may be held, and which are reused.

    Raises:
        ConfigError: a sequence may be longer than all that may be held.
        CapacityError: the device has no room for the prefix cache.
    """
    if cache.max_tokens is not None and cache.max_tokens < limits.max_seq_len:
        raise ConfigError(
            f"max_tokens: found {cache.max_tokens}; needed at least max_seq_len ({limits.max_seq_len}), for one "
            f"sequence may be so long. Raise it or lower max_seq_len."
        )
    loop = DecodeLoop(
        executor,
        drafter,
        limits,
        recorder,
        max_prompt_steps=scheduling.max_prompt_steps,
        priority_aging_s=scheduling.priority_aging_s,
        max_tokens=cache.max_tokens,
        cache_config=cache,
    )
    most_waiting = scheduling.max_queue_size
    max_unfinished = None if most_waiting is None else limits.max_batch_size + most_waiting
    return ServingLoop(loop, executor, recorder, max_unfinished)
