"""Tiny random checkpoints, each written once, with what ``transformers`` makes of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.reference import Reference
from tests.tiny_models import make_nemotron_h, make_qwen

CONFIGS: dict[str, dict[str, Any]] = {
    "mamba_attention_mlp": {"pattern": "M-M*-M", "n_groups": 1, "head_dim": 64},
    "groups8_head80_tied": {"pattern": "MM-*M*", "n_groups": 8, "head_dim": 80, "tied": True},
    "groups2_of_6_heads": {"pattern": "*-M-", "n_groups": 2, "n_heads": 6, "head_dim": 80, "d_state": 24},
    "mamba_alone": {"pattern": "MM", "n_groups": 8, "n_heads": 16, "head_dim": 64, "use_conv_bias": False},
    "qwen3_5": {"make": make_qwen, "pattern": "GG*G"},
    "qwen3_5_multimodal": {"make": make_qwen, "family": "qwen3_5_multimodal", "pattern": "*G"},
    "qwen3_5_one_key_value_head": {
        "make": make_qwen,
        "pattern": "G*G",
        "n_key_heads": 2,
        "n_value_heads": 6,
        "value_dim": 24,
        "n_query_heads": 6,
        "n_kv_heads": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e7,
    },
    "qwen3_next_tied": {"make": make_qwen, "family": "qwen3_next", "pattern": "*GG", "tied": True},
    "qwen3_next_recurrence_alone": {"make": make_qwen, "family": "qwen3_next", "pattern": "GG", "d_conv": 3},
}
DEFAULTS = ["mamba_attention_mlp", "qwen3_5"]
"""One of each family, for the tests that try every way of decoding."""


@dataclass(frozen=True)
class Checkpoint:
    """A model folder and its reference."""

    folder: Path
    reference: Reference


class Checkpoints:
    """Makes each checkpoint when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Checkpoint] = {}

    def __getitem__(self, name: str) -> Checkpoint:
        if name not in self._made:
            options = dict(CONFIGS[name])
            make = options.pop("make", make_nemotron_h)
            folder = make(self._root / name, seed=3, tokenizer=True, **options)
            self._made[name] = Checkpoint(folder, Reference(folder))
        return self._made[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
