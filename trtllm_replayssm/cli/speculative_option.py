"""The options of speculation, which depend on where the drafts come from."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_replayssm.config import (
    DecodingConfig,
    DraftTargetDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SpeculativeConfig,
)
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.wishes import given

Source = Literal["ngram", "mtp", "draft"]
SpeculativeModel = Annotated[
    Path | None, typer.Option("--speculative_model", help="The smaller model's folder, with --speculative draft.")
]
FixedDraftLen = Annotated[
    bool, typer.Option("--fixed_draft_len", help="Draft as much at every step, whether it pays or not.")
]

_CONFIGS: dict[Source, type[DecodingConfig]] = {
    "ngram": NGramDecodingConfig,
    "mtp": MTPDecodingConfig,
    "draft": DraftTargetDecodingConfig,
}


def speculative_config(
    source: Source | None, max_draft_len: int | None, speculative_model: Path | None, *, is_fixed: bool
) -> SpeculativeConfig | None:
    """Make the config of the options; None for plain decoding.

    Args:
        source: where drafts come from.
        max_draft_len: None for the source's default.
        speculative_model: of the source "draft".
        is_fixed: draft as many tokens at every step.

    Raises:
        ConfigError: options that do not go together.
    """
    wishes = given(max_draft_len=max_draft_len, speculative_model=speculative_model)
    if source is None:
        if names := [*wishes, *(["fixed_draft_len"] if is_fixed else [])]:
            raise ConfigError(f"{', '.join(names)}: found without --speculative; needed both or neither.")
        return None
    if (source == "draft") != (speculative_model is not None):
        found = "no --speculative_model" if speculative_model is None else "--speculative_model"
        raise ConfigError(
            f"speculative_model: found {found} with --speculative {source}; needed it with --speculative draft, and "
            f"there alone."
        )
    made = _CONFIGS[source](adaptive=not is_fixed, **wishes)
    assert isinstance(made, NGramDecodingConfig | MTPDecodingConfig | DraftTargetDecodingConfig)
    return made
