"""From a request's parameters to ``SamplingParams``."""

from typing import Any

from trtllm_replayssm.config import GuidedDecodingParams, SamplingParams
from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.serving.openai.errors import invalid
from trtllm_replayssm.serving.openai.protocol import ChatBody, CompletionBody, GenerationBody, ResponseFormat


def sampling_params(body: GenerationBody, max_seq_len: int) -> SamplingParams:
    """Return the rules of a request.

    Penalties are those of OpenAI: for the generated tokens alone, not for the prompt's.

    Args:
        body: the request.
        max_seq_len: as many tokens are generated where the request does not say, or fewer.

    Raises:
        ApiError: contradictory parameters.
    """
    try:
        return SamplingParams(
            max_tokens=_max_tokens(body) or max_seq_len,
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            prompt_ignore_length=max_seq_len,
            logit_bias=body.logit_bias,
            n=body.n,
            seed=body.seed,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
            logprobs=_num_logprobs(body),
            guided_decoding=_guided(body.response_format),
        )
    except ReplaySSMError as error:
        raise invalid(error.message) from error


def _max_tokens(body: GenerationBody) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return body.max_tokens if newer is None else newer


def _num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody), "there are two kinds of requests"
    return (body.top_logprobs or 0) if body.logprobs else None


def _guided(wanted: ResponseFormat) -> GuidedDecodingParams | None:
    if wanted.type == "text":
        return None
    schema: dict[str, Any] | None = None if wanted.json_schema is None else wanted.json_schema.schema_
    if schema is None:
        return GuidedDecodingParams(json_object=True)
    return GuidedDecodingParams(json=schema)
