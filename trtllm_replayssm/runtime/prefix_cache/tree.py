"""A tree of token blocks: which prefixes are known, block by block, and what is kept of each.

The way from the root to a node spells a prefix. A node keeps the key/value rows of its own block and, where a snapshot
was taken at its end, the state there. Prefixes that begin alike share nodes, and with them the rows. All blocks are
full but a leaf's, which may end anywhere. Every leaf has a state: what only a lost state needed goes with it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from trtllm_replayssm.runtime.prefix_cache.store import Chunk

_TOKEN_BYTES = 4


class Node:
    """A block of tokens behind the blocks of its ancestors.

    Attributes:
        parent: the node before; None for the root and for what was removed.
        key: the block's tokens, int32, as bytes.
        start: position of the block's first token.
        end: position behind its last.
        children: key -> node.
        rows: the block's key/value rows.
        state: the state at ``end``, if there is one.
    """

    __slots__ = ("children", "end", "key", "parent", "rows", "start", "state")

    def __init__(self, parent: "Node | None", key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + len(key) // _TOKEN_BYTES
        self.children: dict[bytes, Node] = {}
        self.rows: Chunk | None = None
        self.state: Chunk | None = None

    def path(self) -> list["Node"]:
        """Return the nodes from the first block to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator["Node"]:
        """Yield this node and all below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def detach(self) -> None:
        """Take the node, and all below it, out of the tree."""
        assert self.parent is not None, "the root stays"
        del self.parent.children[self.key]
        self.parent = None


class PrefixTree:
    """The known prefixes.

    Args:
        block_size: tokens of a full block.
    """

    def __init__(self, block_size: int) -> None:
        self.root = Node(None, b"")
        self._block_bytes = block_size * _TOKEN_BYTES

    def match(self, token_ids: Sequence[int]) -> list[Node]:
        """Return the full blocks of the longest known prefix of a sequence, in order."""
        tokens, node = _as_bytes(token_ids), self.root
        nodes: list[Node] = []
        while True:
            at = node.end * _TOKEN_BYTES
            child = node.children.get(tokens[at : at + self._block_bytes])
            if child is None or len(child.key) < self._block_bytes:
                return nodes
            nodes.append(child)
            node = child

    def longest_saved(self, token_ids: Sequence[int]) -> Node | None:
        """Return the node of the longest prefix of a sequence that has a state, of short blocks as well."""
        tokens = _as_bytes(token_ids)
        best: Node | None = None
        for node in (self.root, *self.match(token_ids)):
            short = (child for key, child in node.children.items() if len(key) < self._block_bytes)
            known = (child for child in short if tokens.startswith(child.key, node.end * _TOKEN_BYTES))
            for found in (node, *known):
                if found.state is not None and (best is None or found.end > best.end):
                    best = found
        return best

    def insert(self, token_ids: Sequence[int]) -> list[Node]:
        """Return the nodes that spell a sequence, made where they are missing."""
        tokens, nodes, node = _as_bytes(token_ids), [], self.root
        for at in range(0, len(tokens), self._block_bytes):
            key = tokens[at : at + self._block_bytes]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key)
            nodes.append(child)
            node = child
        return nodes


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype=np.int32).tobytes()
