"""Drafters without a network: prompt lookup copies tokens of the row, Token Recycling the model's last predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, short_repr
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Proposal
from paradec.samplers.causal.drafts.source import write_drafts
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import parse_tree, to_tuples


class NamedDrafter:
    """Base of drafters without a network. Subclasses are frozen dataclasses and implement `DraftSource`."""

    name: ClassVar[str]
    kinds: ClassVar[dict[str, Any]] = {}
    """The subclasses by name."""

    def __init_subclass__(cls) -> None:
        NamedDrafter.kinds[cls.name] = cls

    def to_dict(self) -> dict[str, Any]:
        """Return the drafter as plain data; `from_setting` is the inverse."""
        return {"drafter": self.name} | asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_setting(cls, setting: Any) -> Any:
        """Make a drafter from a name or the data of `to_dict`; return other values unchanged. Raises ValueError for an
        unknown name or setting."""
        if isinstance(setting, str):
            setting = {"drafter": setting}
        if not isinstance(setting, Mapping):
            return setting
        if (name := setting.get("drafter")) not in cls.kinds:
            names = " or ".join(map(repr, sorted(cls.kinds)))
            raise ValueError(f"drafter={short_repr(name)} must be a model, {names}")
        try:
            return cls.kinds[name](**{key: value for key, value in setting.items() if key != "drafter"})
        except TypeError as error:
            raise ValueError(f"drafter={short_repr(dict(setting))}: {error}") from None

    def observe(self, state: CausalState, proposal: Proposal) -> None:
        """Learn from a committed step over a tree. The proposal's quantities are "nodes" [R, N], the evaluated drafts
        (-1: none), and "node_logits" [R, N, V], the logits after each node."""


@dataclass(frozen=True)
class PromptLookup(NamedDrafter):
    """Draft the tokens that followed an earlier occurrence of the last tokens: `create("speculative",
    drafter="prompt_lookup")`, or `drafter=PromptLookup(...)`.

    Saxena, "Prompt Lookup Decoding" (2023); transformers' `prompt_lookup_num_tokens`. It is fast where answers repeat
    their prompts: summaries, edits, code. The row is searched for an earlier occurrence of its last n tokens, n from
    `max_matching_ngram_size` down to 1; the leftmost match of the largest n gives the drafts. q is one-hot: draft x is
    accepted with probability p(x); otherwise its position is resampled from p without x. Lossless.

    The candidates are those of transformers' `PromptLookupCandidateGenerator` on each row. Drafts stop before end
    tokens and tokens that may not be drawn. A match whose first draft may not be drawn is skipped.

    Args:
        prompt_lookup_num_tokens: maximal number of drafts.
        max_matching_ngram_size: number of tokens of the longest match; without such a match, shorter ones are used.
    """

    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int = 2

    name: ClassVar[str] = "prompt_lookup"

    def __post_init__(self) -> None:
        check_int("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, low=1)
        check_int("max_matching_ngram_size", self.max_matching_ngram_size, low=1)

    @property
    def slots(self) -> int:
        """Slots of a window: one for the next token, and one per draft."""
        return self.prompt_lookup_num_tokens + 1

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None = None) -> None:
        index = torch.as_tensor(rows, device=state.canvas.device)
        tokens = state.canvas[index]
        length = torch.as_tensor(state.committed[rows, None], device=tokens.device)
        # prompts may contain ids beyond the logits
        usable = state.guess[tokens.clamp(max=len(state.guess) - 1)] > 0
        usable &= tokens < len(state.guess)
        size, max_drafts = self.max_matching_ngram_size, state.width - 1
        drafts, count = look_up(
            tokens, length, usable, state.ends, size, min(max_drafts, self.prompt_lookup_num_tokens)
        )
        write_drafts(state, rows, drafts, None)
        state.num_drafts[rows] = count.cpu().numpy()
        if state.constraint is not None:
            state.constraint.draft_certain(state, rows)


def look_up(
    tokens: Tensor, length: Tensor, usable: Tensor, end_ids: Tensor, size: int, max_drafts: int
) -> tuple[Tensor, Tensor]:
    """Find the tokens that followed earlier occurrences of the rows' last tokens.

    tokens: [R, L] int64. length: [R, 1] int64: number of real tokens of each row, from the left.
    usable: [R, L] bool: tokens that may be drafted. end_ids: [E] int64: drafts stop before these ids.
    size: tokens of the longest match, at least 1. max_drafts: limit of drafts.
    Returns drafts [R, max_drafts] int64, padded with 0, and their number per row, [R] int64."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    # [R, L] bool: whether the n tokens before a column equal the row's last n; False for columns without a token
    is_match = (column < length).expand_as(tokens)
    start = torch.full_like(length, -1)
    for n in range(1, size + 1):
        n_before, nth_last = tokens.roll(n, 1), tokens.gather(1, (length - n).clamp(min=0))
        is_match = is_match & (n_before == nth_last) & (column >= n)
        candidates = is_match & usable
        start = torch.where(candidates.any(1, keepdim=True), candidates.int().argmax(1, keepdim=True), start)
    columns = start + torch.arange(max_drafts, device=tokens.device)
    in_range = (start >= 0) & (columns < length)
    columns = columns.clamp(0, tokens.shape[1] - 1)
    copied = tokens.gather(1, columns)
    is_usable = in_range & usable.gather(1, columns) & ~torch.isin(copied, end_ids)
    is_usable = is_usable.long().cumprod(1)
    return copied * is_usable, is_usable.sum(1)


@dataclass(frozen=True)
class TokenRecycling(NamedDrafter):
    """Draft the model's latest top predictions after each token: `create("speculative", drafter="token_recycling",
    rule="naive")`, or `drafter=TokenRecycling(...)`.

    Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
    arXiv 2408.08696. Row t of a matrix holds the `k` likeliest next tokens from the last evaluation of token t. Child j
    of a node of a static tree is entry j of the matrix row of the node's token. The drafts are not sampled: the exact
    rule for them is "naive".

    The public code is greedy and decodes one row; its matrix starts with zeros and serves all requests. This class is
    exact at every temperature, has a matrix per row, and drafts nothing where an entry is unknown. As in the public
    code, the matrix does not include the prompt. If a tree contains a token several times, its last node counts.

    Args:
        k: number of next tokens stored per token. The matrix of a row needs 4 * k bytes per token of the vocabulary.
        tree: static tree, as for `Speculative`, with at most k children per node; "2.2.2" is the paper's, with 80
            drafts.

    Raises:
        ValueError: a setting out of its range, or a node with more than `k` children.
    """

    k: int = 8
    tree: str | tuple[int, ...] | tuple[tuple[int, ...], ...] = "2.2.2"

    name: ClassVar[str] = "token_recycling"

    def __post_init__(self) -> None:
        check_int("k", self.k, low=1)
        object.__setattr__(self, "tree", to_tuples(self.tree))
        if (widest := parse_tree(self.tree).children.shape[1]) > self.k:
            raise ValueError(f"k={self.k} must be at least {widest}, the most children of a node of tree={self.tree!r}")

    def memory(self) -> dict[str, MemorySpec]:
        """Declare the matrix [V, k] of each row."""
        return {"recycled": MemorySpec(("vocab", self.k), torch.int32, -1, reset="sequence")}

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None = None) -> None:
        matrix, tree = state.memory["recycled"], parse_tree(self.tree)
        index = torch.as_tensor(rows, device=matrix.device)
        last_token = state.canvas[index, torch.as_tensor(state.committed[rows] - 1, device=matrix.device)]
        parents, depths = tree.layout.parents[0], np.array(tree.depths)
        tokens = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=matrix.device)
        # prompts may contain ids beyond the logits
        tokens[:, 0] = last_token.masked_fill(last_token >= matrix.shape[1], -1)
        child = torch.tensor([0, *(path[-1] for path in tree.paths)], device=matrix.device)
        for depth in range(1, tree.depth + 1):
            nodes = torch.as_tensor(np.flatnonzero(depths == depth), device=matrix.device)
            parent_tokens = tokens[:, parents.to(matrix.device)[nodes]]
            children = matrix[index.unsqueeze(1), parent_tokens.clamp(min=0), child[nodes]].long()
            tokens[:, nodes] = torch.where(parent_tokens >= 0, children, -1)
        tokens[:, 0] = -1
        state.memory.write("drafts", rows, tokens)

    def observe(self, state: CausalState, proposal: Proposal) -> None:
        matrix, logits, rows = state.memory["recycled"], proposal.quantities["node_logits"], proposal.rows
        index = torch.as_tensor(rows, device=matrix.device)
        tokens, root = proposal.quantities["nodes"].clone(), state.committed[rows] - state.last_accepted[rows] - 1
        tokens[:, 0] = state.canvas[index, torch.as_tensor(root, device=matrix.device)]
        top = logits.topk(min(self.k, logits.shape[-1]), -1)
        likeliest = top.indices.masked_fill(top.values == -torch.inf, -1).to(matrix.dtype)
        # write each token once, from its last node: otherwise the order of several writes would be undefined
        is_repeated = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).triu(1).any(2)
        row, node = (~is_repeated & (tokens >= 0) & (tokens < matrix.shape[1])).nonzero(as_tuple=True)
        matrix[index[row], tokens[row, node], : likeliest.shape[-1]] = likeliest[row, node]
