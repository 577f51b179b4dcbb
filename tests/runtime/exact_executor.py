"""An executor without a model: logits are a hash of the sequence, exact in any batch, in any pieces, after any detour.

It keeps states as the real ones do and believes only them: a checkpoint (here a running hash), a ring of pending
tokens and a cache with a row for every position. A token that the runtime forgets, repeats, misplaces or takes from
another request's slot changes the hash of all that follows, and so every later token.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.meta.repository import ROOT
from trtllm_replayssm.builders.checkpoint.model_folder import open_model_folder
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import EngineLimits, ModelGeometry, ReplayGeometry
from trtllm_replayssm.contract.memory_plan import Execution, plan_memory
from trtllm_replayssm.contract.tensors import TensorSpec
from trtllm_replayssm.runtime import llm as llm_module
from trtllm_replayssm.runtime import pools, settings
from trtllm_replayssm.runtime.step import StepInputs, StepOutputs

MODEL = ROOT / "examples" / "tiny_hybrid" / "model"
"""A folder whose geometry and tokenizer the executor can have."""

_MASK = 2**64 - 1
_NUM_ENTRIES = 512
# The last token alone mostly decides, and few tokens are likely: texts repeat themselves, and drafts are accepted.
_CONTEXT = 1
_LIKELY = 24


def fold(state: int, token: int) -> int:
    """Return the hash of a sequence that one more token follows."""
    mixed = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ mixed >> 29


class ExactExecutor:
    """An ``Executor`` for tests.

    Args:
        geometry: whose vocabulary it has.
        replay: history and window.
        limits: slots and lengths.
        is_spoilt: hash of a sequence -> whether the logits behind it are not finite.
    """

    name = "torch"
    is_conventional = False

    def __init__(
        self,
        geometry: ModelGeometry,
        replay: ReplayGeometry,
        limits: EngineLimits,
        is_spoilt: Callable[[int], bool] = lambda state: False,
    ) -> None:
        self.geometry, self.replay, self.limits = geometry, replay, limits
        self.device = torch.device("cpu")
        self.memory_plan = plan_memory(geometry, replay, limits, Execution(has_activations=False))
        self.num_steps = 0
        self.is_closed = False
        self._is_spoilt = is_spoilt
        rng = np.random.default_rng(7)
        table = rng.normal(scale=3.0, size=(_NUM_ENTRIES + 1, geometry.vocab_size)).astype(np.float32)
        table[:, rng.choice(geometry.vocab_size, _LIKELY, replace=False)] += 12.0
        table[_NUM_ENTRIES] = np.nan
        self._table = torch.from_numpy(table)
        slots = limits.max_batch_size
        self._checkpoints = np.full((slots, 1), 0xDEAD, np.uint64)  # never read before it is written
        self._ring = np.full((slots, replay.ring_rows), -1, np.int64)
        self._cache: npt.NDArray[np.int64] = np.full((slots, limits.kv_capacity(replay.window)), -1, np.int64)

    @property
    def states(self) -> tuple[pools.State, ...]:
        """The states as tensors on the same memory, named as those of the real executors that are copied alike."""

        def state(name: str, array: npt.NDArray[Any], first: str | int) -> pools.State:
            spec = TensorSpec(name, "int64", (first, *array.shape[1:]), "state")
            return pools.State(spec, torch.from_numpy(array))

        slots = self.limits.max_batch_size
        return (
            state("ssm_state_0", self._checkpoints.view(np.int64), slots),
            state("x_ring_0", self._ring, slots),
            state("key_cache_0", self._cache[:, None, :, None], "B"),
        )

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run one step."""
        self.num_steps += 1
        ids, past, folded, counts, slots, wanted = (tensor.numpy() for tensor in inputs.tensors())
        is_prefill = protocol.is_prefill(ids.shape[1], self.replay.max_draft_len)
        entries = np.zeros(wanted.shape, np.int64)
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            assert slot == inputs.first_slot + row, "a row stands for another slot"
            window = ids[row, : counts[row]].tolist()
            found = self._run(slot, window, int(past[row]), int(folded[row]), is_prefill=is_prefill)
            if found:  # a window without tokens has no logits: it folds
                entries[row] = [found[position] for position in wanted[row].tolist()]
        return StepOutputs(self._table[torch.from_numpy(entries)])

    def close(self) -> None:
        """Remember it."""
        assert not self.is_closed, "closed twice"
        self.is_closed = True

    def _run(self, slot: int, window: list[int], c: int, f: int, *, is_prefill: bool) -> list[int]:
        """Run one row's window; return the logits' entry behind each of its tokens."""
        replay, ring, cache = self.replay, self._ring[slot], self._cache[slot]
        assert 0 <= c - f <= replay.history, "more pending rows than the ring holds"
        state = int(self._checkpoints[slot, 0]) if f else 0
        pending = [int(ring[t % replay.ring_rows]) for t in range(f, c)]
        assert pending == cache[f:c].tolist(), "ring and cache hold different tokens"
        for token in pending:
            state = fold(state, token)
        flushes = protocol.needs_flush(c, f, history=replay.history, max_draft_len=replay.max_draft_len)
        if not is_prefill and flushes:
            self._checkpoints[slot] = state
        entries = []
        for position, token in enumerate(window, start=c):
            state = fold(state, token)
            cache[position] = token
            if not is_prefill:
                ring[position % replay.ring_rows] = token
            entries.append(self._entry(state, cache[max(0, position + 1 - _CONTEXT) : position + 1].tolist()))
        if is_prefill:
            self._checkpoints[slot] = state
        return entries

    def _entry(self, state: int, last: list[int]) -> int:
        if self._is_spoilt(state):
            return _NUM_ENTRIES
        if state % 5:
            state = 0
            for token in last:
                state = fold(state, token)
        return state % _NUM_ENTRIES


def take_the_models_place(
    monkeypatch: pytest.MonkeyPatch, is_spoilt: Callable[[int], bool] = lambda state: False
) -> None:
    """Let every ``LLM`` run the exact executor in place of its folder's model."""

    def open_exact(
        folder: Path, executor: str, options: settings.Options, *_: object
    ) -> tuple[ExactExecutor, EngineLimits]:
        chosen = settings.of_model(open_model_folder(folder, "float32").geometry, options)
        return ExactExecutor(chosen.geometry, chosen.replay, chosen.limits, is_spoilt), chosen.limits

    monkeypatch.setattr(llm_module, "open_executor", open_exact)
