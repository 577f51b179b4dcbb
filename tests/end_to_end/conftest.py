"""Tiny random checkpoints, each written once, with what ``transformers`` makes of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.reference import Reference
from tests.tiny_models import make_nemotron_h

CONFIGS: dict[str, dict[str, Any]] = {
    "mamba_attention_mlp": {"pattern": "M-M*-M", "n_groups": 1, "head_dim": 64},
    "groups8_head80_tied": {"pattern": "MM-*M*", "n_groups": 8, "head_dim": 80, "tied": True},
    "groups2_of_6_heads": {"pattern": "*-M-", "n_groups": 2, "n_heads": 6, "head_dim": 80, "d_state": 24},
    "mamba_alone": {"pattern": "MM", "n_groups": 8, "n_heads": 16, "head_dim": 64, "use_conv_bias": False},
}
DEFAULT = "mamba_attention_mlp"


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
            folder = make_nemotron_h(self._root / name, seed=3, tokenizer=True, **CONFIGS[name])
            self._made[name] = Checkpoint(folder, Reference(folder))
        return self._made[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
