"""Few cases in which every two values meet: what a full product would test pair by pair."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]


def pairwise(
    axes: Mapping[str, Sequence[Hashable]], is_allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return cases, one value per axis, in which every pair of values of two axes occurs that can occur.

    Greedy: each case starts from a pair that no case has yet, and takes along as many other such pairs as it can. The
    same cases on every machine.

    Args:
        axes: name -> values.
        is_allowed: of a case with some of the axes; a case that is not allowed must not become so by further axes.
    """
    missing = {
        pair
        for first, second in combinations(axes, 2)
        for pair in (((first, a), (second, b)) for a in axes[first] for b in axes[second])
    }
    cases = []
    # Values of an axis in the order of their use, so that one is not taken again and again where nothing decides.
    uses = {(name, value): 0 for name, values in axes.items() for value in values}
    for seed in sorted(missing, key=str):
        if seed not in missing:
            continue
        case = _completed(dict(seed), axes, is_allowed, missing, uses)
        missing.discard(seed)  # covered, or impossible
        if case is not None:
            cases.append(case)
            missing -= set(combinations(_in_order(case, axes), 2))
            for item in case.items():
                uses[item] += 1
    return cases


def _completed(
    case: Case,
    axes: Mapping[str, Sequence[Hashable]],
    is_allowed: Callable[[Case], bool],
    missing: set[Any],
    uses: Mapping[tuple[str, Hashable], int],
) -> Case | None:
    """Fill in the other axes, the choice that covers most first; None where there is no allowed way."""
    if not is_allowed(case):
        return None
    open_axes = [name for name in axes if name not in case]
    if not open_axes:
        return case

    def gain(name: str, value: Hashable) -> tuple[int, int]:
        pairs = combinations(_in_order(case | {name: value}, axes), 2)
        return sum(pair in missing for pair in pairs), -uses[name, value]

    name = open_axes[0]
    for value in sorted(axes[name], key=lambda value: gain(name, value), reverse=True):
        found = _completed(case | {name: value}, axes, is_allowed, missing, uses)
        if found is not None:
            return found
    return None


def _in_order(case: Case, axes: Mapping[str, Sequence[Hashable]]) -> list[tuple[str, Any]]:
    return [(name, case[name]) for name in axes if name in case]
