"""The options of how prompts and decoding take turns, and of what is done before the first request."""

from typing import Annotated

import typer

from trtllm_replayssm.contract import defaults

MaxPromptSteps = Annotated[
    int | None,
    typer.Option(
        "--max_prompt_steps",
        help="Most pieces of prompts between two decode steps: fewer shorten the longest time between two tokens, more "
        f"start new requests sooner. By default {defaults.MAX_PROMPT_STEPS}.",
    ),
]

WarmUp = Annotated[
    bool,
    typer.Option(
        "--warm_up/--no_warm_up",
        help="On a GPU, capture all CUDA graphs before the first request, instead of each when a request needs it.",
    ),
]
