"""The requests of a run: how long prompts and outputs are, and when they come."""

import re
from typing import NamedTuple

import numpy as np

from trtllm_replayssm.contract.geometry import Frozen
from trtllm_replayssm.errors import ConfigError


class Lengths(Frozen):
    """A length of tokens, or a range that lengths are drawn from uniformly, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_lengths(option: str, text: str) -> Lengths:
    """Read ``N`` or ``LOW-HIGH``.

    Raises:
        ConfigError: neither of them, or an empty range.
    """
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
    if found is None:
        raise ConfigError(f"{option}: found {text!r}; needed a number of tokens, or a range such as 128-1024.")
    low = int(found[1])
    lengths = Lengths(low=low, high=int(found[2] or low))
    if not 1 <= lengths.low <= lengths.high:
        raise ConfigError(f"{option}: found {text!r}; needed 1 token or more, and the larger number last.")
    return lengths


class Mix(Frozen):
    """A mix of requests.

    Attributes:
        prompt_len: tokens of a prompt.
        output_len: tokens that a request generates.
        num_requests: how many there are.
        arrival_rate: mean requests per second of a Poisson process; None: all are there at the beginning.
    """

    prompt_len: Lengths
    output_len: Lengths
    num_requests: int
    arrival_rate: float | None = None

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest possible sequence."""
        return self.prompt_len.high + self.output_len.high


class DrawnRequest(NamedTuple):
    """One request.

    Attributes:
        prompt_token_ids: random tokens.
        output_len: tokens to generate.
        arrival: seconds after the beginning.
    """

    prompt_token_ids: list[int]
    output_len: int
    arrival: float


def draw_requests(mix: Mix, vocab_size: int, seed: int = 0) -> list[DrawnRequest]:
    """Draw the requests of a mix, in the order in which they come."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(mix.prompt_len.low, mix.prompt_len.high + 1, mix.num_requests)
    outputs = rng.integers(mix.output_len.low, mix.output_len.high + 1, mix.num_requests)
    gaps = np.zeros(mix.num_requests)
    if mix.arrival_rate is not None:
        gaps = rng.exponential(1.0 / mix.arrival_rate, mix.num_requests)
    return [
        DrawnRequest(rng.integers(0, vocab_size, length).tolist(), int(output), float(arrival))
        for length, output, arrival in zip(prompts, outputs, gaps.cumsum(), strict=True)
    ]
