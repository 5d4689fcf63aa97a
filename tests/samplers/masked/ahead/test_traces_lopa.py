"""Traces of LoPA's branches over D2F's rule, replayed in float64: every round commits what the reference's does.

The reference evaluates the branches of a round one after the other, here they are one call. What is put back:
- "causal": blocks that see earlier ones only, counted from the prompt's end (`block_align="prompt"`). Its cache is
  exact there.
- "full": no causal mask; calls see the opened blocks alone, over keys and values as they were when they were stored.
  There is nothing like that here, so a module does it that is told what the reference stored when (`OpenedBlocks`).
- "forcebase": the branches are evaluated, and never taken (`ForcedBase`; ours is branches=0).
- Where the last round left nothing to look ahead with, the reference evaluates the row itself twice.
- Where something must be committed, D2F takes the best by the sampling strategy, and the mask keeps its probability.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipelined_traces import D2FRule, blocks_of, d2f_model
from replay import load_trace, model_of, replay_case, some_cases, trace_names, which
from torch import Tensor, nn
from transformers import DynamicCache

import paradec
from paradec.models.cache_argument import cache_keyword
from paradec.samplers.masked.ahead.lopa import BranchProposal, LoPA
from paradec.samplers.masked.loop import MaskedState

NAMES = trace_names("lopa")


@dataclass
class Round:
    """What the reference evaluated in a round, and which of our branches it took from then on."""

    cached: int
    """Positions whose keys and values are those of earlier rounds."""
    end: int
    """Where the opened blocks end; nothing after them exists."""
    stored: int
    """Positions after the cached ones whose keys and values are kept, those of the branch that is taken."""
    taken: int
    """0 is the row itself, j the branch with the j-th most confident token."""


def branches_of(steps: list[dict]) -> list[dict]:
    """The forwards of a round: the row itself comes last, and is last among equals."""
    assert steps[-1]["base"]
    twice = len(steps) > 1 and steps[-2]["base"]
    return steps[:-2] + steps[-1:] if twice else steps


def rounds_of(case: dict, force_base: bool) -> list[Round]:
    found = []
    for _, group in itertools.groupby(case["steps"], key=lambda step: step["round"]):
        steps = branches_of(list(group))
        assert len({(step["cached"], *step["fed"][0]) for step in steps}) == 1
        best = max(range(len(steps)), key=lambda at: (steps[at]["score"], -at))
        taken = 0 if force_base else (best + 1) % len(steps)
        ((begin, end),) = steps[0]["fed"]
        assert begin == steps[0]["cached"]
        found.append(Round(begin, end, steps[0]["store"], taken))
    return found


class OpenedBlocks(nn.Module):
    """A model without a causal mask that sees the opened blocks alone, over keys and values as they were when they were
    stored; the logits of the last stored position are as of then, too."""

    def __init__(self, inner: nn.Module, rounds: list[Round]):
        super().__init__()
        self.inner, self.rounds, self.called = inner, rounds, 0
        self.config = SimpleNamespace(vocab_size=inner.config.vocab_size)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.last: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        now, rows = self.rounds[self.called], len(input_ids)
        self.called += 1
        cache = DynamicCache()
        for layer, pair in enumerate(self.kept):
            cache.update(*(part.expand(rows, -1, -1, -1) for part in pair), layer)
        fed = self.inner(
            input_ids=input_ids[:, now.cached : now.end],
            position_ids=torch.arange(now.cached, now.end).expand(rows, -1),
            attention_mask=torch.ones(rows, 1, now.end - now.cached, now.end, dtype=torch.bool),
            use_cache=True,
            **cache_keyword(self.inner, cache),
        ).logits
        logits = fed.new_zeros(*input_ids.shape, fed.shape[-1])
        logits[:, now.cached : now.end] = fed
        if self.last is not None:
            logits[:, now.cached - 1] = self.last
        if now.stored:
            end, own = now.cached + now.stored, slice(now.taken, now.taken + 1)
            self.kept = [(layer.keys[own, :, :end], layer.values[own, :, :end]) for layer in cache.layers]
            self.last = logits[now.taken, end - 1].clone()
        return logits


@dataclass(frozen=True)
class ForcedBase(LoPA):
    """Evaluates the branches, and never takes one."""

    name = "forced_base"

    def propose(self, *arguments: Any) -> BranchProposal:
        proposal = super().propose(*arguments)
        proposal.promise[0] = torch.inf
        return proposal


@dataclass(frozen=True)
class WithMask(D2FRule):
    """D2F's rule, the mask's own probability kept."""

    def weighs_mask(self, state: MaskedState) -> bool:
        return True


@pytest.mark.parametrize("numbers", which(2))
@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, inner = trace["settings"], model_of(trace)
    known = {"neg_entropy": "minus_entropy", "margin": "margin"}
    strategy = known.get(settings.get("sampling_strategy"), "confidence")
    rule = WithMask(settings["skip_threshold"], strategy=strategy)
    count = settings["branching_factor"]
    forced = settings.get("force_base", False)
    sampler = (ForcedBase if forced else LoPA)(
        rule,
        branches=count if count > 1 else 0,  # with 1 the reference looks at nothing
        alpha=settings["alpha"],
        tail=settings["branch_topp"],
        confidence=strategy,
    )
    for name, case in some_cases(trace, numbers):
        with replay_case(trace, name, case):
            (prompt,) = case["prompt_ids"]
            model = d2f_model(trace, inner)
            if settings["full_attention"]:
                model = paradec.wrap(
                    OpenedBlocks(inner.module, rounds_of(case, forced)),
                    mask_token_id=trace["mask_id"],
                    eos_token_id=trace["eos_id"],
                    prediction=inner.facts.prediction,
                    topology="bidirectional",
                )
            out = paradec.generate(
                model,
                [prompt],
                sampler=sampler,
                max_new_tokens=settings["gen_length"],
                blocks=blocks_of(trace, forced="active"),
                eos_early_stop=not settings.get("ignore_eos", False),
                trace=True,
            )
            opened = case["extra"]["returned_length"]
            rounds: dict[int, list[list[int]]] = {}
            evaluated = 0
            for number, group in itertools.groupby(case["steps"], key=lambda step: step["round"]):
                branches = branches_of(list(group))
                evaluated += len(branches)
                rounds[number] = [entry[1:] for entry in branches[-1]["commit"] if entry[1] < opened]
            ours = [sorted([position, token] for _, position, token, _ in step.commits) for step in out.trace.steps]
            assert ours == [sorted(commits) for commits in rounds.values()]
            assert out.sequences[0].tolist() == case["final_ids"][0]
            assert out.nfe == len(rounds) and out.row_forwards == evaluated <= case["nfe"]
