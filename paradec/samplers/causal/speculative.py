"""Speculative decoding: a smaller model drafts, and the model verifies the drafts in one forward.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. Trees of drafts: SpecInfer, arXiv 2305.09781.
Drafters that read hidden states: EAGLE, arXiv 2401.15077, and EAGLE-2, arXiv 2406.16858. Drafters that fill a block of
masks: DFlash, arXiv 2602.06036. The model's own heads: MTP, arXiv 2412.19437. Drafters without a network:
`paradec.samplers.causal.drafts.text`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paradec.core.checks import check_choice, short_repr
from paradec.samplers.causal.drafting import DraftingSampler
from paradec.samplers.causal.drafts.stopping import Unconfident, make_stop_rule
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import RULES, DynamicTree, TreeRule, parse_tree
from paradec.samplers.causal.window import DraftWindow


@dataclass(frozen=True)
class Speculative(DraftingSampler):
    """`drafter` drafts `window - 1` tokens one after the other, or a `tree` of tokens. Exact rules verify the drafts; a
    draft x of a chain is accepted with probability min(1, p(x) / q(x)) (algorithm 1 of the paper).

    Lossless for any drafter. Temperature, filters, guidance and constraints also apply to the draft distribution. `nfe`
    counts the model's forwards, `state.draft_nfe` the drafter's.

    Args:
        drafter: one of these:
            a causal model with the same vocabulary, from `paradec.load`, `paradec.wrap` or transformers;
            an image model of the same family;
            an EAGLE, DFlash, DSpark or MTP drafter trained for this model, from `paradec.load_drafter`;
            "prompt_lookup" or a `paradec.samplers.causal.drafts.text.PromptLookup`;
            with rule="naive", "token_recycling" or a `paradec.samplers.causal.drafts.text.TokenRecycling`;
            "self", which makes a `paradec.samplers.causal.self_speculative.SelfSpeculative`.
        window: slots evaluated at once without a tree: the next token and `window - 1` drafts. Leave it out with
            drafters that fill a whole window (prompt lookup, DFlash, DSpark, several MTP layers).
        tree: a static tree, as the number of children per node at each depth, e.g. (3, 2, 1), as paths, or as a name of
            `paradec.samplers.causal.trees.TREES` ("mc_sim_7b_63" is EAGLE's); or EAGLE-2's
            `paradec.samplers.causal.trees.DynamicTree`. None means a chain.
        rule: rule that verifies a tree's nodes, one of `paradec.samplers.causal.trees.RULES`. EAGLE uses
            "without_replacement", EAGLE-2 "naive".
        stop: rule that ends a chain of drafts early: `Unsure` or `Unconfident` (DSpark's confidence) of
            `paradec.samplers.causal.drafts.stopping`, or a `StopRule` of that module. The result stays exact. With a
            smaller model as drafter, this saves drafter forwards; with other drafters it only reduces the number of
            verified drafts.
    """

    window: int = 5
    rule: str = "without_replacement"
    stop: Any = None

    name = "speculative"
    paper = "Speculative decoding"
    arxiv = "2211.17192"
    summary = "a smaller model drafts a chain or a tree that the model verifies in one forward; lossless"
    needs_drafter = True
    window_drafters = True

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        if cls is not Speculative or settings.get("drafter") != "self":
            return super().__new__(cls, *args, **settings)
        from paradec.samplers.causal.self_speculative import SelfSpeculative

        return SelfSpeculative(*args, **{name: value for name, value in settings.items() if name != "drafter"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, RULES)
        object.__setattr__(self, "stop", make_stop_rule(self.stop))
        self._check_stop()
        is_top_k = isinstance(self.tree, DynamicTree) or (self.has_text_drafter and self.tree is not None)
        if is_top_k and self.rule != "naive":
            source = f"drafter={self.drafter.name!r}" if self.has_text_drafter else "a DynamicTree"
            raise ValueError(f"rule={self.rule!r} must be 'naive' for {source}: its drafts are not sampled")
        if self.tree is not None and self.rule == "greedy":
            tree = parse_tree(self.tree)
            counts = {(depth, int((row >= 0).sum())) for depth, row in zip(tree.depths, tree.children, strict=True)}
            if len({depth for depth, _ in counts}) < len(counts):
                raise ValueError(
                    f"tree={self.tree} must have the same number of children at all nodes of a depth for rule='greedy'"
                )

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        if self.tree is not None or self.has_text_drafter:
            source = f"drafter={self.drafter.name!r}" if self.has_text_drafter else f"tree={short_repr(self.tree)}"
            raise ValueError(
                f"stop={short_repr(self.stop)} needs a chain that a model drafts, not {source}: leave stop out"
            )
        if isinstance(self.stop, Unconfident) and self.drafter is not None:
            if getattr(getattr(self.drafter, "module", None), "confidence_head", None) is None:
                raise ValueError(
                    f"stop={short_repr(self.stop)} needs a drafter with a confidence head (DSpark's); "
                    f"{self.drafter.facts.name} has none"
                )

    def accept(self, window: DraftWindow) -> Tensor:
        """Return the acceptance probabilities min(1, p(x) / q(x))."""
        return window.ratio().clamp(max=1)

    def node_rule(self, state: CausalState) -> TreeRule:
        return RULES[self.rule]
