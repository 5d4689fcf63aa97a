"""Traces of every family: recorded steps, files, and runs that tracing does not change."""

import copy
import dataclasses
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images import tiny_diffusion, tiny_mar, tiny_masked_image
from small_models import PROMPTS, similar_model, tiny, wrap_causal
from traces import scripts_trace

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.facts import ModelFacts
from paradec.core.protocol import decode
from paradec.core.trace import Trace, TraceStep
from paradec.models.adapter import Model
from paradec.samplers.causal.trees import Tree

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12]]
BOTH = "intersection(rules=['threshold', 'klass'])"
MASKED = sorted(name for name in samplers.names() if samplers.get(name).family == "masked")


def is_supported(sampler: str, cache: str) -> bool:
    facts = ModelFacts(vocab_size=2)
    return verdict(samplers.get(sampler), caches.create(cache), facts).status != REFUSED


PAIRS = [(name, cache) for name in MASKED for cache in ("none", "dual") if is_supported(name, cache)]
PAIRS += [("threshold", "dkv_decode"), ("random", "dkv_greedy"), ("recap", "recap"), ("credit", "vicinity")]
FULL = [(name, ("dual", "none")[number % 2]) for number, name in enumerate(MASKED) if is_supported(name, "dual")]
pytestmark = pytest.mark.filterwarnings("ignore:cache=")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2)


def positions_in(row: list[tuple[int, int]]) -> list[int]:
    return [position for start, stop in row for position in range(start, stop)]


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "cache"),
    [  # a sampler that works with both caches runs with one by default and with the other under -m full
        pytest.param(*pair, marks=[pytest.mark.full] if pair in FULL else []) for pair in PAIRS
    ],
)
def test_recorded_steps_add_up_to_the_output(name: str, cache: str, llada64: Model) -> None:
    sampler = samplers.create(name)
    request = {"sampler": sampler, "max_new_tokens": 8, "block_length": 4, "seed": 1, "cache": cache}
    out = paradec.generate(llada64, ROWS, trace=True, **request)
    trace = out.trace
    assert trace.family == "masked" and trace.cache == cache and trace.row_nfe == out.row_nfe
    assert [sum(counts) for counts in zip(*(step.nfe for step in trace.steps), strict=True)] == out.row_nfe
    last = trace.replay()
    for row, prompt in enumerate(ROWS):
        assert trace.to_fill(row) == [(len(prompt), len(prompt) + 8)]
        answer = last[row][len(prompt) : trace.ends[row]]
        assert out.sequences[row].tolist()[-8:][: len(answer)] == answer
    for step in trace.steps:
        for row in range(len(ROWS)):
            evaluated = positions_in(step.evaluated[row])
            assert evaluated == sorted(set(evaluated))
            # mask probes and drafts repeat positions of the row
            if not (sampler.needs.mask_probes or sampler.needs.multi_step):
                assert len(evaluated) == step.forwarded[row]
            committed = [commit[1] for commit in step.commits if commit[0] == row]
            assert set(committed) <= set(evaluated)
            assert (step.blocks[row] is None) == (step.forwarded[row] == 0)
            if committed:
                assert step.blocks[row][0] <= min(committed) and max(committed) < step.blocks[row][1]
        assert step.rules is None or len(step.rules) == len(step.commits)
        assert step.seconds > 0


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "rng"),
    [
        *((name, "counter") for name in ("credit+localleap", BOTH, "freedave", "wino")),
        *((name, "reference") for name in ("random+low_confidence", BOTH, "saber")),
    ],
)
def test_tracing_does_not_change_the_output(name: str, rng: str, llada64: Model) -> None:
    request = {"sampler": name, "max_new_tokens": 8, "block_length": 4, "temperature": 0.7, "rng": rng, "seed": 3}
    plain, traced = (paradec.generate(llada64, [[1, 2], [3, 4]], trace=trace, **request) for trace in (False, True))
    assert torch.equal(plain.sequences, traced.sequences) and plain.row_nfe == traced.row_nfe
    assert plain.recorded_trace is None and len(traced.trace.steps) >= traced.nfe
    assert all(traced.trace.rules)  # every token of a combination has a rule


def test_combinations_record_the_rule_of_each_token(llada64: Model) -> None:
    low, high = (samplers.create("threshold", threshold=t) for t in (0.2, 0.6))
    union = samplers.create("union", rules=(high, samplers.create("low_confidence")))
    out = paradec.generate(llada64, ROWS, sampler=union, max_new_tokens=8, steps=4, eos_early_stop=False, trace=True)
    recorded_rules = set()
    for step in out.trace.steps:
        rules = [out.trace.rules[rule] for rule in step.rules]
        for row in range(len(ROWS)):
            pairs = [(commit[3], rule) for commit, rule in zip(step.commits, rules, strict=True) if commit[0] == row]
            best = max((score for score, _ in pairs), default=0)
            for score, rule in pairs:
                recorded_rules.add(rule)
                assert ("threshold" in rule) == (score >= 0.6 or score == best)
            # the schedule commits two tokens in every step
            assert sum("low_confidence" in rule for _, rule in pairs) == (2 if pairs else 0)
    assert recorded_rules == {"threshold and low_confidence", "low_confidence", "threshold"}
    intersection = samplers.create("intersection", rules=(low, high))
    out = paradec.generate(llada64, ROWS, sampler=intersection, max_new_tokens=8, eos_early_stop=False, trace=True)
    for step in out.trace.steps:
        for (*_, score), rule in zip(step.commits, step.rules, strict=True):
            assert out.trace.rules[rule] == "all rules" or score < 0.6


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["sjd", "speculative", "tree"])
def test_rejected_drafts_were_drafted_and_not_committed(name: str) -> None:
    settings: dict[str, Any] = {"window": 5} if name == "sjd" else {"drafter": similar_model(), "window": 5}
    if name == "tree":
        settings = {"drafter": similar_model(), "tree": (2, 2, 1)}
    model, sampler = wrap_causal(), samplers.create("sjd" if name == "sjd" else "speculative", **settings)
    out = paradec.generate(model, PROMPTS, sampler=sampler, max_new_tokens=9, seed=5, temperature=1.0, trace=True)
    state = sampler.start(model, PROMPTS, max_new_tokens=9, seed=5)
    num_rejected = 0
    for step in out.trace.steps:
        drafted, drafts = set(), state.memory["drafts"].tolist()
        for row in state.rows.tolist():
            first, end = int(state.committed[row]), int(state.length[row])
            if name == "tree":
                depths = Tree.from_setting(sampler.tree).depths
                slots = [(first - 1 + depths[node], drafts[row][node]) for node in range(1, len(depths))]
                slots = [slot for slot in slots if slot[0] < end]
            else:  # the draft of the last slot is not evaluated
                slots = [(first + i, drafts[row][i]) for i in range(min(5, 9, end - first) - 1)]
            drafted |= {(row, *slot) for slot in slots if slot[1] >= 0}
        commit = sampler.commit(state, sampler.step(model, state))
        committed = {entry[:3] for entry in commit.to_list()}
        assert {entry[:3] for entry in step.commits} == committed
        assert set(step.rejected) == drafted - committed
        names = [out.trace.rules[rule] for rule in step.rules]
        assert names == ["accepted draft" if entry[:3] in drafted else "own token" for entry in step.commits]
        num_rejected += len(step.rejected)
    assert state.done and num_rejected > 10 and "accepted draft" in out.trace.rules
    if name == "sjd":
        assert out.trace.steps[-1].draft_nfe is None
    else:
        assert out.trace.steps[-1].draft_nfe == state.draft_nfe.tolist()


def test_traces_of_forecasts_and_continuous_tokens() -> None:
    model = tiny_diffusion()
    noise = torch.randn(2, model.channels, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    from diffusers import DDIMScheduler

    sampler = paradec.TaylorSeer(interval=3, order=1, where="output")
    request = {"scheduler": DDIMScheduler(), "num_inference_steps": 7, "class_labels": [1, 0], "trace": True}
    state = sampler.start(model, noise, **request)
    decode(sampler, model, state)
    trace = state.trace
    assert trace.batch == 2 and trace.family == "forecast" and trace.row_nfe == state.nfe.tolist()
    assert {step.kind for step in trace.steps} == {"full", "forecast"}
    assert all(len(step.pictures) == 2 and step.pictures[0].startswith("data:image/png") for step in trace.steps)
    assert trace.steps[0].pictures != trace.steps[-1].pictures
    mar = tiny_mar()
    trace = paradec.generate_images(mar, class_labels=[0, 1], steps=3, output_type="latent", trace=True).trace
    assert trace.family == "continuous" and trace.grid == (4, 4) and len(trace.cells[0]) == 16
    assert positions_in(trace.to_fill(0)) == list(range(16)) and all(step.evaluated for step in trace.steps)
    assert sorted(entry[1] for step in trace.steps for entry in step.commits if entry[0] == 0) == list(range(16))


def test_saved_traces_load_unchanged(tmp_path: Path, llada64: Model) -> None:
    file = tmp_path / "run.json"
    sampler = "threshold+entropy_threshold"
    out = paradec.generate(llada64, ROWS, sampler=sampler, max_new_tokens=8, block_length=4, cache="dual", trace=True)
    out.trace.save(file)
    loaded = Trace.load(file)
    assert [vars(step) for step in loaded.steps] == [vars(step) for step in out.trace.steps]
    out.trace.settings = loaded.settings = {}  # JSON turns tuples into lists
    assert vars(loaded) == vars(out.trace) and Trace.from_json(out.trace.to_json()) == loaded
    later = json.loads(out.trace.to_json()) | {"of_a_later_version": 1}
    later["steps"][0]["of_a_later_version"] = [0.5]
    assert Trace.from_dict(later) == loaded
    for copied in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert vars(copied) == vars(loaded)


def test_files_with_only_required_fields_are_read_and_drawn(tmp_path: Path) -> None:
    data = {
        "canvas": [[7, 0, 0], [5, 6, 0, 0]],
        "settings": {"sampler": "threshold"},
        "steps": [
            {"commits": [[0, 1, 4, 0.5], [1, 3, 2, 0.25]], "forwarded": [3, 4], "kind": "full"},
            {"commits": [[0, 2, 4, 0.75], [1, 2, 9, 0.5], [1, 3, 0, 0.1]], "forwarded": [3, 0], "kind": "full"},
        ],
    }
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(data))
    trace = Trace.load(file)
    assert trace.to_fill(0) == [(1, 3)] and trace.to_fill(1) == [(2, 4)] and trace.row_nfe == [2, 1]
    assert trace.replay() == [[7, 4, 4], [5, 6, 9, 0]]
    saved = json.loads(trace.to_json())
    assert all(saved[name] == data[name] for name in data)
    for suffix in ("html", "gif"):
        trace.save(tmp_path / f"trace.{suffix}")


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    """Return traces of several kinds of runs as data. Together they have every field."""
    request = {"blocks": paradec.PipelinedBlocks(4), "max_new_tokens": 8, "logprobs": 1, "trace": True}
    text = paradec.generate(tiny(1), ROWS[:2], cache="dual", **request | {"blocks": None, "block_length": 4}).trace
    blocks = paradec.generate(tiny(1), ROWS[:1], **request).trace
    sampler = samplers.create("speculative", drafter=similar_model())
    drafts = paradec.generate(wrap_causal(), PROMPTS[:2], sampler=sampler, max_new_tokens=5, trace=True).trace
    picture = paradec.generate_images(tiny_masked_image(), class_labels=[0, 1], steps=2, trace=True).trace
    latent = TraceStep([], [3, 3], "full", pictures=["data:image/png;base64,", ""])
    actual = [
        text, blocks, drafts, picture, scripts_trace(), Trace([], {}, [latent], filled=[[(0, 4)], []], images=["", ""]),
    ]  # fmt: skip
    data = [json.loads(trace.to_json()) for trace in actual]
    names = {name for run in data for fields in (run, *run["steps"]) for name in fields}
    assert names == {f.name for kind in (Trace, TraceStep) for f in dataclasses.fields(kind)}
    return data


NUMBERS = [-2, -1, 0, 1, 3, 10**400, -(2**70), 2**63 - 1, 0.5, math.nan, math.inf]
JUNK = [None, True, *NUMBERS, "", "\ud800", [0], [-1, 1], [[]], [[0, 1]], [[[0, 9]], [[2, 1]]], {}, {"sampler": {}}]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_trace_that_loads_can_be_drawn(recorded: list[dict[str, Any]], data: st.DataObject) -> None:
    """Replace, delete or repeat one or two values anywhere in a file."""
    trace = copy.deepcopy(data.draw(st.sampled_from(recorded)))
    for _ in range(data.draw(st.integers(1, 2))):
        node: Any = trace
        while True:
            key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
            if not node[key] or not isinstance(node[key], (dict, list)) or data.draw(st.integers(0, 3)) == 0:
                break
            node = node[key]
        change = data.draw(st.sampled_from(["replace", "replace", "delete", "repeat"]))
        if change == "replace":
            node[key] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
        elif change == "delete":
            del node[key]
        elif isinstance(node, list):
            node.insert(key, node[key])
        if not node:
            break
    try:
        actual = Trace.from_json(json.dumps(trace))
    except ValueError as error:
        match = re.match(r"the text is not a trace that paradec wrote: (steps\[\d+\]\.?)?(\w*)", str(error))
        assert match is not None and (match[1] or match[2] in vars(Trace([]))), str(error)
        return
    assert "<html" in actual.to_html() and Trace.from_json(actual.to_json()).to_json() == actual.to_json()
