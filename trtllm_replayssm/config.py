"""What a user sets: sampling, replay and speculation. Frozen; an unknown key is an error."""

import warnings
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.errors import PydanticUserError

from trtllm_replayssm.contract import defaults
from trtllm_replayssm.contract.geometry import AUTO, Frozen, History, StateDtype
from trtllm_replayssm.errors import ConfigError, unknown_key_hint, validation_text

PositiveInt = Annotated[int, Field(ge=1)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]

_MAY_BE_NONE = (
    *("min_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "stop_token_ids", "bad", "bad_token_ids"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_ignore_length", "logit_bias"),
)


class UserOptions(Frozen):
    """Options as a user writes them: no value is converted to another type.

    Raises:
        ConfigError: every option that is unknown, of another type or out of range.
    """

    model_config = ConfigDict(strict=True)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(f"{validation_text(error)}.{unknown_key_hint(error, type(self).model_fields)}") from None


class ReplayConfig(UserOptions):
    """How recurrent layers keep their state.

    Attributes:
        history: most pending tokens of a slot before its checkpoint is written; at least 1 + max_draft_len. "auto"
            takes what costs least for the model, the state type, the drafts and the device; with an engine, what it
            has.
        state_dtype: type of the checkpoint in memory.
        enabled: False runs the conventional decode for comparison: the state is rewritten for every token and, with
            speculation, a state snapshot is kept per window token. The torch executor alone has it.
    """

    history: History = defaults.HISTORY
    state_dtype: StateDtype = defaults.STATE_DTYPE
    enabled: bool = True

    @field_validator("history", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        if (type(value) is int and value >= 1) or (isinstance(value, str) and value == AUTO):
            return value
        raise ValueError(f"found {value!r}; needed an integer from 1 up or {AUTO!r}")


class KvCacheConfig(UserOptions):
    """How much memory the requests' states may take, and the reuse of prompt beginnings.

    With enable_block_reuse, snapshots are kept of prompts that ran, for later ones that begin alike. A snapshot holds
    all states, key/value rows included, so it costs a whole recurrent state however short the prefix is. A request that
    starts from one generates the tokens that it generates without: every prompt then runs in the same pieces, cut at
    the blocks' borders, and snapshots stand at these.

    Attributes:
        free_gpu_memory_fraction: where ``max_batch_size`` is not given, a GPU gets as many slots as fit this part of
            the memory that the weights and the largest step leave free.
        max_tokens: most tokens of all running sequences together, at least ``max_seq_len``; what outgrows it goes back
            to waiting and is computed again. None for what the slots hold, max_batch_size x max_seq_len.
        enable_block_reuse: keep and use snapshots.
        tokens_per_block: prompts share multiples of so many tokens. No prompt piece is longer than a block, so a short
            one makes long prompts slow; at most max_num_tokens, more than 1 + max_draft_len.
        tokens_per_snapshot: a prompt leaves snapshots at its last block border, at the one where it parts from an
            earlier prompt, and every so many tokens, rounded up to whole blocks; None for after 1, 2, 4, 8, ... blocks.
        device_cache_size: bytes next to the state pools, set aside when the model is loaded.
        host_cache_size: bytes of host memory, page-locked for a GPU, that take what no longer fits the device; the
            least recently used goes first, from both.
        reuse_generated_tokens: also keep a snapshot of every sequence as it ends, for prompts that continue it, as the
            next turn of a conversation does. Such a state was made by decode steps, not by prompt pieces, and differs
            from a prompt's by rounding: a request that starts from it may generate other tokens where two are about
            equally likely.
    """

    free_gpu_memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    max_tokens: PositiveInt | None = None
    enable_block_reuse: bool = False
    tokens_per_block: PositiveInt = 256
    tokens_per_snapshot: PositiveInt | None = None
    device_cache_size: Annotated[int, Field(ge=0)] = 2**30
    host_cache_size: Annotated[int, Field(ge=0)] = 0
    reuse_generated_tokens: bool = False

    @property
    def prefix_device_bytes(self) -> int:
        """Bytes that snapshots take on the device, whether there are any yet or not."""
        return self.device_cache_size if self.enable_block_reuse else 0


class CudaGraphConfig(UserOptions):
    """Which steps of the torch executor are replayed as CUDA graphs.

    Attributes:
        batch_sizes: rows to capture; None takes 1, 2, 4, 8 and then about four to every doubling.
        max_batch_size: without ``batch_sizes``, no step of more rows is captured; None takes the ``LLM``'s.
        enable_padding: run a step in the next larger size that is captured; False captures exact sizes alone.
        warm_up: capture all sizes when the model is opened; False captures a size when a step first has it, which
            makes that step wait.
        max_prompt_tokens: longest prompt piece that is captured, at powers of two; 0 captures decode steps alone.
    """

    batch_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    max_batch_size: PositiveInt | None = None
    enable_padding: bool = True
    warm_up: bool = False
    max_prompt_tokens: Annotated[int, Field(ge=0)] = defaults.MAX_CAPTURED_PROMPT

    @field_validator("batch_sizes", mode="before")
    @classmethod
    def _list_or_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if self.batch_sizes is not None and self.max_batch_size is not None:
            raise ValueError("max_batch_size: found together with batch_sizes; needed one of the two")
        return self


class DecodingConfig(UserOptions):
    """What every kind of speculation has.

    Drafts never change what is generated: see ``runtime.acceptance``. They cost time, though, and where they cost more
    than they save, fewer or none are taken.

    Attributes:
        max_draft_len: most draft tokens of a step.
        adaptive: fit the draft length of each request to how many of its drafts were accepted, and of each step to the
            measured times of steps with and without drafts, down to none; False always takes max_draft_len.
        max_concurrency: most requests running at a time with which drafts are made; None for any number.
        acceptance_rate_window_size: steps with drafts over which the acceptance rate is watched.
        acceptance_rate_threshold: where the accepted share of the drafts of the last acceptance_rate_window_size steps
            falls below it, speculation stays off. Needs acceptance_rate_window_size, and the other way round.
    """

    max_draft_len: PositiveInt = 4
    adaptive: bool = True
    max_concurrency: PositiveInt | None = None
    acceptance_rate_window_size: PositiveInt | None = None
    acceptance_rate_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None

    @model_validator(mode="after")
    def _window_and_threshold(self) -> Self:
        window, threshold = self.acceptance_rate_window_size, self.acceptance_rate_threshold
        if (window is None) != (threshold is None):
            raise ValueError(
                f"acceptance_rate_window_size, acceptance_rate_threshold: found {window} and {threshold}; needed both "
                f"or neither"
            )
        return self


class NGramDecodingConfig(DecodingConfig):
    """Prompt-lookup drafts: continue the latest earlier occurrence of the sequence's last tokens.

    Attributes:
        max_matching_ngram_size: longest suffix to look up; shorter ones are tried next, down to one token.
    """

    max_matching_ngram_size: PositiveInt = 3


class DraftTargetDecodingConfig(DecodingConfig):
    """Drafts from a smaller model with the same tokenizer.

    Attributes:
        speculative_model: the draft model: a Hugging Face folder, a rank checkpoint or an engine folder that was built
            for at least max_draft_len drafts.
    """

    speculative_model: str | Path


class MTPDecodingConfig(DecodingConfig):
    """Drafts from the multi-token prediction head that the model's own checkpoint has.

    The TensorRT executor needs an engine of the head: ``build --speculative_decoding_mode mtp``.

    Attributes:
        max_draft_len: most draft tokens of a step; for each of them the head runs once.
        num_nextn_predict_layers: TensorRT-LLM's older name of max_draft_len; where both are given they must agree.
    """

    max_draft_len: PositiveInt = 1
    num_nextn_predict_layers: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, options: Any) -> Any:
        older = options.get("num_nextn_predict_layers")
        return options if older is None else {"max_draft_len": older, **options}

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.num_nextn_predict_layers not in (None, self.max_draft_len):
            raise ValueError(
                f"max_draft_len, num_nextn_predict_layers: found {self.max_draft_len} and "
                f"{self.num_nextn_predict_layers}; needed one number, or one of the two"
            )
        return self


class SchedulerConfig(UserOptions):
    """Whose turn it is, and how many may wait.

    Attributes:
        max_queue_size: most requests that wait for a slot; further ones are refused. None lets any number wait.
        priority_aging_s: so many seconds of waiting count as one more of priority, so that no request waits for ever
            behind higher ones; None keeps priorities strict.
        max_prompt_steps: most pieces of prompts that run while decoding requests wait for their next step; together
            they have at most ``max_num_tokens`` tokens. Fewer shorten the longest time between two tokens, more start
            new requests sooner.
    """

    max_queue_size: Annotated[int, Field(ge=0)] | None = None
    priority_aging_s: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    max_prompt_steps: PositiveInt = defaults.MAX_PROMPT_STEPS


SpeculativeConfig = NGramDecodingConfig | DraftTargetDecodingConfig | MTPDecodingConfig


with warnings.catch_warnings():
    # TensorRT-LLM's name for a schema is also that of an obsolete method of pydantic's models.
    warnings.filterwarnings("ignore", 'Field name "json"')

    class GuidedDecodingParams(UserOptions):
        """What a generated text must be: one of the four.

        Attributes:
            json: a JSON schema, as text, as a dict or as a pydantic model class; the text is a value of it.
            regex: a regular expression (the syntax of Rust's regex crate) that matches the whole text.
            grammar: an extended Backus-Naur form, as GBNF (from the rule ``root``) or as Lark (from ``start``).
            json_object: any JSON object.
        """

        json: Any = None
        regex: str | None = None
        grammar: str | None = None
        json_object: bool = False

        @field_validator("json", mode="before")
        @classmethod
        def _schema_text(cls, value: object) -> object:
            if isinstance(value, type) and issubclass(value, BaseModel):
                try:
                    value = value.model_json_schema()
                except PydanticUserError as error:
                    raise ValueError(f"found a model that has no JSON schema: {error}") from error
            if value is None or isinstance(value, str):
                return value
            if not isinstance(value, dict):
                raise ValueError(
                    f"found {type(value).__name__}; needed a JSON schema: text, a dict or a pydantic model"
                )
            try:
                return dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"found a dict that is no JSON: {error}; needed a JSON schema") from error

        @model_validator(mode="after")
        def _exactly_one(self) -> Self:
            found = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
            if len(found) != 1:
                raise ValueError(
                    f"found {' and '.join(found) or 'nothing'}; needed one of json, regex, grammar, json_object"
                )
            return self

        def source(self) -> tuple[Literal["json", "regex", "grammar"], str]:
            """Return the kind of grammar and its text."""
            if self.regex is not None:
                return "regex", self.regex
            if self.grammar is not None:
                return "grammar", self.grammar
            return "json", '{"type": "object"}' if self.json_object else str(self.json)


class SamplingParams(UserOptions):
    """How the tokens of one request are chosen, when it ends, and what is returned.

    As in TensorRT-LLM, what chooses tokens and what ends a request may be None, for the default. A token's logit first
    gets its bias, then the repetition, the presence and the frequency penalty, each for the tokens before it, accepted
    drafts included; what is banned is taken out; temperature, top_k, top_p and min_p follow in this order.

    Attributes:
        max_tokens: most tokens to generate.
        min_tokens: no end token or stop string ends the request before so many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probability reaches top_p.
        min_p: keep the tokens whose probability is at least min_p times that of the most likely one.
        repetition_penalty: divides a positive logit, and multiplies a negative one, of every token of the sequence so
            far, the prompt included.
        presence_penalty: taken off the logit of every token of the sequence so far.
        frequency_penalty: the same, times how often the token is there.
        prompt_ignore_length: so many tokens at the start of the prompt count for neither the presence nor the frequency
            penalty; more than the prompt has means all of it.
        logit_bias: token id -> what is added to its logit.
        bad: strings that are not to be generated: the tokens of each, as they are in and at the start of a text, never
            follow one another. The same text from other tokens is not noticed.
        bad_token_ids: tokens that are not generated.
        guided_decoding: what the text must be, up to its end or to max_tokens, which may cut it; other options choose
            among the tokens that are allowed. A text that nothing can follow ends the request.
        n: sequences to generate, each with random numbers of its own; the first is that of n=1. Those that get
            slots at a time run the prompt once.
        seed: of this request's random numbers; None takes one from the operating system.
        stop: strings that end the request, wherever the borders of tokens are; the text is cut before the first.
        include_stop_str_in_output: cut the text behind that stop string instead.
        stop_token_ids: tokens that end the request; they stay out of the text.
        end_id: the end token, when it is not the model's own.
        ignore_eos: do not end at the end token.
        skip_special_tokens: leave special tokens out of the text.
        enable_block_reuse: with KvCacheConfig(enable_block_reuse=True), whether this request may start from a snapshot
            and leaves ones.
        logprobs: return, for each generated token, the log-probabilities of so many likeliest tokens and its own; 0
            returns its own alone, None nothing. They are the model's: no other option here changes them.
    """

    max_tokens: PositiveInt = 32
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    presence_penalty: FiniteFloat = 0.0
    frequency_penalty: FiniteFloat = 0.0
    prompt_ignore_length: Annotated[int, Field(ge=0)] = 0
    logit_bias: dict[int, FiniteFloat] = Field(default_factory=dict)
    bad: tuple[str, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    guided_decoding: GuidedDecodingParams | None = None
    n: PositiveInt = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    end_id: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    enable_block_reuse: bool = True
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @field_validator(*_MAY_BE_NONE, mode="before")
    @classmethod
    def _none_is_the_default(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        return cls.model_fields[str(info.field_name)].get_default(call_default_factory=True)

    @field_validator("stop", "stop_token_ids", "bad", "bad_token_ids", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("found an empty string; it would end every request at once")
        return value

    @field_validator("bad")
    @classmethod
    def _no_empty_bad_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("found an empty string; needed text that is not to be generated")
        return value

    @model_validator(mode="after")
    def _min_at_most_max(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: found {self.min_tokens}; needed at most max_tokens ({self.max_tokens})")
        return self

    @model_validator(mode="after")
    def _several_are_sampled(self) -> Self:
        if self.n > 1 and self.temperature == 0.0:
            raise ValueError(f"n: found {self.n} with temperature 0; needed 1, for greedy sequences are all the same")
        return self
