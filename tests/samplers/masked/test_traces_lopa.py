"""Traces of LoPA's branches over D2F's rule, replayed in float64: every round commits what the reference's does.

The reference evaluates the branches of a round one after the other, here they are one call. What is put back:
- "causal": blocks that see earlier ones only, counted from the prompt's end (`PromptBlocks`). Its cache is exact there.
- "full", one block of 32: no causal mask, and keys, values and last logits of the prompt are those of the first round
  (`KeptPrompt`). With several blocks its calls see the opened ones alone, over blocks as they were when they were
  stored: there is nothing like that here, and those files are left out, as is the option that always takes the base.
- Where something must be committed, D2F takes the best by the sampling strategy, and the mask keeps its probability.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay import load_trace, trace_names
from test_traces_pipelined import NUMBERS, D2FRule, PromptBlocks, blocks_of, model_of
from torch import Tensor, nn
from transformers import DynamicCache

import paradec
from paradec.samplers.masked.base import MaskedState
from paradec.samplers.masked.lopa import LoPA

NAMES = trace_names("lopa")


def test_all_traces_are_there() -> None:
    assert len(NAMES) == 22


class KeptPrompt(nn.Module):
    """A model whose first call is of a whole canvas, and whose later calls keep what that one made of the prompt."""

    def __init__(self, inner: nn.Module, prompt: int):
        super().__init__()
        self.inner, self.prompt = inner, prompt
        self.config = SimpleNamespace(vocab_size=inner.config.vocab_size)
        self.kept: Any = None

    def forward(self, input_ids: Tensor) -> Tensor:
        (rows, size), prompt, cache = input_ids.shape, self.prompt, DynamicCache()
        begin = 0 if self.kept is None else prompt
        if self.kept is not None:
            for layer, pair in enumerate(self.kept[0]):
                cache.update(*(part.expand(rows, -1, -1, -1) for part in pair), layer)
        logits = self.inner(
            input_ids=input_ids[:, begin:],
            position_ids=torch.arange(begin, size).expand(rows, -1),
            attention_mask=torch.ones(rows, 1, size - begin, size, dtype=torch.bool),
            past_key_values=cache,
            use_cache=True,
        ).logits
        if self.kept is None:
            pairs = [(layer.keys[:1, :, :prompt], layer.values[:1, :, :prompt]) for layer in cache.layers]
            self.kept = pairs, logits[:1, :prompt].clone()
            return logits
        return torch.cat((self.kept[1].expand(rows, -1, -1), logits), 1)


@dataclass(frozen=True)
class WithMask(D2FRule):
    """D2F's rule, the mask's own probability kept."""

    def _weighs_mask(self, state: MaskedState) -> bool:
        return True


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str, numbers: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    trace = load_trace(name)
    settings, inner = trace["settings"], model_of(request, trace)
    known = {"neg_entropy": "minus_entropy", "margin": "margin"}
    strategy = known.get(settings.get("sampling_strategy"), "confidence")
    rule = WithMask(settings["skip_threshold"], strategy=strategy)
    count = settings["branching_factor"]
    sampler = LoPA(
        rule,
        branches=count if count > 1 else 0,  # with 1 the reference looks at nothing
        alpha=settings["alpha"],
        tail=settings["branch_topp"],
        confidence=strategy,
    )
    for case in (trace["cases"][number] for number in numbers):
        assert case["fp64_same"]
        (prompt,) = case["prompt_ids"]
        module = KeptPrompt(inner.module, len(prompt))
        if not settings["full_attention"]:
            module = PromptBlocks(inner.module, len(prompt), settings["block_size"])
        model = paradec.wrap(
            module,
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
        rounds: dict[int, list[list[int]]] = defaultdict(list)
        branches: dict[int, int] = defaultdict(int)
        for step in case["steps"]:
            rounds[step["round"]] += [entry[1:] for entry in step["commit"] if entry[1] < opened]
            branches[step["round"]] += 1
        ours = [sorted([position, token] for _, position, token, _ in step.commits) for step in out.trace.steps]
        assert ours == [sorted(commits) for commits in rounds.values()]
        assert out.sequences[0].tolist() == case["final_ids"][0]
        assert out.nfe == len(rounds) and out.row_forwards == sum(branches.values()) == case["nfe"]
