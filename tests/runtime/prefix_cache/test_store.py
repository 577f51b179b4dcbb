"""Memory of the prefix cache: ranges never overlap, budgets hold, the least recently used goes first."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_replayssm.errors import CapacityError
from trtllm_replayssm.runtime.prefix_cache.arena import ALIGNMENT, Arena, Range
from trtllm_replayssm.runtime.prefix_cache.store import Chunk, Store

CPU = torch.device("cpu")


def arena(units: int) -> Arena:
    return Arena(units * ALIGNMENT, CPU)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * ALIGNMENT)), max_size=60))
def test_ranges_in_use_never_overlap_and_freed_neighbours_join(steps: list[tuple[bool, int]]) -> None:
    memory, held = arena(16), list[Range]()
    for is_free, number in steps:
        if is_free and held:
            memory.free(held.pop(number % len(held)))
        else:
            taken = memory.allocate(number)
            needed = max(1, -(-number // ALIGNMENT)) * ALIGNMENT
            bounds = [0, *(edge for found in sorted(held) for edge in (found.start, found.end)), memory.capacity]
            longest = max(end - start for start, end in zip(bounds[::2], bounds[1::2], strict=True))
            assert (taken is not None) == (longest >= needed)
            if taken is not None:
                assert taken.num_bytes == needed and taken.start % ALIGNMENT == 0 and taken.end <= memory.capacity
                assert all(taken.end <= other.start or other.end <= taken.start for other in held)
                held.append(taken)
        assert memory.used_bytes == sum(found.num_bytes for found in held)
    for found in held:
        memory.free(found)
    assert memory.used_bytes == 0 and memory.allocate(memory.capacity) == Range(0, memory.capacity)


def test_an_arena_without_capacity_gives_nothing() -> None:
    assert arena(0).allocate(1) is None
    assert Arena(ALIGNMENT - 1, CPU).allocate(1) is None


def filled(store: Store, names: str, num_bytes: int = ALIGNMENT) -> list[Chunk]:
    chunks = []
    for name in names:
        chunk = store.add(name, num_bytes)
        assert chunk is not None
        store.view(chunk).fill_(ord(name))
        chunks.append(chunk)
    return chunks


def names_in(store: Store) -> tuple[str, str]:
    device, host = ("".join(chunk.owner for chunk in tier.chunks) for tier in (store.device, store.host))
    return device, host


def test_what_leaves_the_device_goes_to_the_host_and_from_there_for_good() -> None:
    gone: list[str] = []
    store = Store(arena(2), arena(2), lambda chunk: gone.append(chunk.owner))
    a, b, c = filled(store, "abc")
    assert names_in(store) == ("bc", "a") and not gone
    store.touch(b)
    (d, e) = filled(store, "de")
    assert names_in(store) == ("de", "cb") and gone == ["a"]
    assert a.tier is None
    for chunk in (b, c, d, e):
        assert bool((store.view(chunk) == ord(chunk.owner)).all())
    store.promote(c)  # d must leave the device while c still has its place on the host: b has none then
    assert names_in(store) == ("ec", "d") and gone == ["a", "b"] and bool((store.view(c) == ord("c")).all())
    store.free(c)
    store.free(c)
    assert names_in(store) == ("e", "d")


def test_pinned_chunks_stay_and_a_chunk_that_finds_no_room_is_refused() -> None:
    gone: list[str] = []
    store = Store(arena(2), arena(1), lambda chunk: gone.append(chunk.owner))
    a, b = filled(store, "ab")
    with store.pinned([a]):
        filled(store, "cd")
        assert names_in(store) == ("ad", "c") and gone == ["b"]
        assert store.add("too big", 3 * ALIGNMENT) is None and names_in(store) == ("ad", "c")
    with store.pinned([*store.device.chunks, *store.host.chunks]):
        assert store.add("x", 1) is None
        store.promote(next(iter(store.host.chunks)))
    assert names_in(store) == ("ad", "c")
    assert b.tier is None


def test_without_a_device_budget_everything_is_on_the_host() -> None:
    store = Store(arena(0), arena(2), lambda chunk: None)
    (a, _) = filled(store, "ab")
    store.promote(a)
    assert names_in(store) == ("", "ab")


def test_a_dropped_chunk_may_take_the_one_that_needed_its_room() -> None:
    chunks: list[Chunk] = []

    def drop(chunk: Chunk) -> None:
        if chunk.owner == "parent":
            store.free(chunks[1])

    store = Store(arena(1), arena(1), drop)
    for name in ("parent", "child"):
        chunk = store.add(name, 1)
        assert chunk is not None
        chunks.append(chunk)
    assert names_in(store) == ("child", "parent")
    assert store.add("new", 1) is not None
    assert names_in(store) == ("new", "") and (store.device.arena.used_bytes, store.host.arena.used_bytes) == (256, 0)


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "promote", "free"]), st.integers(0, 1000)), max_size=50))
def test_whatever_happens_bytes_stay_within_budget_and_chunks_keep_their_own(
    steps: Sequence[tuple[str, int]],
) -> None:
    store = Store(arena(7), arena(5), lambda chunk: None)
    for number, (action, argument) in enumerate(steps):
        alive = [*store.device.chunks, *store.host.chunks]
        if action == "add":
            chunk = store.add(number, argument)
            assert chunk is not None
            store.view(chunk).fill_(number)
        elif alive:
            getattr(store, action)(alive[argument % len(alive)])
        for tier in (store.device, store.host):
            assert tier.arena.used_bytes == sum(found.num_bytes for found in tier.chunks.values())
            assert tier.arena.used_bytes <= tier.arena.capacity
            for chunk in tier.chunks:
                assert chunk.tier is tier and bool((store.view(chunk)[: chunk.num_bytes] == chunk.owner).all())


@pytest.mark.parametrize("size", [2**60, 2**63, 10**30], ids=["2**60", "2**63", "10**30"])
def test_more_memory_than_there_is_says_which_option_to_lower(size: int) -> None:
    with pytest.raises(CapacityError, match="Lower device_cache_size") as caught:
        Arena(size, CPU)
    assert "\n" not in str(caught.value)
