"""What ``LLM.generate`` returns, in TensorRT-LLM's shape."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

FinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


@dataclass(frozen=True)
class Logprob:
    """How likely the model found a token.

    Attributes:
        logprob: natural log-probability.
        rank: 1 for the likeliest token of the vocabulary; equals share a rank.
    """

    logprob: float
    rank: int


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: number of the sequence within its request.
        text: the generated text without the end token, stop token or stop string that ended it, the stop string with
            include_stop_str_in_output; "" without a tokenizer. While the sequence goes on, what may become a stop
            string is held back.
        token_ids: every generated token, those of the stop string and the end token included.
        cumulative_logprob: sum of the tokens' natural log-probabilities under the model's own logits, before
            bias, penalties, temperature and everything else.
        finish_reason: "stop" for an end token, stop token or stop string, "length" at max_tokens or max_seq_len,
            "timeout" and "cancelled" as the words say, "error" for one that the request's output names; None before
            the end.
        stop_reason: the stop string or stop token id that ended the request; None for the end token and for "length".
        logprobs: per token, those of the likeliest tokens, most likely first, and of the token itself, last where it is
            none of them; None unless ``SamplingParams.logprobs`` asks for it.
        num_seen_characters: of the text, those that the same iteration over the request has given before.
        num_seen_tokens: of the tokens, likewise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None = None
    num_seen_characters: int = field(default=0, repr=False, compare=False)
    num_seen_tokens: int = field(default=0, repr=False, compare=False)

    @property
    def text_diff(self) -> str:
        """The text that an iteration over the request gives for the first time; elsewhere all of it."""
        return self.text[self.num_seen_characters :]

    @property
    def token_ids_diff(self) -> list[int]:
        """The tokens that an iteration gives for the first time; there may be some without any text yet."""
        return self.token_ids[self.num_seen_tokens :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]] | None:
        """What ``logprobs`` has for these tokens."""
        return None if self.logprobs is None else self.logprobs[self.num_seen_tokens :]

    def since(self, before: "CompletionOutput") -> Self:
        """Return the sequence with the differences from what it was ``before``."""
        return replace(self, num_seen_characters=len(before.text), num_seen_tokens=len(before.token_ids))


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and what was generated from it.

    Attributes:
        request_id: counts up over the life of an ``LLM``, by as many as the prompt has sequences.
        prompt: the prompt's text; None when it was given as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: the generated sequences, ``SamplingParams.n`` of them.
        finished: whether all of them have ended.
        error: what ended a sequence with finish_reason "error"; None without such a one.
        cached_tokens: of the prompt, those that did not run because the prefix cache held what comes of them.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    cached_tokens: int = field(default=0, compare=False)

    def since(self, before: "RequestOutput") -> Self:
        """Return the output with the differences of its sequences from what they were ``before``."""
        pairs = zip(self.outputs, before.outputs, strict=True)
        return replace(self, outputs=[sequence.since(earlier) for sequence, earlier in pairs])
