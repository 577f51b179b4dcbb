"""Tokens become text one at a time: multi-byte characters are held back until whole, stop strings cut the text."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4  # of UTF-8, hence the most byte-level tokens of one character


class TextStream:
    """The growing text of one sequence.

    A byte-level tokenizer may split a character over up to four tokens, and some decoders treat the first token of a
    call specially. So the new text of a token is the difference of two decodings that both start at the last emitted
    piece, taken once the longer one does not end within a character.

    Args:
        decode: token ids -> text.
        keeps_stop: leave the stop string that ends the text in it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, keeps_stop: bool = False) -> None:
        self.text = ""
        self._keeps_stop = keeps_stop
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # both decodings start here
        self._emitted = 0  # tokens whose text is out

    def push(self, token_id: int, stop: Sequence[str] = ()) -> str | None:
        """Add a token.

        Args:
            token_id: the next token.
            stop: strings that end the text when they are completed by this token.

        Returns:
            The stop string that now ends the text, which is cut before it, or behind it where it is kept; otherwise
            None.
        """
        self._tokens.append(token_id)
        return self._emit(self._next_piece(), stop)

    def settled(self, stop: Sequence[str]) -> str:
        """Return the text that no later token takes back: without an end that a stop string may begin with.

        What has been shown of a text that streams stays its beginning, whatever follows.
        """
        # At most so long an end can be a stop string's beginning and not yet the whole.
        longest = min(len(self.text), max(map(len, stop), default=1) - 1)
        for at in range(len(self.text) - longest, len(self.text)):
            end = self.text[at:]
            if any(len(end) < len(string) and string.startswith(end) for string in stop):
                return self.text[:at]
        return self.text

    def close(self, stop: Sequence[str] = ()) -> str | None:
        """Emit what is held back: an incomplete character shows as the replacement character.

        Args:
            stop: as for ``push``.

        Returns:
            As ``push`` does.
        """
        held = self._difference(len(self._tokens)) if self._emitted < len(self._tokens) else ""
        self._emitted = len(self._tokens)
        return self._emit(held, stop)

    def _emit(self, piece: str, stop: Sequence[str]) -> str | None:
        searched_from = len(self.text)
        self.text += piece
        return self._cut(stop, searched_from) if piece else None

    def _next_piece(self) -> str:
        end = len(self._tokens)
        piece = self._difference(end)
        if piece.endswith(_REPLACEMENT):
            end = self._settled_end(piece)
            piece = self._difference(end)
        if piece:
            self._context, self._emitted = self._emitted, end
        return piece

    def _difference(self, end: int) -> str:
        before = self._decode(self._tokens[self._context : self._emitted])
        after = self._decode(self._tokens[self._context : end])
        return after[len(before) :]

    def _settled_end(self, piece: str) -> int:
        """Return how many tokens can be emitted although the last ones do not end a character.

        Bytes that are no UTF-8 never become a character. Of those only the last few can still change, so the tokens
        before them are emitted, at a border where both sides decode on their own.
        """
        if len(self._tokens) - self._emitted <= _MAX_CHARACTER_BYTES:
            return self._emitted
        for end in range(len(self._tokens) - _MAX_CHARACTER_BYTES, self._emitted, -1):
            if self._difference(end) + self._decode(self._tokens[end:]) == piece:
                return end
        return self._emitted

    def _cut(self, stop: Sequence[str], searched_from: int) -> str | None:
        hits = []
        for string in stop:
            # Only an occurrence that ends in the new piece counts: earlier ones came before min_tokens.
            at = self.text.find(string, max(0, searched_from - len(string) + 1))
            if at >= 0:
                hits.append((at, -len(string), string))
        if not hits:
            return None
        at, _, string = min(hits)
        self.text = self.text[: at + len(string) if self._keeps_stop else at]
        return string
