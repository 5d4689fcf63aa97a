"""Blocks whose ends depend on the logits of their first step (`paradec.AdaptiveBlocks`)."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_at_most, check_choice, check_int, check_number, short_repr
from paradec.core.rows import ROWS
from paradec.samplers.features.feature import Ends, Feature
from paradec.samplers.masked.blocks import LONGEST_BLOCK, FixedBlocks


@dataclass
class Opening:
    """Input of a policy with `reads_logits`: `R` rows that open a block, `W` positions from its start."""

    tokens: Tensor
    """[R, W] int64: candidate tokens."""
    confidence: Tensor
    """[R, W] float64: their probabilities."""
    available: Tensor
    """[R, W] bool: undecided positions that were evaluated this step, without padding."""
    start: np.ndarray
    prompt_length: np.ndarray
    length: np.ndarray
    """[R] int64 each, on the host: start of the block, end of the prompt, end of the row."""


@dataclass(frozen=True)
class AdaptiveBlocks(BlockPolicy):
    """Blocks that end with a semantic step, at a position where the model predicts a delimiter.

    Lu et al., "AdaBlock-dLLM", arXiv 2509.26432. When a row opens a block, the policy reads the candidates within a
    window. If the most confident delimiter among them (the leftmost on ties) has at least probability
    `delimiter_threshold`, it ends the block. Otherwise the block has the default length. Prompt tokens in the window
    are not delimiters.

    Args:
        length: B_0, the default block length (16, 32 or 64 in the paper).
        delimiter_threshold: tau_D, in [0, 1]; 0.3 for LLaDA and 0.5 for Dream in the paper.
        delimiters: token ids, or texts of tokens. Texts without a token are ignored; if no delimiter remains, blocks
            have the fixed length, with a warning.
        delimiter_match: "exact" accepts tokens whose text is a delimiter (LLaDA: its newline). "ends" accepts tokens
            whose text ends with a delimiter, such as ";\\n" (the public code for Dream lists 24 of these tokens).
        window: share of the answer's length in which delimiters are searched, rounded down. A block may be as long as
            the window, even if the window is longer than `length`.
        min_length: shortest block, at least 1 (the paper's value). With a cache, every new block costs a full forward.

    A request with these blocks cannot have `steps`, since the number of blocks is unknown. A sampler with a time grid
    (Dream's) plans a block's first step for all positions that the policy reads, and later steps for the block.
    """

    length: int = 32
    delimiter_threshold: float = 0.3
    delimiters: tuple[str | int, ...] = ("\n",)
    delimiter_match: str = "exact"
    window: float = 0.25
    min_length: int = 1
    model_block: int | None = field(default=None, repr=False)
    model_align: str = field(default="absolute", repr=False)
    """`for_model` sets the `model_*` fields, so that blocks do not cross block bounds of a block-causal model."""

    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_number("delimiter_threshold", self.delimiter_threshold, low=0, high=1)
        check_choice("delimiter_match", self.delimiter_match, ("exact", "ends"))
        check_number("window", self.window, low=0, high=1)
        check_int("min_length", self.min_length, low=1)
        check_at_most("min_length", self.min_length, "length", self.length)
        check_int("model_block", self.model_block, low=1, none=True)
        object.__setattr__(self, "delimiters", check_delimiters(self.delimiters))

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        end = np.minimum(start + np.maximum(self._window(prompt_length, length), self.length), length)
        if self.model_block is None:
            return end
        origin = prompt_length if self.model_align == "prompt" else 0
        return np.minimum(end, ((start - origin) // self.model_block + 1) * self.model_block + origin)

    def count(self, prompt_length: int, length: int) -> None:
        return None

    def cut(self, opening: Opening) -> Tensor:
        device = opening.tokens.device
        num_read = self.open(opening.start, opening.prompt_length, opening.length) - opening.start
        # one transfer to the device
        host_sizes = np.stack((self._window(opening.prompt_length, opening.length), num_read))
        window, max_size = torch.as_tensor(host_sizes, device=device)
        ids = torch.tensor([i for i in self.delimiters if isinstance(i, int)], dtype=torch.int64, device=device)
        column = torch.arange(opening.tokens.shape[1], device=device)
        is_delimiter = torch.isin(opening.tokens, ids) & opening.available & (column < window.unsqueeze(1))
        confidence = torch.where(is_delimiter, opening.confidence, -1.0)
        delimiter_column = confidence.argmax(1, keepdim=True)
        confident = confidence.gather(1, delimiter_column) >= self.delimiter_threshold
        size = torch.where(confident, delimiter_column + 1, self.length).squeeze(1)
        return size.clamp(min=self.min_length).minimum(max_size)

    def _window(self, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        return (self.window * (length - prompt_length)).astype(np.int64)

    def for_model(self, model: Any) -> AdaptiveBlocks | FixedBlocks:
        """Return the policy with token ids; fixed blocks if no delimiter has one. Raises ValueError for unknown ids."""
        facts = model.facts
        texts = tuple(d for d in self.delimiters if isinstance(d, str))
        ids = {d for d in self.delimiters if isinstance(d, int)}
        for token in ids:
            check_int("delimiters", token, low=0, high=facts.vocab_size - 1)
        if texts and model.tokenizer is not None:
            token_texts = _decode_vocabulary(model.tokenizer)[: facts.vocab_size]
            ends = texts if self.delimiter_match == "ends" else ()
            delimiter_ids = {i for i, text in enumerate(token_texts) if text in texts or text.endswith(ends)}
            ids |= delimiter_ids - {facts.mask_token_id}
        model_block = facts.block_length
        if ids:
            return replace(self, delimiters=tuple(sorted(ids)), model_block=model_block, model_align=facts.block_align)
        fixed = FixedBlocks(self.length) if model_block is None else FixedBlocks(model_block, align=facts.block_align)
        why = "has no tokenizer" if model.tokenizer is None else "has no such token"
        warnings.warn(
            f"delimiters={self.delimiters} match no token, since {facts.name} {why}; blocks have the fixed length "
            f"{fixed.length}: give token ids",
            stacklevel=2,
        )
        return fixed


def check_delimiters(value: Any) -> tuple[str | int, ...]:
    """Turn a sequence of texts and token ids into a tuple; raise ValueError for anything else."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not len(value) or "" in value:
        raise ValueError(
            f"delimiters={short_repr(value)} must be a sequence of token ids and texts that are not empty; without "
            "delimiters, use paradec.FixedBlocks"
        )
    for entry in value:
        if not isinstance(entry, str):
            check_int("delimiters", entry, low=0)
    return tuple(entry if isinstance(entry, str) else int(entry) for entry in value)


_TOKEN_TEXTS: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def _decode_vocabulary(tokenizer: Any) -> list[str]:
    """Decode each id of a vocabulary. As this takes seconds, the texts are cached per tokenizer."""
    if tokenizer not in _TOKEN_TEXTS:
        _TOKEN_TEXTS[tokenizer] = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return _TOKEN_TEXTS[tokenizer]


@dataclass
class AdaptiveBlockEnds(Feature):
    """Ends of adaptive blocks, which are unknown until a block's first step."""

    is_opening: np.ndarray = field(metadata=ROWS)
    """[B] bool: rows whose block has no end yet. Such a block includes all positions that the policy reads."""

    why_host_only = "the host reads the ends of blocks={state.blocks} from the logits"

    def reads_window(self, state: Any) -> bool:
        return bool(self.is_opening.any())

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        self.is_opening[rows] = True

    def on_propose(self, state: Any, proposal: Any) -> None:
        """Set the ends of blocks that have just opened, and restrict the proposal to them."""
        rows = state.window.rows
        index = self.is_opening[rows].nonzero()[0]
        if not len(index):
            return
        opening_rows, device = rows[index], proposal.values.device
        start, end = torch.as_tensor(np.stack((state.block_start[rows], state.block_end[rows])), device=device)
        device_index = torch.as_tensor(index, device=device)
        opening = Opening(
            tokens=proposal.values[device_index],
            confidence=proposal.quantities["confidence"][device_index],
            available=proposal.available[device_index],
            start=state.block_start[opening_rows],
            prompt_length=state.prompt_length[opening_rows],
            length=state.length[opening_rows],
        )
        # a block that begins with prompt tokens includes the first position that can be committed
        size = state.blocks.cut(opening).maximum(opening.available.int().argmax(1) + 1)
        proposal.block_end = end.index_copy(0, device_index, start[device_index] + size)
        proposal.available = proposal.available & (proposal.positions < proposal.block_end.unsqueeze(1))

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        if proposal.block_end is None:
            return False
        self.is_opening[proposal.rows] = False
        return True


def cut_blocks(state: Any, rows: np.ndarray, end: np.ndarray) -> None:
    """End the newly opened blocks of `rows` [R] at `end` [R]. Raises RuntimeError for an end that is too late."""
    if (end > state.block_end[rows]).any():
        raise RuntimeError(f"blocks={state.blocks}: cut returned more positions than it read")
    is_shorter = end < state.block_end[rows]
    rows, end = rows[is_shorter], end[is_shorter]
    state.block_end[rows] = end
    masks = state.masks_before[rows, end] - state.masks_before[rows, state.block_start[rows]]
    state.masks_at_open[rows] = state.remaining[rows] = masks
