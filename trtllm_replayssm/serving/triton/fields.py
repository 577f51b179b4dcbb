"""Inputs and outputs of the Triton model: one table, for ``config.pbtxt`` and for the code that reads requests.

The names are those of TensorRT-LLM's Triton models. Triton's batch dimension comes first in every shape and is 1: a
request is one prompt, and requests are batched by the scheduler behind them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_replayssm.errors import ConfigError

Type = Literal["TYPE_STRING", "TYPE_INT32", "TYPE_FP32", "TYPE_UINT64", "TYPE_BOOL"]

SCALAR = (1,)
LIST = (-1,)


@dataclass(frozen=True)
class Field:
    """One tensor of a request or a response.

    Attributes:
        name: of the tensor.
        data_type: Triton's name of the type.
        dims: the shape behind the batch dimension.
        meaning: for ``config.pbtxt``.
        option: of ``SamplingParams``, where the tensor is one.
    """

    name: str
    data_type: Type
    dims: tuple[int, ...]
    meaning: str
    option: str | None = None


INPUTS = (
    Field("text_input", "TYPE_STRING", SCALAR, "The prompt. Give this or input_ids."),
    Field("input_ids", "TYPE_INT32", LIST, "The prompt as token ids."),
    Field("max_tokens", "TYPE_INT32", SCALAR, "Most tokens to generate; 32 by default.", "max_tokens"),
    Field(
        "min_tokens",
        "TYPE_INT32",
        SCALAR,
        "No end token or stop word ends the request before so many tokens.",
        "min_tokens",
    ),
    Field("min_length", "TYPE_INT32", SCALAR, "The older name of min_tokens, which GenAI-Perf has.", "min_tokens"),
    Field("num_return_sequences", "TYPE_INT32", SCALAR, "Sequences to sample from the prompt; 1 by default.", "n"),
    Field(
        "temperature",
        "TYPE_FP32",
        SCALAR,
        "0 is greedy. By default 1 where top_k, top_p or min_p is given, else 0.",
        "temperature",
    ),
    Field("top_k", "TYPE_INT32", SCALAR, "Keep the k most likely tokens; 0 keeps all.", "top_k"),
    Field("top_p", "TYPE_FP32", SCALAR, "Keep the fewest tokens that reach this probability.", "top_p"),
    Field("min_p", "TYPE_FP32", SCALAR, "Keep what is at least so likely relative to the most likely token.", "min_p"),
    Field(
        "repetition_penalty",
        "TYPE_FP32",
        SCALAR,
        "Above 1 makes tokens of the sequence less likely.",
        "repetition_penalty",
    ),
    Field(
        "presence_penalty",
        "TYPE_FP32",
        SCALAR,
        "Taken off the logits of tokens of the sequence.",
        "presence_penalty",
    ),
    Field(
        "frequency_penalty",
        "TYPE_FP32",
        SCALAR,
        "The same, times how often the token is there.",
        "frequency_penalty",
    ),
    Field(
        "prompt_ignore_length",
        "TYPE_INT32",
        SCALAR,
        "So many tokens of the prompt count for neither of the two penalties above.",
        "prompt_ignore_length",
    ),
    Field("seed", "TYPE_UINT64", SCALAR, "Of this request's random numbers; by default a new one.", "seed"),
    Field("stop_words", "TYPE_STRING", LIST, "Text that ends the request; empty strings are left out.", "stop"),
    Field("bad_words", "TYPE_STRING", LIST, "Text not to generate; empty strings are left out.", "bad"),
    Field("end_id", "TYPE_INT32", SCALAR, "The end token, when it is not the model's own.", "end_id"),
    Field(
        "guided_decoding_guide_type",
        "TYPE_STRING",
        SCALAR,
        "What the text must be: json (any object), json_schema, regex or ebnf_grammar.",
    ),
    Field("guided_decoding_guide", "TYPE_STRING", SCALAR, "The schema, regular expression or grammar."),
    Field("pad_id", "TYPE_INT32", SCALAR, "Fills output_ids behind the shorter of several sequences; -1 by default."),
    Field("beam_width", "TYPE_INT32", SCALAR, "1: there is no beam search."),
    Field("exclude_input_in_output", "TYPE_BOOL", SCALAR, "Leave the prompt out of text_output; true by default."),
    Field("stream", "TYPE_BOOL", SCALAR, "Send what is new after every step; of decoupled models alone."),
    Field("return_log_probs", "TYPE_BOOL", SCALAR, "Return cum_log_probs and output_log_probs."),
    Field("return_num_input_tokens", "TYPE_BOOL", SCALAR, "Return num_input_tokens."),
    Field("return_num_output_tokens", "TYPE_BOOL", SCALAR, "Return num_output_tokens."),
)
"""All of them are optional to Triton, so that what is missing is said by the model, in a sentence."""

OUTPUTS = (
    Field("text_output", "TYPE_STRING", LIST, "Per sequence, the text; of a stream, what is new of it."),
    Field("output_ids", "TYPE_INT32", (-1, -1), "Per sequence, the generated tokens; of a stream, the new ones."),
    Field("sequence_length", "TYPE_INT32", LIST, "Per sequence, how many of output_ids are tokens."),
    Field("finish_reason", "TYPE_STRING", LIST, "Per sequence, stop, length or timeout; empty while it goes on."),
    Field("stop_reason", "TYPE_STRING", LIST, "Per sequence, the stop word or stop token that ended it, or empty."),
    Field("cum_log_probs", "TYPE_FP32", LIST, "Per sequence, the sum of its tokens' log-probabilities so far."),
    Field("output_log_probs", "TYPE_FP32", (-1, -1), "The log-probability of each of output_ids."),
    Field("num_input_tokens", "TYPE_INT32", SCALAR, "Tokens of the prompt."),
    Field("num_output_tokens", "TYPE_INT32", LIST, "Per sequence, tokens generated so far."),
)

BATCH_SIZE = 1
"""Triton's ``max_batch_size``: prompts of one request."""


def check_declared(config: Mapping[str, Any]) -> None:
    """Refuse a model configuration whose tensors are not those of the table; it may leave out some.

    Args:
        config: as Triton hands it to a model.

    Raises:
        ConfigError: naming the first tensor that is unknown or of another type.
    """
    for kind, fields in (("input", INPUTS), ("output", OUTPUTS)):
        types = {field.name: field.data_type for field in fields}
        for tensor in config.get(kind, ()):
            name, found = tensor["name"], tensor["data_type"]
            if name not in types:
                raise ConfigError(
                    f"{kind} {name}: found it in config.pbtxt; needed none of that name. Known are {', '.join(types)}."
                )
            if found != types[name]:
                raise ConfigError(f"{kind} {name}: found {found} in config.pbtxt; needed {types[name]}.")
