"""Prompt-lookup drafts: what followed the sequence's last tokens the last time they occurred in it."""

from collections.abc import Mapping, Sequence

from trtllm_replayssm.config import NGramDecodingConfig

# An n-gram is one number: a 1, then its tokens of so many bits each. A shift makes it of the shorter one before, and it
# is found faster than a tuple: looking is most of what a step pays for drafts that are not found.
_TOKEN_BITS = 32


class NGramIndex:
    """The n-grams of one sequence, kept up to date token by token.

    Args:
        max_size: longest n-gram that is looked up.
    """

    def __init__(self, max_size: int) -> None:
        self.tokens: list[int] = []
        self._max_size = max_size
        self._suffixes: list[int] = []  # the sequence's last n-grams, the shortest first
        # n-gram -> the position after its latest occurrence. An n-gram enters when the token after it is known, so
        # the sequence's own end is never found.
        self._next_position: dict[int, int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, Python's own numbers below 2^32; O(max_size) each."""
        suffixes, positions, end = self._suffixes, self._next_position, len(self.tokens)
        for token_id in token_ids:
            for suffix in suffixes:
                positions[suffix] = end
            shorter = (1, *suffixes[: self._max_size - 1])
            suffixes = [suffix << _TOKEN_BITS | token_id for suffix in shorter]
            end += 1
        self._suffixes = suffixes
        self.tokens.extend(token_ids)

    def continuation(self, limit: int) -> list[int]:
        """Return up to ``limit`` tokens that followed the longest suffix that occurred before.

        A copy that reaches the sequence's end goes on with what it has copied, so a loop of any period is continued.
        """
        if limit <= 0:
            return []
        start = None
        for suffix in self._suffixes:
            found = self._next_position.get(suffix)
            if found is None:  # nor does a longer one, which ends with this one
                break
            start = found
        if start is None:
            return []
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(limit)]


class NGramDrafter:
    """Drafts from the sequence itself: no model, no device memory.

    Args:
        config: draft length and n-gram size.
    """

    def __init__(self, config: NGramDecodingConfig) -> None:
        self.max_draft_len: int = config.max_draft_len
        self._max_size = config.max_matching_ngram_size
        self._indices: dict[int, NGramIndex] = {}

    def begin(self, request_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Index the prompt."""
        index = self._indices[request_id] = NGramIndex(self._max_size)
        index.extend(prompt_token_ids)

    def observe(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Index generated tokens."""
        self._indices[request_id].extend(token_ids)

    def propose(self, limits: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Look every sequence's end up in the sequence; those that have none are left out."""
        found = {}
        for request_id, limit in limits.items():
            if drafts := self._indices[request_id].continuation(min(limit, self.max_draft_len)):
                found[request_id] = drafts
        return found

    def end(self, request_id: int) -> None:
        """Drop the index."""
        self._indices.pop(request_id, None)
