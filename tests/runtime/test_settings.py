"""Options, completed from a model or held against an engine's manifest; the memory plan."""

from typing import Any

import pytest
import torch

from tests.builders.tiny_geometry import tiny_geometry
from tests.runtime.manifests import tiny_manifest
from trtllm_replayssm import LLM, ReplayConfig, SchedulerConfig
from trtllm_replayssm.bench.shapes import MAMBA2
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.contract.tensors import state_specs
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.plugins.history_choice import TIME_OVER_LIMIT
from trtllm_replayssm.runtime import opening, pools, settings
from trtllm_replayssm.runtime.speculative.base import NoDrafter


def options(**chosen: Any) -> settings.Options:
    values: dict[str, Any] = {
        "dtype": "auto",
        "max_batch_size": None,
        "max_seq_len": None,
        "max_num_tokens": None,
        "replay": ReplayConfig(),
        "max_draft_len": 0,
    }
    return settings.Options(**(values | chosen))


def test_a_model_gets_its_own_context_eight_slots_and_whole_prompts() -> None:
    found = settings.of_model(tiny_geometry(max_position_embeddings=512), options())
    assert found.limits == EngineLimits(max_batch_size=8, max_input_len=511, max_seq_len=512, max_num_tokens=511)
    assert found.replay == ReplayGeometry(history=16, max_draft_len=0)
    long = settings.of_model(tiny_geometry(max_position_embeddings=131072), options())
    assert (long.limits.max_seq_len, long.limits.max_num_tokens) == (4096, 2048)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"replay": ReplayConfig(history=4), "max_draft_len": 4}, "history: found 4 with max_draft_len=4; needed at l"),
        ({"max_seq_len": 1}, "max_seq_len: found 1"),
        ({"max_batch_size": 0}, "max_batch_size: found 0"),
        ({"max_num_tokens": -3}, "max_num_tokens: found -3"),
    ],
)
def test_impossible_options_are_errors_with_the_numbers(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.of_model(tiny_geometry(), options(**chosen))


def test_auto_becomes_the_history_that_costs_least_for_the_model_and_its_device() -> None:
    geometry = tiny_geometry(dtype="bfloat16", mamba2=MAMBA2["nano9b"])
    wish = options(replay=ReplayConfig(history="auto"), max_draft_len=3)
    found = [settings.of_model(geometry, wish, targets).replay for targets in ((), (80,), (90,))]
    assert found == [ReplayGeometry(history=32, max_draft_len=3)] * 3
    with pytest.raises(ConfigError, match="history: found 'auto' with max_draft_len=40"):
        settings.of_model(geometry, options(replay=ReplayConfig(history="auto"), max_draft_len=40))


@pytest.mark.parametrize(("name", "enabled", "expected"), [("cuda", True, 16), ("cuda", False, 32), ("cpu", True, 32)])
def test_auto_asks_the_device_whose_kernels_will_run(
    monkeypatch: pytest.MonkeyPatch, name: str, enabled: bool, expected: int
) -> None:
    """The conventional decode has no kernels, like the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    # A device whose kernel would be slow with what is best elsewhere.
    monkeypatch.setitem(TIME_OVER_LIMIT, ("pipelined_step", 4, 4, 32), 9.0)
    wish = options(replay=ReplayConfig(history="auto", enabled=enabled), max_draft_len=3)
    targets = opening._kernel_capabilities(wish, torch.device(name))
    geometry = tiny_geometry(dtype="bfloat16", mamba2=MAMBA2["nano9b"])
    assert settings.of_model(geometry, wish, targets).replay.history == expected


@pytest.mark.parametrize("history", [0, -1, True, 8.0, "8", "AUTO", None])
def test_a_history_is_a_number_or_auto(history: Any) -> None:
    with pytest.raises(ConfigError, match=f"history: found {history!r}; needed an integer from 1 up or 'auto'"):
        ReplayConfig(history=history)


def test_an_engine_gives_its_own_values_and_less_can_be_asked_for() -> None:
    manifest = tiny_manifest()
    found = settings.of_engine(manifest, options())
    assert (found.geometry, found.replay, found.limits) == (manifest.geometry, manifest.replay, manifest.limits)
    less = settings.of_engine(manifest, options(max_batch_size=1, max_seq_len=20, max_num_tokens=3, max_draft_len=1))
    assert less.limits == EngineLimits(max_batch_size=1, max_input_len=20, max_seq_len=20, max_num_tokens=3)
    assert less.replay == manifest.replay, "the window is the engine's, however few drafts are proposed"


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"max_batch_size": 4}, "max_batch_size=4, built for at most 3"),
        ({"max_seq_len": 65}, "max_seq_len=65, built for at most 64"),
        ({"max_num_tokens": 99}, "max_num_tokens=99, built for at most 11"),
        ({"max_draft_len": 3}, "max_draft_len=3, built for at most 2"),
        ({"replay": ReplayConfig(history=16)}, "history=16, built for 8"),
        ({"replay": ReplayConfig(state_dtype="float16")}, "state_dtype=float16, built for float32"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16, built for float32"),
    ],
)
def test_what_contradicts_an_engine_is_named(chosen: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings.of_engine(tiny_manifest(), options(**chosen))


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size=9.*history=9.*dtype=float16"):
        settings.of_engine(tiny_manifest(), options(max_batch_size=9, replay=ReplayConfig(history=9), dtype="float16"))


def test_what_the_user_left_at_its_default_contradicts_nothing() -> None:
    assert settings.of_engine(tiny_manifest(), options(replay=ReplayConfig())).replay.history == 8
    assert settings.of_engine(tiny_manifest(), options(replay=ReplayConfig(history=8))).replay.history == 8
    assert settings.of_engine(tiny_manifest(), options(replay=ReplayConfig(history="auto"))).replay.history == 8


def test_pools_are_allocated_as_the_contract_lists_them() -> None:
    geometry, replay = tiny_geometry(), ReplayGeometry(history=8, max_draft_len=2)
    limits = EngineLimits(max_batch_size=3, max_input_len=9, max_seq_len=10, max_num_tokens=9)
    for conventional in (False, True):
        specs = state_specs(geometry, replay, limits, conventional=conventional)
        states = pools.allocate(specs, limits, torch.device("cpu"))
        for spec, state in zip(specs, states, strict=True):
            assert tuple(state.shape) == tuple(3 if dim == "B" else dim for dim in spec.shape)
            assert str(state.dtype) == f"torch.{spec.dtype}" and state.is_contiguous()


@pytest.mark.parametrize("wrong", [{}, {"max_queue_size": 1}, 0, 3, "x", SchedulerConfig], ids=repr)
def test_what_is_no_scheduler_config_is_refused_before_a_model_is_opened(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="scheduler_config: found .*; needed an instance of SchedulerConfig"):
        LLM("no/such/folder", scheduler_config=wrong)


@pytest.mark.parametrize("wrong", [None, "folder", NoDrafter()], ids=lambda value: type(value).__name__)
def test_what_is_no_executor_is_not_served(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="executor: found .*; needed an object that runs"):
        LLM.from_executor(wrong)


@pytest.mark.parametrize("length", [-1, "3", 2.0, True, None], ids=repr)
def test_a_drafter_says_how_many_drafts_it_makes_at_most(length: Any) -> None:
    drafter = NoDrafter()
    drafter.max_draft_len = length
    with pytest.raises(ConfigError, match="drafter: found max_draft_len .*; needed a whole number"):
        LLM("no/such/folder", drafter=drafter)
