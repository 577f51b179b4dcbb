"""Where the time of a step goes: the device's kernels by what they do, and the time in which none runs."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from trtllm_replayssm.bench.e2e.stepping import CHOICE
from trtllm_replayssm.contract.geometry import Frozen

SAMPLING: Final = "sampling"
GAPS: Final = "gaps"
OTHER: Final = "other"
COPIES: Final = "copies"

# The first pattern that is found in a kernel's name counts: attention of torch is made of CUTLASS, too. Attention in
# plain matrix products cannot be told from other ones, and counts as they do.
_PATTERNS: Final = (
    ("state", r"replay_mamba2|replay_gated_delta_net|selective_scan|selective_state|gated_delta_rule|delta_rule"),
    ("conv", r"causal_conv"),
    ("attention", r"fmha|flash|attention|splitkv|mha_"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|gemv|cublas|splitk"),
)
CATEGORIES: Final = (*(name for name, _ in _PATTERNS), OTHER, COPIES, SAMPLING, GAPS)
_COPY_KINDS: Final = ("gpu_memcpy", "gpu_memset")
_RANGE_KIND: Final = "gpu_user_annotation"
_SHOWN_KERNELS: Final = 30


class KernelTime(Frozen):
    """One kernel's share of a step.

    Attributes:
        name: of the kernel, cut to 120 characters.
        category: what it does.
        us: of one step, all launches.
        launches: in one step.
    """

    name: str
    category: str
    us: float
    launches: float


class Breakdown(Frozen):
    """One step's time on the device.

    Attributes:
        us: category -> microseconds of a step; "gaps" is the time in which no kernel runs.
        step_us: their sum.
        launches: kernels and copies of a step.
        kernels: those that take most.
    """

    us: dict[str, float]
    step_us: float
    launches: float
    kernels: tuple[KernelTime, ...]


class _Work(NamedTuple):
    name: str
    category: str
    start: float
    end: float


def profile(run: Callable[[], object], num_steps: int, device: torch.device) -> Breakdown:
    """Run some steps under torch's profiler.

    Args:
        run: runs ``num_steps`` steps, warmed up before.
        num_steps: how many they are.
        device: a CUDA device; the CPU has no kernels to count.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return of_trace(json.loads(path.read_text())["traceEvents"], num_steps)


def category_of(kernel: str) -> str:
    """Tell from a kernel's name what it does."""
    name = kernel.lower()
    return next((category for category, pattern in _PATTERNS if re.search(pattern, name)), OTHER)


def of_trace(events: Iterable[Mapping[str, Any]], num_steps: int) -> Breakdown:
    """Sum the device's work in a trace of ``num_steps`` steps by category.

    Args:
        events: of a Chrome trace: dictionaries with cat, name, ts and dur (microseconds).
        num_steps: in the trace.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    choices = [event for event in complete if event.get("cat") == _RANGE_KIND and event["name"] == CHOICE]
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in choices]
    works = sorted((_work(event, spans) for event in complete if _is_work(event)), key=lambda work: work.start)
    us = dict.fromkeys(CATEGORIES, 0.0)
    by_kernel: dict[tuple[str, str], list[float]] = {}
    reached = works[0].start if works else 0.0
    for work in works:
        us[GAPS] += max(0.0, work.start - reached)
        # Kernels may overlap; what ran before counts for the earlier one.
        took = max(0.0, work.end - max(work.start, reached))
        us[work.category] += took
        by_kernel.setdefault((work.name, work.category), []).append(took)
        reached = max(reached, work.end)
    kernels = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:_SHOWN_KERNELS]
    return Breakdown(
        us={category: total / num_steps for category, total in us.items()},
        step_us=sum(us.values()) / num_steps,
        launches=len(works) / num_steps,
        kernels=tuple(
            KernelTime(name=name[:120], category=category, us=sum(t) / num_steps, launches=len(t) / num_steps)
            for (name, category), t in kernels
        ),
    )


def _is_work(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "kernel" or event.get("cat") in _COPY_KINDS


def _work(event: Mapping[str, Any], choices: Sequence[tuple[float, float]]) -> _Work:
    start = float(event["ts"])
    end = start + float(event["dur"])
    if any(first <= start and end <= last for first, last in choices):
        category = SAMPLING
    elif event["cat"] in _COPY_KINDS:
        category = COPIES
    else:
        category = category_of(event["name"])
    return _Work(str(event["name"]), category, start, end)
