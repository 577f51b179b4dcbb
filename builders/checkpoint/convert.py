"""Hugging Face folder -> rank checkpoint, tensor by tensor."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from trtllm_replayssm.builders.checkpoint import rank_checkpoint
from trtllm_replayssm.builders.checkpoint.companions import copy_companions
from trtllm_replayssm.builders.checkpoint.model_folder import folder_kind
from trtllm_replayssm.builders.checkpoint.safetensors_writer import write_safetensors
from trtllm_replayssm.builders.checkpoint.source import CheckpointSource, open_source
from trtllm_replayssm.builders.checkpoint.staging import check_output, staged_folder
from trtllm_replayssm.contract.manifest import WEIGHTS_FILE
from trtllm_replayssm.contract.memory import tensor_bytes
from trtllm_replayssm.errors import CapacityError, CheckpointError, UnsupportedError


@dataclass(frozen=True)
class BalanceSheet:
    """The accounts of a conversion: sources used + ignored = stored, and every target written once.

    Attributes:
        num_used: stored tensors that went into targets.
        used_bytes: their bytes.
        ignored: reason -> names of the stored tensors left out for it.
        num_written: tensors of the rank checkpoint.
        written_bytes: bytes of the weights file.
        companions: tokenizer files that were copied.
        notes: what a user should know.
    """

    num_used: int
    used_bytes: int
    ignored: dict[str, tuple[str, ...]]
    num_written: int
    written_bytes: int
    companions: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the sheet as text."""
        yield f"used     {self.num_used} stored tensors, {self.used_bytes:,} bytes"
        for reason, names in self.ignored.items():
            more = f", and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"ignored  {', '.join(names[:3])}{more}: {reason}"
        yield f"written  {self.num_written} tensors, {self.written_bytes:,} bytes"
        yield f"copied   {', '.join(self.companions) or 'no tokenizer files: there are none'}"
        yield from (f"note     {note}" for note in self.notes)


def convert(
    model_dir: Path | str,
    output_dir: Path | str,
    dtype: str = "auto",
    tp_size: int = 1,
    *,
    progress: bool = False,
    report: Callable[[BalanceSheet], None] | None = None,
) -> Path:
    """Convert a Hugging Face folder to a rank checkpoint, holding one tensor in memory at a time.

    Args:
        model_dir: Hugging Face folder with safetensors weights in float32, float16 or bfloat16.
        output_dir: folder to write, new or empty. It appears whole, or not at all.
        dtype: type of the weights; "auto" takes the config's.
        tp_size: ranks to split the model over.
        progress: show a bar, where standard error is a terminal.
        report: called with the accounts once the folder is in place.

    Returns:
        output_dir.

    Raises:
        CheckpointError: no model folder, or one whose tensors are missing, unexpected, misshapen or damaged.
        ConfigError: unknown or contradictory config keys, or an output that is taken or cannot be written.
        UnsupportedError: another architecture, or more than one rank.
        CapacityError: the disk has too little room.
    """
    model_dir, output_dir = Path(model_dir), Path(output_dir)
    if tp_size != 1:
        raise UnsupportedError(f"tp_size: found {tp_size}; needed 1. This version runs a model on one rank.")
    check_output(output_dir)
    if folder_kind(model_dir) != "huggingface":
        raise CheckpointError(f"{model_dir}: found a folder that is converted already; needed a Hugging Face folder.")
    source = open_source(model_dir, dtype)
    with staged_folder(output_dir) as staging:
        _check_room(staging, source)
        with _bar(source, shown=progress) as advance:
            written = write_safetensors(staging / WEIGHTS_FILE, source.specs, source.tensors(), advance)
        companions = copy_companions(model_dir, staging)
        rank_checkpoint.write_config(staging, source.geometry)
    if report is not None:
        report(_balance(source, written, companions))
    return output_dir


def _balance(source: CheckpointSource, written_bytes: int, companions: tuple[str, ...]) -> BalanceSheet:
    ignored: dict[str, tuple[str, ...]] = {}
    for name, reason in source.ignored.items():
        ignored[reason] = (*ignored.get(reason, ()), name)
    return BalanceSheet(
        num_used=len(source.used),
        used_bytes=sum(tensor.num_bytes for tensor in source.used),
        ignored=ignored,
        num_written=len(source.recipes),
        written_bytes=written_bytes,
        companions=companions,
        notes=source.notes,
    )


def _check_room(folder: Path, source: CheckpointSource) -> None:
    needed, free = sum(map(tensor_bytes, source.specs)), shutil.disk_usage(folder).free
    if needed > free:
        raise CapacityError(
            f"{folder.parent}: found {free:,} bytes free; needed {needed:,} for the weights. Name another output_dir, "
            "or remove something."
        )


@contextmanager
def _bar(source: CheckpointSource, *, shown: bool) -> Iterator[Callable[[int], object]]:
    total = sum(map(tensor_bytes, source.specs))
    with tqdm(total=total, desc="converting", unit="B", unit_scale=True, disable=None if shown else True) as bar:
        yield bar.update
