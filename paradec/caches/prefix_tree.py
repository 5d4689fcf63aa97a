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
AT_ONCE = 2**20
"""Bytes of which layers are laid side by side before blocks are cut from them."""


@dataclass(eq=False)
class _Node:
    """One block of tokens after those of its ancestors."""

    parent: _Node | None
    key: Hashable
    rows: Tensor | None
    """[block, W], in memory of its own: keys and values of all layers side by side; None for a root."""
    used: int = 0
    """When it was asked for or added, counted in calls of the tree."""
    children: dict[Hashable, _Node] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes


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
        self._like: dict[int, tuple[Tensor, Tensor]] = {}  # each layer's keys and values, of no position

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
        widths = [like.shape[1:].numel() for pair in self._like.values() for like in pair]
        parts = iter(torch.cat([node.rows for node in path if node.rows is not None]).split(widths, 1))
        layers = {
            layer: (_as(next(parts), keys), _as(next(parts), values)) for layer, (keys, values) in self._like.items()
        }
        return len(path) * self.block, layers

    def add(self, tokens: Sequence[int], layers: Layers, start: int = 0, scope: Hashable = None) -> int:
        """Keep the whole blocks of `tokens` that the tree does not have.

        Args:
            layers: of the positions from `start` on, which is no larger than what the tree has.

        Returns:
            How many tokens were added. Nothing is added from a block on whose numbers are not all finite.
        """
        path = self._path(tokens, scope)
        self._touch(path)
        first, count = len(path), len(tokens) // self.block
        if first == count:
            return 0
        if not self._like:
            self._like = {layer: (keys[:0].clone(), values[:0].clone()) for layer, (keys, values) in layers.items()}
        missing = slice(first * self.block - start, count * self.block - start)
        parts = [part[missing].flatten(1) for pair in layers.values() for part in pair]
        parts = [part.to(parts[0].device) for part in parts]  # layers may lie on several
        size = self.block * sum(part.shape[1] * part.element_size() for part in parts)
        count = max(min(count, self.budget // size), first)
        made = self._blocks(parts, count - first, self._make_room((count - first) * size))
        for at, rows in enumerate(made, first):
            node = path[-1] if path else self._roots.setdefault(scope, _Node(None, None, None))
            key = tuple(tokens[at * self.block : (at + 1) * self.block])
            child = node.children[key] = _Node(node, key, rows)
            self.nbytes += child.nbytes
            path.append(child)
        self._touch(path)
        return len(made) * self.block

    def clear(self) -> None:
        """Forget everything."""
        self._roots, self._leaves, self._like, self.nbytes = {}, {}, {}, 0

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

    def _blocks(self, parts: Sequence[Tensor], count: int, memory: list[Tensor]) -> list[Tensor]:
        """The leading `count` blocks of parts [N, W], side by side: up to the first with a number that is not finite.
        They are written to `memory`, what a store frees and takes for each prompt, where it fits."""
        wide, first = sum(part.shape[1] for part in parts), parts[0]
        alike = (first.dtype, first.device, (self.block, wide))
        memory = [rows for rows in memory if (rows.dtype, rows.device, rows.shape) == alike]
        exact = torch.promote_types(first.dtype, torch.float32)
        piece = max(1, AT_ONCE // (self.block * wide * first.element_size()))
        made, sums = list[Tensor](), list[Tensor]()
        with torch.inference_mode():
            for at in range(0, count, piece):
                here = slice(at * self.block, min(at + piece, count) * self.block)
                blocks = torch.cat([part[here] for part in parts], 1).unflatten(0, (-1, self.block))
                sums.append(blocks.flatten(1).sum(1, dtype=exact))
                made += [memory.pop().copy_(rows) if memory else rows.clone() for rows in blocks]
            # one read of the device: a number, and so a sum, that is not finite
            return made[: int(torch.cat(sums).isfinite().cumprod(0).sum())] if sums else []

    def _make_room(self, nbytes: int) -> list[Tensor]:
        """Let leaves go until so many bytes more are within the budget: the memory that they had."""
        freed: list[Tensor] = []
        while self.nbytes > self.budget - nbytes:
            leaf = self._leaves.pop(min(self._leaves))
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key]
            self.nbytes -= leaf.nbytes
            freed += [] if leaf.rows is None else [leaf.rows]
            if parent.parent is not None and not parent.children:
                self._leaves[parent.used] = parent
            if parent.parent is None and not parent.children:
                self._roots = {scope: root for scope, root in self._roots.items() if root is not parent}
        return freed


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """Keys or values [N, W] as a layer has them, where it lies."""
    return rows.unflatten(1, like.shape[1:]).to(like.device)
