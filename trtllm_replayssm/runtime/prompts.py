"""What a user may pass to ``generate``, and the checks that every prompt passes before any runs."""

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


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

    def requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], first_id: int) -> list[Request]:
        """Return one request per prompt; nothing runs unless all are good.

        Raises:
            RequestError: naming the prompt by its number.
        """
        return [
            self._request(first_id + number, number, prompt, rules)
            for number, (prompt, rules) in enumerate(zip(prompts, params, strict=True))
        ]

    def _request(self, request_id: int, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        token_ids = self._token_ids(number, prompt)
        self._check_length(number, token_ids)
        self._check_params(number, params)
        end_ids = frozenset(self.geometry.eos_token_ids if params.end_id is None else (params.end_id,))
        return Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            end_ids=frozenset() if params.ignore_eos else end_ids,
            max_new_tokens=min(params.max_tokens, self.limits.max_seq_len - len(token_ids)),
            text=self.tokenizer.stream(skip_special_tokens=params.skip_special_tokens) if self.tokenizer else None,
        )

    def _token_ids(self, number: int, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"prompt {number}: found text, and the model folder has no tokenizer.json; needed token ids. "
                    f"Copy the model's tokenizer.json into the folder, or pass a list of ids."
                )
            token_ids = tuple(self.tokenizer.encode(prompt))
        else:
            token_ids = tuple(_integer(number, value) for value in prompt)
        vocab_size = self.geometry.vocab_size
        bad = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if bad:
            raise RequestError(f"prompt {number}: found token id {bad[0]}; needed 0 <= id < {vocab_size}.")
        return token_ids

    def _check_length(self, number: int, token_ids: tuple[int, ...]) -> None:
        length, limits = len(token_ids), self.limits
        if not length:
            raise RequestError(f"prompt {number}: found no tokens; needed at least one.")
        if length > limits.max_input_len:
            raise RequestError(
                f"prompt {number}: found {length} tokens; needed at most max_input_len ({limits.max_input_len}). "
                f"Shorten it, or raise the limit where the model is loaded or the engine is built."
            )
        if length >= limits.max_seq_len:
            raise RequestError(
                f"prompt {number}: found {length} tokens; needed fewer than max_seq_len ({limits.max_seq_len}), "
                f"which counts the generated ones as well. Shorten it or raise max_seq_len."
            )

    def _check_params(self, number: int, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise RequestError(
                f"prompt {number}: found stop strings {params.stop}, and the model folder has no tokenizer.json; "
                f"needed a tokenizer. Use stop_token_ids instead."
            )
        vocab_size = self.geometry.vocab_size
        named = (*params.stop_token_ids, *(() if params.end_id is None else (params.end_id,)))
        bad = [token_id for token_id in named if not 0 <= token_id < vocab_size]
        if bad:
            raise RequestError(f"prompt {number}: found stop or end token id {bad[0]}; needed 0 <= id < {vocab_size}.")


def as_list(prompts: Prompts) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether the caller gave a single one.

    A string is one prompt, and so is a sequence of ints; anything else is a sequence of those.

    Raises:
        RequestError: neither.
    """
    if isinstance(prompts, str):
        return [prompts], True
    try:
        items = list(prompts)
    except TypeError:
        raise RequestError(
            f"prompts: found {type(prompts).__name__}; needed text, token ids or a list of those."
        ) from None
    if not items:
        raise RequestError("prompts: found an empty list; needed at least one prompt or token.")
    if all(_is_integer(item) for item in items):
        return [[operator.index(item) for item in items]], True  # type: ignore[arg-type]
    for number, item in enumerate(items):
        if not isinstance(item, str) and not hasattr(item, "__iter__"):
            raise RequestError(f"prompt {number}: found {type(item).__name__}; needed text or a list of token ids.")
    return items, False  # type: ignore[return-value]


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> Sequence[SamplingParams]:
    """Return one ``SamplingParams`` per prompt.

    Raises:
        RequestError: a list of another length.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"sampling_params: found {len(params)} for {count} prompts; needed one, or one per prompt.")
    return params


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _integer(number: int, value: object) -> int:
    if not _is_integer(value):
        raise RequestError(f"prompt {number}: found {value!r} among its token ids; needed whole numbers.")
    return operator.index(value)  # type: ignore[arg-type]
