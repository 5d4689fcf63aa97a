"""Learn2PD: a trained filter accepts tokens ("Learning to Parallel", arXiv 2509.25188, and its generate.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_bool, check_choice, check_number, short_repr
from paradec.samplers.masked.blocks import FixedBlocks, WholeCanvas
from paradec.samplers.masked.loop import LAST, UNCUT, MaskedProposal, MaskedSampler, Needs, View
from paradec.samplers.masked.rules.learn2pd_filter import DEFAULT_FILTERS, QUANTITIES, block_features, load_filter
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class Learn2PD(MaskedSampler):
    """Per row, commit every masked position of the block that the filter accepts, and always the most confident one.

    Args:
        filter: path of a file from `paradec learn2pd train`. None uses the packaged filter for the packaged model, and
            the filter given to `register_filter` for other models.
        filter_threshold: accept a position if the filter's probability that it is final exceeds this, in [0, 1].
        eot: which end tokens shorten the canvas ("EoTP"). "committed" is the paper's rule: once an end token is
            final, all positions after it are dropped; the row continues until all positions before it are decided.
            "greedy" is the public code's rule: a step that makes no end token final also drops the positions after the
            most confident predicted end token, which does not become final. "none", or a request with
            `eos_early_stop=False`, drops nothing.
        eot_confidence: lowest confidence of an end token that drops the positions after it, in [0, 1].
        allow_mismatch: accept a filter that was trained for another model, block length or cache.

    The public code's "greedy" also reads end tokens in later blocks that the step evaluates; this class reads only the
    open block, as the code's variants with a cache do. In addition to accepted positions, the public code commits the
    top n of LLaDA's schedule; here n is 1, as in its runs with one token per step. Filters run in float64 here, and in
    float32 in the public code.
    """

    filter: str | None = None
    filter_threshold: float = 0.96
    eot: str = "committed"
    eot_confidence: float = 0.0
    allow_mismatch: bool = False

    name = "learn2pd"
    paper = "Learn2PD"
    arxiv = "2509.25188"
    summary = "every token that a trained filter accepts, and the best one"
    needs = Needs(decided_logits=True)
    sweep = ({"filter_threshold": 0.9}, {"filter_threshold": 0.7}, {"filter_threshold": 0.5})

    def __post_init__(self) -> None:
        if isinstance(self.filter, os.PathLike):
            object.__setattr__(self, "filter", os.fspath(self.filter))
        if self.filter is not None and not isinstance(self.filter, str):
            raise ValueError(f"filter={short_repr(self.filter)} must be the path of a file, or None")
        check_number("filter_threshold", self.filter_threshold, low=0, high=1)
        check_choice("eot", self.eot, ("committed", "greedy", "none"))
        check_number("eot_confidence", self.eot_confidence, low=0, high=1)
        check_bool("allow_mismatch", self.allow_mismatch)
        defaults = [path for path in DEFAULT_FILTERS.values() if os.path.isfile(path)]
        paths = defaults if self.filter is None else [self.filter]
        features = {name for path in paths for name in load_filter(path).network.reads}
        reads = [quantity for name, quantity in QUANTITIES.items() if name in features | {"confidence"}]
        object.__setattr__(self, "needs", replace(self.needs, reads=tuple(reads)))

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        path = self.filter or DEFAULT_FILTERS.get((facts.name, facts.vocab_size))
        if path is None:
            raise ValueError(
                f"sampler 'learn2pd' needs a filter for {facts.name}: train one with `paradec learn2pd train --model "
                "... --out filter.safetensors` and give filter='filter.safetensors'"
            )
        trained = load_filter(path).facts
        length = blocks.length if isinstance(blocks, FixedBlocks) else None
        length = longest if isinstance(blocks, WholeCanvas) else length
        differences = trained.mismatches(facts.name, facts.vocab_size, length, cache.name)
        if differences and not self.allow_mismatch:
            raise ValueError(
                f"filter={str(path)!r} was trained for {'; '.join(differences)}. Train one with `paradec learn2pd "
                "train`, change the request, or give allow_mismatch=True"
            )
        if trained.kind == "block" and (length is None or length > trained.block_length):
            raise ValueError(
                f"filter={str(path)!r} reads blocks of up to {trained.block_length} positions, not "
                f"{short_repr(blocks)}; give block_length={trained.block_length}, or train a filter of kind 'features'"
            )

    def extra_quantities(self, state: MaskedState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        """Compute the filter's probabilities ("acceptance"), and the positions at which the text may end ("is_end")."""
        path = self.filter or DEFAULT_FILTERS[state.facts.name, state.facts.vocab_size]
        filter_ = load_filter(path, state.canvas.device)
        is_end = torch.isin(proposal.values, state.ends)
        if (state.answer_start > state.prompt_length).any():  # masks precede prompt tokens: the text cannot end there
            answer_start = torch.as_tensor(state.answer_start[state.window.rows, None], device=is_end.device)
            is_end = is_end & (proposal.positions >= answer_start)
        return {"acceptance": filter_.accept(*block_features(state, proposal)), "is_end": is_end}

    def select(self, view: View) -> Tensor:
        accepted = (view.quantities["acceptance"] > self.filter_threshold) & (view.scores > LAST)
        return accepted | view.best()

    def trim(self, view: View, selected: Tensor) -> Tensor | None:
        if self.eot == "none":
            return None
        is_end = view.quantities["is_end"] & (view.quantities["confidence"] >= self.eot_confidence)
        ends = selected & is_end
        cut = torch.where(ends.any(1, keepdim=True), ends.int().argmax(1, keepdim=True), -1)
        if self.eot == "greedy":
            # by confidence, since scores may rank all end tokens last
            predicted = view.quantities["confidence"].where(is_end & view.candidates, -torch.inf)
            best = predicted.argmax(1, keepdim=True)
            is_predicted = (cut < 0) & (predicted.gather(1, best) > -torch.inf)
            cut = torch.where(is_predicted, best, cut)
        length = view.positions.gather(1, cut.clamp(min=0)) + 1
        return torch.where(cut < 0, UNCUT, length).squeeze(1)
