"""The bodies of requests: OpenAI's parameters, and those of ``SamplingParams`` that OpenAI does not have.

A parameter that is not here is refused rather than ignored; null is the same as leaving one out.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from trtllm_replayssm.serving.openai.errors import invalid, shown, unreadable

MAX_TOP_LOGPROBS = 20

_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_BodyT = TypeVar("_BodyT", bound="GenerationBody")


class Body(BaseModel):
    """A JSON object of known keys; no value is converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    """What a stream has beside its text.

    Attributes:
        include_usage: a last chunk with the numbers of tokens.
    """

    include_usage: bool = False


class JsonSchema(Body):
    """A schema that the text must follow.

    Attributes:
        name: of no consequence here.
        description: idem.
        schema_: the schema; null for any JSON value that is an object.
        strict: of no consequence: texts always follow the schema.
    """

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be.

    Attributes:
        type: "text" for anything.
        json_schema: of the type that is named so.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                f"found type {self.type!r} with{'out' * (self.json_schema is None)} json_schema; "
                "needed type 'json_schema' with one, or another type without"
            )
        return self


class GenerationBody(Body):
    """What both endpoints have.

    Attributes:
        model: the name that ``/v1/models`` lists.
        stream: send the text while it grows.
        stream_options: with ``stream`` alone.
        user: of no consequence.
        response_format: what the text must be.
        return_token_ids: add the tokens of prompt and text to the result; not OpenAI's.

    The others are explained at ``SamplingParams``; those behind ``user`` are not OpenAI's.
    """

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[_Stop], Field(max_length=16), FailFast()] = []
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: dict[int, float] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat = ResponseFormat(type="text")
    user: str | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    stop_token_ids: Annotated[list[int], Field(max_length=1024), FailFast()] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids_as_text(cls, value: object) -> object:
        if not isinstance(value, dict) or len(value) > 1024:
            found = f"{len(value)} entries" if isinstance(value, dict) else shown(value)
            raise ValueError(f"found {found}; needed an object of at most 1024 token ids, each with a number")
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"found the key {shown(key)}; needed a token id")
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise ValueError(f"found {shown(bias)}; needed a number from -100 to 100")
        return {int(key): float(bias) for key, bias in value.items()}

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: found without stream; needed both or neither")
        return self


class CompletionBody(GenerationBody):
    """``POST /v1/completions``.

    Attributes:
        prompt: texts, or lists of token ids.
        logprobs: so many likeliest tokens at each generated one.
        echo: put the prompt before the text.
    """

    prompt: list[Any]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: object) -> object:
        """Make a list of prompts of any of the four forms; stop at the first thing that is none."""
        prompts = value if isinstance(value, list) else [value]
        if prompts and all(_is_token(item) for item in prompts):
            return [prompts]
        for prompt in prompts:
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_token, prompt))):
                raise ValueError(f"found {shown(prompt)}; needed text, a list of token ids, or a list of these")
        if not prompts:
            raise ValueError("found an empty list; needed at least one prompt or token")
        return prompts

    @model_validator(mode="after")
    def _no_logprobs_of_prompts(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: found with logprobs, which the prompt's tokens do not have; needed one of the two")
        return self


class Message(Body):
    """One turn of a conversation.

    Attributes:
        role: who speaks; "developer" is what models know as "system".
        content: what is said; text parts are joined by line ends.
        name: given to the chat template.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        if value is None or isinstance(value, str):
            return value or ""
        if not isinstance(value, list):
            raise ValueError(f"found {shown(value)}; needed text, or a list of text parts")
        for part in value:
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text or len(part) != 2:
                raise ValueError(
                    f'found {shown(part)}; needed {{"type": "text", "text": ...}}, for models here read text'
                )
        return "\n".join(part["text"] for part in value)


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``.

    Attributes:
        messages: the conversation so far.
        max_completion_tokens: OpenAI's newer name of ``max_tokens``; by default as many as there is room for.
        logprobs: return the log-probability of each token.
        top_logprobs: and those of so many likeliest ones.
        add_generation_prompt: begin the assistant's turn; not OpenAI's, as the next one.
        chat_template_kwargs: further variables of the chat template, ``enable_thinking`` for instance.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _whole_options(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: found without logprobs; needed both or neither")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_completion_tokens: found another number than max_tokens; needed one of the two")
        return self


def read_body(kind: type[_BodyT], data: bytes) -> _BodyT:
    """Read a request.

    Raises:
        ApiError: naming what cannot be read.
    """
    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"body: found no valid JSON ({error}); needed a JSON object.") from None
    if not isinstance(content, dict):
        raise invalid(f"body: found {shown(content)}; needed a JSON object.")
    try:
        return kind.model_validate({key: value for key, value in content.items() if value is not None})
    except ValidationError as error:
        raise unreadable(error) from None


def _is_token(value: object) -> bool:
    return type(value) is int
