"""Few cases in which every two values meet: what a full product would test pair by pair."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Hashable]]) -> list[Case]:
    """Return cases, one value per axis, in which every pair of values of two axes occurs.

    Greedy: each case starts from a pair that no case has yet, and takes along as many other such pairs as it can, of
    equally good values the one that has been used least. The same cases on every machine.

    Args:
        axes: name -> values.
    """
    missing = {pair for a, b in combinations(axes, 2) for pair in product(_items(a, axes), _items(b, axes))}
    uses = dict.fromkeys((item for name in axes for item in _items(name, axes)), 0)
    cases = []
    for seed in sorted(missing, key=str):
        if seed not in missing:
            continue
        case: Case = dict(seed)
        for name in axes:
            if name not in case:
                gains = {
                    item: (len(_pairs(case | dict([item]), axes) & missing), -uses[item]) for item in _items(name, axes)
                }
                case |= [max(gains, key=lambda item: gains[item])]
        cases.append(case)
        missing -= _pairs(case, axes)
        for item in case.items():
            uses[item] += 1
    return cases


def _items(name: str, axes: Mapping[str, Sequence[Hashable]]) -> list[tuple[str, Hashable]]:
    return [(name, value) for value in axes[name]]


def _pairs(case: Case, axes: Mapping[str, Sequence[Hashable]]) -> set[tuple[Any, ...]]:
    """Return the pairs of a case, or of what there is of it, each in the order of the axes."""
    return set(combinations([(name, case[name]) for name in axes if name in case], 2))
