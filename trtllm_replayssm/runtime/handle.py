"""A request as its user holds it: waited for, iterated over or aborted, from any thread and any event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence

from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.request import Request

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class RequestHandle:
    """What ``LLM.generate_async`` returns.

    ``await handle`` and ``handle.result()`` wait for the whole output. ``async for output in handle`` and
    ``for output in handle`` go through the outputs as they grow, each with all tokens so far, and in ``text_diff``,
    ``token_ids_diff`` and ``logprobs_diff`` what the same iteration has not given before; a slow reader gets fewer and
    longer ones. Without streaming there is but the last. All of them raise the error that ended the request, where one
    did, an iteration after the last output; a request that was aborted or ran out of time has an output like any other,
    whose finish_reason says so. Giving up waiting does not abort the request.

    Args:
        sequences: the requests of the prompt, as many as ``SamplingParams.n``.
        is_streaming: publish every step's tokens, not the last output alone.
        abort: tells the worker to end the request.
        owner: kept alive until the request has ended.
    """

    def __init__(
        self,
        sequences: Sequence[Request],
        *,
        is_streaming: bool,
        abort: "Callable[[RequestHandle], None]",
        owner: object = None,
    ) -> None:
        self.sequences = tuple(sequences)
        self._is_streaming = is_streaming
        self._abort = abort
        self._owner = owner
        self._changed = threading.Condition()
        self._waiters: list[Waiter] = []
        self._output: RequestOutput | None = None
        self._error: ReplaySSMError | None = None
        self._version = 0
        self._is_done = False

    def __repr__(self) -> str:
        return f"RequestHandle({self.request_id}, {'finished' if self._is_done else 'unfinished'})"

    @property
    def request_id(self) -> int:
        """The number of the request, as in its output."""
        return self.sequences[0].request_id

    @property
    def is_streaming(self) -> bool:
        """Whether every step's tokens are shown, or the last output alone."""
        return self._is_streaming

    @property
    def finished(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._is_done

    @property
    def output(self) -> RequestOutput | None:
        """The newest output, that of a failed request included; None before the first."""
        return self._output

    @property
    def error(self) -> ReplaySSMError | None:
        """What ended the request, where an error did."""
        return self._error

    def abort(self) -> None:
        """End the request before the next step, with finish_reason "cancelled"; one that has ended stays as it is."""
        self._abort(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended; return whether it has within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_done, timeout)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output.

        Args:
            timeout: seconds to wait; None waits as long as it takes. The request goes on all the same: see ``abort``.

        Raises:
            TimeoutError: the request has not ended by then.
            ReplaySSMError: what ended the request.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"request {self.request_id}: found no end within {timeout} s; needed one.")
        return self._last()

    async def aresult(self) -> RequestOutput:
        """Wait for the whole output, as ``await handle`` does."""
        while not self._is_done:
            await self._next_change(self._version)
        return self._last()

    def __await__(self) -> Generator[object, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        seen, before = 0, None
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._version != seen)  # type: ignore[misc]
                seen, output, is_done = self._version, self._output, self._is_done
            if output is not None and output is not before:  # one that was given up has nothing new
                yield output if before is None else output.since(before)
                before = output
            if is_done:
                self._last()
                return

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        seen, before = 0, None
        while True:
            await self._next_change(seen)
            with self._changed:
                seen, output, is_done = self._version, self._output, self._is_done
            if output is not None and output is not before:  # one that was given up has nothing new
                yield output if before is None else output.since(before)
                before = output
            if is_done:
                self._last()
                return

    def publish(self) -> Iterable[Waiter]:
        """Show what the sequences are now; for the worker alone, which then wakes the returned waiters."""
        is_done = all(sequence.is_finished for sequence in self.sequences)
        if not (is_done or self._is_streaming):
            return ()
        first, *others = self.sequences
        output = first.output(*others)
        with self._changed:
            self._output = output
            self._version += 1
            if is_done:
                self._is_done = True
                self._error = next((s.error for s in self.sequences if s.error is not None), None)
                self._owner = None
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        return waiters

    def give_up(self, error: ReplaySSMError, *, is_forked: bool = False) -> Iterable[Waiter]:
        """End with an error where no last output can be had; for the worker alone, as ``publish``.

        Args:
            error: why; one that ended the request before stays.
            is_forked: in a process in which whoever holds the handle's lock may not exist.
        """
        if is_forked:
            self._changed = threading.Condition()
        with self._changed:
            if self._is_done:
                return ()
            self._is_done, self._error, self._owner = True, error, None
            self._version += 1
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        return waiters

    async def _next_change(self, seen: int) -> None:
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._version != seen or self._is_done:  # the end may have come after ``seen`` was asked for
                return
            waiter = (loop, loop.create_future())
            self._waiters.append(waiter)
        try:
            await waiter[1]
        finally:
            with self._changed:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def _last(self) -> RequestOutput:
        if self._error is not None:
            raise self._error.with_traceback(None)  # whoever asks again adds to what is there, and keeps it alive
        assert self._output is not None, "the end of a request has an output or an error"
        return self._output


def wake(waiters: Iterable[Waiter]) -> None:
    """Let coroutines go on, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in waiters:
        by_loop.setdefault(loop, []).append(future)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, futures)
        except Exception:  # noqa: BLE001 - a RuntimeError of one that was closed: nobody waits there any more
            continue


def _set_all(futures: Sequence["asyncio.Future[None]"]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
