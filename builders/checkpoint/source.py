"""A Hugging Face folder as a stream of rank checkpoint tensors: written by ``convert``, or loaded directly."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.builders.checkpoint.families import nemotron_h_names, qwen_names, reasons
from trtllm_replayssm.builders.checkpoint.hf_config import read_hf_config
from trtllm_replayssm.builders.checkpoint.index import SourceTensor, read_index
from trtllm_replayssm.builders.checkpoint.names import Naming, Recipe, make_recipes, mtp_problems
from trtllm_replayssm.contract.geometry import Architecture, ModelGeometry, MtpGeometry
from trtllm_replayssm.contract.tensors import TensorSpec, checkpoint_specs
from trtllm_replayssm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

_NAMINGS: dict[Architecture, Naming] = {
    "NemotronHForCausalLM": nemotron_h_names.NAMING,
    "Qwen3NextForCausalLM": qwen_names.NAMING,
    "Qwen3_5ForCausalLM": qwen_names.NAMING,
}

# Rows compared at a time when two matrices may be one: a few megabytes.
_COMPARED_ROWS = 1024


@dataclass(frozen=True)
class CheckpointSource:
    """A checked Hugging Face checkpoint: nothing missing, nothing left over.

    Attributes:
        folder: the Hugging Face folder.
        geometry: the model, with ``tie_word_embeddings`` and ``mtp`` as the weights have them.
        recipes: one per target, in the order of ``checkpoint_specs``.
        ignored: tensors left out on purpose, with the reason.
        notes: what a user should know about the conversion.
    """

    folder: Path
    geometry: ModelGeometry
    recipes: tuple[Recipe, ...]
    ignored: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The targets."""
        return tuple(recipe.target for recipe in self.recipes)

    @property
    def used(self) -> tuple[SourceTensor, ...]:
        """The stored tensors that the recipes read."""
        return tuple(source for recipe in self.recipes for source in recipe.sources)

    def tensors(self, wanted: Sequence[TensorSpec] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the wanted targets' names and values, all of them by default, one in memory at a time."""
        names = None if wanted is None else {spec.name for spec in wanted}
        for recipe in self.recipes:
            if names is None or recipe.target.name in names:
                yield recipe.target.name, recipe.make()


def open_source(folder: Path, dtype: str | None = None) -> CheckpointSource:
    """Check a Hugging Face folder against its config; no weight is loaded.

    Args:
        folder: the Hugging Face folder.
        dtype: type of the targets; None or "auto" takes the config's.

    Raises:
        CheckpointError: the folder or its tensors are incomplete, damaged or do not fit the config.
        ConfigError: the config has unknown, missing or contradictory keys.
        UnsupportedError: another architecture, or a form of this one that is not supported.
    """
    config = read_hf_config(folder, dtype)
    index = read_index(folder)
    naming = _NAMINGS[config.geometry.architecture]
    geometry, notes = _resolve_output_matrix(config.geometry, index, naming)
    geometry, reason = _resolve_mtp(geometry, config.mtp, index, naming)
    recipes, ignored = make_recipes(geometry, index, naming, use_conv_bias=config.use_conv_bias)
    if reason is not None:
        ignored |= {name: reason for name in ignored if naming.mtp.search(naming.plain_name(name))}
    return CheckpointSource(folder, geometry, recipes, ignored, notes)


def stream_weights(
    folder: Path, geometry: ModelGeometry, wanted: Sequence[TensorSpec] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rank checkpoint's tensors of a Hugging Face folder without writing one; its notes are logged.

    Args:
        folder: the Hugging Face folder.
        geometry: as ``open_model_folder`` gave it; its ``dtype`` is the targets' type.
        wanted: some of ``checkpoint_specs``; None for all.

    Raises:
        CheckpointError: the folder is incomplete, damaged, or of another shape than ``geometry``.
    """
    source = open_source(folder, geometry.dtype)
    if checkpoint_specs(source.geometry) != checkpoint_specs(geometry):
        raise CheckpointError(
            f"{folder}: found tensors of another geometry; needed those it was opened with. Open the folder anew."
        )
    for note in source.notes:
        _logger.warning("%s: %s", folder, note)
    return source.tensors(wanted)


def _resolve_mtp(
    geometry: ModelGeometry, mtp: MtpGeometry | str, index: Mapping[str, SourceTensor], naming: Naming
) -> tuple[ModelGeometry, str | None]:
    """Decide whether the model has a multi-token prediction head: a folder may describe one that it does not store.

    A head that cannot be run is no reason to refuse the model, which runs without. Returns the reason as well.
    """
    if isinstance(mtp, str):
        return geometry, mtp
    with_head = geometry.model_copy(update={"mtp": mtp})
    problems = mtp_problems(with_head, index, naming)
    if problems:
        return geometry, reasons.MTP_INCOMPLETE.format(problems[0])
    return (geometry if problems is None else with_head), None


def _resolve_output_matrix(
    geometry: ModelGeometry, index: Mapping[str, SourceTensor], naming: Naming
) -> tuple[ModelGeometry, tuple[str, ...]]:
    """Decide whether the embedding also serves as output matrix.

    ``tie_word_embeddings`` is a promise of the config that transformers 5 does not keep for Nemotron-H: it declares no
    tied weights there, stores ``lm_head.weight`` and runs what is stored. So a stored matrix that differs from the
    embedding is used, and logits equal transformers'; an equal one is dropped; an absent one means the embedding.
    """
    if not geometry.tie_word_embeddings:
        return geometry, ()
    stored = {naming.plain_name(name): source for name, source in index.items()}
    matrix, embedding = stored.get(naming.output_matrix), stored.get(naming.embedding)
    if matrix is None or embedding is None or _equal(matrix, embedding):
        return geometry, ()
    note = (
        f"config.json says tie_word_embeddings, yet {naming.output_matrix} differs from the embedding; the stored "
        "matrix is used, as transformers does."
    )
    return geometry.model_copy(update={"tie_word_embeddings": False}), (note,)


def _equal(a: SourceTensor, b: SourceTensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype) or not a.shape:
        return False
    import torch

    values, others = a.read(), b.read()
    rows = range(0, a.shape[0], _COMPARED_ROWS)
    return all(torch.equal(values[i : i + _COMPARED_ROWS], others[i : i + _COMPARED_ROWS]) for i in rows)
