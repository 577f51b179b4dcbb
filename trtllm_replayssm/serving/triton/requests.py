"""The tensors of a Triton request -> a prompt, its ``SamplingParams``, and what the response is to hold."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_replayssm.config import GuidedDecodingParams, SamplingParams
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.serving.triton.fields import INPUTS, LIST, Field

Array = npt.NDArray[Any]

_BY_NAME = {field.name: field for field in INPUTS}
_SAMPLED_BY = ("top_k", "top_p", "min_p")
# TensorRT-LLM's type of a guide -> the option of ``GuidedDecodingParams`` that takes its text.
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}


@dataclass(frozen=True)
class GenerationRequest:
    """What one Triton request asks for.

    Attributes:
        prompt: text or token ids.
        params: how tokens are chosen.
        streaming: whether to send what is new after every step.
        with_input: put the prompt's text in front of each text.
        pad_id: fills rows of token ids.
        with_log_probs: return log-probabilities.
        with_num_input_tokens: return the number of the prompt's tokens.
        with_num_output_tokens: return the number of generated tokens.
        timeout_s: when the request ends at the latest; None for never.
    """

    prompt: str | tuple[int, ...]
    params: SamplingParams
    streaming: bool = False
    with_input: bool = False
    pad_id: int = -1
    with_log_probs: bool = False
    with_num_input_tokens: bool = False
    with_num_output_tokens: bool = False
    timeout_s: float | None = None


def read_request(
    tensors: Mapping[str, Array], parameters: Mapping[str, object], *, is_decoupled: bool, timeout_us: int = 0
) -> GenerationRequest:
    """Read a request.

    Args:
        tensors: its inputs, the batch dimension included.
        parameters: its parameters; Triton's ``generate`` puts there every key of the body that is no input.
        is_decoupled: whether the model may answer several times.
        timeout_us: microseconds that the client gives it; 0 for any number.

    Raises:
        RequestError: something is missing, unknown, or not of its form.
        ConfigError: sampling options are out of range.
    """
    _check_parameters(parameters)
    values = {name: _value(_BY_NAME[name], tensor) for name, tensor in tensors.items()}
    streaming = values.get("stream", False)
    if streaming and not is_decoupled:
        raise RequestError(
            "stream: found true for a model that answers once; needed false. Use a model with the decoupled "
            "transaction policy."
        )
    if values.get("beam_width", 1) != 1:
        raise RequestError(
            f"beam_width: found {values['beam_width']}; needed 1, for there is no beam search. "
            f"Use num_return_sequences for several samples."
        )
    return GenerationRequest(
        prompt=_prompt(values),
        params=_params(values),
        streaming=streaming,
        with_input=not values.get("exclude_input_in_output", True),
        pad_id=values.get("pad_id", -1),
        with_log_probs=values.get("return_log_probs", False),
        with_num_input_tokens=values.get("return_num_input_tokens", False),
        with_num_output_tokens=values.get("return_num_output_tokens", False),
        timeout_s=timeout_us / 1e6 if timeout_us else None,
    )


def _check_parameters(parameters: Mapping[str, object]) -> None:
    # Triton's own begin so; those of a header pattern are the operator's and said by nobody's mistake.
    for name in parameters:
        if name.startswith(("triton_", "sequence_", "binary_data")):
            continue
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f" Was {near[0]} meant?" if near else f" Known are {', '.join(_BY_NAME)}."
        raise RequestError(f"{name}: found a name that is no input of this model; needed one of its inputs.{hint}")


def _value(field: Field, tensor: Array) -> Any:
    """Return a tensor's content: a Python scalar or a tuple of them; empty words, which some clients send, are none."""
    row = tensor.reshape(-1)
    if field.dims != LIST:
        if row.size != 1:
            raise RequestError(f"{field.name}: found {row.size} values; needed one.")
        return _plain(field, row[0])
    values = tuple(_plain(field, item) for item in row)
    return tuple(word for word in values if word != "") if field.data_type == "TYPE_STRING" else values


def _plain(field: Field, item: Any) -> Any:
    if field.data_type == "TYPE_STRING":
        try:
            return item.decode("utf-8") if isinstance(item, bytes) else str(item)
        except UnicodeDecodeError as error:
            raise RequestError(f"{field.name}: found bytes that are no UTF-8 ({error}); needed text.") from error
    if field.data_type == "TYPE_FP32":
        return float(str(np.float32(item)))  # what a client wrote as 0.8 is 0.8, not 0.800000012
    return bool(item) if field.data_type == "TYPE_BOOL" else int(item)


def _prompt(values: Mapping[str, Any]) -> str | tuple[int, ...]:
    given = [name for name in ("text_input", "input_ids") if name in values]
    if len(given) != 1:
        raise RequestError(
            f"prompt: found {' and '.join(given) or 'neither text_input nor input_ids'}; needed one of the two."
        )
    prompt: str | tuple[int, ...] = values[given[0]]
    return prompt


def _params(values: Mapping[str, Any]) -> SamplingParams:
    if "min_tokens" in values and "min_length" in values:
        raise RequestError("min_length: found together with min_tokens, its newer name; needed one of the two.")
    options = {field.option: values[field.name] for field in INPUTS if field.option and field.name in values}
    if "temperature" not in values and not any(name in values for name in _SAMPLED_BY):
        options["temperature"] = 0.0
    if values.get("return_log_probs"):
        options["logprobs"] = 0
    return SamplingParams(**options, guided_decoding=_guided_decoding(values))


def _guided_decoding(values: Mapping[str, Any]) -> GuidedDecodingParams | None:
    kind, guide = values.get("guided_decoding_guide_type"), values.get("guided_decoding_guide")
    if kind is None and guide is None:
        return None
    if kind == "json" and guide is None:
        return GuidedDecodingParams(json_object=True)
    if kind not in _GUIDES or guide is None:
        raise RequestError(
            f"guided_decoding_guide_type: found {kind!r} {'without' if guide is None else 'with'} a "
            f"guided_decoding_guide; needed 'json' alone, or one of {', '.join(map(repr, _GUIDES))} with a guide."
        )
    return GuidedDecodingParams(**{_GUIDES[kind]: guide})
