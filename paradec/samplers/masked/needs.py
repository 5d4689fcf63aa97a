"""What a masked method needs of a step: one value, `needs`, that the loop asks.

A class says what it needs (`needs = Needs(score="margin")`), but for what follows from the methods that it overrides
(`OVERRIDES`). Where needs depend on settings, `__post_init__` sets those of the one sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paradec.core.checks import check_choice
from paradec.core.facts import TOPOLOGIES
from paradec.core.registry import unknown
from paradec.samplers.statistics import QUANTITIES

OVERRIDES = {
    "preview": "previews",
    "process_logits": "processes_logits",
    "extra_quantities": "extra_quantities",
    "revise": "revises",
    "draw_tokens": "draws_tokens",
}
"""Methods of `MaskedSampler`, and the field of `Needs` that follows from overriding each."""


@dataclass(frozen=True)
class Needs:
    """What a method reads, and what it does beside its `select`.

    Raises:
        ValueError: quantities that nothing computes, or another `score_from`.
    """

    reads: tuple[str, ...] = ()
    """Quantities computed from the logits (`paradec.samplers.statistics.QUANTITIES`); "confidence" and `score` too."""
    score: str = "confidence"
    """The one of them that ranks positions."""
    score_from: str = "raw"
    """"raw" computes them from softmax(logits) whatever the temperature (LLaDA), "sampled" from the tempered and
    filtered distribution that tokens are drawn from (Dream)."""
    reference_draws: str = "canvas"
    """Whether the public code draws position noise for the whole "canvas" or the "masked" positions."""
    decided_logits: bool = False
    """Whether the method reads the logits of decided positions of the block as well (to edit or remask). Without it,
    and without a `process_logits`, `extra_quantities` or `revise`, large vocabularies have none there."""
    topologies: tuple[str, ...] = ()
    """The topologies (`paradec.core.facts.TOPOLOGIES`) of models that the method is for; none is all of the family."""
    may_wait: bool = False
    """Whether a step may commit nothing; then the method's schedule must bound the steps."""
    least_by_steps: bool = False
    """Whether the schedule of `steps` says only what a step commits at least, beside what the rule finds without it;
    then pipelined blocks take the method, without `steps`."""
    mask_probes: bool = False
    """Whether it evaluates masks beside the row that the rest of the row does not see."""
    stores_final: bool = False
    """Whether it lets keys and values of final blocks be stored, and no others: for caches with `final_alone`."""
    causal_keys: bool = False
    """Whether final tokens attend causally in the calls that store their keys and values, whatever the model's
    topology. Only requests that agree on it share keys and values."""
    multi_step: bool = False
    """Whether it evaluates drafts of later steps, and promises the result of taking them one by one."""
    moves: bool = False
    """Whether a step of a method that `revises` may move what is decided within the open block, and leave more
    undecided than there was; then its last step must fill the block."""
    ends_with_block: bool = False
    """Whether stop rules of a method that `revises` see a block only when it closes."""
    names_rules: bool = False
    """Whether a selection is several rules' (`rules_of`)."""
    previews: bool = False
    """Whether `preview` says what a step will commit before the model is called."""
    processes_logits: bool = False
    """Whether the method has a logits stage of its own."""
    extra_quantities: bool = False
    """Whether it finds out more about a proposal."""
    revises: bool = False
    """Whether it takes back what it decided in the open block. Then stop rules count a token as decided when a step has
    left it as it is, or its block has closed."""
    draws_tokens: bool = False
    """Whether counter-based draws of tokens go through the method's own `draw_tokens`."""

    def __post_init__(self) -> None:
        if not isinstance(self.reads, (tuple, list)):
            raise ValueError(f"reads={self.reads!r} must be a tuple of {', '.join(QUANTITIES)}")
        reads = tuple(dict.fromkeys(("confidence", *self.reads, self.score)))  # every commit looks at the first
        if wrong := [name for name in reads if name not in QUANTITIES]:
            said = f"score={self.score!r}" if wrong[0] == self.score else f"reads={self.reads!r}"
            raise ValueError(f"{said}: {unknown('quantity', wrong[0], QUANTITIES)}")
        check_choice("score_from", self.score_from, ("raw", "sampled"))
        check_choice("reference_draws", self.reference_draws, ("canvas", "masked"))
        object.__setattr__(self, "reads", reads)
        for topology in self.topologies:
            check_choice("topologies", topology, TOPOLOGIES)

    def refusal(self, facts: Any) -> str | None:
        """Why the method is not for models of these facts; None where it is."""
        if facts.whole_blocks and (self.mask_probes or self.multi_step):
            what = "masks beside the row" if self.mask_probes else "several drafts"
            return f"it evaluates {what} in one call; {facts.name} chooses experts for whole blocks of a call"
        if not self.topologies or facts.topology in self.topologies:
            return None
        needed = " or ".join(topology.replace("_", "-") for topology in self.topologies)
        return f"it needs a {needed} model; {facts.name} is {facts.topology.replace('_', '-')}"


def declare(cls: Any, base: type) -> None:
    """Complete the `needs` of a subclass of `base` by what it overrides.

    Raises:
        TypeError: `needs` that are no `Needs`.
    """
    if not isinstance(cls.needs, Needs):
        raise TypeError(f"needs={cls.needs!r} of sampler class {cls.__name__} must be a paradec.samplers.masked.Needs")
    own: Any = {OVERRIDES[name]: True for name in OVERRIDES if getattr(cls, name) is not getattr(base, name)}
    cls.needs = replace(cls.needs, **own)
    cls.device_step = vars(cls).get("device_step", False)
