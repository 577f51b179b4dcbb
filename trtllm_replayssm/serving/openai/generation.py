"""One client's request at work: one handle a prompt, waited for together and ended together."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.runtime.handle import RequestHandle
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.serving.openai.errors import ApiError, failed, shutting_down


class Generation:
    """The handles of a request.

    Args:
        handles: one for each prompt.
        is_guided: whether the client brought a grammar.
    """

    def __init__(self, handles: Sequence[RequestHandle], *, is_guided: bool) -> None:
        self._handles = tuple(handles)
        self._is_guided = is_guided

    @property
    def outputs(self) -> list[RequestOutput]:
        """The newest output of each prompt that has one."""
        return [handle.output for handle in self._handles if handle.output is not None]

    def abort(self) -> None:
        """Free the slots of what has not ended."""
        for handle in self._handles:
            handle.abort()

    async def results(self) -> list[RequestOutput]:
        """Wait for the whole outputs.

        Raises:
            ApiError: what ended one of them before its time.
        """
        try:
            outputs = [await handle.aresult() for handle in self._handles]
        except ReplaySSMError as error:
            raise failed(error, is_guided=self._is_guided) from error
        for handle, output in zip(self._handles, outputs, strict=True):
            self._check_end(handle, output)
        return outputs

    async def growing(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Go through the outputs of all prompts as they grow, each with its prompt's number.

        Raises:
            ApiError: what ended one of them before its time.
        """
        streams = [handle.__aiter__() for handle in self._handles]
        nexts = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
        try:
            while nexts:
                done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=nexts.__getitem__):
                    number = nexts.pop(task)
                    try:
                        output = task.result()
                    except StopAsyncIteration:
                        continue
                    self._check_end(self._handles[number], output)
                    yield number, output
                    nexts[asyncio.ensure_future(anext(streams[number]))] = number
        except ReplaySSMError as error:
            raise failed(error, is_guided=self._is_guided) from error
        finally:
            for task in nexts:
                task.cancel()

    def _check_end(self, handle: RequestHandle, output: RequestOutput) -> None:
        """Refuse an end that is no client's wish, of one sequence as of all."""
        for sequence, completion in zip(handle.sequences, output.outputs, strict=True):
            if completion.finish_reason == "error":
                assert sequence.error is not None, "an error has ended it"
                raise failed(sequence.error, is_guided=self._is_guided)
            if completion.finish_reason == "timeout":
                raise ApiError(
                    504,
                    "request: found no end within the server's time for a request; needed a shorter one. Lower "
                    "max_tokens, or send it when the server is less busy.",
                    code="timeout",
                )
            if completion.finish_reason == "cancelled":  # nobody but the server aborts what a client still waits for
                raise shutting_down(None)
