"""Keys and values shared by requests: a radix tree over blocks of tokens, with a byte limit. Zheng et al., "SGLang:
Efficient Execution of Structured Language Model Programs" (RadixAttention), arXiv 2312.07104, with one block per node,
as in vLLM."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Layers", "PrefixTree"]

Layers = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values [N, kv_heads, head_dim] per layer, of N positions of one row."""
MAX_BYTES_AT_ONCE = 2**20
"""Bytes copied at a time, before they are cut into blocks."""


@dataclass(eq=False)
class _Node:
    parent: _Node | None
    key: Hashable
    packed: Tensor | None
    """[block, W]: keys and values of all layers, concatenated to `W` numbers per token; None for a root."""
    last_used: int = 0
    """Value of the tree's clock at the last use."""
    children: dict[Hashable, _Node] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return 0 if self.packed is None else self.packed.nbytes


class PrefixTree:
    """Keys and values by token prefix, in whole blocks. The tree copies its inputs and results. Not thread-safe.

    block: tokens per node. budget: limit in bytes; the least recently used leaves are dropped."""

    def __init__(self, block: int, budget: int):
        self.block, self.budget = block, budget
        self.nbytes = 0
        self._roots: dict[Hashable, _Node] = {}
        self._leaves: dict[int, _Node] = {}  # by `last_used`
        self._clock = 0
        self._empty: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of no position, for shapes and devices

    def __len__(self) -> int:
        """Number of stored tokens."""
        pending, count = list(self._roots.values()), 0
        while pending:
            node = pending.pop()
            pending += node.children.values()
            count += 0 if node.parent is None else self.block
        return count

    def count(self, tokens: Sequence[int], scope: Hashable = None) -> int:
        """Count the leading `tokens` that the tree stores. scope: only entries added with an equal scope are found."""
        return len(self._path(tokens, scope)) * self.block

    def find(self, tokens: Sequence[int], scope: Hashable = None) -> tuple[int, Layers]:
        """Count the leading `tokens` that the tree stores, and copy their keys and values."""
        path = self._path(tokens, scope)
        self._touch(path)
        if not path:
            return 0, {}
        widths = [template.shape[1:].numel() for pair in self._empty.values() for template in pair]
        parts = iter(torch.cat([node.packed for node in path if node.packed is not None]).split(widths, 1))

        def read(template: Tensor) -> Tensor:
            return next(parts).unflatten(1, template.shape[1:]).to(template.device)

        layers = {layer: (read(keys), read(values)) for layer, (keys, values) in self._empty.items()}
        return len(path) * self.block, layers

    def add(self, tokens: Sequence[int], layers: Layers, start: int = 0, scope: Hashable = None) -> int:
        """Add missing whole blocks of `tokens`, up to the budget or a block with NaN or infinite values; return how
        many tokens were added. layers: keys and values from position `start` on; earlier ones must be in the tree."""
        path = self._path(tokens, scope)
        self._touch(path)
        first, count = len(path), len(tokens) // self.block
        if first == count:
            return 0
        if not self._empty:
            self._empty = {layer: (keys[:0].clone(), values[:0].clone()) for layer, (keys, values) in layers.items()}
        missing = slice(first * self.block - start, count * self.block - start)
        parts = [part[missing].flatten(1) for pair in layers.values() for part in pair]
        parts = [part.to(parts[0].device) for part in parts]  # layers may be on several devices
        size = self.block * sum(part.shape[1] * part.element_size() for part in parts)
        count = max(min(count, self.budget // size), first)
        blocks = self._copy_blocks(parts, count - first, self._make_room((count - first) * size))
        for index, packed in enumerate(blocks, first):
            node = path[-1] if path else self._roots.setdefault(scope, _Node(None, None, None))
            key = tuple(tokens[index * self.block : (index + 1) * self.block])
            child = node.children[key] = _Node(node, key, packed)
            self.nbytes += child.nbytes
            path.append(child)
        self._touch(path)
        return len(blocks) * self.block

    def clear(self) -> None:
        self._roots, self._leaves, self._empty, self.nbytes = {}, {}, {}, 0

    def _path(self, tokens: Sequence[int], scope: Hashable) -> list[_Node]:
        """Find the nodes of the leading blocks of `tokens` that are stored."""
        node, path = self._roots.get(scope), []
        for start in range(0, len(tokens) - self.block + 1, self.block):
            node = None if node is None else node.children.get(tuple(tokens[start : start + self.block]))
            if node is None:
                break
            path.append(node)
        return path

    def _touch(self, path: Sequence[_Node]) -> None:
        """Mark the nodes of a path as used, the last one first, so that a node is dropped before its parents."""
        for node in reversed(path):
            self._leaves.pop(node.last_used, None)
            self._clock += 1
            node.last_used = self._clock
            if not node.children:
                self._leaves[node.last_used] = node

    def _copy_blocks(self, parts: Sequence[Tensor], count: int, memory: list[Tensor]) -> list[Tensor]:
        """Copy the leading `count` blocks of parts [N, W], up to the first block with NaN or infinite values. Tensors
        of `memory` with the right shape are reused."""
        width, first = sum(part.shape[1] for part in parts), parts[0]
        layout = (first.dtype, first.device, (self.block, width))
        memory = [packed for packed in memory if (packed.dtype, packed.device, packed.shape) == layout]
        sum_dtype = torch.promote_types(first.dtype, torch.float32)
        num_blocks = max(1, MAX_BYTES_AT_ONCE // (self.block * width * first.element_size()))
        copies, sums = list[Tensor](), list[Tensor]()
        with torch.inference_mode():
            for start in range(0, count, num_blocks):
                part_rows = slice(start * self.block, min(start + num_blocks, count) * self.block)
                blocks = torch.cat([part[part_rows] for part in parts], 1).unflatten(0, (-1, self.block))
                sums.append(blocks.flatten(1).sum(1, dtype=sum_dtype))
                copies += [memory.pop().copy_(packed) if memory else packed.clone() for packed in blocks]
            # a block with NaN or infinite values has no finite sum; one read of the device checks all blocks
            return copies[: int(torch.cat(sums).isfinite().cumprod(0).sum())] if sums else []

    def _make_room(self, nbytes: int) -> list[Tensor]:
        """Drop leaves until `nbytes` more fit into the budget; return their tensors for reuse."""
        freed: list[Tensor] = []
        while self.nbytes > self.budget - nbytes:
            leaf = self._leaves.pop(min(self._leaves))
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key]
            self.nbytes -= leaf.nbytes
            freed += [] if leaf.packed is None else [leaf.packed]
            if parent.parent is not None and not parent.children:
                self._leaves[parent.last_used] = parent
            if parent.parent is None and not parent.children:
                self._roots = {scope: root for scope, root in self._roots.items() if root is not parent}
        return freed
