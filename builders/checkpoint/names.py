"""Which stored tensors make which tensor of a rank checkpoint, with exact accounting.

Every stored tensor is used by one recipe or ignored for a stated reason; every target has one recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_replayssm.builders.checkpoint.index import SOURCE_DTYPE_BYTES, SourceTensor
from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.tensors import TensorSpec, checkpoint_specs, mtp_weight_specs
from trtllm_replayssm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    Join = Callable[[list[torch.Tensor]], torch.Tensor]

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Parts:
    """What a target is made of.

    Attributes:
        sources: plain name and shape of each stored tensor, in order.
        join: their values -> the target's values.
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    join: Join


@dataclass(frozen=True)
class Naming:
    """How a family's checkpoints name their tensors.

    Attributes:
        prefix: what differs between publishers, at the beginning of a stored name.
        embedding: plain name of the embedding.
        output_matrix: plain name of the output matrix.
        parts: target and model -> what the target is made of.
        mtp: pattern of the plain name of a multi-token prediction head's tensor.
        ignored: pattern of a plain name -> why such a tensor is left out.
    """

    prefix: re.Pattern[str]
    embedding: str
    output_matrix: str
    parts: Callable[[TensorSpec, ModelGeometry], Parts]
    mtp: re.Pattern[str]
    ignored: tuple[tuple[re.Pattern[str], str], ...]

    def plain_name(self, stored: str) -> str:
        """Return a stored name without the prefix that differs between publishers."""
        return self.prefix.sub("", stored)


@dataclass(frozen=True)
class Recipe:
    """How one target is made.

    Attributes:
        target: name, type and shape in the rank checkpoint.
        sources: the stored tensors, in order; none where zeros are meant.
        join: their values -> the target's values, before the cast to its type.
    """

    target: TensorSpec
    sources: tuple[SourceTensor, ...]
    join: Join

    def make(self) -> torch.Tensor:
        """Read, join and cast.

        Raises:
            CheckpointError: a file changed, or a value does not fit the target's type.
        """
        import torch

        shape = tuple(int(size) for size in self.target.shape)
        values = self.join([source.read() for source in self.sources]) if self.sources else torch.zeros(shape)
        return cast(values.reshape(shape), self.target.dtype, self.target.name)


def cast(values: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """Convert to another type; a finite value that overflows the type is an error, not an infinity.

    Args:
        values: any float type.
        dtype: name of the type.
        name: of the tensor, for the message.

    Raises:
        CheckpointError: |value| is above the type's largest.
    """
    import torch

    from trtllm_replayssm.ops.dtypes import torch_dtype

    converted = values.to(torch_dtype(dtype))
    # float16 alone has a smaller range than the types that are read.
    if dtype == "float16" and values.dtype != torch.float16 and values.numel():
        largest, limit = float(values.abs().max()), torch.finfo(torch.float16).max
        if largest > limit:
            raise CheckpointError(
                f"{name}: found a value of magnitude {largest:g}; needed at most {limit:g} for float16. "
                "Convert with --dtype bfloat16."
            )
    return converted


def make_recipes(
    geometry: ModelGeometry, index: Mapping[str, SourceTensor], naming: Naming, *, use_conv_bias: bool
) -> tuple[tuple[Recipe, ...], dict[str, str]]:
    """Account for every tensor of a checkpoint.

    Args:
        geometry: the model; it decides the targets.
        index: the stored tensors.
        naming: how they are named.
        use_conv_bias: whether convolution biases are stored; zeros stand in for them otherwise.

    Returns:
        The recipes in the order of ``checkpoint_specs``, and the ignored tensors with the reasons.

    Raises:
        CheckpointError: missing, unexpected, doubled, misshapen or mistyped tensors: all of them in one message.
    """
    problems: list[str] = []
    stored = _by_plain_name(index, naming, problems)
    recipes = [
        Recipe(spec, (), concatenate)
        if spec.name.endswith(".conv1d.bias") and not use_conv_bias
        else _make_recipe(spec, naming.parts(spec, geometry), stored, problems)
        for spec in checkpoint_specs(geometry)
    ]
    used = {source.name for recipe in recipes for source in recipe.sources}
    ignored: dict[str, str] = {}
    for name, source in sorted(stored.items()):
        if source.name in used:
            continue
        reason = _reason_to_ignore(name, naming, geometry)
        if reason is None:
            problems.append(f"{source.name}: unexpected {list(source.shape)}; no part of this model uses it")
        else:
            ignored[source.name] = reason
    if problems:
        raise CheckpointError(_list(problems))
    return tuple(recipes), ignored


def mtp_problems(geometry: ModelGeometry, index: Mapping[str, SourceTensor], naming: Naming) -> list[str] | None:
    """Say what a multi-token prediction head lacks, nothing if it is whole; None where no tensor of one is stored.

    Args:
        geometry: of the model with the head.
        index: the stored tensors.
        naming: how they are named.
    """
    stored = {naming.plain_name(source.name): source for source in index.values()}
    if not any(naming.mtp.search(name) for name in stored):
        return None
    problems: list[str] = []
    for spec in mtp_weight_specs(geometry):
        _make_recipe(spec, naming.parts(spec, geometry), stored, problems)
    return problems


def _list(problems: list[str]) -> str:
    shown = "\n  - ".join(problems[:_MOST_SHOWN])
    more = f"\n  ... and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
    return (
        f"weights: found {len(problems)} tensors that do not fit config.json:\n  - {shown}{more}\n"
        "The folder's files are incomplete or of different models."
    )


def _by_plain_name(index: Mapping[str, SourceTensor], naming: Naming, problems: list[str]) -> dict[str, SourceTensor]:
    stored: dict[str, SourceTensor] = {}
    for source in index.values():
        name = naming.plain_name(source.name)
        if name in stored:
            problems.append(f"{source.name}: stored twice, also as {stored[name].name}")
        stored[name] = source
    return stored


def _reason_to_ignore(name: str, naming: Naming, geometry: ModelGeometry) -> str | None:
    if name == naming.output_matrix and geometry.tie_word_embeddings:
        return "equal to the embedding, which serves for both"
    return next((reason for pattern, reason in naming.ignored if pattern.search(name)), None)


def _make_recipe(spec: TensorSpec, parts: Parts, stored: Mapping[str, SourceTensor], problems: list[str]) -> Recipe:
    sources: list[SourceTensor] = []
    for name, shape in parts.sources:
        source = stored.get(name)
        if source is None:
            problems.append(f"{name}: missing; needed {list(shape)}")
        elif source.shape != shape:
            problems.append(f"{source.name}: found {list(source.shape)}; needed {list(shape)}")
        elif source.dtype not in SOURCE_DTYPE_BYTES:
            problems.append(f"{source.name}: found type {source.dtype}; needed one of {', '.join(SOURCE_DTYPE_BYTES)}")
        if source is not None:
            sources.append(source)
    return Recipe(spec, tuple(sources), parts.join)


def concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join along the first axis; one part is handed on as it is."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts)
