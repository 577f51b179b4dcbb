"""One sequence's life: waiting -> prefill -> decode -> finished, and from anywhere back to waiting or to the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trtllm_replayssm.config import SamplingParams
from trtllm_replayssm.errors import ReplaySSMError, RequestError, error_text
from trtllm_replayssm.runtime.guided import GrammarState
from trtllm_replayssm.runtime.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from trtllm_replayssm.runtime.sampling import TokenRule
from trtllm_replayssm.runtime.text_stream import TextStream


class RequestState(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


_ALLOWED = {
    RequestState.WAITING: (RequestState.PREFILL, RequestState.FINISHED),
    RequestState.PREFILL: (RequestState.DECODE, RequestState.WAITING, RequestState.FINISHED),
    RequestState.DECODE: (RequestState.WAITING, RequestState.FINISHED),
    RequestState.FINISHED: (),
}

_NONE: frozenset[int] = frozenset()


@dataclass(eq=False)
class Request:
    """A prompt, the rules of its generation, and the tokens so far.

    Attributes:
        request_id: unique within an ``LLM``.
        prompt: the prompt's text, or None.
        prompt_token_ids: at least one token.
        params: the rules.
        seed: of this request's random numbers.
        end_ids: tokens that end the request silently.
        bad_words: token sequences, none empty, that are not to be generated.
        max_new_tokens: max_tokens, cut to what max_seq_len leaves.
        index: number of the sequence among the params.n of its prompt; each is a request of its own.
        priority: higher ones run first.
        arrived_s: when the request came, by ``time.perf_counter``.
        deadline_s: when it ends at the latest, by the same clock; None for never.
        text: detokenised output, or None without a tokenizer.
        grammar: what the text must be, and where in it the sequence stands; None for anything.
        slot: row of the state pools while prefilling or decoding, else None.
        state: where the request stands; changed by ``move_to`` alone.
        token_ids: generated tokens. The last is the newest token, which the recurrent state does not hold yet.
        cumulative_logprob: sum of the tokens' log-probabilities.
        top_logprobs: per generated token the likeliest tokens, where params.logprobs asks for them.
        cached_tokens: of the prompt, those that a snapshot brought when the request first got a slot.
        num_computed: tokens of the sequence that had run when it last lost its slot; they run again.
        last_token_s: when the newest token came, by the clock of ``arrived_s``.
        finish_reason: why it ended.
        stop_reason: the stop string or token id that ended it.
        error: what ended it, for finish_reason "error".
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    max_new_tokens: int
    index: int = 0
    priority: int = 0
    arrived_s: float = 0.0
    deadline_s: float | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    text: TextStream | None = None
    grammar: GrammarState | None = None
    slot: int | None = None
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    top_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cached_tokens: int = 0
    num_computed: int = 0
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: ReplaySSMError | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: prompt and generated tokens."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - len(self.token_ids)

    @property
    def prompt_id(self) -> int:
        """The same for all sequences of a prompt."""
        return self.request_id - self.index

    @cached_property
    def token_rule(self) -> TokenRule:
        """How its tokens are chosen, but for what depends on the tokens before."""
        params = self.params
        return TokenRule(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.seed,
            bias=params.logit_bias,
            sequence=self.index,
        )

    @property
    def is_fresh(self) -> bool:
        """Whether the request is about to run its prompt and nothing else."""
        return self.state is RequestState.PREFILL and not self.token_ids

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens are to come."""
        return self.state is RequestState.FINISHED

    def move_to(self, state: RequestState) -> None:
        """Change state; a transition that the life of a request does not have is our own bug."""
        assert state in _ALLOWED[self.state], f"request {self.request_id} cannot go from {self.state} to {state}"
        self.state = state

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens of positions [start, stop), prompt and generated ones, as far as there are any."""
        length = len(self.prompt_token_ids)
        generated = self.token_ids[max(start - length, 0) : max(stop - length, 0)]
        return (*self.prompt_token_ids[start:stop], *generated)

    def sequence(self, drafts: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """Return the prompt, the generated tokens, and drafts taken for generated."""
        return np.concatenate([self._prompt, np.array((*self.token_ids, *drafts), dtype=np.int64)])

    def banned_after(self, drafts: Sequence[int] = ()) -> frozenset[int]:
        """Return the tokens that may not follow the sequence and the drafts, were these generated.

        Before min_tokens those are the tokens that end the request; and always the last token of a bad word whose
        other tokens are there.
        """
        generated = len(self.token_ids) + len(drafts)
        ends = self.end_ids.union(self.params.stop_token_ids) if generated < self.params.min_tokens else _NONE
        if not self.bad_words:
            return ends
        return ends.union(word[-1] for word in self.bad_words if self._ends_with(word[:-1], drafts))

    def append(self, token_id: int, logprob: float, top_logprobs: dict[int, Logprob] | None = None) -> None:
        """Add a generated token, and finish the request if it is the last."""
        self.token_ids.append(token_id)
        self.cumulative_logprob += logprob
        if top_logprobs is not None:
            self.top_logprobs.append(top_logprobs)
        if token_id in self.end_ids:
            self._finish("stop", None)
        elif token_id in self.params.stop_token_ids:
            self._finish("stop", token_id)
        else:
            if self.grammar is not None:
                self.grammar.advance(token_id)
            stopped_by = self._read_text(token_id)
            if stopped_by is not None or (self.grammar is not None and self.grammar.is_complete):
                self._finish("stop", stopped_by)
            elif self.num_remaining <= 0:
                self._finish("length", None)

    def output(self, *others: "Request") -> RequestOutput:
        """Return the request as the user sees it, with the other sequences of its prompt."""
        sequences = (self, *others)
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.prompt_token_ids),
            [sequence._completion() for sequence in sequences],
            finished=all(sequence.is_finished for sequence in sequences),
            error=next((str(sequence.error) for sequence in sequences if sequence.error is not None), None),
            cached_tokens=self.cached_tokens,
        )

    def end(self, reason: FinishReason, error: ReplaySSMError | None = None) -> None:
        """End the request before its time."""
        self.error = error
        try:
            self._finish(reason, None)
        except BaseException as trouble:  # noqa: BLE001 - the tokenizer's, over what it still held back
            self.error = text_failure(self.request_id, trouble)
            self._finish("error", None)

    def _completion(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self._shown_text(),
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else list(self.top_logprobs),
        )

    def _shown_text(self) -> str:
        if self.text is None:
            return ""
        return self.text.text if self.is_finished else self.text.settled(self.params.stop)

    @cached_property
    def _prompt(self) -> npt.NDArray[np.int64]:
        return np.array(self.prompt_token_ids, dtype=np.int64)

    def _ends_with(self, tokens: tuple[int, ...], drafts: Sequence[int]) -> bool:
        if not tokens:
            return True
        tail = (*self.token_ids[-len(tokens) :], *drafts)
        if len(tail) < len(tokens):
            tail = (*self.prompt_token_ids[-len(tokens) :], *tail)
        return tail[-len(tokens) :] == tokens

    def _read_text(self, token_id: int) -> str | None:
        if self.text is None:
            return None
        return self.text.push(token_id, self._stop_strings())

    def _stop_strings(self) -> tuple[str, ...]:
        return self.params.stop if len(self.token_ids) >= self.params.min_tokens else ()

    def _finish(self, reason: FinishReason, stopped_by: str | int | None) -> None:
        # After a tokenizer's error its stream is left as it is.
        if self.text is not None and not isinstance(stopped_by, str) and self.error is None:
            has_ended_by_itself = reason in ("stop", "length")
            found = self.text.close(self._stop_strings() if has_ended_by_itself else ())
            if found is not None:  # it came first, though it could not be read before
                reason, stopped_by = "stop", found
        self.finish_reason = reason
        self.stop_reason = stopped_by
        self.move_to(RequestState.FINISHED)


def text_failure(request_id: int, error: BaseException) -> RequestError:
    """Return the error of a request whose tokenizer or grammar has raised one; a Rust library's is no Exception."""
    return RequestError(f"request {request_id}: its text failed: {type(error).__name__}: {error_text(error)}.")
