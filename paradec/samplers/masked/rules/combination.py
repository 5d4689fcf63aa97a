"""Combinations of samplers, as values: which rules are joined and how, and which logits stages come before them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import shown
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Sampler
from paradec.core.registry import Registry
from paradec.core.trace import Notes
from paradec.samplers.masked import reference
from paradec.samplers.masked.loop import LAST, MaskedProposal, MaskedSampler, MaskedState, Stage, View, make_view
from paradec.samplers.masked.view import checked_select


@dataclass(frozen=True)
class Combination(MaskedSampler):
    """Base of `union` and `intersection`.

    Args:
        rules: one masked sampler or more: names, samplers, or their `to_dict`. Combinations can be rules as well.
        stages: samplers of which only the logits stage (`process_logits`) is used, not the rule: `credit`, say.

    The logits stages of `stages` and of the rules run first, one after the other, each on what the one before made of
    the logits; every rule then reads the result. Each rule has its own score, quota and memory. What it remembers of a
    step's selection is what became final, whichever rule asked for it. A commit's confidence is the first rule's score.
    Where rules cut a row off (Learn2PD's end-of-text prediction), the first cut counts.

    Raises:
        ValueError: rules that cannot be joined: of different `score_from`, or with a step of their own (drafts), or
            that take back what they decided.
    """

    rules: tuple[Any, ...] = ()
    stages: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rules", "stages"):
            given = getattr(self, name)
            if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
                raise ValueError(f"{name}={shown(given)} must be a sequence of samplers")
            object.__setattr__(self, name, tuple(self._member(name, entry) for entry in given))
        if not self.rules:
            raise ValueError("rules=() must name one sampler at least")
        sources = {rule.needs.score_from: rule.name for rule in reversed(self.rules)}
        if len(sources) > 1:
            raise ValueError(
                f"rules {sources['raw']!r} and {sources['sampled']!r} cannot be joined: one scores tokens by the "
                "model's distribution, the other by the one that they are drawn from"
            )
        for stage in self.stages:
            if not stage.needs.processes_logits:
                raise ValueError(f"stages: sampler {stage.name!r} has no logits stage")
        needs = dataclasses.replace(
            self.needs,
            reads=tuple(read for rule in self.rules for read in rule.needs.reads),
            score=self.rules[0].needs.score,
            score_from=self.rules[0].needs.score_from,
            least_by_steps=all(rule.needs.least_by_steps or not rule.uses_steps for rule in self.rules),
            may_wait=self._may_wait(),
            decided_logits=any(rule.needs.decided_logits for rule in self.rules),
            processes_logits=any(member.needs.processes_logits for member in self.members),
            extra_quantities=any(rule.needs.extra_quantities for rule in self.rules),
        )
        draws, uses_steps = (any(getattr(rule, name) for rule in self.rules) for name in ("draws", "uses_steps"))
        vars(self).update(needs=needs, draws=draws, uses_steps=uses_steps)

    def _member(self, name: str, given: Any) -> MaskedSampler:
        """The sampler that an entry of `rules` or `stages` means, if it can be joined with others."""
        if isinstance(given, str):
            given = Registry.by_kind["sampler"].create(given)
        elif isinstance(given, Mapping):
            given = Sampler.from_dict(given)
        if not isinstance(given, MaskedSampler):
            raise ValueError(f"{name}: {shown(given)} must be a masked sampler, its name or its to_dict")
        own_step = any(getattr(type(given), half) is not getattr(MaskedSampler, half) for half in OWN)
        own_order = type(given).position_noise is not MaskedSampler.position_noise and given.memory()
        for cause, why in {
            "it drafts steps ahead": given.needs.multi_step,
            "it takes back what it decided": given.needs.revises,
            "its step is its own": own_step,
            "its order is drawn once per block": own_order,
        }.items():
            if why:
                raise ValueError(f"{name}: sampler {given.name!r} cannot be joined with others: {cause}")
        return given

    def _may_wait(self) -> bool:
        raise NotImplementedError

    @property
    def members(self) -> tuple[MaskedSampler, ...]:
        """Stages and rules, in the order of their logits stages."""
        return (*self.stages, *self.rules)

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        for member in self.members:
            member.check(facts, blocks, cache, longest)

    def blocks(self, block_length: int | None) -> BlockPolicy | None:
        policies = {rule.blocks(block_length): rule.name for rule in reversed(self.rules)}
        policies.pop(None, None)
        if len(policies) > 1:
            raise ValueError(f"rules {sorted(policies.values())} cut the text into different blocks; give blocks=")
        return next(iter(policies), None)

    def memory(self) -> Mapping[str, MemorySpec]:
        return _joined({index: member.memory() for index, member in enumerate(self.members)})

    def quota(self, state: MaskedState, rows: np.ndarray) -> Any:
        """What the schedule grants each rule, in order: a tuple of their quotas."""
        return tuple(rule.quota(state, rows) for rule in self.rules)

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        updates = {}
        for index, member in enumerate(self.members):
            if member.needs.processes_logits:
                own = dataclasses.replace(stage, memory=_own(stage.memory, index))
                logits, updates[index] = member.process_logits(logits, own)
        return logits, _joined(updates)

    def extra_quantities(self, state: MaskedState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        return _joined(
            {at: rule.extra_quantities(state, proposal) for at, rule in enumerate(self.rules, len(self.stages))}
        )

    def trim(self, view: View, selected: Tensor) -> Tensor | None:
        if all(type(rule).trim is MaskedSampler.trim for rule in self.rules):
            return None
        found = [rule.trim(own, selected) for _, rule, own in self.views(view)]
        cuts = [cut for cut in found if cut is not None]
        return torch.stack(cuts).amin(0) if cuts else None

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
        """As for all; and which rules choose what."""
        notes = super().observe(state, proposal)
        generator = None
        if state.generator is not None:  # a copy: the commit draws the same numbers
            generator = reference.after(state.generator, proposal.generator_state)
        view, rows = make_view(self, state, proposal, generator), proposal.rows.tolist()
        chosen: dict[tuple[int, int], list[str]] = {}
        for _, rule, own in self.views(view):
            for row, column in (checked_select(rule, own) & view.candidates).nonzero().tolist():
                chosen.setdefault((row, column), []).append(rule.name)
        names = self.named({place: tuple(rules) for place, rules in chosen.items()}, view)
        positions = proposal.positions.tolist()
        rules = {(rows[index], positions[index][column]): name for (index, column), name in names.items()}
        notes.rules = {**rules, **(notes.rules or {})} or None
        return notes

    def named(self, chosen: Mapping[tuple[int, int], tuple[str, ...]], view: View) -> dict[tuple[int, int], str]:
        """What a trace calls the choice of several rules, by (row, column)."""
        return {place: " and ".join(names) for place, names in chosen.items()}

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        return _joined({index: rule.remember(own, selected) for index, rule, own in self.views(view)})

    def views(self, view: View) -> list[tuple[int, MaskedSampler, View]]:
        """(index among the members, rule, what it sees) of every rule."""
        found = []
        fixed = (view.scores == -torch.inf) | (view.scores == LAST)  # may not be committed, or only after all others
        for index, rule in enumerate(self.rules, len(self.stages)):
            own = dataclasses.replace(
                view,
                scores=torch.where(fixed, view.scores, view.quantities[rule.needs.score]),
                quota=view.quota[index - len(self.stages)],
                quantities={**view.quantities, **_own(view.quantities, index)},
                memory=_own(view.memory, index),
                updates=_own(view.updates, index),
            )
            found.append((index, rule, own))
        return found


OWN = ("query", "propose", "commit")
"""What a rule must leave to the family."""


@dataclass(frozen=True)
class Union(Combination):
    """Commit positions that at least one of the rules would commit. As a name: "credit+localleap".

    Rules that may wait (Dream's time grid) are allowed: another rule makes progress, or all wait within their schedule.
    """

    rules: tuple[Any, ...] = ("credit", "localleap")

    name = "union"
    paper = ""
    summary = "what at least one of several samplers would commit"
    sweep = ({"rules": ("threshold", "persistence")}, {"rules": ("credit", "hierarchy")})

    def _may_wait(self) -> bool:
        return all(rule.needs.may_wait for rule in self.rules)

    def select(self, view: View) -> Tensor:
        return functools.reduce(operator.or_, (checked_select(rule, own) for _, rule, own in self.views(view)))


@dataclass(frozen=True)
class Intersection(Combination):
    """Commit positions that all rules would commit, or, if there are none, the first rule's best one.

    Rules that may wait are refused: the first rule's best position would be committed against their schedule.
    """

    rules: tuple[Any, ...] = ("threshold", "entropy_threshold")

    name = "intersection"
    paper = ""
    summary = "what all of several samplers would commit, and the best token where there is none"
    sweep = ({"rules": ("threshold", "margin")}, {"rules": ("localleap", "entropy_threshold")})

    def _may_wait(self) -> bool:
        for rule in self.rules:
            if rule.needs.may_wait:
                raise ValueError(f"rules: sampler {rule.name!r} may wait, which an intersection does not")
        return False

    def select(self, view: View) -> Tensor:
        agreed = functools.reduce(operator.and_, (checked_select(rule, own) for _, rule, own in self.views(view)))
        agreed = agreed & view.candidates
        return torch.where(agreed.any(-1, keepdim=True), agreed, view.best())

    def named(self, chosen: Mapping[tuple[int, int], tuple[str, ...]], view: View) -> dict[tuple[int, int], str]:
        best = [tuple(place) for place in view.best().nonzero().tolist()]
        alone = {place: "best one, where rules disagree" for place in best}
        return alone | {place: "all rules" for place, names in chosen.items() if len(names) == len(self.rules)}


def _joined(parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Entries of several members under names that say whose they are."""
    return {f"{index}.{name}": value for index, part in parts.items() for name, value in part.items()}


def _own(joined: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The entries of one member, under its own names."""
    prefix = f"{index}."
    return {name.removeprefix(prefix): value for name, value in joined.items() if name.startswith(prefix)}
