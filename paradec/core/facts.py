"""Ids and conventions of a model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import LARGEST_INT64, check_choice, check_int

PREDICTIONS = ("same", "shifted")
TOPOLOGIES = ("bidirectional", "block_causal", "causal", "causal_context", "canvas")
BLOCK_ALIGNS = ("absolute", "prompt")
TOPOLOGY_ALIGNS = {"block_causal": BLOCK_ALIGNS, "causal_context": ("prompt",)}
"""Allowed alignments by topology; other topologies allow "absolute" only."""
HOLE = -1
"""Id of a position to fill, for models with canvases, which have no mask token."""


@dataclass(frozen=True)
class ModelFacts:
    """Ids and conventions of one model.

    Args:
        vocab_size: number of rows of the output matrix.
        name: the model's name in messages.
        mask_token_id: id of undecided tokens, never proposed; None for models without one.
        eos_token_ids: ids that end an answer (end of text, end of turn); may be empty.
        pad_token_id: id after the end of an answer; by default the first end id, else 0 (1 if 0 is the mask id).
        max_length: limit of prompt and answer together; None: unlimited.
        trained_length: rows longer than this give a warning.
        prediction: "same" (logits row i predicts token i: LLaDA) or "shifted" (row i - 1 predicts it: Dream).
        topology: "bidirectional", "block_causal", "causal"; "causal_context" (a bidirectional block after causal keys
            and values; the position before the block predicts its first token: Nemotron-Labs-Diffusion); "canvas" (a
            bidirectional block of noise after a causal encoder of final tokens: DiffusionGemma).
        block_length: length of a block-causal model's blocks, or of the canvas.
        block_align: "absolute" counts blocks from position 0 (SDAR, LLaDA2); "prompt" counts them from the end of the
            prompt, and the whole prompt is one block (D2F).
        delete_token_id, split_token_id: ids that delete a position, or insert a mask before it (LLaDA2.2).
        tokenizer_size: ids from this number on have no text, such as embedding padding; None: all ids have text.
        whole_blocks: whether a call must evaluate whole blocks, because the model chooses experts per block.

    Raises ValueError for a value out of its range.
    """

    vocab_size: int
    mask_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    max_length: int | None = None
    prediction: str = "same"
    topology: str = "bidirectional"
    block_length: int | None = None
    block_align: str = "absolute"
    name: str = "model"
    trained_length: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None
    whole_blocks: bool = False
    tokenizer_size: int | None = None

    def __post_init__(self) -> None:
        check_int("vocab_size", self.vocab_size, low=1)
        check_int("tokenizer_size", self.tokenizer_size, low=1, none=True)
        check_choice("prediction", self.prediction, PREDICTIONS)
        check_choice("topology", self.topology, TOPOLOGIES)
        check_choice("block_align", self.block_align, BLOCK_ALIGNS)
        for name in ("mask_token_id", "pad_token_id", "delete_token_id", "split_token_id"):
            check_int(name, getattr(self, name), low=0, high=self.vocab_size - 1, none=True)
        for eos in self.eos_token_ids:
            check_int("eos_token_id", eos, low=0, high=self.vocab_size - 1)
        if self.mask_token_id is not None and self.mask_token_id in self.eos_token_ids:
            raise ValueError(f"mask_token_id={self.mask_token_id} is also an end-of-text id {self.eos_token_ids}")
        if self.mask_token_id is not None and self.mask_token_id == self.pad_token_id:
            raise ValueError(f"pad_token_id={self.pad_token_id} is also the mask id; give another id to pad with")
        if self.topology in ("block_causal", "causal_context", "canvas"):
            check_int("block_length", self.block_length, low=1)
        elif self.block_length is not None:
            raise ValueError(
                f"block_length={self.block_length} is only for topology='block_causal', 'causal_context' or 'canvas'"
            )
        allowed = TOPOLOGY_ALIGNS.get(self.topology, ("absolute",))
        if self.block_align not in allowed:
            raise ValueError(
                f"block_align={self.block_align!r} is not for topology={self.topology!r}, which allows {allowed}"
            )
        for name in ("max_length", "trained_length"):
            check_int(name, getattr(self, name), low=1, high=LARGEST_INT64, none=True)

    @property
    def mask_id(self) -> int:
        """`mask_token_id`. Raises ValueError for a model without one."""
        if self.mask_token_id is None:
            reason = "it decodes canvases of noise" if self.topology == "canvas" else "it is autoregressive"
            raise ValueError(f"{self.name} has no mask token: {reason}")
        return self.mask_token_id

    @property
    def textless_ids(self) -> frozenset[int]:
        """Ids without text, which requests suppress by default."""
        if self.tokenizer_size is None:
            return frozenset()
        control_ids = {*self.eos_token_ids, self.delete_token_id, self.split_token_id}
        return frozenset(range(self.tokenizer_size, self.vocab_size)) - control_ids

    @property
    def hole_id(self) -> int | None:
        """Id of a position to fill: the mask id, or `HOLE` on canvases; None for causal models."""
        if self.topology == "causal":
            return None
        return HOLE if self.topology == "canvas" else self.mask_token_id

    def check_length(self, longest: int, new: int) -> None:
        """Raise ValueError if the longest row has more than `max_length` positions; warn if it has more than
        `trained_length`. longest: its number of positions. new: number of its positions after the prompt."""
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"prompt of {longest - new} tokens + max_new_tokens={new} = {longest} is longer than {self.name} takes "
                f"({self.max_length})"
            )
        if self.trained_length is not None and longest > self.trained_length:
            warnings.warn(
                f"a row of {longest} positions is longer than {self.name} was trained for ({self.trained_length})",
                stacklevel=2,
            )

    @property
    def block_unit(self) -> int:
        """Length of the blocks whose positions see each other: `block_length` of a block-causal model, else 1."""
        return self.block_length or 1 if self.topology == "block_causal" else 1

    @property
    def prompt_aligned(self) -> bool:
        return self.block_align == "prompt"

    def block_numbers(self, positions: Any, origin: Any = None) -> Any:
        """Compute the block numbers of positions (int64 tensor or array of any shape). Models that count blocks from
        the prompt's end need `origin` [R, 1] int64, the ends of the prompts; prompt positions then get -1."""
        if not self.prompt_aligned:
            return positions // self.block_unit
        return ((positions - origin) // self.block_unit).clip(-1)

    def block_bounds(self, start: Any, stop: Any, origin: Any) -> tuple[Any, Any]:
        """Widen ranges [start, stop) to whole blocks; all int64 arrays. origin: as in `block_numbers`."""
        block = self.block_unit
        if not self.prompt_aligned:
            return start // block * block, -(-stop // block) * block
        start, stop = start - origin, stop - origin
        starts_in_block = start >= 0  # a range that begins in the prompt includes the whole prompt
        return (start // block * block + origin) * starts_in_block, (-(-stop // block)).clip(0) * block + origin

    @property
    def shift(self) -> int:
        """Distance from a token to the position on its left that predicts it."""
        return 1 if self.prediction == "shifted" else 0

    @property
    def fill_token_id(self) -> int:
        """Id after the end of an answer. Never the mask id: padding would count as undecided."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        if self.eos_token_ids:
            return self.eos_token_ids[0]
        return 1 if self.mask_token_id == 0 else 0
