"""What a user may pass to ``generate``, and the checks that every prompt passes before any runs."""

import numbers
import operator
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.guided import Grammars, GrammarState
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.text_stream import TextStream
from trtllm_replayssm.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a mapping with one of the keys "prompt" and "prompt_token_ids"."""
Inputs = Prompt | Sequence[Prompt]
PlainPrompt = str | tuple[int, ...]

_KINDS = 'text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@dataclass(frozen=True)
class PromptDesk:
    """Turns prompts into requests, or refuses them.

    Attributes:
        geometry: vocabulary and end tokens.
        limits: longest prompt and sequence.
        tokenizer: None refuses text.
    """

    geometry: ModelGeometry
    limits: EngineLimits
    tokenizer: Tokenizer | None

    def requests(
        self, prompts: Sequence[PlainPrompt], params: Sequence[SamplingParams], first_id: int
    ) -> list[list[Request]]:
        """Return per prompt its params.n sequences, numbered one after another; nothing runs unless all are good.

        Raises:
            RequestError: naming the prompt by its number.
        """
        requests = []
        for number, (prompt, rules) in enumerate(zip(prompts, params, strict=True)):
            requests.append(self._sequences(first_id, number, prompt, rules))
            first_id += rules.n
        return requests

    def _sequences(self, first_id: int, number: int, prompt: PlainPrompt, params: SamplingParams) -> list[Request]:
        token_ids = self._token_ids(number, prompt)
        self._check_length(number, token_ids)
        self._check_params(number, params)
        end_ids = self._end_ids(params)
        bad_words = self._bad_words(number, params)
        self._check_bans(number, params, end_ids, bad_words)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return [
            Request(
                request_id=first_id + index,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=token_ids,
                params=params,
                seed=seed,
                end_ids=end_ids,
                max_new_tokens=min(params.max_tokens, self.limits.max_seq_len - len(token_ids)),
                index=index,
                bad_words=bad_words,
                text=self._stream(params),
                grammar=self._grammar(number, params, end_ids),
            )
            for index in range(params.n)
        ]

    def _grammar(self, number: int, params: SamplingParams, end_ids: frozenset[int]) -> GrammarState | None:
        if params.guided_decoding is None:
            return None
        if self.tokenizer is None:
            raise _no_tokenizer(number, "guided_decoding", "logit_bias or bad_token_ids")
        try:
            return self._grammars.start(params.guided_decoding, end_ids.union(params.stop_token_ids))
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error.message}") from error

    @cached_property
    def _grammars(self) -> Grammars:
        assert self.tokenizer is not None, "grammars are of a tokenizer's tokens"
        return Grammars(self.tokenizer, self.geometry)

    def _stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.stream(
            skip_special_tokens=params.skip_special_tokens, keeps_stop=params.include_stop_str_in_output
        )

    def _token_ids(self, number: int, prompt: PlainPrompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"prompt {number}: found text, and the model folder has no tokenizer.json; needed token ids. "
                    f"Copy the model's tokenizer.json into the folder, or pass a list of ids."
                )
            prompt = tuple(self.tokenizer.encode(prompt))
        vocab_size = self.geometry.vocab_size
        bad = [token_id for token_id in prompt if not 0 <= token_id < vocab_size]
        if bad:
            raise RequestError(f"prompt {number}: found token id {bad[0]}; needed 0 <= id < {vocab_size}.")
        return prompt

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        model_ids = self.geometry.eos_token_ids if params.end_id is None else (params.end_id,)
        return frozenset(() if params.ignore_eos else model_ids)

    def _bad_words(self, number: int, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        words: set[tuple[int, ...]] = {(token_id,) for token_id in params.bad_token_ids}
        for text in params.bad:
            if self.tokenizer is None:
                raise _no_tokenizer(number, f"bad strings {params.bad}", "bad_token_ids")
            # Most tokenizers have other tokens for a word behind a space than for the same letters elsewhere.
            for form in (text,) if text[0].isspace() else (text, f" {text}"):
                words.add(tuple(self.tokenizer.encode(form, name="bad", add_special_tokens=False)))
        return tuple(sorted(word for word in words if word))

    def _check_bans(
        self, number: int, params: SamplingParams, end_ids: frozenset[int], bad_words: Sequence[tuple[int, ...]]
    ) -> None:
        """Refuse rules that may leave no token to choose."""
        vocab_size = self.geometry.vocab_size
        bad = frozenset(word[-1] for word in bad_words)
        if len(bad) >= vocab_size:
            raise RequestError(
                f"prompt {number}: found all {vocab_size} tokens of the vocabulary among bad_token_ids and the ends of "
                f"bad strings; needed one that may be generated."
            )
        if params.min_tokens and len(bad | end_ids.union(params.stop_token_ids)) >= vocab_size:
            raise RequestError(
                f"prompt {number}: found min_tokens={params.min_tokens} with all {vocab_size} tokens of the vocabulary "
                f"among stop_token_ids, end tokens and bad ones; needed one that may be generated before the end."
            )

    def _check_length(self, number: int, token_ids: tuple[int, ...]) -> None:
        length, limits = len(token_ids), self.limits
        if not length:
            raise RequestError(f"prompt {number}: found no tokens; needed at least one.")
        if length > limits.max_input_len:
            raise RequestError(
                f"prompt {number}: found {length} tokens; needed at most max_input_len ({limits.max_input_len}). "
                f"Shorten it, or raise max_seq_len where the model is loaded; an engine has both from its build."
            )
        if length >= limits.max_seq_len:
            raise RequestError(
                f"prompt {number}: found {length} tokens; needed fewer than max_seq_len ({limits.max_seq_len}), "
                f"which counts the generated ones as well. Shorten it or raise max_seq_len."
            )

    def _check_params(self, number: int, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise _no_tokenizer(number, f"stop strings {params.stop}", "stop_token_ids")
        named = {
            "stop or end token": (*params.stop_token_ids, *(() if params.end_id is None else (params.end_id,))),
            "bad token": params.bad_token_ids,
            "logit_bias token": tuple(params.logit_bias),
        }
        vocab_size = self.geometry.vocab_size
        if (params.logprobs or 0) > vocab_size:
            raise RequestError(f"prompt {number}: found logprobs={params.logprobs}; needed at most {vocab_size}.")
        for name, token_ids in named.items():
            bad = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
            if bad:
                raise RequestError(f"prompt {number}: found {name} id {bad[0]}; needed 0 <= id < {vocab_size}.")


def as_list(inputs: Inputs) -> tuple[list[PlainPrompt], bool]:
    """Return the prompts as a list, and whether the caller gave a single one.

    Text, a mapping and a sequence of ints are one prompt each; any other sequence is one of prompts.

    Raises:
        RequestError: none of these; the prompt is named by its number.
    """
    if isinstance(inputs, str | Mapping):
        return [_plain(0, inputs)], True
    items = _items(inputs)
    if items is None:
        raise RequestError(f"inputs: found {_type_name(inputs)}; needed {_KINDS}, or a list of those.")
    if not items:
        raise RequestError("inputs: found an empty list; needed at least one prompt or token.")
    if any(_index(item) is not None for item in items):
        return [_plain(0, items)], True
    return [_plain(number, item) for number, item in enumerate(items)], False


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> Sequence[SamplingParams]:
    """Return one ``SamplingParams`` per prompt.

    Raises:
        RequestError: something else, or a list of another length.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    items = _items(params)
    strangers = [params] if items is None else [item for item in items if not isinstance(item, SamplingParams)]
    if strangers:
        raise RequestError(
            f"sampling_params: found {_type_name(strangers[0])}; needed SamplingParams, or a list of them, one per "
            f"prompt."
        )
    if len(params) != count:
        raise RequestError(f"sampling_params: found {len(params)} for {count} prompts; needed one, or one per prompt.")
    return params


def schedule(priority: int, timeout_s: float | None) -> tuple[int, float | None]:
    """Return a priority and a time as Python's own numbers, which neither wrap around nor lack an order.

    Raises:
        RequestError: one is none.
    """
    whole = _index(priority)
    if whole is None:
        raise RequestError(f"priority: found {priority!r}; needed a whole number.")
    if timeout_s is None:
        return whole, None
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not (is_number and timeout_s > 0):
        raise RequestError(f"timeout_s: found {timeout_s!r}; needed seconds, more than 0, or None.")
    try:
        return whole, float(timeout_s)
    except OverflowError:
        return whole, None  # later than the end of all days


def _no_tokenizer(number: int, found: str, instead: str) -> RequestError:
    return RequestError(
        f"prompt {number}: found {found}, and the model folder has no tokenizer.json; needed a tokenizer. "
        f"Use {instead} instead."
    )


def _plain(number: int, prompt: object) -> PlainPrompt:
    content = _content(number, prompt) if isinstance(prompt, Mapping) else prompt
    if isinstance(content, str):
        return content
    items = _items(content)
    if items is None:
        raise RequestError(f"prompt {number}: found {_type_name(content)}; needed {_KINDS}.")
    return tuple(_token_id(number, item) for item in items)


def _content(number: int, prompt: Mapping[object, object]) -> object:
    """Return what a mapping holds: text under "prompt", token ids under "prompt_token_ids"."""
    key = next(iter(prompt), None)
    if len(prompt) != 1 or key not in ("prompt", "prompt_token_ids"):
        raise RequestError(f"prompt {number}: found a mapping with the keys {list(prompt)}; needed {_KINDS}.")
    content = prompt[key]
    if isinstance(content, str) != (key == "prompt"):
        raise RequestError(f"prompt {number}: found {_type_name(content)} under {key!r}; needed {_KINDS}.")
    return content


def _items(value: object) -> list[object] | None:
    """Return the items of a list or whatever is like one, an array for instance; None for anything else."""
    is_like_a_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not is_like_a_list or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:  # an array without dimensions
        return None


def _token_id(number: int, value: object) -> int:
    token_id = _index(value)
    if token_id is None:
        raise RequestError(f"prompt {number}: found {reprlib.repr(value)} among its token ids; needed whole numbers.")
    return token_id


def _index(value: object) -> int | None:
    # An array of one element has __index__ as well, yet it is a list of one.
    if isinstance(value, bool) or getattr(value, "ndim", 0) > 0:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _type_name(value: object) -> str:
    return type(value).__name__
