"""What the decode loop does with the prefix cache, and in which order: restore, run, save."""

import logging
from collections.abc import Sequence

import torch

from trtllm_replayssm.config import KvCacheConfig
from trtllm_replayssm.contract import protocol
from trtllm_replayssm.contract.geometry import EngineLimits, ReplayGeometry
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.executors.base import Executor
from trtllm_replayssm.runtime.inputs import build_fold_inputs
from trtllm_replayssm.runtime.prefix_cache.arena import Arena
from trtllm_replayssm.runtime.prefix_cache.cache import PrefixCache
from trtllm_replayssm.runtime.prefix_cache.slot_states import SlotStates
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.slots import Slots
from trtllm_replayssm.runtime.step import StepPlan, Verdict

_LOGGER = logging.getLogger(__name__)


class PrefixReuse:
    """The prefix cache of one executor, as the loop sees it.

    Args:
        executor: folds what is pending.
        states: copies of its slots.
        slots: the counters.
        config: budgets and block size; enable_block_reuse is set.
        limits: what requests are held to.

    Raises:
        ConfigError: blocks are too short for prompt pieces that fold.
        CapacityError: the device has no room for the budget.
    """

    def __init__(
        self, executor: Executor, states: SlotStates, slots: Slots, config: KvCacheConfig, limits: EngineLimits
    ) -> None:
        self.block_size = block_size(config, limits, executor.replay)
        self._executor = executor
        self._slots = slots
        self._max_seq_len = limits.max_seq_len
        self._keeps_generated = config.reuse_generated_tokens
        _warn_of_small_budgets(config, states, self.block_size)
        is_cuda = executor.device.type == "cuda"
        self._cache = PrefixCache(
            states,
            self.block_size,
            Arena(config.device_cache_size, executor.device),
            Arena(config.host_cache_size, torch.device("cpu"), is_page_locked=is_cuda),
            config.tokens_per_snapshot,
        )
        self._to_save: dict[int, frozenset[int]] = {}

    def begin(self, request: Request) -> None:
        """Bring the slot of a request that was just admitted to the longest known prefix of its tokens."""
        if not request.params.enable_block_reuse:
            return
        assert request.slot is not None, "an admitted request has a slot"
        tokens = request.tokens(0, request.num_tokens)  # generated ones, too, of one that lost its slot
        start = self._cache.restore(tokens, request.slot)
        self._slots.resume(request.slot, start, start)
        if not request.num_computed:  # what comes back later is its own
            request.cached_tokens = start
        self._to_save[request.request_id] = self._cache.positions_to_save(tokens)

    def follow(self, requests: Sequence[Request]) -> None:
        """Know requests that take over another's states: their own ends may be kept, too."""
        self._to_save |= {request.request_id: frozenset() for request in requests if request.params.enable_block_reuse}

    def after_commit(self, plan: StepPlan, verdicts: Sequence[Verdict]) -> None:
        """Take the snapshots that a prompt piece has led to."""
        if plan.kind != "prompt":
            return
        for row, verdict in zip(plan.rows, verdicts, strict=True):
            if verdict.num_accepted_tokens < len(row.token_ids):
                continue  # refused: the lengths do not count what the checkpoint has taken in
            c, f = int(self._slots.past_lengths[row.slot]), int(self._slots.checkpoint_lengths[row.slot])
            # A piece of at most T tokens runs as a step, and leaves pending rows.
            if c == f and c in self._to_save.get(row.request.request_id, ()):
                self._cache.save(row.request.tokens(0, c), row.slot)

    def keep(self, request: Request, slot: int) -> None:
        """Take a snapshot of a sequence that ended in this slot, if that is wanted; the slot is free already."""
        if not self._keeps_generated or request.request_id not in self._to_save or request.error is not None:
            return
        # The newest token has not run. Accepted drafts behind the request's end did; they are rolled back here.
        past_length = request.num_tokens - 1
        checkpoint_length = int(self._slots.checkpoint_lengths[slot])
        # Without room for a window behind it nothing can continue the sequence either.
        if 0 < past_length < self._max_seq_len - 1:
            assert checkpoint_length <= past_length <= self._slots.past_lengths[slot], "all but the newest token ran"
            if checkpoint_length < past_length:
                self._fold(slot, past_length, checkpoint_length)
            self._cache.save(request.tokens(0, past_length), slot)

    def end(self, request: Request) -> None:
        """Forget a request that ended or lost its slot; one that never had any is not known."""
        self._to_save.pop(request.request_id, None)

    def metrics(self) -> dict[str, int]:
        """Return ``PrefixCache.metrics``."""
        return self._cache.metrics()

    def reset_metrics(self) -> None:
        """Count from zero again."""
        self._cache.reset_metrics()

    def close(self) -> None:
        """Drop the snapshots and their memory."""
        self._cache.close()

    def _fold(self, slot: int, past_length: int, checkpoint_length: int) -> None:
        """Fold a slot's pending rows into its checkpoint: a prefill window without tokens does nothing else."""
        window = 1 + protocol.window_length(self._executor.replay.max_draft_len)
        self._executor.step(
            build_fold_inputs(slot, past_length, checkpoint_length, window, device=self._executor.device)
        )


def block_size(config: KvCacheConfig, limits: EngineLimits, replay: ReplayGeometry) -> int:
    """Return the block size: that of the configuration, at most the longest piece of a prompt.

    Raises:
        ConfigError: blocks are too short for prompt pieces that fold.
    """
    size = min(config.tokens_per_block, limits.max_num_tokens)
    if not protocol.is_prefill(size, replay.max_draft_len):
        raise ConfigError(
            f"tokens_per_block: found {config.tokens_per_block} with max_num_tokens={limits.max_num_tokens}; needed "
            f"prompt pieces of more than {protocol.window_length(replay.max_draft_len)} tokens (1 + max_draft_len), "
            f"for shorter ones leave no whole state. Raise it, or switch enable_block_reuse off."
        )
    return size


def _warn_of_small_budgets(config: KvCacheConfig, states: SlotStates, block_size: int) -> None:
    """Say so where not even a prompt of one block could be kept: nothing else would tell that reuse does nothing."""
    budgets = (config.device_cache_size, config.host_cache_size)
    state, rows = states.state_bytes, states.rows_bytes(block_size)
    if max(budgets) < max(state, rows) or sum(budgets) < state + rows:
        _LOGGER.warning(
            "prefix cache: found device_cache_size=%d, host_cache_size=%d; needed %d bytes for a snapshot of one block "
            "of %d tokens (%d of them the recurrent state). No prompt is reused until one of the two is raised.",
            *(*budgets, state + rows, block_size, state),
        )
