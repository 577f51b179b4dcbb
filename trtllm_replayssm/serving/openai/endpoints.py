"""The endpoints: read a request, submit it, send its result or its stream."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from trtllm_replayssm import __version__
from trtllm_replayssm.serving.openai.errors import ApiError, invalid, shutting_down
from trtllm_replayssm.serving.openai.event_stream import DONE, EventStream, event, until_gone
from trtllm_replayssm.serving.openai.generation import Generation
from trtllm_replayssm.serving.openai.protocol import ChatBody, CompletionBody, read_body
from trtllm_replayssm.serving.openai.results import Choice, TokenTexts, usage
from trtllm_replayssm.serving.openai.service import Service


class Endpoints:
    """The functions behind the paths.

    Args:
        service: what runs requests.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def completions(self, request: Request) -> ASGIApp:
        """Continue texts."""
        return await self._generate(request, read_body(CompletionBody, await self._body(request)))

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Answer in a conversation."""
        return await self._generate(request, read_body(ChatBody, await self._body(request)))

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the model of a name."""
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """Say whether requests are taken."""
        obstacle = self._service.obstacle
        if obstacle is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": obstacle}, 503)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "trtllm_replayssm",
            "max_model_len": self._service.llm.limits.max_seq_len,
        }

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "content-type: found another one; needed application/json.")
        settings = self._service.settings
        reading = asyncio.ensure_future(_read(request, settings.max_body_bytes))
        ending = asyncio.ensure_future(self._service.is_ending.wait())
        try:
            timeout_s = settings.body_timeout_s
            await asyncio.wait({reading, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if ending.done():
                raise shutting_down(None)
            raise ApiError(408, f"body: found no end of it within {timeout_s:g} s; needed it faster.")
        finally:
            await _give_up(reading, ending)

    async def _generate(self, request: Request, body: CompletionBody | ChatBody) -> ASGIApp:
        self._service.check_model(body.model)
        waiting = asyncio.ensure_future(self._service.submit(body))
        generation: Generation = await self._or_left(request, waiting)
        reply = _Reply(self._service, body, generation, request.state.request_id)
        request.state.generation = generation
        if body.stream:
            return EventStream(reply.events(), self._service.running(generation))
        with self._service.running(generation):
            return JSONResponse(await self._or_left(request, asyncio.ensure_future(reply.whole())))

    async def _or_left(self, request: Request, work: "asyncio.Future[Any]") -> Any:
        """Wait for work, and give it up when the client leaves.

        Raises:
            ClientDisconnect: it has.
        """
        watching = asyncio.ensure_future(until_gone(request.receive))
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            await _give_up(work, watching)


class _Reply:
    """What a client gets for its request."""

    def __init__(
        self, service: Service, body: CompletionBody | ChatBody, generation: Generation, request_id: str
    ) -> None:
        self._body = body
        self._generation = generation
        self._is_chat = isinstance(body, ChatBody)
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())
        self._texts = TokenTexts(service.llm.tokenizer)

    async def whole(self) -> dict[str, Any]:
        outputs = await self._generation.results()
        choices = [
            self._choice(number, completion.index).whole(output, completion)
            for number, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return self._object(choices, is_chunk=False) | {"usage": usage(outputs)}

    async def events(self) -> AsyncIterator[bytes]:
        count = 1 if isinstance(self._body, ChatBody) else len(self._body.prompt)
        choices = [[self._choice(number, index) for index in range(self._body.n)] for number in range(count)]
        for choice in (choice for row in choices for choice in row):
            if (first := choice.first()) is not None:
                yield self._chunk([first])
        try:
            async for number, output in self._generation.growing():
                pairs = zip(choices[number], output.outputs, strict=True)
                deltas = [delta for choice, completion in pairs if (delta := choice.delta(completion)) is not None]
                for delta in deltas:
                    yield self._chunk([delta])
        except ApiError as error:  # the status has been sent: clients look into the events
            yield event(error.body())
            return
        if self._has_usage:
            yield event(self._object([], is_chunk=True) | {"usage": usage(self._generation.outputs)})
        yield DONE

    @property
    def _has_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and options.include_usage

    def _choice(self, number: int, index: int) -> Choice:
        body = self._body
        if isinstance(body, ChatBody):
            num_top, echo = (body.top_logprobs or 0) if body.logprobs else None, ""
        else:
            num_top, echo = body.logprobs, self._echo(body, number)
        return Choice(
            number * body.n + index,
            is_chat=self._is_chat,
            texts=self._texts,
            num_top=num_top,
            echo=echo,
            returns_token_ids=body.return_token_ids,
            skips_special=body.skip_special_tokens,
        )

    def _echo(self, body: CompletionBody, number: int) -> str:
        prompt = body.prompt[number]
        if not body.echo or isinstance(prompt, str):
            return prompt if body.echo else ""
        return "" if self._texts.tokenizer is None else self._texts.tokenizer.decode(prompt)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return event(self._object(choices, is_chunk=True) | ({"usage": None} if self._has_usage else {}))

    def _object(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self._is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
            "system_fingerprint": f"trtllm_replayssm-{__version__}",
            "choices": choices,
        }


async def _give_up(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read(request: Request, most: int) -> bytes:
    """Read a body of bounded size; the rest of a longer one stays unread."""
    said = request.headers.get("content-length", "0")
    too_large = ApiError(
        413, f"body: found more than {most} bytes; needed at most so many. Shorten the prompt.", code="body_too_large"
    )
    if not said.isdigit() or len(said) > 15:
        raise invalid("content-length: found no number of bytes; needed one.")
    if int(said) > most:
        raise too_large
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)
