"""Which stored tensors make which tensor of a rank checkpoint, with exact accounting.

Every stored tensor is used by one recipe or ignored for a stated reason; every target has one recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_replayssm.builders.checkpoint.index import SOURCE_DTYPE_BYTES, SourceTensor
from trtllm_replayssm.contract.geometry import ModelGeometry
from trtllm_replayssm.contract.tensors import TensorSpec, weight_specs
from trtllm_replayssm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    Join = Callable[[list[torch.Tensor]], torch.Tensor]

EMBEDDING = "embeddings.weight"
OUTPUT_MATRIX = "lm_head.weight"

# "backbone." in published checkpoints and on disk; "model." is transformers' name in memory.
_PREFIX = re.compile(r"^(?:backbone|model)\.(?=(?:embeddings|layers|norm_f|mtp)\.)")

_IGNORED = (
    (re.compile(r"^mtp\."), "the multi-token prediction head is not run"),
    (re.compile(r"\.rotary_emb\.inv_freq$"), "a constant; the attention has no positional encoding"),
)

_RENAMED = {"embedding.weight": EMBEDDING, "final_norm.weight": "norm_f.weight"}


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


def plain_name(stored: str) -> str:
    """Return a stored name without the prefix that differs between publishers."""
    return _PREFIX.sub("", stored)


def make_recipes(
    geometry: ModelGeometry, index: Mapping[str, SourceTensor], *, use_conv_bias: bool
) -> tuple[tuple[Recipe, ...], dict[str, str]]:
    """Account for every tensor of a checkpoint.

    Args:
        geometry: the model; it decides the targets.
        index: the stored tensors.
        use_conv_bias: whether convolution biases are stored; zeros stand in for them otherwise.

    Returns:
        The recipes in the order of ``weight_specs``, and the ignored tensors with the reasons.

    Raises:
        CheckpointError: missing, unexpected, doubled, misshapen or mistyped tensors: all of them in one message.
    """
    problems: list[str] = []
    stored = _by_plain_name(index, problems)
    recipes = [_make_recipe(spec, geometry, stored, use_conv_bias, problems) for spec in weight_specs(geometry)]
    used = {source.name for recipe in recipes for source in recipe.sources}
    ignored: dict[str, str] = {}
    for name, source in sorted(stored.items()):
        if source.name in used:
            continue
        reason = _reason_to_ignore(name, geometry)
        if reason is None:
            problems.append(f"{source.name}: unexpected {list(source.shape)}; no part of this model uses it")
        else:
            ignored[source.name] = reason
    if problems:
        raise CheckpointError(_list(problems))
    return tuple(recipes), ignored


def _list(problems: list[str], limit: int = 20) -> str:
    shown = "\n  - ".join(problems[:limit])
    more = f"\n  ... and {len(problems) - limit} more" if len(problems) > limit else ""
    return (
        f"weights: found {len(problems)} tensors that do not fit config.json:\n  - {shown}{more}\n"
        "The folder's files are incomplete or of different models."
    )


def _by_plain_name(index: Mapping[str, SourceTensor], problems: list[str]) -> dict[str, SourceTensor]:
    stored: dict[str, SourceTensor] = {}
    for source in index.values():
        name = plain_name(source.name)
        if name in stored:
            problems.append(f"{source.name}: stored twice, also as {stored[name].name}")
        stored[name] = source
    return stored


def _reason_to_ignore(name: str, geometry: ModelGeometry) -> str | None:
    if name == OUTPUT_MATRIX and geometry.tie_word_embeddings:
        return "equal to the embedding, which serves for both"
    return next((reason for pattern, reason in _IGNORED if pattern.search(name)), None)


def _make_recipe(
    spec: TensorSpec,
    geometry: ModelGeometry,
    stored: Mapping[str, SourceTensor],
    use_conv_bias: bool,
    problems: list[str],
) -> Recipe:
    if spec.name.endswith(".conv1d.bias") and not use_conv_bias:
        return Recipe(spec, (), _concatenate)
    sources: list[SourceTensor] = []
    for name, shape in _parts(spec, geometry):
        source = stored.get(name)
        if source is None:
            problems.append(f"{name}: missing; needed {list(shape)}")
        elif source.shape != shape:
            problems.append(f"{source.name}: found {list(source.shape)}; needed {list(shape)}")
        elif source.dtype not in SOURCE_DTYPE_BYTES:
            problems.append(f"{source.name}: found type {source.dtype}; needed one of {', '.join(SOURCE_DTYPE_BYTES)}")
        if source is not None:
            sources.append(source)
    return Recipe(spec, tuple(sources), _decay_rate if spec.name.endswith(".mixer.A") else _concatenate)


def _parts(spec: TensorSpec, geometry: ModelGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the plain name and shape of each stored part of a target."""
    shape = tuple(int(size) for size in spec.shape)
    layer, _, role = spec.name.rpartition(".mixer.")
    if role == "A":
        yield f"{layer}.mixer.A_log", shape
    elif role == "conv1d.weight":
        yield spec.name, (shape[0], 1, shape[1])
    elif role == "qkv.weight":
        a = geometry.attention
        assert a is not None, "a geometry with attention layers describes them"
        for part, n_heads in (("q", a.n_query_heads), ("k", a.n_kv_heads), ("v", a.n_kv_heads)):
            yield f"{layer}.mixer.{part}_proj.weight", (n_heads * a.head_dim, shape[1])
    else:
        yield _RENAMED.get(spec.name, spec.name), shape


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decay_rate(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return ``A = -exp(A_log)`` in fp32 (Mamba-2's parametrisation)."""
    return -parts[0].float().exp()
