"""Keys and values that requests leave for each other: a radix tree over blocks of tokens, with a limit of bytes.

The tree is that of Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (RadixAttention),
arXiv 2312.07104, with nodes of one block each, as in vLLM's prefix cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Layers", "PrefixTree"]

Layers = Mapping[int, tuple[Tensor, Tensor]]
"""Per layer keys and values [N, kv_heads, head_dim] of N positions of one row."""


@dataclass(eq=False)
class _Node:
    """One block of tokens after those of its ancestors."""

    parent: _Node | None
    key: Hashable
    layers: Layers
    used: int = 0
    """When it was asked for or added, counted in calls of the tree."""
    children: dict[Hashable, _Node] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pair in self.layers.values() for part in pair)


class PrefixTree:
    """Keys and values by the tokens that they are of, in whole blocks from position 0.

    What is added is copied, and what is found is copied by whoever uses it: a block can go at any time. One thread at
    a time.

    Args:
        block: tokens of a node.
        budget: bytes of keys and values at most; the leaves that were used least recently go first.
    """

    def __init__(self, block: int, budget: int):
        self.block, self.budget = block, budget
        self.nbytes = 0
        """Bytes of the keys and values held."""
        self._roots: dict[Hashable, _Node] = {}
        self._leaves: dict[int, _Node] = {}  # by when they were used, oldest first
        self._clock = 0

    def __len__(self) -> int:
        """Tokens that are held."""
        waiting, count = list(self._roots.values()), 0
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            count += 0 if node.parent is None else self.block
        return count

    def count(self, tokens: Sequence[int], scope: Hashable = None) -> int:
        """How many leading tokens the tree has. scope: only what was added with an equal one is found."""
        return len(self._path(tokens, scope)) * self.block

    def find(self, tokens: Sequence[int], scope: Hashable = None) -> tuple[int, Layers]:
        """How many leading tokens the tree has, and their keys and values, in memory of their own."""
        path = self._path(tokens, scope)
        self._touch(path)
        if not path:
            return 0, {}
        layers = {}
        for layer in path[0].layers:
            keys, values = zip(*(node.layers[layer] for node in path), strict=True)
            layers[layer] = (torch.cat(keys), torch.cat(values))
        return len(path) * self.block, layers

    def add(self, tokens: Sequence[int], layers: Layers, start: int = 0, scope: Hashable = None) -> int:
        """Keep the whole blocks of `tokens` that the tree does not have.

        Args:
            layers: of the positions from `start` on, which is no larger than what the tree has.

        Returns:
            How many tokens were added. Nothing is added from a block on whose numbers are not all finite.
        """
        path = self._path(tokens, scope)
        at, added = len(path) * self.block, 0
        node = path[-1] if path else self._roots.setdefault(scope, _Node(None, None, {}))
        while at + self.block <= len(tokens):
            part = slice(at - start, at - start + self.block)
            own = {layer: (pair[0][part].clone(), pair[1][part].clone()) for layer, pair in layers.items()}
            if not all(bool(each.isfinite().all()) for pair in own.values() for each in pair):
                break
            child = _Node(node, tuple(tokens[at : at + self.block]), own)
            node.children[child.key] = child
            self.nbytes += child.nbytes
            path.append(child)
            node, at, added = child, at + self.block, added + self.block
        self._touch(path)
        self._evict()
        return added

    def clear(self) -> None:
        """Forget everything."""
        self._roots, self._leaves, self.nbytes = {}, {}, 0

    def _path(self, tokens: Sequence[int], scope: Hashable) -> list[_Node]:
        """The nodes of the leading blocks of `tokens`, as far as there are any."""
        node, found = self._roots.get(scope), []
        for at in range(0, len(tokens) - self.block + 1, self.block):
            node = None if node is None else node.children.get(tuple(tokens[at : at + self.block]))
            if node is None:
                break
            found.append(node)
        return found

    def _touch(self, path: Sequence[_Node]) -> None:
        """The nodes of a path were used now, the last one first to go."""
        for node in reversed(path):
            self._leaves.pop(node.used, None)
            self._clock += 1
            node.used = self._clock
            if not node.children:
                self._leaves[node.used] = node

    def _evict(self) -> None:
        while self.nbytes > self.budget:
            leaf = self._leaves.pop(min(self._leaves))
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key]
            self.nbytes -= leaf.nbytes
            if parent.parent is not None and not parent.children:
                self._leaves[parent.used] = parent
            if parent.parent is None and not parent.children:
                self._roots = {scope: root for scope, root in self._roots.items() if root is not parent}
