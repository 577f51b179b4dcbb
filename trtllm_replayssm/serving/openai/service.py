"""What stands between HTTP and the ``LLM``: it submits requests, knows those that run, and ends them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trtllm_replayssm.errors import ReplaySSMError, error_text
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.prompts import PlainPrompt
from trtllm_replayssm.serving.openai.chat_template import ChatTemplate
from trtllm_replayssm.serving.openai.errors import ApiError, invalid, refused
from trtllm_replayssm.serving.openai.generation import Generation
from trtllm_replayssm.serving.openai.protocol import ChatBody, CompletionBody
from trtllm_replayssm.serving.openai.sampling import sampling_params
from trtllm_replayssm.serving.openai.settings import ServerSettings


class Service:
    """The model, its limits and what runs on it.

    Args:
        llm: the model; the service does not close it.
        settings: limits and times.
        chat_template: None refuses chats.

    Attributes:
        is_draining: no more requests are taken.
        is_ending: set when those that were taken must end.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, chat_template: ChatTemplate | None) -> None:
        self.llm = llm
        self.settings = settings
        self._chat_template = chat_template
        self._running: set[Generation] = set()
        self.is_draining = False
        self.is_ending = asyncio.Event()

    @property
    def obstacle(self) -> str | None:
        """Why no request is taken; None where they are."""
        if self.is_draining:
            return "shutting down"
        return None if self.llm.is_healthy else "the model has failed, or is closed"

    def check_model(self, name: str) -> None:
        """Refuse what asks for another model.

        Raises:
            ApiError: naming the one that is there.
        """
        own = self.settings.model_name
        if name != own:
            message = f"model: found {name[:100]!r}; needed {own!r}, the one that this server has."
            raise ApiError(404, message, code="model_not_found", param="model")

    def prompts(self, body: CompletionBody | ChatBody) -> list[PlainPrompt]:
        """Return the prompts of a request; a chat has one.

        Raises:
            ApiError: there is no chat template, or it refuses the conversation.
        """
        if isinstance(body, CompletionBody):
            return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompt]
        tokenizer = self.llm.tokenizer
        if self._chat_template is None or tokenizer is None:
            raise invalid(
                "messages: found a model without a chat template or without a tokenizer; needed both. Use "
                "/v1/completions, or start the server with --chat_template.",
                param="messages",
            )
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        for message in messages:
            message["role"] = message["role"].replace("developer", "system")
        try:
            text = self._chat_template.render(
                messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs
            )
            # The template has written the special tokens itself.
            return [tuple(tokenizer.encode(text, name="messages", add_special_tokens=False))]
        except ReplaySSMError as error:
            raise invalid(error.message, param="messages") from error

    async def submit(self, body: CompletionBody | ChatBody) -> Generation:
        """Queue a request's prompts, all of them or none.

        Raises:
            ApiError: they cannot be served, or not now.
        """
        work = asyncio.ensure_future(asyncio.to_thread(self._submit, body))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:  # the client has left while its prompt was tokenised
            work.add_done_callback(_abort_result)
            raise
        except Exception:
            raise
        except BaseException as error:  # a Rust library's panic, which no handler of exceptions would meet
            raise RuntimeError(f"{type(error).__name__}: {error_text(error)}") from error

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        """Know of a request while its client waits; free its slots whatever ends the waiting."""
        self._running.add(generation)
        if self.is_ending.is_set():  # its prompt was tokenised meanwhile
            generation.abort()
        try:
            yield
        finally:
            self._running.discard(generation)
            generation.abort()

    def end_all(self) -> None:
        """End what still runs or is still being read; its clients are told so."""
        self.is_ending.set()
        for generation in self._running:
            generation.abort()

    def _submit(self, body: CompletionBody | ChatBody) -> Generation:
        limits, settings = self.llm.limits, self.settings
        params = sampling_params(body, limits.max_seq_len)
        prompts = self.prompts(body)
        count = len(prompts) * params.n
        if count > settings.max_sequences:
            raise invalid(
                f"n: found {count} sequences, prompts times n; needed at most {settings.max_sequences} in one request.",
                param="n",
            )
        rules, timeout_s = [params] * len(prompts), settings.request_timeout_s
        try:
            handles = self.llm.submit(prompts, rules, streaming=body.stream, timeout_s=timeout_s)
        except ReplaySSMError as error:
            raise refused(error, settings.retry_after_s) from error
        return Generation(handles, is_guided=params.guided_decoding is not None)


def _abort_result(work: "asyncio.Future[Generation]") -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().abort()
