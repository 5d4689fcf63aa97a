"""Recorded runs of public code with several open blocks, replayed in float64: d3LLM, D2F and LoPA.

Every forward evaluates and commits the same positions as the reference's. `rng="reference"` includes the mask token in
the softmax, as the references do. The references differ from paradec in these points, which the tests imitate:
- d3LLM for LLaDA also commits the most confident position of all open blocks (`MostConfidentOfAll`). A plain loop gives
  the reference's calls with this quirk, and paradec's calls without it.
- d3LLM's early stop fills the row after a decided end token (`fill_after_end`). paradec opens no block there.
- d3LLM's cached calls for Dream read the first position's logits from the wrong position (`read_own_column`). Cases in
  which it attends to some positions twice ("duplicated_keys") are refused.
- D2F's attention is block-causal, with blocks that start at the prompt's end (`block_align="prompt"`), so that
  cache="block" is exact. For Dream it reuses the logits of the last stored position; paradec evaluates it again.
- LoPA evaluates the branches of a round one by one, paradec in one call. With full attention, LoPA's calls contain only
  the opened blocks, with stored keys and values (`OpenedBlocks`). Its "forcebase" evaluates branches but never selects
  them (`ForcedBase`). Without branches, LoPA evaluates the row twice.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded import Refused
from torch import Tensor, nn
from traces import (
    Forward,
    assert_confidences,
    load_trace,
    mark_others_full,
    model_of,
    peek_trace,
    recorded_forwards,
    replay_case,
    scores_of,
    select_cases,
    some_or_all,
    trace_names,
)
from transformers import DynamicCache

import paradec
from paradec import PipelinedBlocks, samplers
from paradec.caches.base import Part
from paradec.caches.delayed import DelayedCache
from paradec.caches.parts import range_parts
from paradec.core.protocol import Commit
from paradec.core.query import WindowQuery
from paradec.models.adapter import Model
from paradec.models.cache_argument import cache_keyword
from paradec.samplers.masked.ahead.lopa import BranchProposal, LoPA
from paradec.samplers.masked.blocks import close_blocks
from paradec.samplers.masked.loop import Needs, View
from paradec.samplers.masked.rules.entropy_threshold import EntropyThreshold
from paradec.samplers.masked.rules.threshold import Threshold
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import MaskedProposal

pytestmark = pytest.mark.filterwarnings("ignore:cache=")


def blocks_of(trace: dict, forced: str = "first") -> Any:
    settings = trace["settings"]
    if "block_add_threshold" not in settings:
        return paradec.FixedBlocks(settings["block_size"])
    add, full = settings["block_add_threshold"], settings["decoded_token_threshold"]
    return PipelinedBlocks(settings["block_size"], add=add, full=full, forced=forced)


def d2f_model(trace: dict, inner: Model) -> Model:
    """Wrap the module of `inner` with D2F's attention."""
    blocks = {"topology": "block_causal", "block_length": trace["settings"]["block_size"], "block_align": "prompt"}
    return paradec.wrap(inner.module, **facts_of(trace, inner), **blocks)


def facts_of(trace: dict, inner: Model) -> dict[str, Any]:
    ids = {"mask_token_id": trace["mask_id"], "eos_token_id": trace["eos_id"]}
    return ids | {"prediction": inner.facts.prediction}


@dataclass(frozen=True)
class D2FRule(Threshold):
    """D2F's rule: commit positions above the threshold, and the best by `strategy` if one is forced."""

    strategy: str = "confidence"

    name = "d2f_rule"
    needs = Needs(reads=("margin",))

    def select(self, view: View) -> Tensor:
        return (view.scores >= self.threshold) | view.best(view.quantities[self.strategy])


D3LLM = trace_names("d3llm")
D2F = trace_names("d2f")


def has_plain_loop(settings: dict) -> bool:
    """Whether `pipelined_loop` supports the settings: several open blocks, no cache, no early stop."""
    return "block_add_threshold" in settings and not (settings.get("early_stop") or "cache_delay_iter" in settings)


WITH_PLAIN_LOOP = [name for name in D3LLM if has_plain_loop(peek_trace(name)["settings"])]


@dataclass(frozen=True)
class MostConfidentOfAll(EntropyThreshold):
    """Also commit the position with the lowest entropy of all open blocks."""

    name = "most_confident_of_all"

    def select(self, view: View) -> Tensor:
        return super().select(view).scatter(1, view.scores.argmax(1, keepdim=True), True)


def read_own_column(query: WindowQuery) -> WindowQuery:
    """Change a call of a shifted model so that its first position uses its own logits instead of those left of it."""
    return query.with_fields(window=query.window.with_fields(available=None))


class WithoutLeft(DelayedCache):
    """The delayed cache without evaluation of the position left of the window."""

    def partial(self, state: Any, index: Any, picks: Any, limit: int) -> list[Part]:
        start, stop = self.range(state, state.window.rows[index])
        return range_parts(state, index, start, stop, "window", limit)


def fill_after_end(state: MaskedState) -> None:
    """Fill the single row with end tokens after its first decided end token."""
    (end,), canvas = state.facts.eos_token_ids, state.canvas[0]
    first = int(state.prompt_length[0])
    ends = (canvas[first:] == end).nonzero()
    if not len(ends) or state.done:
        return
    after = torch.arange(len(canvas)) > first + int(ends[0])
    canvas[after] = end
    remaining = int((canvas == state.mask_id).sum())
    state.decided[0] += int(state.total[0]) - int(state.decided[0]) - remaining
    state.remaining[0] = remaining
    if not remaining:
        state.block_end[0] = state.length[0]
        close_blocks(state, state.window.rows, None)


def d3llm_sampler(trace: dict, llada: bool) -> EntropyThreshold:
    """The rule with the quirks of d3LLM's code for LLaDA or for Dream."""
    stops = trace["settings"].get("early_stop")

    class Quirky(MostConfidentOfAll if llada else EntropyThreshold):  # type: ignore[misc]
        def query(self, state: MaskedState) -> list[WindowQuery]:
            queries = super().query(state)
            return queries if llada or state.store is None else [read_own_column(query) for query in queries]

        def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
            result = super().commit(state, proposal)
            if stops:
                fill_after_end(state)
            return result

    return Quirky(threshold=trace["settings"]["threshold"])


def cache_of(trace: dict, llada: bool) -> Any:
    settings = trace["settings"]
    if "cache_delay_iter" not in settings:
        return "none"
    kind = DelayedCache if llada else WithoutLeft
    return kind(settings["cache_delay_iter"], settings["refresh_interval"])


def calls_of(out: Any) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return for each of paradec's calls the number of evaluated positions and the (position, token) commits."""
    return [(step.forwarded[0], sorted(entry[1:3] for entry in step.commits)) for step in out.trace.steps]


def their_calls(case: dict) -> list[tuple[int, list[tuple[int, int]]]]:
    return [(step["input_shape"][1], sorted(tuple(entry[1:]) for entry in step["commit"])) for step in case["steps"]]


def decode(model: Model, case: dict, **request: Any) -> tuple[Any, list[Forward]]:
    """Decode a case; return the output, and each call's commits with the scores of all candidates."""
    (prompt,) = case["prompt_ids"]
    new = len(case["final_ids"][0]) - len(prompt)
    fields: dict[str, Any] = {"rng": "reference", "trace": True, "eos_early_stop": False} | request
    commits: list[Commit] = []
    fields |= {"max_new_tokens": new, "callback": lambda state, commit: commits.append(commit)}
    out = paradec.generate(model, [prompt], **fields)
    entries = [frozenset((at, token) for _, at, token, _ in commit.to_list()) for commit in commits]
    return out, [Forward(frozenset(), e, scores_of(c)[0]) for e, c in zip(entries, commits, strict=True)]


@pytest.mark.parametrize("numbers", some_or_all(2))
@pytest.mark.parametrize("name", mark_others_full(D3LLM))
def test_d3llm(name: str, numbers: tuple[int, ...] | None) -> None:
    trace, model = load_trace(name), model_of(load_trace(name))
    llada = model.facts.prediction == "same"
    sampler = d3llm_sampler(trace, llada)
    for case_name, case in select_cases(trace, numbers):
        pairs: list[Any] = []
        with replay_case(trace, case_name, case, pairs):
            if case["extra"].get("duplicated_keys") and not llada:
                raise Refused("the reference attends to some positions twice (extra.duplicated_keys)")
            out, forwards = decode(model, case, sampler=sampler, blocks=blocks_of(trace), cache=cache_of(trace, llada))
            pairs += zip(forwards, recorded_forwards(case), strict=False)
            ours, theirs = calls_of(out), their_calls(case)
            if trace["settings"].get("early_stop"):
                final, end_id = case["final_ids"][0], trace["eos_id"]
                answer_start = len(case["prompt_ids"][0])
                end = final.index(end_id, answer_start) if end_id in final[answer_start:] else len(final)
                ours, theirs = (
                    [(size, [entry for entry in commits if entry[0] <= end]) for size, commits in calls]
                    for calls in (ours, theirs)
                )
            assert ours == theirs
            assert out.sequences[0].tolist() == case["final_ids"][0]


@pytest.mark.parametrize("numbers", some_or_all(2))
@pytest.mark.parametrize("name", mark_others_full(D2F))
def test_d2f(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, inner = trace["settings"], model_of(trace)
    strategy = {"margin_confidence": "margin"}.get(settings.get("sampling_strategy"), "confidence")
    model = d2f_model(trace, inner)
    for case_name, case in select_cases(trace, numbers):
        pairs: list[Any] = []
        with replay_case(trace, case_name, case, pairs):
            request = {"cache": "block", "eos_early_stop": not settings.get("ignore_eos", False)}
            request["sampler"] = D2FRule(settings["skip_threshold"], strategy=strategy)
            out, forwards = decode(model, case, blocks=blocks_of(trace, forced="active"), **request)
            pairs += zip(forwards, recorded_forwards(case), strict=False)
            returned_length = case["extra"]["returned_length"]
            theirs = [[entry for entry in commits if entry[0] < returned_length] for _, commits in their_calls(case)]
            assert [commits for _, commits in calls_of(out)] == theirs
            sizes = [step["input_shape"][1] for step in case["steps"]]
            if model.facts.shift:  # paradec also evaluates the last stored position
                sizes = [size + (s["cached"] > 0 and not s["store"]) for size, s in zip(sizes, case["steps"])]
            assert [size for size, _ in calls_of(out)] == sizes
            assert out.sequences[0].tolist() == case["final_ids"][0]
            assert_confidences(forwards, recorded_forwards(case))


def pipelined_loop(
    model: Model, case: dict, settings: dict, most_confident_of_all: bool
) -> list[list[tuple[int, int]]]:
    """Decode one row like d3LLM without a cache; return the (position, token) pairs that each call commits."""
    (prompt,), mask = case["prompt_ids"], model.facts.mask_id
    size, new = settings["block_size"], settings["gen_length"]
    ids = [*prompt, *[mask] * new]
    blocks = [range(at, at + size) for at in range(len(prompt), len(ids), size)]
    num_open, calls = 1, []

    def decided_share(block: range) -> float:
        return sum(ids[i] != mask for i in block) / size

    while mask in ids:
        full = settings["decoded_token_threshold"]
        is_active = [b == 0 or decided_share(blocks[b - 1]) >= full for b in range(num_open)]
        last_share = decided_share(blocks[num_open - 1])
        if num_open < len(blocks) and last_share >= settings["block_add_threshold"] and calls:
            is_active.append(last_share >= full)
            num_open += 1
        with torch.no_grad():
            logits = model.module(input_ids=torch.tensor([ids]), attention_mask=EVERYTHING, use_cache=False).logits[0]
        if model.facts.shift:
            logits = torch.cat((logits[:1], logits[:-1]))
        p = logits.softmax(-1)
        entropy = (-p * (p + 1e-12).log()).sum(-1).tolist()
        logits[:, mask] = -torch.inf
        masks = [i for block in blocks[:num_open] for i in block if ids[i] == mask]
        chosen = {i for i in masks if entropy[i] <= settings["threshold"]}
        if most_confident_of_all:
            chosen.add(min(masks, key=lambda i: entropy[i]))
        first = next(b for b in range(num_open) if is_active[b] and decided_share(blocks[b]) < 1)
        first_masks = [i for i in blocks[first] if ids[i] == mask]
        if not chosen & set(first_masks):
            chosen.add(min(first_masks, key=lambda i: entropy[i]))
        calls.append([(i, int(logits[i].argmax())) for i in sorted(chosen)])
        for i, token in calls[-1]:
            ids[i] = token
    return calls


EVERYTHING = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    "names",
    [WITH_PLAIN_LOOP[1:2] or WITH_PLAIN_LOOP, pytest.param(WITH_PLAIN_LOOP, marks=pytest.mark.full)],
    ids=["one", "all"],
)
def test_paradec_and_d3llm_differ_only_by_one_quirk(names: list[str]) -> None:
    """The plain loop equals the reference with the quirk of its code for LLaDA, and paradec without the quirk."""
    num_different = 0
    for name in names:
        trace = load_trace(name)
        settings, model = trace["settings"], model_of(trace)
        llada = model.facts.prediction == "same"
        for _, case in select_cases(trace, None):
            if not case.get("fp64_same", True):
                continue
            theirs = [commits for _, commits in their_calls(case)]
            assert pipelined_loop(model, case, settings, most_confident_of_all=llada) == theirs
            without_quirk = pipelined_loop(model, case, settings, most_confident_of_all=False)
            rule = samplers.create("entropy_threshold", threshold=settings["threshold"])
            out, _ = decode(model, case, sampler=rule, blocks=blocks_of(trace))
            assert [commits for _, commits in calls_of(out)] == without_quirk
            num_different += without_quirk != theirs
    assert num_different


NAMES = trace_names("lopa")


@dataclass
class Round:
    """A round of the reference: evaluated positions and selected branch."""

    cached: int  # number of leading positions with keys and values from earlier rounds
    end: int  # end of the opened blocks
    stored: int  # number of positions after the cached positions whose keys and values the selected branch stores
    selected: int  # selected branch: 0 is the row itself, j the branch with the j-th most confident token


def branches_of(steps: list[dict]) -> list[dict]:
    """Return one forward per branch of a round. The last is the row itself, which the reference may evaluate twice."""
    assert steps[-1]["base"]
    is_repeated = len(steps) > 1 and steps[-2]["base"]
    return steps[:-2] + steps[-1:] if is_repeated else steps


def rounds_of(case: dict, force_base: bool) -> list[Round]:
    rounds = []
    for _, group in itertools.groupby(case["steps"], key=lambda step: step["round"]):
        steps = branches_of(list(group))
        assert len({(step["cached"], *step["fed"][0]) for step in steps}) == 1
        best = max(range(len(steps)), key=lambda at: (steps[at]["score"], -at))
        selected = 0 if force_base else (best + 1) % len(steps)
        ((begin, end),) = steps[0]["fed"]
        assert begin == steps[0]["cached"]
        rounds.append(Round(begin, end, steps[0]["store"], selected))
    return rounds


class OpenedBlocks(nn.Module):
    """A bidirectional model that evaluates only the opened blocks.

    It stores keys and values of cached positions, and the logits of the last cached position."""

    def __init__(self, inner: nn.Module, rounds: list[Round]):
        super().__init__()
        self.inner, self.rounds, self.num_calls = inner, rounds, 0
        self.config = SimpleNamespace(vocab_size=inner.config.vocab_size)
        self.stored_layers: list[tuple[Tensor, Tensor]] = []
        self.last_logits: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        current, rows = self.rounds[self.num_calls], len(input_ids)
        self.num_calls += 1
        cache = DynamicCache()
        for layer, pair in enumerate(self.stored_layers):
            cache.update(*(part.expand(rows, -1, -1, -1) for part in pair), layer)
        evaluated_logits = self.inner(
            input_ids=input_ids[:, current.cached : current.end],
            position_ids=torch.arange(current.cached, current.end).expand(rows, -1),
            attention_mask=torch.ones(rows, 1, current.end - current.cached, current.end, dtype=torch.bool),
            use_cache=True,
            **cache_keyword(self.inner, cache),
        ).logits
        logits = evaluated_logits.new_zeros(*input_ids.shape, evaluated_logits.shape[-1])
        logits[:, current.cached : current.end] = evaluated_logits
        if self.last_logits is not None:
            logits[:, current.cached - 1] = self.last_logits
        if current.stored:
            end, branch = current.cached + current.stored, slice(current.selected, current.selected + 1)
            self.stored_layers = [
                (layer.keys[branch, :, :end], layer.values[branch, :, :end]) for layer in cache.layers
            ]
            self.last_logits = logits[current.selected, end - 1].clone()
        return logits


@dataclass(frozen=True)
class ForcedBase(LoPA):
    """LoPA that evaluates branches and never selects one."""

    name = "forced_base"

    def propose(self, *arguments: Any) -> BranchProposal:
        proposal = super().propose(*arguments)
        proposal.branch_scores[0] = torch.inf
        return proposal


@dataclass(frozen=True)
class WithMask(D2FRule):
    """D2F's rule, with the mask token in the softmax."""

    def weighs_mask(self, state: MaskedState) -> bool:
        return True


@pytest.mark.parametrize("numbers", some_or_all(2))
@pytest.mark.parametrize("name", mark_others_full(NAMES))
def test_lopa(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, inner = trace["settings"], model_of(trace)
    strategies = {"neg_entropy": "minus_entropy", "margin": "margin"}
    strategy = strategies.get(settings.get("sampling_strategy"), "confidence")
    rule = WithMask(settings["skip_threshold"], strategy=strategy)
    count = settings["branching_factor"]
    forced = settings.get("force_base", False)
    count = count if count > 1 else 0  # with 1 the reference evaluates no branch
    scores = {"alpha": settings["alpha"], "tail": settings["branch_topp"], "confidence": strategy}
    sampler = (ForcedBase if forced else LoPA)(rule, branches=count, **scores)
    for case_name, case in select_cases(trace, numbers):
        with replay_case(trace, case_name, case):
            (prompt,) = case["prompt_ids"]
            model = d2f_model(trace, inner)
            if settings["full_attention"]:
                module = OpenedBlocks(inner.module, rounds_of(case, forced))
                model = paradec.wrap(module, topology="bidirectional", **facts_of(trace, inner))
            request = {"blocks": blocks_of(trace, forced="active"), "max_new_tokens": settings["gen_length"]}
            request |= {"eos_early_stop": not settings.get("ignore_eos", False), "trace": True}
            out = paradec.generate(model, [prompt], sampler=sampler, **request)
            returned_length = case["extra"]["returned_length"]
            commits_by_round: dict[int, list[list[int]]] = {}
            evaluated = 0
            for number, group in itertools.groupby(case["steps"], key=lambda step: step["round"]):
                branches = branches_of(list(group))
                evaluated += len(branches)
                commits_by_round[number] = [entry[1:] for entry in branches[-1]["commit"] if entry[1] < returned_length]
            ours = [sorted([position, token] for _, position, token, _ in step.commits) for step in out.trace.steps]
            assert ours == [sorted(commits) for commits in commits_by_round.values()]
            assert out.sequences[0].tolist() == case["final_ids"][0]
            assert out.nfe == len(commits_by_round) and out.row_forwards == evaluated <= case["nfe"]
