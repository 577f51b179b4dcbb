"""Prompt-lookup drafts: what followed the sequence's last tokens the last time they occurred in it."""

from collections.abc import Mapping, Sequence

from trtllm_replayssm.config import NGramDecodingConfig


class NGramIndex:
    """The n-grams of one sequence, kept up to date token by token.

    Args:
        max_size: longest n-gram that is looked up.
    """

    def __init__(self, max_size: int) -> None:
        self.tokens: list[int] = []
        self._max_size = max_size
        # n-gram -> the position after its latest occurrence. An n-gram enters when the token after it is known, so
        # the sequence's own end is never found.
        self._next_position: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; O(max_size) each."""
        for token_id in token_ids:
            end = len(self.tokens)
            for size in range(1, min(self._max_size, end) + 1):
                self._next_position[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token_id)

    def continuation(self, limit: int) -> list[int]:
        """Return up to ``limit`` tokens that followed the longest suffix that occurred before.

        A copy that reaches the sequence's end goes on with what it has copied, so a loop of any period is continued.
        """
        if limit <= 0:
            return []
        end = len(self.tokens)
        for size in range(min(self._max_size, end), 0, -1):
            start = self._next_position.get(tuple(self.tokens[end - size :]))
            if start is not None:
                period = end - start
                return [self.tokens[start + i % period] for i in range(limit)]
        return []


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
        """Look every sequence's end up in the sequence."""
        return {
            request_id: self._indices[request_id].continuation(min(limit, self.max_draft_len))
            for request_id, limit in limits.items()
        }

    def end(self, request_id: int) -> None:
        """Drop the index."""
        self._indices.pop(request_id, None)
