"""Results as OpenAI's clients read them: whole ones and chunks of a stream, of completions and of chats."""

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_replayssm.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from trtllm_replayssm.runtime.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """The texts of single tokens.

    Args:
        tokenizer: None where the model's folder has none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """Return a token's text, or "token_id:<id>" where it has none of its own: a part of a character."""
        text = "" if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text if text and _REPLACEMENT not in text else f"token_id:{token_id}"

    def bytes(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token's text; None where it has none of its own."""
        text = self.text(token_id)
        return None if text == f"token_id:{token_id}" else list(text.encode())


class Choice:
    """One sequence of a request, as a whole or in a stream's pieces.

    Args:
        index: among the request's.
        is_chat: whether the request was a chat.
        texts: of tokens.
        num_top: likeliest tokens that were asked for; None for no log-probabilities.
        echo: text to put first.
        returns_token_ids: whether tokens were asked for.
    """

    def __init__(
        self,
        index: int,
        *,
        is_chat: bool,
        texts: TokenTexts,
        num_top: int | None,
        echo: str,
        returns_token_ids: bool,
        skips_special: bool,
    ) -> None:
        self.index = index
        self._is_chat = is_chat
        self._texts = texts
        self._num_top = num_top
        self._echo = echo
        self._returns_token_ids = returns_token_ids
        self._is_ended = False
        tokenizer = texts.tokenizer
        # Follows the sequence to tell where in the text each token begins.
        self._offsets = None if tokenizer is None else tokenizer.stream(skip_special_tokens=skips_special)

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Return the finished sequence."""
        text = self._echo + completion.text
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}
        )
        prompt = {"prompt_token_ids": output.prompt_token_ids} if self._returns_token_ids else {}
        return self._entry(content, completion, completion.finish_reason) | prompt

    def first(self) -> dict[str, Any] | None:
        """Return what a stream begins with; None for nothing."""
        if self._is_chat:
            return self._bare({"delta": {"role": "assistant", "content": ""}})
        return self._bare({"text": self._echo}) if self._echo else None

    def delta(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Return what an item of a handle's iteration has for the first time; None for nothing."""
        text, reason = completion.text_diff, completion.finish_reason
        has_tokens = bool(completion.token_ids_diff) and (self._num_top is not None or self._returns_token_ids)
        if self._is_ended or not (text or reason or has_tokens):
            return None
        self._is_ended = reason is not None
        return self._entry(
            {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}, completion, reason
        )

    def _bare(self, content: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, **content, "logprobs": None, "finish_reason": None}

    def _entry(self, content: dict[str, Any], completion: CompletionOutput, reason: str | None) -> dict[str, Any]:
        """Return a choice with the tokens that the client has not seen."""
        tokens = completion.token_ids_diff
        entry = {"index": self.index, **content, "logprobs": None, "finish_reason": reason}
        if reason == "stop":
            entry["stop_reason"] = completion.stop_reason
        if completion.logprobs_diff is not None:
            entry["logprobs"] = self._logprobs(tokens, completion.logprobs_diff)
        return entry | ({"token_ids": tokens} if self._returns_token_ids else {})

    def _logprobs(self, tokens: Sequence[int], found: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        if self._is_chat:
            entries = [self._chat_logprob(token, likeliest) for token, likeliest in zip(tokens, found, strict=True)]
            return {"content": entries, "refusal": None}
        return {
            "tokens": [self._texts.text(token) for token in tokens],
            "token_logprobs": [likeliest[token].logprob for token, likeliest in zip(tokens, found, strict=True)],
            "top_logprobs": [
                {self._texts.text(i): entry.logprob for i, entry in likeliest.items()} for likeliest in found
            ],
            "text_offset": [self._offset(token) for token in tokens],
        }

    def _chat_logprob(self, token: int, likeliest: Mapping[int, Logprob]) -> dict[str, Any]:
        top = list(likeliest.items())[: self._num_top]
        return self._named(token, likeliest[token]) | {"top_logprobs": [self._named(i, entry) for i, entry in top]}

    def _named(self, token: int, entry: Logprob) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": entry.logprob, "bytes": self._texts.bytes(token)}

    def _offset(self, token: int) -> int:
        if self._offsets is None:
            return 0
        offset = len(self._offsets.text)
        self._offsets.push(token)
        return offset


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the numbers of tokens of a request's prompts and sequences, and how many the prefix cache had."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
    }
