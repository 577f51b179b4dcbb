"""Text to tokens and back, from a model folder's ``tokenizer.json`` alone."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _FastTokenizer

from trtllm_replayssm.errors import CheckpointError, RequestError
from trtllm_replayssm.runtime.text_stream import TextStream


class Tokenizer:
    """A fast tokenizer, read without ``transformers``.

    Args:
        file: a ``tokenizer.json``.

    Raises:
        CheckpointError: the file cannot be read as a tokenizer.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._tokenizer = _FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise CheckpointError(
                f"{file}: found no readable tokenizer ({error}); needed a tokenizer.json. Copy the model's again."
            ) from error
        # Left by whoever trained with the file: a prompt is never cut or filled up in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """Return the folder's tokenizer, or None where it has none."""
        file = folder / "tokenizer.json"
        return cls(file) if file.is_file() else None

    def encode(self, text: str, *, name: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: what to encode.
            name: what the text is, for an error.
            add_special_tokens: whether to add those of the tokenizer's own template, as for a prompt.

        Raises:
            RequestError: the text has half of a surrogate pair, or a byte that was no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = text[max(error.start - 10, 0) : error.start + 10]
            raise RequestError(
                f"{name}: found no valid Unicode at character {error.start} ({near!a}); needed text that can be "
                "written as UTF-8."
            ) from error
        # As a batch: encoding a single text keeps the interpreter's lock, and all other threads wait.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; bytes that form no character become the replacement character."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_ids(self) -> dict[str, int]:
        """Return every token and its id, added ones included."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def stream(self, *, skip_special_tokens: bool = True, keeps_stop: bool = False) -> TextStream:
        """Return an empty text that grows token by token."""
        return TextStream(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), keeps_stop=keeps_stop)
