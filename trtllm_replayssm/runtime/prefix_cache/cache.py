"""The prefix cache: which snapshot a prompt can start from, which ones to take of it, and what they do to the budgets.

Where snapshots are taken: at the last block border within a prompt; where a prompt leaves what is known, for what two
prompts share a third one is likely to begin with; and at some borders between, for the first two. A snapshot costs a
whole recurrent state, however short the prefix, so they are not taken at every border unless that is asked for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from trtllm_replayssm.runtime.prefix_cache.arena import Arena, range_bytes
from trtllm_replayssm.runtime.prefix_cache.slot_states import SlotStates
from trtllm_replayssm.runtime.prefix_cache.store import Chunk, Store
from trtllm_replayssm.runtime.prefix_cache.tree import Node, PrefixTree


@dataclass
class PrefixCounters:
    """What the cache did.

    Attributes:
        num_prefix_queries: prompts that asked for a snapshot.
        num_prefix_hits: those that found one.
        num_reused_tokens: prompt tokens that did not run, because a snapshot held them.
        num_prefix_snapshots: snapshots taken.
    """

    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_reused_tokens: int = 0
    num_prefix_snapshots: int = 0


class PrefixCache:
    """Snapshots of prefixes in device and host memory.

    Args:
        states: copies of slots.
        block_size: tokens of a block; a snapshot of a prompt stands at a multiple.
        device: the memory next to the pools.
        host: the memory for what leaves the device.
        tokens_per_snapshot: within prompts, snapshots are so many tokens apart, rounded up to whole blocks; None takes
            them at 1, 2, 4, 8, ... blocks.
    """

    def __init__(
        self, states: SlotStates, block_size: int, device: Arena, host: Arena, tokens_per_snapshot: int | None = None
    ) -> None:
        self.block_size = block_size
        self._interval = None if tokens_per_snapshot is None else -(-tokens_per_snapshot // block_size) * block_size
        self._states = states
        self._tree = PrefixTree(block_size)
        self._store = Store(device, host, self._forget)
        self._counters = PrefixCounters()

    def restore(self, token_ids: Sequence[int], slot: int) -> int:
        """Bring a slot to the longest known prefix of a prompt.

        Args:
            token_ids: the prompt; its last token is left to run, for the logits.
            slot: a slot that nobody uses.

        Returns:
            How many tokens the slot now holds, folded into its checkpoint: f = c = this. 0 leaves it as it was.
        """
        self._counters.num_prefix_queries += 1
        node = self._tree.longest_saved(token_ids[:-1])
        if node is None:
            return 0
        path, state = node.path(), node.state
        assert state is not None, "a saved node has a state"
        chunks = _needed(path, state)
        self._touch(path, state)
        with self._store.pinned(chunks):
            for chunk in chunks:
                self._store.promote(chunk)
            for part in path:
                assert part.rows is not None, "a node that leads to a state has its rows"
                self._states.load_rows(slot, part.start, part.end, self._store.view(part.rows))
            self._states.load_state(slot, node.end, self._store.view(state))
        self._counters.num_prefix_hits += 1
        self._counters.num_reused_tokens += node.end
        return node.end

    def positions_to_save(self, token_ids: Sequence[int]) -> frozenset[int]:
        """Return the block borders within a prompt where a snapshot is worth its bytes; fewer tokens follow none."""
        last = (len(token_ids) - 1) // self.block_size * self.block_size
        known = self._tree.match(token_ids[:last])
        branch = known[-1].end if known else 0
        held = {node.end for node in known if node.state is not None}
        return frozenset({last, branch, *self._milestones(last)} - held - {0})

    def save(self, token_ids: Sequence[int], slot: int) -> bool:
        """Take a snapshot of a slot whose checkpoint holds exactly these tokens; say whether there is one now."""
        if self._snapshot_bytes(len(token_ids)) > self._store.capacity:
            return False  # before others leave for what would not be whole without them either
        path = self._tree.insert(token_ids)
        leaf = path[-1]
        if leaf.state is None:
            with self._store.pinned([node.rows for node in path if node.rows is not None]):
                self._fill(path, slot)
        if leaf.state is None:
            self._prune(leaf)
            return False
        self._touch(path, leaf.state)
        return True

    def clear(self) -> None:
        """Forget every snapshot."""
        for node in list(self._tree.root.children.values()):
            self._remove(node)

    def metrics(self) -> dict[str, int]:
        """Return the counters, and the bytes in use now."""
        return asdict(self._counters) | {
            "prefix_device_bytes": self._store.device.arena.used_bytes,
            "prefix_host_bytes": self._store.host.arena.used_bytes,
        }

    def reset_metrics(self) -> None:
        """Count from zero again; the snapshots stay."""
        self._counters = PrefixCounters()

    def close(self) -> None:
        """Forget everything and drop the memory."""
        self.clear()
        self._store.device.arena.close()
        self._store.host.arena.close()

    def _milestones(self, last: int) -> Iterable[int]:
        """Return the borders before the last at which a snapshot is taken of every prompt, whatever it begins with.

        With doubled distances a prompt that shares blocks with one earlier prompt starts behind more than half of them,
        for a few states each.
        """
        if self._interval is not None:
            return range(self._interval, last, self._interval)
        return (self.block_size << exponent for exponent in range((last // self.block_size).bit_length()))

    def _snapshot_bytes(self, num_tokens: int) -> int:
        """Return what a snapshot takes with the rows of all its blocks."""
        num_full, rest = divmod(num_tokens, self.block_size)
        rows = num_full * range_bytes(self._states.rows_bytes(self.block_size))
        rows += range_bytes(self._states.rows_bytes(rest)) if rest else 0
        return rows + range_bytes(self._states.state_bytes)

    def _fill(self, path: Sequence[Node], slot: int) -> None:
        """Copy what is missing of a path, rows first; nothing more once a chunk finds no room."""
        added: list[Chunk] = []
        try:
            for node in path:
                if node.rows is None:
                    rows = self._add(node, self._states.rows_bytes(node.end - node.start), added)
                    if rows is None:
                        return
                    node.rows = rows
                    self._states.save_rows(slot, node.start, node.end, self._store.view(rows))
            leaf = path[-1]
            state = self._add(leaf, self._states.state_bytes, added)
            if state is not None:
                leaf.state = state
                self._states.save_state(slot, leaf.end, self._store.view(state))
                self._counters.num_prefix_snapshots += 1
        finally:
            for chunk in added:
                chunk.num_pins -= 1

    def _add(self, node: Node, num_bytes: int, added: list[Chunk]) -> Chunk | None:
        chunk = self._store.add(node, num_bytes)
        if chunk is not None:
            chunk.num_pins += 1  # until the snapshot is whole
            added.append(chunk)
        return chunk

    def _touch(self, path: Sequence[Node], state: Chunk) -> None:
        """Count a snapshot as just used; its state is the first of it to leave, then the rows, the last block's first.

        So no rows leave before the states that need them.
        """
        self._store.touch(state)
        for node in reversed(path):
            assert node.rows is not None
            self._store.touch(node.rows)

    def _forget(self, chunk: Chunk) -> None:
        """Take note that a chunk is gone: a state alone, or rows and with them all states below."""
        node: Node = chunk.owner
        if chunk is node.state:
            node.state = None
            self._prune(node)
        else:
            parent = node.parent
            self._remove(node)
            if parent is not None:
                self._prune(parent)

    def _prune(self, node: Node) -> None:
        """Remove a node that leads to no state, and its ancestors as far as they do not either.

        One whose rows are pinned stays: it is about to get its state.
        """
        while node.parent is not None and node.state is None and not node.children:
            if node.rows is not None and node.rows.num_pins:
                return
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, node: Node) -> None:
        if node.parent is not None:
            node.detach()
        for below in node.subtree():
            for chunk in (below.rows, below.state):
                if chunk is not None:
                    self._store.free(chunk)
            below.rows = below.state = None


def _needed(path: Iterable[Node], state: Chunk) -> list[Chunk]:
    return [*(node.rows for node in path if node.rows is not None), state]
