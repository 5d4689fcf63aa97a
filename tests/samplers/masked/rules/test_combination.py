"""Unions and intersections of samplers: construction from text, steps compared with their parts, and errors."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from decoding import refuses, view_from_scores
from oracles.masked import decode_combination
from small_models import tiny
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core.protocol import Sampler
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import UNCUT, MaskedSampler, Needs, View
from paradec.samplers.masked.rules.combination import Intersection, Union
from paradec.samplers.masked.rules.learn2pd import Learn2PD

PROMPTS = [[38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18, 14, 10, 19, 10, 41], [37, 5, 0, 2, 3, 0, 5, 7, 41]]


def decode(model: Model, sampler: str | Sampler, **request: object) -> paradec.Output:
    request = {"max_new_tokens": 24, "block_length": 12, "eos_early_stop": False} | request
    return paradec.generate(model, PROMPTS, sampler=sampler, trace=True, **request)


pytestmark = pytest.mark.filterwarnings("ignore:delimiters=")


def has_same_steps(a: paradec.Output, b: paradec.Output) -> bool:
    steps = [[[(r, p, t) for r, p, t, _ in step.commits] for step in out.trace.steps] for out in (a, b)]
    return torch.equal(a.sequences, b.sequences) and steps[0] == steps[1]


RULE_TEXTS = (
    "threshold", "entropy_threshold", "margin", "klass(history=1, kl_threshold=0.5)", "persistence", "localleap",
    "learn2pd(filter_threshold=0.5)",
)  # fmt: skip
PAIRS = [*itertools.combinations(RULE_TEXTS[:-1], 2), RULE_TEXTS[-2:], RULE_TEXTS[:-3:-1]]


@pytest.mark.thinned
@pytest.mark.parametrize("combination", [Union, Intersection])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_each_step_is_the_union_or_intersection_of_the_rules_steps(
    combination: type, names: tuple[str, str], llada64: Model
) -> None:
    pair = tuple(samplers.create(name) for name in names)
    sampler, request = combination(rules=pair), {"max_new_tokens": 16, "block_length": 8, "steps": 8}
    state = sampler.start(llada64, PROMPTS, eos_early_stop=False, **request)
    parts = [rule.start(llada64, PROMPTS, eos_early_stop=False, **request) for rule in pair]
    with torch.inference_mode():
        while not state.done:
            commits = []
            for rule, part in zip(pair, parts, strict=True):
                part.canvas.copy_(state.canvas)
                for name in ("running", "block_start", "block_end", "remaining", "masks_at_open", "_steps"):
                    getattr(part, name)[:] = getattr(state, name)
                part.make_window()
                for name in part.memory.specs:  # the combination's memory of this rule
                    part.memory[name] = state.memory[f"{pair.index(rule)}.{name}"].clone()
                commit = rule.commit(part, rule.step(llada64, part))
                commits.append({entry[:3] for entry in commit.to_list()})
            before = state.running.copy()
            ours = {entry[:3] for entry in sampler.commit(state, sampler.step(llada64, state)).to_list()}
            if combination is Union:
                assert ours == commits[0] | commits[1]
                continue
            common = commits[0] & commits[1]
            rows_without = set(before.nonzero()[0].tolist()) - {row for row, *_ in common}
            # a row whose intersection is empty commits one position
            assert common <= ours and {row for row, *_ in ours - common} == rows_without
            assert len(ours - common) == len(rows_without)


@pytest.mark.parametrize("combination", [Union, Intersection])
def test_rows_are_cut_at_the_earliest_end_of_the_learn2pd_rules(combination: type) -> None:
    rules = [
        Learn2PD(),
        Learn2PD(eot="greedy", eot_confidence=0.5),
        Learn2PD(eot_confidence=0.75),
        Learn2PD(eot="none"),
    ]
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(200, 6, dtype=torch.float64, generator=generator)
    is_end, selected = torch.rand(2, 200, 6, generator=generator) < 0.2
    fields = {"quantities": {"confidence": confidence}, "quota": (None,) * 4, "memory": {}, "updates": {}}
    view = replace(view_from_scores(confidence), **fields)
    kinds = set()
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        for rule in range(4):
            view.quantities[f"{rule}.is_end"] = is_end
        trimmed = combination(rules=[rules[i] for i in order]).trim(view, selected).tolist()
        for row in range(200):
            ends = [i for i in range(6) if is_end[row, i]]
            least = {0: 0.0, 1: 0.5, 2: 0.75}
            cuts = []
            for rule in (0, 1, 2):
                counting = [i for i in ends if confidence[row, i] >= least[rule]]
                final = [i for i in counting if selected[row, i]]
                if final:
                    cuts.append(final[0])
                elif rule == 1 and counting:
                    cuts.append(max(counting, key=lambda i: float(confidence[row, i])))
            assert trimmed[row] == (7 + min(cuts) + 1 if cuts else UNCUT)  # the view begins at position 7
            kinds.add(len(set(cuts)))
    assert kinds == {0, 1, 2}


# (combination, rules, steps)
COMBINATIONS = [
    (Union, [("threshold", {"threshold": 0.6}), ("margin", {})], 6),
    (Union, [("margin", {}), ("threshold", {"threshold": 0.6})], 6),
    (Union, [("entropy", {}), ("maskgit_plus", {})], 12),  # in the first step both commit nothing
    (Union, [("maskgit_plus", {}), ("entropy", {})], 9),
    (Intersection, [("threshold", {"threshold": 0.3}), ("margin", {})], 4),
    (Intersection, [("margin", {}), ("entropy_threshold", {"threshold": 0.8})], 4),
    (Intersection, [("entropy_threshold", {"threshold": 1.5}), ("margin", {}), ("threshold", {"threshold": 0.4})], 3),
]


@pytest.mark.parametrize(("combination", "rules", "steps"), COMBINATIONS)
def test_combinations_equal_the_oracle(combination: type, rules: list[tuple[str, dict]], steps: int) -> None:
    model, num_idle = tiny(1), 0
    sampler = combination(rules=[samplers.create(name, **settings) for name, settings in rules])
    for prompt in ([1, 2, 3], [20, 30]):
        request = {"max_new_tokens": 12, "block_length": 12, "steps": steps, "eos_early_stop": False}
        out = paradec.generate(model, prompt, sampler=sampler, trace=True, **request)
        ours = [{(i, token, round(score, 9)) for _, i, token, score in step.commits} for step in out.trace.steps]
        assert ours == decode_combination(model, prompt, combination is Union, rules, 12, steps)
        num_idle += set() in ours
    assert bool(num_idle) == sampler.needs.may_wait


@dataclass(frozen=True)
class Idle(MaskedSampler):
    """A sampler that never commits a token."""

    name = "idle"
    needs = Needs(score_from="sampled")
    uses_steps = True

    def quota(self, state: Any, rows: Any) -> Any:
        return 0 * rows

    def select(self, view: View) -> Tensor:
        return torch.zeros_like(view.candidates)


@dataclass(frozen=True)
class DeclaredIdle(Idle):
    """A sampler that never commits a token and declares that it may wait."""

    name = "declared_idle"
    needs = replace(Idle.needs, may_wait=True)


def step_of_error(sampler: Any, steps: int) -> int | None:
    """Return the step at which decoding raises the error "committed nothing", or None if decoding ends without it."""
    model = tiny(1)
    state = sampler.start(model, [[1, 2, 3]], max_new_tokens=12, block_length=12, steps=steps, eos_early_stop=False)
    with torch.inference_mode():
        while not state.done:
            proposal = sampler.step(model, state)
            try:
                sampler.commit(state, proposal)
            except RuntimeError as error:
                assert f"sampler '{sampler.name}' committed nothing for row 0" in str(error)
                return int(state.row_step[0])
    return None


def test_samplers_that_may_wait_may_commit_nothing_until_the_last_step() -> None:
    assert samplers.create("maskgit_plus").needs.may_wait and not samplers.create("threshold").needs.may_wait
    assert step_of_error(samplers.create("maskgit_plus"), 12) is None
    assert step_of_error(Union(rules=(DeclaredIdle(), "maskgit_plus")), 12) is None
    assert step_of_error(Idle(), 12) == 0
    for rules in ((Idle(), "maskgit_plus"), ("maskgit_plus", Idle())):
        assert step_of_error(Union(rules=rules), 12) == 0  # maskgit_plus commits nothing in the first step
    for steps in (1, 5):
        assert step_of_error(DeclaredIdle(), steps) == steps - 1
        assert step_of_error(Union(rules=(DeclaredIdle(), DeclaredIdle())), steps) == steps - 1


def test_stages_run_in_order(llada64: Model) -> None:
    """After credit, KLASS compares distributions that include credit; before credit, the model's distributions."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, llada64.facts.vocab_size, dtype=torch.float64, generator=generator)
    previous = {}
    for text in ("credit+klass", "klass+credit", "klass"):
        sampler = samplers.create(text)
        state = sampler.start(llada64, PROMPTS[0], max_new_tokens=4, block_length=4)
        query = sampler.query(state)
        proposal = sampler.propose(state, [logits.clone()], query)
        (previous[text],) = (value for name, value in proposal.updates.items() if name.endswith("previous"))
    assert torch.equal(previous["klass+credit"], previous["klass"])
    assert not torch.equal(previous["credit+klass"], previous["klass"])


def test_combinations_can_be_created_from_text() -> None:
    create = samplers.create
    assert create("credit+localleap") == create("union") == Union(rules=("credit", "localleap"))
    assert create("threshold + klass + ccd") == Union(rules=("threshold", "klass", "ccd"))
    assert create("intersection(rules=['threshold', 'klass'])") == Intersection(rules=("threshold", "klass"))
    assert create("union(rules=('factor',), stages=['credit'])") == Union(rules=("factor",), stages=("credit",))
    assert create("localleap(radius=2)+threshold") == Union(rules=(create("localleap", radius=2), "threshold"))


def test_the_name_lantern_plus_plus_is_not_read_as_a_combination() -> None:
    create = samplers.create
    assert create("lantern++") == create("lantern++()") == create("lantern++", k=10)
    assert create("lantern++(k=5)") == create(" lantern++ ( k = 5 ) ") == create("lantern++", k=5)
    assert create("lantern++", k=5) != create("lantern++")
    refuses(lambda: create("lantern++(k=5)+credit"), "LanternPlusPlus")  # a causal sampler cannot be combined
    wrong = ("+credit", "credit+", "credit + + klass", "threshold+credit++klass", "credit(threshold=0.9)+")
    for text in (*wrong, "lantern+(k=5)", "lantern++(k=5"):
        with pytest.raises(ValueError, match="cannot be read"):
            create(text)


@pytest.mark.parametrize("text", ["credit+localleap", "intersection(rules=['threshold', 'klass'])"])
def test_combinations_accept_block_policies_by_name(text: str, llada64: Model) -> None:
    request = {"block_length": None, "eos_early_stop": True}
    adaptive = paradec.AdaptiveBlocks(length=8)
    outs = {
        name: decode(llada64, text, blocks=name, **request | {"block_length": length})
        for name, length in (("fixed", 8), ("whole", None), ("adaptive", 8))
    }
    assert has_same_steps(outs["fixed"], decode(llada64, text, **request | {"block_length": 8}))
    assert has_same_steps(outs["whole"], decode(llada64, text, **request | {"block_length": 24}))
    assert has_same_steps(outs["adaptive"], decode(llada64, text, blocks=adaptive, **request))
    assert not has_same_steps(outs["fixed"], outs["whole"])


def test_a_block_policy_of_a_rule_is_kept(llada64: Model) -> None:
    sampler = samplers.create("credit+adablock(init_block_length=16)")
    assert sampler.blocks(None) == samplers.create("adablock", init_block_length=16).blocks()
    with pytest.raises(ValueError, match="cut the text into different blocks; give blocks="):
        samplers.create("adablock+adablock(init_block_length=16)").start(llada64, PROMPTS)


UNREADABLE = [
    *("threshold(2)+klass", "threshold+", "threshold+(klass", "threshold(threshold=[x for x in 'ab'])+klass"),
    *("threshold+(klass+ccd)", "threshold&klass+ccd", "credit>>localleap+ccd", "(lambda: 1)()+threshold"),
    "(" * 400 + "threshold" + ")" * 400,
]
BAD = [
    ("threshold+entropy", "rules 'threshold' and 'entropy' cannot be joined"),
    ("threshold+freedave", "sampler 'freedave' cannot be joined with others: it drafts steps ahead"),
    ("random(order='block')+threshold", "sampler 'random' cannot be joined with others: its order is drawn once"),
    ("intersection(rules=['entropy', 'entropy'])", "sampler 'entropy' may commit nothing in a step"),
    ("union(rules=['factor'], stages=['threshold'])", "stages: sampler 'threshold' has no logits stage"),
    ("sjd+threshold", "rules: .*SJD.* must be a masked sampler"),
    ("treshold+klass", "unknown sampler: 'treshold' .did you mean 'threshold'"),
    ("threshold(thresh=1)+klass", "unknown setting of sampler 'threshold': 'thresh'"),
    ("threshold&klass", "unknown sampler: 'threshold&klass'"),
    *((text, "cannot be read; settings go in parentheses") for text in UNREADABLE),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_samplers_that_cannot_be_combined_are_refused_by_name(text: str, message: str) -> None:
    refuses(lambda: samplers.create(text), message)


def test_wrong_rules_are_refused() -> None:
    refuses(lambda: Union(rules=()), r"rules=\(\) must be a sequence of samplers")
    refuses(lambda: Union(rules="threshold"), "rules='threshold' must be a sequence of samplers")
    refuses(lambda: samplers.create("threshold+klass", threshold=0.5), "threshold=...: give it to one of")
