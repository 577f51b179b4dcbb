"""The value of ``--history``, which ``build`` and ``run`` share: a number or "auto"."""

from typing import Final

import typer

from trtllm_replayssm.contract.geometry import AUTO, History

METAVAR: Final = "<number|auto>"


def parse_history(text: str) -> History:
    """Read the text of the option.

    Raises:
        typer.BadParameter: neither a number nor "auto".
    """
    if text == AUTO:
        return "auto"
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        raise typer.BadParameter(f"history: found {text!r}; needed an integer or {AUTO!r}.")
    return int(text)
