"""Copies of slots bit for bit, and which snapshots are found, taken, shared and lost."""

from collections.abc import Sequence

import pytest
import torch

from tests.builders.tiny_geometry import tiny_geometry, tiny_qwen_geometry
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.tensors import state_specs
from trtllm_replayssm.runtime import pools
from trtllm_replayssm.runtime.prefix_cache.arena import ALIGNMENT, Arena
from trtllm_replayssm.runtime.prefix_cache.cache import PrefixCache
from trtllm_replayssm.runtime.prefix_cache.slot_states import SlotStates

CPU = torch.device("cpu")
LIMITS = EngineLimits(max_batch_size=4, max_input_len=40, max_seq_len=48, max_num_tokens=16)
REPLAY = ReplayGeometry(history=5, max_draft_len=2)
GEOMETRIES = [tiny_geometry("M*-M"), tiny_qwen_geometry("G*-G")]


def random_states(geometry: ModelGeometry, *, conventional: bool = False) -> list[pools.State]:
    generator = torch.Generator().manual_seed(0)
    specs = state_specs(geometry, REPLAY, LIMITS, conventional=conventional)
    return [
        pools.State(spec, torch.rand(pool.shape, generator=generator).to(pool.dtype))
        for spec, pool in zip(specs, pools.allocate(specs, LIMITS, CPU), strict=True)
    ]


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["mamba2", "gated_delta_net"])
@pytest.mark.parametrize("position", [1, 2, 3, 5, 17, 30])
def test_a_snapshot_brings_another_slot_what_a_step_at_its_position_reads(
    geometry: ModelGeometry, position: int, conventional: bool
) -> None:
    states = random_states(geometry, conventional=conventional)
    before = [state.pool.clone() for state in states]
    copies = SlotStates(geometry, states)
    flat_state = torch.empty(copies.state_bytes, dtype=torch.uint8)
    copies.save_state(1, position, flat_state)
    borders = [0, position // 2, position]
    blocks = [(start, end) for start, end in zip(borders, borders[1:], strict=False) if end > start]
    flat_rows = [torch.empty(copies.rows_bytes(end - start), dtype=torch.uint8) for start, end in blocks]
    for (start, end), flat in zip(blocks, flat_rows, strict=True):
        copies.save_rows(1, start, end, flat)
    assert all(torch.equal(state.pool, was) for state, was in zip(states, before, strict=True))
    for (start, end), flat in zip(blocks, flat_rows, strict=True):
        copies.load_rows(3, start, end, flat)
    copies.load_state(3, position, flat_state)
    d_conv = geometry.recurrence.d_conv if geometry.recurrence else 0
    for state, was in zip(states, before, strict=True):
        kind, pool = state.spec.name.rpartition("_")[0], state.pool
        expected = was.clone()
        if state.spec.is_cache:
            expected[3, :, :position] = was[1, :, :position]
        elif kind == "ssm_state":
            expected[3] = was[1]
        elif kind == "ssm_snapshots":
            row = position % pool.shape[1]
            expected[3, row] = was[1, row]
        elif kind == "conv_ring":
            rows = [token % pool.shape[1] for token in range(max(0, position - d_conv + 1), position)]
            expected[3, rows] = was[1, rows]
        assert torch.equal(pool, expected), state.spec.name


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["mamba2", "gated_delta_net"])
def test_a_copied_slot_has_everything_of_the_other_up_to_its_length(geometry: ModelGeometry) -> None:
    states = random_states(geometry)
    before = [state.pool.clone() for state in states]
    SlotStates(geometry, states).copy_slot(2, 0, 13)
    for state, was in zip(states, before, strict=True):
        expected = was.clone()
        if state.spec.is_cache:
            expected[0, :, :13] = was[2, :, :13]
        else:
            expected[0] = was[2]
        assert torch.equal(state.pool, expected), state.spec.name


def small_cache(num_snapshots: float, *, block: int = 4, interval: int | None = 1000) -> tuple[PrefixCache, int, int]:
    geometry = GEOMETRIES[0]
    copies = SlotStates(geometry, random_states(geometry))
    state, rows = (-(-size // ALIGNMENT) * ALIGNMENT for size in (copies.state_bytes, copies.rows_bytes(block)))
    capacity = int(num_snapshots * (state + rows))
    return PrefixCache(copies, block, Arena(capacity, CPU), Arena(0, CPU), interval), state, rows


def tokens(*blocks: int, tail: Sequence[int] = ()) -> list[int]:
    return [token for block in blocks for token in range(10 * block, 10 * block + 4)] + list(tail)


def test_rows_of_blocks_that_are_alike_are_there_once() -> None:
    cache, state, rows = small_cache(10)
    assert cache.save(tokens(1, 2), 0) and cache.save(tokens(1, 3), 0) and cache.save(tokens(1), 0)
    assert cache.save(tokens(1, 2), 0)
    assert cache.metrics()["num_prefix_snapshots"] == 3
    assert cache.metrics()["prefix_device_bytes"] == 3 * state + 3 * rows
    cache.clear()
    assert cache.metrics()["prefix_device_bytes"] == 0 and cache.restore(tokens(1, 2, 3), 1) == 0


def test_the_longest_saved_prefix_is_found_and_the_last_token_is_left_to_run() -> None:
    cache, _, _ = small_cache(10)
    for known in (tokens(1), tokens(1, 2, 3), tokens(1, 2, tail=[7, 8])):
        cache.save(known, 0)
    for prompt, found in (
        (tokens(2, 1), 0),
        (tokens(1), 0),
        (tokens(1, tail=[5]), 4),
        (tokens(1, 2, tail=[7]), 4),
        (tokens(1, 2, tail=[7, 8]), 4),
        (tokens(1, 2, tail=[7, 8, 9]), 10),
        (tokens(1, 2, 3), 4),
        (tokens(1, 2, 3, 4), 12),
        (tokens(1, 2, 4), 4),
    ):
        assert cache.restore(prompt, 1) == found, prompt


def test_snapshots_are_wanted_at_the_last_border_and_where_prompts_part() -> None:
    cache, _, _ = small_cache(10)
    assert cache.positions_to_save(tokens(1, 2, 3)) == {8}
    assert cache.positions_to_save(tokens(1, 2, 3, tail=[1])) == {12}
    assert cache.positions_to_save([1, 2, 3, 4]) == set()
    cache.save(tokens(1, 2, 3), 0)
    assert cache.positions_to_save(tokens(1, 2, 9, 9, 9)) == {8, 16}
    cache.save(tokens(1, 2), 0)
    assert cache.positions_to_save(tokens(1, 2, 9, 9, 9)) == {16}
    assert cache.positions_to_save(tokens(1, 2, 3, tail=[1])) == set()


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (None, {4, 8, 16, 32, 40}),
        (1, {*range(4, 41, 4)}),
        (8, {8, 16, 24, 32, 40}),
        (9, {12, 24, 36, 40}),
        (40, {40}),
        (41, {40}),
    ],
)
def test_snapshots_are_wanted_within_a_prompt(interval: int | None, expected: set[int]) -> None:
    cache, _, _ = small_cache(20, interval=interval)
    prompt = tokens(*range(1, 11), tail=[1])
    assert cache.positions_to_save(prompt) == expected
    assert cache.positions_to_save(prompt[:4]) == set()
    for position in sorted(expected):
        assert cache.save(prompt[:position], 0)
    assert cache.positions_to_save(prompt) == set()
    for shared in range(1, 11):
        found = cache.restore([*prompt[: 4 * shared], 7, 7, 7, 7, 7], 1)
        assert found == max((position for position in expected if position <= 4 * shared), default=0)
        assert interval is not None or shared == 0 or found > 2 * shared


def test_the_least_recently_used_snapshot_leaves_and_the_rows_it_alone_needed_go_with_it() -> None:
    cache, state, rows = small_cache(3)
    for first in (1, 2, 3):
        cache.save(tokens(first), 0)
    assert cache.restore(tokens(1, tail=[0]), 1) == 4
    cache.save(tokens(4), 0)
    assert [cache.restore(tokens(first, tail=[0]), 1) for first in (1, 2, 3, 4)] == [4, 0, 4, 4]
    assert cache.metrics()["prefix_device_bytes"] == 3 * (state + rows)


def test_a_snapshot_where_two_prompts_part_may_push_the_prompts_own_out() -> None:
    cache, state, rows = small_cache(1.5)
    assert cache.save(tokens(1, 2), 0)
    assert cache.save(tokens(1), 0)
    assert cache.restore(tokens(1, 2, 3), 1) == 4
    assert cache.metrics()["prefix_device_bytes"] == state + rows


def test_a_snapshot_that_does_not_fit_leaves_nothing_behind() -> None:
    cache, _, _ = small_cache(0.9)
    assert not cache.save(tokens(1), 0)
    assert not cache.save(tokens(1, 2, 3), 0)
    assert cache.metrics()["prefix_device_bytes"] == cache.metrics()["num_prefix_snapshots"] == 0


def test_a_prompt_that_is_too_long_for_the_budget_costs_no_other_snapshot() -> None:
    _, state, rows = small_cache(1)
    cache, _, _ = small_cache((2 * state + 6 * rows) / (state + rows) + 0.001, interval=1)  # no fraction is lost
    prompt = tokens(*range(1, 31), tail=[1])
    assert cache.save(tokens(40), 0) and cache.save(prompt[:16], 0)
    assert 30 * rows + state > 2 * state + 6 * rows and not cache.save(prompt[:120], 0)
    assert cache.restore(tokens(40, tail=[1]), 1) == 4 and cache.restore(prompt, 1) == 16
    longest = (state + 6 * rows) // rows  # with one state, its own
    saved = [number for number in range(1, 31) if cache.save(prompt[: 4 * number], 0)]
    assert saved == [*range(1, longest + 1)] and cache.restore(prompt, 1) == 4 * longest
