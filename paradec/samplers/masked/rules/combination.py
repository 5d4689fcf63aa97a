"""Samplers that combine the rules of other samplers."""

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
from paradec.core.checks import short_repr
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Sampler
from paradec.core.registry import Registry
from paradec.core.trace import Notes
from paradec.samplers.features.feature import overrides
from paradec.samplers.masked import reference
from paradec.samplers.masked.loop import LOOP_METHODS, MaskedSampler, make_view
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import LAST, MaskedProposal, Stage, View, run_process_logits, run_select


@dataclass(frozen=True)
class Combination(MaskedSampler):
    """Base of `union` and `intersection`.

    Args:
        rules: at least one masked sampler: a name, a sampler, or its `to_dict`. Combinations can be rules as well.
        stages: samplers that run only their logits stage (`process_logits`), not their rule; for example `credit`.

    The logits stages of `stages` and then of the rules run one after the other; every rule then reads the final logits.
    Each rule has its own score, quota and memory. `remember` of each rule gets the combined selection. A commit's
    confidence is the first rule's score. If several rules cut a row off (Learn2PD's end-of-text prediction), the first
    cut counts. Not supported: different `score_from`, and rules that draft, take tokens back or override the step.
    """

    rules: tuple[Any, ...] = ()
    stages: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rules", "stages"):
            entries = getattr(self, name)
            is_sequence = isinstance(entries, Sequence) and not isinstance(entries, (str, bytes))
            if not is_sequence or (name == "rules" and not entries):
                raise ValueError(f"{name}={short_repr(entries)} must be a sequence of samplers, with at least one rule")
            object.__setattr__(self, name, tuple(self._make_member(name, entry) for entry in entries))
        sources = {rule.needs.score_from: rule.name for rule in reversed(self.rules)}
        if len(sources) > 1:
            names = f"{sources['raw']!r} and {sources['sampled']!r}"
            raise ValueError(f"rules {names} cannot be joined: score_from differs")
        for stage in self.stages:
            if not stage.needs.processes_logits:
                raise ValueError(f"stages: sampler {stage.name!r} has no logits stage")
        needs = dataclasses.replace(
            self.needs,
            reads=tuple(read for rule in self.rules for read in rule.needs.reads),
            score=self.rules[0].needs.score,
            score_from=self.rules[0].needs.score_from,
            least_by_steps=all(rule.needs.least_by_steps or not rule.uses_steps for rule in self.rules),
            may_wait=all(rule.needs.may_wait for rule in self.rules),
            decided_logits=any(rule.needs.decided_logits for rule in self.rules),
            processes_logits=any(member.needs.processes_logits for member in self.members),
            extra_quantities=any(rule.needs.extra_quantities for rule in self.rules),
        )
        draws, uses_steps = (any(getattr(rule, name) for rule in self.rules) for name in ("draws", "uses_steps"))
        vars(self).update(needs=needs, draws=draws, uses_steps=uses_steps)

    def _make_member(self, name: str, entry: Any) -> MaskedSampler:
        if isinstance(entry, str):
            entry = Registry.by_kind["sampler"].create(entry)
        elif isinstance(entry, Mapping):
            entry = Sampler.from_dict(entry)
        if not isinstance(entry, MaskedSampler):
            raise ValueError(f"{name}: {short_repr(entry)} must be a masked sampler, its name or its to_dict")
        overrides_step = any(overrides(entry, method) for method in LOOP_METHODS)
        has_block_order = overrides(entry, "position_noise") and entry.memory()
        for why, holds in {
            "it drafts steps ahead": entry.needs.multi_step,
            "it takes tokens back": entry.needs.revises,
            "it overrides the step": overrides_step,
            "its order is drawn once per block": has_block_order,
        }.items():
            if holds:
                raise ValueError(f"{name}: sampler {entry.name!r} cannot be joined with others: {why}")
        return entry

    @property
    def members(self) -> tuple[MaskedSampler, ...]:
        """Stages and rules, in the order in which their logits stages run."""
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
        return _prefix_names({index: member.memory() for index, member in enumerate(self.members)})

    def quota(self, state: MaskedState, rows: np.ndarray) -> Any:
        return tuple(rule.quota(state, rows) for rule in self.rules)

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        updates = {}
        for index, member in enumerate(self.members):
            if member.needs.processes_logits:
                member_stage = dataclasses.replace(stage, memory=_member_entries(stage.memory, index))
                logits, updates[index] = run_process_logits(member, logits, member_stage)
        return logits, _prefix_names(updates)

    def extra_quantities(self, state: MaskedState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        return _prefix_names(
            {index: rule.extra_quantities(state, proposal) for index, rule in enumerate(self.rules, len(self.stages))}
        )

    def trim(self, view: View, selected: Tensor) -> Tensor | None:
        if not any(overrides(rule, "trim") for rule in self.rules):
            return None
        member_cuts = [rule.trim(rule_view, selected) for _, rule, rule_view in self.rule_views(view)]
        cuts = [cut for cut in member_cuts if cut is not None]
        return torch.stack(cuts).amin(0) if cuts else None

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
        notes = super().observe(state, proposal)
        generator = None
        if state.generator is not None:  # draw from a copy, so that the commit draws the same numbers
            generator = reference.generator_after(state.generator, proposal.generator_state)
        view, rows = make_view(self, state, proposal, generator), proposal.rows.tolist()
        names: dict[tuple[int, int], tuple[str, ...]] = {}
        for _, rule, rule_view in self.rule_views(view):
            for index, column in (run_select(rule, rule_view) & view.candidates).nonzero().tolist():
                names[index, column] = (*names.get((index, column), ()), rule.name)
        positions = proposal.positions.tolist()
        labels = self.rule_labels(names, view).items()
        rules = {(rows[index], positions[index][column]): label for (index, column), label in labels}
        notes.rules = {**rules, **(notes.rules or {})} or None
        return notes

    def rule_labels(self, names: Mapping[tuple[int, int], tuple[str, ...]], view: View) -> dict[tuple[int, int], str]:
        """Label selected positions (row of the view, column) for a trace. names: rules that select each position."""
        return {position: " and ".join(rules) for position, rules in names.items()}

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        return _prefix_names(
            {index: rule.remember(rule_view, selected) for index, rule, rule_view in self.rule_views(view)}
        )

    def rule_views(self, view: View) -> list[tuple[int, MaskedSampler, View]]:
        """List (index among the members, rule, view of this rule) for every rule."""
        entries = []
        is_fixed = (view.scores == -torch.inf) | (view.scores == LAST)  # never committed, or only after all others
        for index, rule in enumerate(self.rules, len(self.stages)):
            rule_view = dataclasses.replace(
                view,
                scores=torch.where(is_fixed, view.scores, view.quantities[rule.needs.score]),
                quota=view.quota[index - len(self.stages)],
                quantities={**view.quantities, **_member_entries(view.quantities, index)},
                memory=_member_entries(view.memory, index),
                updates=_member_entries(view.updates, index),
            )
            entries.append((index, rule, rule_view))
        return entries


@dataclass(frozen=True)
class Union(Combination):
    """Commit positions that at least one of the rules would commit. A sampler name such as "credit+localleap" makes a
    union. A step may commit nothing only if every rule's schedule allows that, as Dream's time grid does."""

    rules: tuple[Any, ...] = ("credit", "localleap")

    name = "union"
    paper = ""
    summary = "the tokens that at least one of several samplers would commit"
    sweep = ({"rules": ("threshold", "persistence")}, {"rules": ("credit", "hierarchy")})

    def select(self, view: View) -> Tensor:
        selections = [run_select(rule, rule_view) for _, rule, rule_view in self.rule_views(view)]
        return functools.reduce(operator.or_, selections)


@dataclass(frozen=True)
class Intersection(Combination):
    """Commit positions that all rules would commit; if there is none, the first rule's best position. Rules whose steps
    may commit nothing are not supported: an intersection would break their schedule."""

    rules: tuple[Any, ...] = ("threshold", "entropy_threshold")

    name = "intersection"
    paper = ""
    summary = "the tokens that all of several samplers would commit, or else the first sampler's best token"
    sweep = ({"rules": ("threshold", "margin")}, {"rules": ("localleap", "entropy_threshold")})

    def __post_init__(self) -> None:
        super().__post_init__()
        if waiting := [rule.name for rule in self.rules if rule.needs.may_wait]:
            raise ValueError(f"rules: sampler {waiting[0]!r} may commit nothing in a step; use it in a union")

    def select(self, view: View) -> Tensor:
        selections = [run_select(rule, rule_view) for _, rule, rule_view in self.rule_views(view)]
        agreed = functools.reduce(operator.and_, selections) & view.candidates
        return torch.where(agreed.any(-1, keepdim=True), agreed, view.best())

    def rule_labels(self, names: Mapping[tuple[int, int], tuple[str, ...]], view: View) -> dict[tuple[int, int], str]:
        best = [tuple(position) for position in view.best().nonzero().tolist()]
        labels = {position: "best one, where rules disagree" for position in best}
        return labels | {position: "all rules" for position, rules in names.items() if len(rules) == len(self.rules)}


def _prefix_names(parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the entries of several members. A name gets the prefix of its member's index."""
    return {f"{index}.{name}": value for index, part in parts.items() for name, value in part.items()}


def _member_entries(entries: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Select the entries of one member, and remove its index from the names."""
    prefix = f"{index}."
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
