"""The options of guided decoding: what a generated text must be."""

from pathlib import Path
from typing import Annotated

import typer

from trtllm_replayssm.config import GuidedDecodingParams
from trtllm_replayssm.errors import ConfigError

GuidedJson = Annotated[
    Path | None, typer.Option("--guided_json", help="File of a JSON schema: texts are values of it.")
]
GuidedJsonObject = Annotated[bool, typer.Option("--guided_json_object", help="Texts are JSON objects of any kind.")]
GuidedRegex = Annotated[
    str | None, typer.Option("--guided_regex", help="Regular expression that matches texts from beginning to end.")
]
GuidedGrammar = Annotated[
    Path | None, typer.Option("--guided_grammar", help="File of a grammar that texts follow: GBNF or Lark.")
]


def guided_decoding(
    json: Path | None, regex: str | None, grammar: Path | None, *, is_json_object: bool
) -> GuidedDecodingParams | None:
    """Make the parameters of the options; None where none is given.

    Raises:
        ConfigError: more than one of them, or a file that is no text.
        OSError: a file cannot be read.
    """
    given = {"guided_json": json, "guided_regex": regex, "guided_grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    names += ["guided_json_object"] if is_json_object else []
    if not names:
        return None
    if len(names) > 1:
        raise ConfigError(f"{', '.join(names)}: found {len(names)} kinds of guided decoding; needed one.")
    return GuidedDecodingParams(json=_text(json), regex=regex, grammar=_text(grammar), json_object=is_json_object)


def _text(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: found no UTF-8 text ({error}); needed a JSON schema or a grammar.") from error
