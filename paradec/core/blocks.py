"""How a sequence is cut into blocks: a value given to `generate`, separate from the sampler."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import LARGEST_INT, check_choice, check_int, check_number, check_order, shown
from paradec.core.protocol import plain

LONGEST_BLOCK = LARGEST_INT


class BlockPolicy(Protocol):
    """Says where the next block of each row ends.

    A policy that decides from the model's prediction sets `reads_logits`. Then `open` says how far it wants to read,
    the step that opens a block proposes tokens for all of that, and `cut` says how much of it is the block; nothing
    beyond is committed. That step is the block's first one: reading costs no forward of its own. A block always reaches
    the first position that may be committed. A policy may also have `for_model(model)`, which returns the policy to use
    with that model.
    """

    reads_logits: ClassVar[bool] = False

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        """End (exclusive) of the block that begins at `start`, or of what is read. All arrays: [R] int64 positions."""
        ...

    def count(self, prompt_length: int, length: int) -> int | None:
        """How many blocks a row will have; None when only decoding shows."""
        ...

    def cut(self, opening: Opening) -> Tensor:
        """[R] int64: lengths of the blocks that begin at the opening's column 0; only for `reads_logits`."""
        raise TypeError(f"{type(self).__name__} reads no logits")


@dataclass
class Opening:
    """What a policy with `reads_logits` sees of rows that open a block.

    Shapes: `R` rows, `W` positions from the start of each row's block on (the widest row's; see `available`).
    """

    tokens: Tensor
    """[R, W] int64: candidate tokens."""
    confidence: Tensor
    """[R, W] float64: their probabilities."""
    available: Tensor
    """[R, W] bool: undecided, evaluated this step, and no padding."""
    start: np.ndarray
    prompt_length: np.ndarray
    length: np.ndarray
    """[R] int64 on the host: where the block starts, the prompt ends and the row ends."""


@dataclass(frozen=True)
class FixedBlocks(BlockPolicy):
    """Blocks of one length, decoded left to right (LLaDA, arXiv 2502.09992, "semi-autoregressive remasking").

    Args:
        length: positions per block, at least 1; the last block of a row may be shorter.
        align: "prompt" counts blocks from the end of the prompt (LLaDA), "absolute" from position 0 (SDAR, LLaDA2), so
            that the first block may begin inside the prompt's last one.
    """

    length: int
    align: str = "prompt"

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_choice("align", self.align, ("prompt", "absolute"))

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        if self.align == "absolute":
            return np.minimum((start // self.length + 1) * self.length, length)
        return np.minimum(start + self.length, length)

    def count(self, prompt_length: int, length: int) -> int:
        first = prompt_length // self.length * self.length if self.align == "absolute" else prompt_length
        return -(-(length - first) // self.length)


@dataclass(frozen=True)
class WholeCanvas(BlockPolicy):
    """One block that holds everything after the prompt (Dream)."""

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        return length.copy()

    def count(self, prompt_length: int, length: int) -> int:
        return 1


@dataclass(frozen=True)
class AdaptiveBlocks(BlockPolicy):
    """Blocks that end with a semantic step, where the model predicts a delimiter.

    Lu et al., "AdaBlock-dLLM", arXiv 2509.26432. When a row opens a block, the candidates of the coming
    window are read. Of those that are delimiters the most confident one (the leftmost on ties) ends the block if its
    probability is at least `delimiter_threshold`; without one the block has the default length. A row's blocks depend
    on that row alone. What the user gave among the positions read is no delimiter.

    Args:
        length: B_0, the default block length (16, 32 or 64 in the paper).
        delimiter_threshold: tau_D, in [0, 1]; 0.3 for LLaDA and 0.5 for Dream in the paper.
        delimiters: texts, looked up in the model's tokenizer, or token ids. A text that is no token of the vocabulary
            is no delimiter; when none is left, a warning says that blocks stay fixed.
        delimiter_match: "exact" takes tokens that read as one of the texts (LLaDA: its newline), "ends" all tokens that
            end with one (";\\n" too: the public code for Dream lists 24 tokens of this kind, this finds all).
        window: share of the answer's length that is read ahead, truncated to whole positions. A block may be that
            long, beyond `length`.
        min_length: shortest block, at least 1, the paper's. A new block costs caches a full forward, so that a newline
            that certainly comes next is better not a block of its own.

    The number of blocks is not known before decoding: `steps` cannot be spread over them. A method with a time grid
    (Dream's) plans the first step of a block for the positions read, the others for the block.
    """

    length: int = 32
    delimiter_threshold: float = 0.3
    delimiters: tuple[str | int, ...] = ("\n",)
    delimiter_match: str = "exact"
    window: float = 0.25
    min_length: int = 1
    model_block: int | None = field(default=None, repr=False)
    model_align: str = field(default="absolute", repr=False)
    """Set by `for_model`: blocks do not cross those that a block-causal model was trained with, and where these are
    counted from."""

    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_number("delimiter_threshold", self.delimiter_threshold, low=0, high=1)
        check_choice("delimiter_match", self.delimiter_match, ("exact", "ends"))
        check_number("window", self.window, low=0, high=1)
        check_int("min_length", self.min_length, low=1)
        check_order("min_length", self.min_length, "length", self.length)
        check_int("model_block", self.model_block, low=1, none=True)
        object.__setattr__(self, "delimiters", check_delimiters(self.delimiters))

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        end = np.minimum(start + np.maximum(self._window(prompt_length, length), self.length), length)
        if self.model_block is None:
            return end
        first = prompt_length if self.model_align == "prompt" else 0
        return np.minimum(end, ((start - first) // self.model_block + 1) * self.model_block + first)

    def count(self, prompt_length: int, length: int) -> None:
        return None

    def cut(self, opening: Opening) -> Tensor:
        device = opening.tokens.device
        read = self.open(opening.start, opening.prompt_length, opening.length) - opening.start
        # one transfer for what is known on the host
        known = np.stack((self._window(opening.prompt_length, opening.length), read))
        window, most = torch.as_tensor(known, device=device)
        ids = torch.tensor([i for i in self.delimiters if isinstance(i, int)], dtype=torch.int64, device=device)
        column = torch.arange(opening.tokens.shape[1], device=device)
        is_delimiter = torch.isin(opening.tokens, ids) & opening.available & (column < window.unsqueeze(1))
        confidence = torch.where(is_delimiter, opening.confidence, -1.0)
        at = confidence.argmax(1, keepdim=True)
        confident = confidence.gather(1, at) >= self.delimiter_threshold
        size = torch.where(confident, at + 1, self.length).squeeze(1)
        return size.clamp(min=self.min_length).minimum(most)

    def _window(self, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        return (self.window * (length - prompt_length)).astype(np.int64)

    def for_model(self, model: Any) -> AdaptiveBlocks | FixedBlocks:
        """The policy with token ids in place of texts; fixed blocks where no text is a token.

        Raises:
            ValueError: a token id outside the model's vocabulary.
        """
        facts = model.facts
        texts = tuple(d for d in self.delimiters if isinstance(d, str))
        ids = {d for d in self.delimiters if isinstance(d, int)}
        for token in ids:
            check_int("delimiters", token, low=0, high=facts.vocab_size - 1)
        if texts and model.tokenizer is not None:
            read = _readings(model.tokenizer)[: facts.vocab_size]
            found = {i for i, text in enumerate(read) if text in texts or self._ends(text, texts)}
            ids |= found - {facts.mask_token_id}
        own = facts.block_length
        if ids:
            return replace(self, delimiters=tuple(sorted(ids)), model_block=own, model_align=facts.block_align)
        fixed = FixedBlocks(self.length) if own is None else FixedBlocks(own, align=facts.block_align)
        why = "has no tokenizer" if model.tokenizer is None else "has no such token"
        warnings.warn(
            f"delimiters={self.delimiters} name no token, {facts.name} {why}: blocks stay {fixed.length} long; "
            "give token ids",
            stacklevel=2,
        )
        return fixed

    def _ends(self, text: str, texts: tuple[str, ...]) -> bool:
        return self.delimiter_match == "ends" and text.endswith(texts)


def check_delimiters(value: Any) -> tuple[str | int, ...]:
    """A sequence of texts and token ids as a tuple; raise ValueError for anything else."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ValueError(f"delimiters={shown(value)} must be a sequence of texts and token ids")
    if not len(value):
        raise ValueError(f"delimiters={shown(value)} is empty; without any, use paradec.FixedBlocks")
    for entry in value:
        if entry == "":
            raise ValueError(f"delimiters={shown(value)} holds an empty text; give texts that some token reads as")
        if not isinstance(entry, str):
            check_int("delimiters", entry, low=0)
    return tuple(entry if isinstance(entry, str) else int(entry) for entry in value)


_READ: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def _readings(tokenizer: Any) -> list[str]:
    """What each id reads as. Decoding a whole vocabulary takes seconds, so it is kept while the tokenizer lives."""
    if tokenizer not in _READ:
        _READ[tokenizer] = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return _READ[tokenizer]


@dataclass(frozen=True)
class PipelinedBlocks(FixedBlocks):
    """Fixed blocks of which several are open at once: the next one is added before the last one is full.

    "D2F", arXiv 2508.09192; "d3LLM", arXiv 2601.07568, and the public code of both. What a step may commit are the
    undecided positions of all open blocks. Before a step the next block is added where at least `add` of the last one's
    positions are decided: one a step, and none after an end of the text. The sampler's rule sees all open blocks
    together; the token that it commits in any case is the best one of the first block that is not full, not of all.

    Works with the samplers that need no schedule over steps and take nothing back, on all models, with the usual block
    caches, and with `delayed`, which is made for it. `PipelinedBlocks(n, add=1, full=1)` is `FixedBlocks(n)`.

    Args:
        length: positions per block, as for `FixedBlocks`.
        align: "model" counts blocks from where the model's begin: position 0 for block-causal models, else the end of
            the prompt. "prompt" and "absolute" as for `FixedBlocks`.
        add: share of the last open block's positions that must be decided for the next block, in [0, 1]. The published
            scripts have 0.1 (d3LLM) and 0.1 to 0.7 (D2F); their code's default is 0.5.
        full: share of a block's positions, in [0, 1], from which on the block after it is fully active; the first open
            block always is. 0.95 in the published scripts. With `forced="first"` nothing depends on it.
        forced: which blocks commit at least one token in every step: "first" the first open one (d3LLM), "active" every
            fully active one that is not full (D2F). Blocks that were merely added commit what the rule passes.

    What was given within a block (holes) counts neither as decided nor as undecided. d3LLM's code for LLaDA also
    commits the surest position of all open blocks whatever its score; here no rule does that across blocks.
    """

    align: str = "model"
    add: float = 0.1
    full: float = 0.95
    forced: str = "first"

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_choice("align", self.align, ("model", "prompt", "absolute"))
        check_number("add", self.add, low=0, high=1)
        check_number("full", self.full, low=0, high=1)
        check_choice("forced", self.forced, ("first", "active"))

    def for_model(self, model: Any) -> PipelinedBlocks:
        """The policy with its blocks counted from where the model's are."""
        own = model.facts.block_align if model.facts.topology == "block_causal" else "prompt"
        return replace(self, align=own) if self.align == "model" else self


def count_blocks(steps: int, policy: BlockPolicy, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B] int64: how many blocks each row will have, to spread `steps` over.

    Args:
        starts, lengths: [B] int64, where each row's blocks begin and end.

    Raises:
        ValueError: a policy whose blocks only decoding shows.
    """
    counts = [policy.count(int(start), int(length)) for start, length in zip(starts, lengths, strict=True)]
    if None in counts:
        raise ValueError(
            f"steps={steps} cannot be spread over {shown(policy)}: only decoding shows how many blocks there are; "
            "leave steps out"
        )
    return np.array(counts, np.int64)


POLICIES = {
    "fixed": FixedBlocks,
    "whole": WholeCanvas,
    "adaptive": AdaptiveBlocks,
    "pipelined": PipelinedBlocks,
}
"""Names of policies, for `blocks="adaptive"` and the command line."""


def policy_of(name: str, value: Any) -> Any:
    """Check the field `blocks` of a request; what `policy_data` makes becomes a policy.

    Raises:
        ValueError: an unknown name, or settings that the policy does not have; the message begins with `name`.
    """
    if isinstance(value, Mapping):
        settings = dict(value)
        policy = settings.pop(name, None)
        check_choice(name, policy, POLICIES)
        try:
            return POLICIES[policy](**{key: tuple(s) if isinstance(s, list) else s for key, s in settings.items()})
        except TypeError as error:
            raise ValueError(f"{name}={shown(dict(value))}: {error}") from None
    if isinstance(value, str):
        check_choice(name, value, POLICIES)
    return value


def policy_data(value: Any) -> Any:
    """Turn a policy into data that JSON can hold; a name stays one.

    Raises:
        ValueError: a custom policy.
    """
    for name, kind in POLICIES.items():
        if type(value) is kind:
            return {"blocks": name} | {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if not isinstance(value, str):
        raise ValueError(f"blocks={shown(value)} is no data and cannot be saved: leave it out")
    return value
