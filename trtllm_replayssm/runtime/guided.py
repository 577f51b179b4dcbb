"""Guided decoding: the tokens that a grammar allows next, along a sequence and along drafts.

The grammars are llguidance's. It is asked for masks on the host while the device runs the step.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from trtllm_replayssm.config import GuidedDecodingParams
from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.errors import ConfigError, RequestError
from trtllm_replayssm.runtime.logit_rules import MASK_WORD_BITS, TokenMask, allows
from trtllm_replayssm.runtime.tokenizer import Tokenizer

INSTALL = "pip install 'llguidance>=1.9,<2'"
"""The package of the ``guided`` extra, as pyproject.toml lists it."""

_MAX_COMPILED = 64  # grammars kept ready; a service has few

# Blank space between the parts of a JSON text: enough for any indentation, not so much that a model that likes it can
# go on with it for ever.
_JSON_DEFAULTS: Any = {"whitespace_pattern": r"[ \t\n\r]{1,64}"}


class GrammarState:
    """Where one sequence stands in its grammar.

    Args:
        matcher: llguidance's, at the start of the grammar.
        vocab_size: of the model.
        model_end_ids: the end tokens that the matcher allows where the text may end.
        end_ids: those that end this request, and stand in for the model's.
    """

    def __init__(self, matcher: Any, vocab_size: int, model_end_ids: Sequence[int], end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // MASK_WORD_BITS)
        self._foreign_ends = [token_id for token_id in model_end_ids if token_id not in end_ids]
        self._end_ids = sorted(end_ids)

    @property
    def is_complete(self) -> bool:
        """Whether no text can follow."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """Follow a generated token, not an end token.

        Raises:
            RequestError: the grammar does not allow it, or has become too complex.
        """
        if not self._matcher.consume_token(token_id):
            raise self._error()

    def masks(self, drafts: Sequence[int]) -> list[TokenMask | None]:
        """Return what is allowed after the sequence and after each draft; the state stays as it is.

        Args:
            drafts: tokens that may follow. Behind the first one that is not allowed, or that ends the text,
                nothing is of use: None.

        Raises:
            RequestError: the grammar has become too complex.
        """
        masks: list[TokenMask | None] = []
        followed = 0
        for draft in (*drafts, None):
            mask = self._mask()
            masks.append(mask)
            # An end token is none of the grammar's, and nothing follows it.
            if draft is None or not allows(mask, draft) or draft in self._end_ids:
                break
            self.advance(draft)
            followed += 1
            if self.is_complete:
                break
        if followed and not self._matcher.rollback(followed):
            raise self._error()
        return masks + [None] * (1 + len(drafts) - len(masks))

    def _error(self) -> RequestError:
        return RequestError(f"guided_decoding: found {_reason(self._matcher)}; needed a grammar that goes on.")

    def _mask(self) -> TokenMask:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            raise self._error()
        mask = np.zeros(self._num_words, dtype=np.uint32)
        mask[: len(words)] = words[: self._num_words]
        if self._foreign_ends:
            _set_bits(mask, self._foreign_ends, is_allowed=False)
        if self._end_ids and self._matcher.is_accepting():
            _set_bits(mask, self._end_ids, is_allowed=True)
        return mask


class Grammars:
    """Compiles the grammars of requests, each once.

    Args:
        tokenizer: of the model.
        geometry: vocabulary and end tokens.

    Raises:
        ConfigError: llguidance is not installed, or does not know the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, geometry: ModelGeometry) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                f"guided_decoding: found no llguidance; needed it. Install the extra guided, or: {INSTALL}"
            ) from error
        self._library = llguidance
        self._vocab_size = geometry.vocab_size
        self._end_ids = sorted(geometry.eos_token_ids)
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()  # of them: any thread may bring a request
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer.to_json(), n_vocab=geometry.vocab_size, eos_token=self._end_ids or None
            )
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"guided_decoding: llguidance does not read the model's tokenizer.json ({error}); needed one that it "
                f"knows, with at most {geometry.vocab_size} tokens."
            ) from error

    def start(self, params: GuidedDecodingParams, end_ids: frozenset[int]) -> GrammarState:
        """Return a sequence's state at the start of its grammar.

        Args:
            params: the grammar.
            end_ids: tokens that end the request; allowed where the grammar may end.

        Raises:
            RequestError: the grammar has an error.
        """
        return GrammarState(self._matcher(*params.source()).deep_copy(), self._vocab_size, self._end_ids, end_ids)

    def _grammar(self, kind: Literal["json", "regex", "grammar"], source: str) -> str:
        if kind == "json":
            return str(self._library.LLMatcher.grammar_from_json_schema(source, defaults=_JSON_DEFAULTS))
        return str(self._library.grammar_from(kind, source))

    def _matcher(self, kind: Literal["json", "regex", "grammar"], source: str) -> Any:
        matcher = self._compiled.get((kind, source))
        if matcher is None:
            try:
                grammar = self._grammar(kind, source)
            except ValueError as error:
                raise RequestError(f"guided_decoding.{kind}: {_one_line(error)}.") from error
            matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise RequestError(f"guided_decoding.{kind}: {_one_line(matcher.get_error())}.")
            start = matcher.deep_copy()
            start.compute_bitmask()  # where no text can begin, this is where it shows
            if start.is_error():
                raise RequestError(f"guided_decoding.{kind}: found {_reason(start)}; needed what some text can match.")
        with self._lock:
            self._compiled[kind, source] = matcher
            self._compiled.move_to_end((kind, source))
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


def _one_line(message: object) -> str:
    """Return a message of the library, which points at a place by lines, as one line: what a user and a log get."""
    return " ".join(str(message).split())


def _reason(matcher: Any) -> str:
    """Return the first line of llguidance's error; the others are its parser's state."""
    return str(matcher.get_error()).partition("\n")[0]


def _set_bits(mask: TokenMask, token_ids: Sequence[int], *, is_allowed: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1) << np.uint32(token_id % MASK_WORD_BITS)
        if is_allowed:
            mask[token_id // MASK_WORD_BITS] |= bit
        else:
            mask[token_id // MASK_WORD_BITS] &= ~bit
