"""Constraints on masked models: recorded runs, distributions by enumeration, and answers of every sampler."""

import copy
import itertools
import math
import re
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from decoding import MASKED, refuses, supported_fields, topology_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.constraints import masked_law, surest
from recorded import Refused, replays
from structured import (
    CASES,
    KINDS,
    SETTINGS,
    Canvas,
    accepts,
    automaton_of,
    case_names,
    distribution,
    model_of,
    softmax,
    texts_behind_a_marker,
    tiny_with_texts,
)

import paradec
from paradec import AdaptiveBlocks, PipelinedBlocks, samplers
from paradec.constraints import passes
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.marginals import Marginals
from paradec.constraints.values import parse_constraint
from paradec.models.adapter import Model
from paradec.samplers.features import constraints, spans
from paradec.samplers.features.constraints import MaskedConstraint
from paradec.samplers.masked.loop import MaskedSampler, View


def uniform_for(automaton: TokenAutomaton, nu: dict[tuple[int, ...], float], text: tuple[int, ...]) -> np.ndarray:
    """Return uniform numbers, one per token, with which a text is drawn: the middle of each token's interval.

    nu: probabilities of the texts that the automaton accepts."""
    numbers, remaining = [], nu
    for slot, token in enumerate(text):
        total = math.fsum(remaining.values())
        below = math.fsum(mass for tokens, mass in remaining.items() if tokens[slot] < token)
        remaining = {tokens: mass for tokens, mass in remaining.items() if tokens[slot] == token}
        numbers.append((below + math.fsum(remaining.values()) / 2) / total)
    return np.array(numbers)


class RecordingConstraint(MaskedConstraint):
    """A constraint feature that draws with `uniforms[step][slot]` and logs each step.

    forced: whether tokens without alternatives are written, and logged, before each step."""

    uniforms: Any = None
    forced = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log: list[tuple[str, Any]] = []
        self.z = 1.0

    def uniform(self, state: Any, part: Any) -> np.ndarray:
        return np.array([self.uniforms[int(state.row_step[part.row])][at - 1] for at in part.open_positions])

    def _marginals(self, state: Any, part: Any, logits: torch.Tensor) -> Marginals | None:
        marginals = super()._marginals(state, part, logits)
        assert marginals is not None
        self.z = math.exp(marginals.log_z())
        return marginals

    def _find_certain(self, state: Any, row: int, canvas: np.ndarray) -> dict[int, int]:
        certain = super()._find_certain(state, row, canvas) if self.forced else {}
        self.log.append(("forced", sorted([at - 1, token] for at, token in certain.items())))
        return certain

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        """Write certain tokens at every temperature; the reference does not count them in the weight."""
        self.log.append(("opened", None))
        self.write_certain(state, rows)

    def on_commit(self, state: Any, proposal: Any, decision: Any) -> None:
        chosen = decision.selected[0].nonzero()[:, 0]
        columns = (proposal.positions, decision.values, proposal.scores)
        entries = zip(*(column[0, chosen].tolist() for column in columns), strict=True)
        self.log.append(("step", (self.z, sorted([at - 1, token, score] for at, token, score in entries))))
        super().on_commit(state, proposal, decision)

    def steps(self) -> list[dict[str, Any]]:
        """The logged steps in the format of the recorded cases."""
        entries, before = list[dict[str, Any]](), list[Any]()
        for kind, value in [*self.log, ("opened", None)]:
            if kind == "step":
                z, chosen = value
                entry = {"z": z, "commit": [[at, token] for at, token, _ in chosen], "scores": [s for *_, s in chosen]}
                entries.append(entry | ({"forced": before} if self.forced else {}))
            elif kind == "opened" and before:
                entries.append({"forced": before})
            before = value if kind == "forced" else []
        return entries


class Never:
    """A stopping rule that never stops, but makes every step read the logits up to the end of the row."""

    reads = ("confidence",)

    def satisfied(self, state: Any, proposal: Any) -> torch.Tensor:
        return torch.zeros(len(proposal.rows), dtype=torch.bool)


def start_case(case: dict[str, Any], sampler: Any = None, canvas: Canvas | None = None, **more: Any) -> Any:
    """Return the sampler, the model and the first state."""
    settings, slots, size = case.get("settings", {}), case["slots"], len(case["vocab"])
    canvas, holes = case["canvas"] if canvas is None else canvas, case.get("holes") or []
    if not holes and not case["ends"] and canvas.count(None) == slots:
        holes = [{"first": 0, "stop": slots, **case["constraint"]}]
    width = slots + bool(holes)
    block, rule = settings.get("block") or width, dict(settings.get("rule", {"name": "low_confidence"}))
    request: dict[str, Any] = {"block_length": block, "temperature": settings.get("temperature", 0.0)}
    if "steps" in rule:
        request["steps"] = rule.pop("steps") * -(-width // block)
    if settings.get("seen", True) and block < slots:
        request["stop"] = Never()
    sampler, model = samplers.create(**rule) if sampler is None else sampler, model_of(case)
    row = [size + 1, *(size if token is None else token for token in canvas)]
    if holes:  # the answer fills the holes; a prompt token follows
        row = [*row, size + 1]
        request["constraint"] = [paradec.Regex(hole["regex"]) for hole in holes]
        request["holes_eos_inf"] = False
    else:
        request["constraint"] = parse_constraint("constraint", case["constraint"])
        request["suppress_tokens"] = () if case["ends"] else (case["end"],)
    return sampler, model, sampler.start(model, torch.tensor([row]), max_new_tokens=0, **request | more)


def text_of(state: Any, case: dict[str, Any]) -> list[int]:
    canvas = state.canvas[0, 1 : 1 + case["slots"]].tolist()
    tokens = canvas[: int(state.end[0]) - 1] if case.get("ends") else canvas
    return tokens + [case["end"]] * (case["slots"] - len(tokens))


def assert_case_fits_its_canvas(case: dict[str, Any]) -> None:
    """Assert that the recorded text and holes fit the recorded tokens and canvas."""
    expected = case["expected"]
    if "text" in expected:
        assert expected["text"] == "".join(case["vocab"][token] for token in expected["tokens"] if token != case["end"])
    canvas, holes = case["canvas"], case.get("holes", ())
    if holes:
        inside = {at for hole in holes for at in range(hole["first"], hole["stop"])}
        assert inside == {at for at, token in enumerate(canvas) if token is None}


def assert_same_steps(case: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    expected, end = case["expected"]["steps"], case["end"]
    prompt_tokens = [token for token in case["canvas"] if token is not None]
    if end in prompt_tokens:  # in paradec it does not end the row, so later steps fill the remaining positions
        later = [pair for step in steps[len(expected) :] for pair in step.get("commit", step.get("forced"))]
        assert all(token == end for _, token in later)
        steps = steps[: len(expected)]
    # if the canvas has tokens, paradec excludes forbidden tokens before the softmax, which changes z
    compared = {"z", "scores"} if case.get("ends", True) or not prompt_tokens or "holes" in case else {"scores"}
    for ours, theirs in zip(steps, expected, strict=True):
        assert all(ours[key] == theirs[key] for key in ("commit", "forced") if key in theirs)
        for key in compared & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-12)


PATH_RUNS = [name for name in case_names("run", "draws", "holes") if SETTINGS[name]["settings"]["candidates"] == "path"]


@pytest.mark.parametrize("name", PATH_RUNS)
@replays("name")
def test_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    fields = {"uniforms": case.get("uniforms"), "forced": case["settings"].get("forced", False)}
    monkeypatch.setattr(constraints, "MaskedConstraint", type("Own", (RecordingConstraint,), fields))
    if case["canvas"][0] is not None and "holes" not in case:
        raise Refused("paradec's blocks begin at the first mask; the case's first block begins before it")
    sampler, model, state = start_case(case)
    while not state.done:
        sampler.commit(state, sampler.step(model, state))
    feature = state.features["constraint"]
    steps, expected = feature.steps(), case["expected"]
    assert_same_steps(case, steps)
    assert text_of(state, case) == expected["tokens"]
    assert_case_fits_its_canvas(case)


MARGINAL_RUNS = [name for name in case_names("run", "draws", "holes") if name not in PATH_RUNS]


@pytest.mark.parametrize("name", MARGINAL_RUNS)
@replays("name")
def test_recorded_runs_that_take_the_best_token_of_each_marginal(name: str) -> None:
    """Replay with a plain loop over paradec's marginals and automaton, because paradec has no such decoding.

    The reference takes the best token of each marginal and checks the candidates one by one."""
    case, expected = CASES[name], CASES[name]["expected"]
    settings, canvas, end = case["settings"], [*case["canvas"]], case["end"]
    rule, size, forces = settings["rule"], len(case["vocab"]), settings.get("forced")
    spans = [(hole["first"], hole["stop"], automaton_of(case, hole["regex"], False)) for hole in case.get("holes", ())]
    spans = spans or [(0, case["slots"], automaton_of(case))]
    module, block = model_of(case).module, settings.get("block") or case["slots"]

    def has_ended() -> bool:
        known = canvas[: canvas.index(None)] if None in canvas else canvas
        return case.get("ends", False) and end in known

    def write_certain(first: int, stop: int) -> list[list[int]]:
        begin, last, automaton = spans[0]
        fits = passes.possible_classes(automaton, canvas[begin:last], 0, automaton.accept)
        entries = []
        for at in range(first, stop):
            ids = np.concatenate([automaton.members[index] for index in np.flatnonzero(fits[at])])
            if canvas[at] is None and len(ids) == 1:
                entries.append([at, int(ids[0])])
        for at, token in entries:
            canvas[at] = token
        return entries

    steps: list[dict[str, Any]] = []
    for begin in range(0, case["slots"], block):
        if has_ended():
            break
        stop, count = min(begin + block, case["slots"]), 0
        forced = write_certain(begin, stop) if forces else []
        masks = canvas[begin:stop].count(None)
        while None in canvas[begin:stop] and not has_ended():
            logits, scores, tokens = module.canvas_logits(canvas), {}, {}
            z = 1.0
            for first, last, automaton in spans:
                read_end = last if settings.get("seen", True) else min(last, stop)
                accept = passes.completions(automaton, canvas[read_end:last], automaton.accept)[0]
                span_canvas = canvas[first:read_end]
                positions = [first + at for at, token in enumerate(span_canvas) if token is None]
                if not positions:
                    continue
                padded = torch.nn.functional.pad(logits[positions], (0, 2), value=-torch.inf)
                marginals = Marginals(automaton, padded, span_canvas, 0, accept)
                z *= math.exp(marginals.log_z())
                best = marginals.conditioned_logits().softmax(-1)[:, :size].max(-1)
                scores |= dict(zip(positions, best.values.tolist(), strict=True))
                tokens |= dict(zip(positions, best.indices.tolist(), strict=True))
            free = [at for at in scores if begin <= at < stop]
            order = sorted(free, key=lambda at: (-scores[at], at))
            if rule["name"] == "threshold":
                order = [at for number, at in enumerate(order) if not number or scores[at] >= rule["threshold"]]
            else:
                quota = masks // rule["steps"] + (count < masks % rule["steps"]) if "steps" in rule else 1
                order = order[:quota]
            committed = []
            for first, last, automaton in spans:  # holes are independent
                for at in [at for at in order if first <= at < last]:
                    trial = [*canvas]
                    trial[at] = tokens[at]
                    if passes.completions(automaton, trial[first:last], automaton.accept)[0, 0]:
                        canvas, committed = trial, [*committed, at]
            committed.sort()
            entry = {"z": z, "scores": [scores[at] for at in committed]} | ({"forced": forced} if forces else {})
            steps.append(entry | {"commit": [[at, tokens[at]] for at in committed]})
            forced, count = write_certain(begin, stop) if forces else [], count + 1
        if forced:
            steps.append({"forced": forced})
    if case.get("ends") and has_ended():
        canvas[canvas.index(end) :] = [end] * (case["slots"] - canvas.index(end))
    assert canvas == expected["tokens"]
    assert_same_steps(case, steps)
    assert_case_fits_its_canvas(case)


class OrderedSampler(MaskedSampler):
    """Commit one position per step, which `where(canvas)` returns."""

    name = "ordered by a test"
    where: ClassVar[Any] = None

    def select(self, view: View) -> torch.Tensor:
        canvas = [None if free else token for free, token in zip(view.candidates[0].tolist(), view.current[0].tolist())]
        chosen = torch.zeros_like(view.candidates)
        chosen[0, type(self).where(canvas)] = True
        return chosen


def all_runs(
    case: dict[str, Any], sampler: Any, monkeypatch: pytest.MonkeyPatch, forced: bool = False
) -> dict[tuple[int, ...], list[float]]:
    """Return text -> [probability, sum of probability times weight], for all texts that a request can return.

    Each step is run once for every text that it can draw, with the uniform numbers that draw this text."""
    tracker = type("Own", (RecordingConstraint,), {"forced": forced})
    monkeypatch.setattr(constraints, "MaskedConstraint", tracker)
    automaton, probabilities = automaton_of(case), dict[tuple[int, ...], list[float]]()
    texts = {*texts_behind_a_marker(case)} if "after" in case["constraint"] else None
    temperature = case["settings"].get("temperature", 1.0)
    sampler, model, state = start_case(case, sampler, [None] * case["slots"], eos_early_stop=False)
    pending = [(state, 1.0)]
    while pending:
        state, probability = pending.pop()
        if state.done:
            entry = probabilities.setdefault(tuple(text_of(state, case)), [0.0, 0.0])
            entry[0] += probability
            entry[1] += probability * math.exp(state.log_weight[0])
            continue
        tokens = state.canvas[0, 1 : 1 + case["slots"]].tolist()
        canvas = [None if token == state.mask_id else token for token in tokens]
        nu, _ = distribution(automaton, softmax(model.module.canvas_logits(canvas) / temperature), canvas)
        if texts is not None:
            total = math.fsum(mass for text, mass in nu.items() if text in texts)
            nu = {text: mass / total for text, mass in nu.items() if text in texts}
        next_states: dict[tuple[int, ...], list[Any]] = {}
        for text, share in nu.items():
            tracker.uniforms = {int(state.row_step[0]): uniform_for(automaton, nu, text)}
            proposal = sampler.step(model, state)
            undecided = state.undecided[0, 1 : 1 + case["slots"]].tolist()
            drawn = proposal.values[0, : case["slots"]].tolist()
            assert all(drawn[at] == token for at, token in enumerate(text) if undecided[at])
            next_state = copy.deepcopy(state)
            sampler.commit(next_state, proposal)
            key = tuple(next_state.canvas[0].tolist())
            next_states.setdefault(key, [next_state, 0.0])[1] += probability * share
        pending += [(next_state, mass) for next_state, mass in next_states.values()]
    return probabilities


@pytest.mark.thinned
@pytest.mark.parametrize("name", case_names("law"))
@replays("name")
def test_one_token_a_step_has_the_recorded_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, expected = CASES[name], CASES[name]["expected"]
    assert case["settings"]["tokens_per_step"] == 1
    orders = {
        "left": lambda canvas: canvas.index(None),
        "right": lambda canvas: max(at for at, token in enumerate(canvas) if token is None),
        "surest": lambda canvas: surest(case, canvas),
    }
    monkeypatch.setattr(OrderedSampler, "where", orders[case["settings"]["order"]])
    probabilities = all_runs(case | {"settings": case["settings"] | {"rule": {}}}, OrderedSampler(), monkeypatch)
    stepwise = {tuple(text): mass for text, mass in expected["stepwise"]}
    assert {text: mass for text, (mass, _) in probabilities.items()} == pytest.approx(stepwise, rel=1e-9)
    inside = math.fsum(weighted for _, weighted in probabilities.values())
    assert inside == pytest.approx(expected["inside"], rel=1e-9)
    weighted = {text: mass / inside for text, (_, mass) in probabilities.items()}
    conditioned = {tuple(text): mass for text, mass in expected["global"]}
    assert weighted == pytest.approx(conditioned, rel=1e-9)
    masked = {tuple(text): mass for text, mass in expected["masked"]}
    choose_position = orders[case["settings"]["order"]]
    assert masked_law(case, choose_position, [None] * case["slots"]) == pytest.approx(masked, rel=1e-9)
    for kind, law in (("stepwise", stepwise), ("masked", masked)):
        distance = math.fsum(abs(law.get(text, 0.0) - conditioned.get(text, 0.0)) for text in law | conditioned) / 2
        assert distance == pytest.approx(expected["distance"][kind], rel=1e-9, abs=1e-12)


def case_of(vocab: str, slots: int, pattern: str, bias: Any = None, **settings: Any) -> dict[str, Any]:
    """Return a case whose slots are independent of each other."""
    size = len(vocab) + 1
    return {
        "vocab": [*vocab, "<end>"], "end": size - 1, "ends": True, "slots": slots, "canvas": [None] * slots,
        "constraint": {"regex": pattern}, "settings": settings,
        "model": {"bias": bias or [[0.0] * size] * slots, "pair": [[[[0.0] * size] * size] * slots] * slots},
    }  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize("pattern", ["[ab]c?[ab]|cab", "(ab|ba|cc)[abc]", "[abc]{2,3}"])
@pytest.mark.parametrize("place", [0, -1])
def test_weights_include_tokens_without_alternatives(pattern: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With independent slots, probability times weight is the model's probability of a text, in any order."""
    monkeypatch.setattr(
        OrderedSampler, "where", lambda canvas: sorted(at for at in range(3) if canvas[at] is None)[place]
    )
    draw, slots = torch.Generator().manual_seed(len(pattern)), 3
    bias = torch.randn(3, 4, generator=draw).tolist()
    case = case_of("abc", slots, pattern, bias, rule={}, temperature=1.0)
    expected = dict.fromkeys(itertools.product(range(4), repeat=slots), 0.0)
    automaton = automaton_of(case)
    allowed = [text for text in expected if accepts(automaton, text)]
    p = softmax(torch.tensor(bias, dtype=torch.float64))
    probabilities = all_runs(case, OrderedSampler(), monkeypatch, forced=True)
    assert probabilities.keys() == {*allowed}
    for text, (_, weighted) in probabilities.items():
        assert weighted == pytest.approx(math.prod(p[at][token] for at, token in enumerate(text)), rel=1e-9), text


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("pattern", ["abc", "a[ab]", "a[ab]c|cab"])
def test_weights_of_a_uniform_model_are_shares_of_continuations(pattern: str, block: int) -> None:
    """For a uniform model the weight is the product over blocks of the share of allowed continuations."""
    slots = 3
    case = case_of("abcd", slots, pattern)
    automaton = automaton_of(case)
    texts = [text for text in itertools.product(range(5), repeat=slots) if accepts(automaton, text)]
    request: dict[str, Any] = {"constraint": paradec.Regex(pattern), "max_new_tokens": slots, "block_length": block}
    request |= {"temperature": 1.0, "seed": [*range(3)], "eos_early_stop": False}
    for name in ("low_confidence", "random"):
        out = paradec.generate(model_of(case), torch.full((3, 1), 6), sampler=name, **request)
        for text, weight in zip(out.new_tokens.tolist(), out.log_weight, strict=True):
            expected = 1.0
            for first in range(0, slots, block):
                prefixes = {text_[: first + block] for text_ in texts if [*text_[:first]] == text[:first]}
                expected *= len(prefixes) / 5 ** min(block, slots - first)
            assert math.exp(weight) == pytest.approx(expected, rel=1e-9)


BEHIND_MARKERS = [("a", None, 4), ("ab", None, 4), ("aa", None, 4), ("c", 0, 4), ("a", 1, 4), ("ca", 1, 4)]


def case_behind_a_marker(after: str, budget: int | None, slots: int, temperature: float) -> dict[str, Any]:
    bias = torch.randn(slots, 4, generator=torch.Generator().manual_seed(slots)).tolist()
    case = case_of("abc", slots, "[bc]?a?|ca*", bias, rule={}, temperature=temperature)
    case["constraint"] |= {"after": after} | ({} if budget is None else {"thinking_budget": budget})
    return case


@pytest.mark.thinned
@pytest.mark.parametrize(("after", "budget", "slots"), BEHIND_MARKERS)
@pytest.mark.parametrize(("temperature", "place"), [(0.7, 0), (1.0, -1)])
def test_reasoning_and_answers_have_the_models_distribution(
    after: str, budget: int | None, slots: int, temperature: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With independent slots, probability times weight is the model's probability of each enumerated text."""
    monkeypatch.setattr(
        OrderedSampler, "where", lambda canvas: [at for at in range(slots) if canvas[at] is None][place]
    )
    case = case_behind_a_marker(after, budget, slots, temperature)
    p = softmax(model_of(case).module.canvas_logits([None] * slots) / temperature)
    probabilities, texts = all_runs(case, OrderedSampler(), monkeypatch), texts_behind_a_marker(case)
    assert probabilities.keys() == {*texts} and len(texts) > 2
    for text, (_, weighted) in probabilities.items():
        assert weighted == pytest.approx(math.prod(p[at][token] for at, token in enumerate(text)), rel=1e-9), text


@pytest.mark.parametrize(("after", "budget", "slots"), BEHIND_MARKERS)
def test_the_most_likely_reasoning_and_answer_is_found(after: str, budget: int | None, slots: int) -> None:
    case = case_behind_a_marker(after, budget, slots, 0.0)
    model, value = model_of(case), parse_constraint("constraint", case["constraint"])
    p = softmax(model.module.canvas_logits([None] * slots))
    best = max(texts_behind_a_marker(case), key=lambda text: math.prod(p[at][token] for at, token in enumerate(text)))
    for block in (1, slots):
        request: dict[str, Any] = {"max_new_tokens": slots, "block_length": block, "eos_early_stop": False}
        out = paradec.generate(model, torch.tensor([[5]]), constraint=value, sampler="random", **request)
        tokens = tuple(out.new_tokens[0].tolist())
        assert tokens == best if block == slots else tokens in texts_behind_a_marker(case)
        assert out.reasoning is not None and out.reasoning_tokens == [len(out.reasoning[0] + after)]
        assert value.accepts(out.reasoning[0] + after + out.text[0])


NAMED_REFUSALS = {
    **dict.fromkeys(("wino", "editing", "saber", "levenshtein", "s2d2"), "replaces decided tokens"),
    **dict.fromkeys(("freedave", "lopa"), "drafts steps ahead"),
    **dict.fromkeys(("maskgit", "halton"), "draws every token a second time"),
    "recap": "chooses the positions of several steps ahead",
}
"""Sampler -> part of the error. "maskgit" and "halton" are refused only above temperature 0."""
POLICIES: dict[str, dict[str, Any]] = {
    "4": {"block_length": 4},
    "whole": {"blocks": "whole"},
    "adaptive": {"blocks": AdaptiveBlocks(4, delimiters=(",", "1"))},
    "pipelined": {"blocks": PipelinedBlocks(4)},
}
REFUSED_POLICIES = {"adaptive": "end at single candidates", "pipelined": "open several blocks of a row at once"}
CACHES = ("none", "prefix", "dual", "block", "delayed", "dkv_decode", "dkv_prefill", "hierarchical")


def product() -> list[Any]:
    """Return all combinations as parameters; a tenth, with every sampler, kind and policy, is not marked `full`."""
    cases = []
    for number, name in enumerate(MASKED):
        for at, (kind, policy) in enumerate(itertools.product(KINDS, POLICIES)):
            marks = [] if (number + at) % 12 == 0 or policy == "4" and (number + at) % 36 == 5 else [pytest.mark.full]
            cases.append(pytest.param(name, kind, policy, marks=marks))
    return cases


@pytest.fixture(scope="module")
def bidirectional() -> Model:
    return tiny_with_texts()


@pytest.fixture(scope="module")
def block_causal() -> Model:
    return tiny_with_texts("block_causal")


@pytest.mark.filterwarnings("ignore:cache=", "ignore:.*delimiter", "ignore:.*no effect")
@pytest.mark.parametrize(("name", "kind", "policy"), product())
def test_answers_satisfy_the_constraint_or_the_request_is_refused(
    name: str, kind: str, policy: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(topology_of(name))
    value, is_allowed = KINDS[kind]
    for turn, temperature in enumerate((0.0, 0.8)):
        cache = CACHES[(len(name) + len(kind) + turn) % len(CACHES)]
        for cache_name in dict.fromkeys((cache, "none")):
            fields = POLICIES[policy] | {"constraint": value, "temperature": temperature, "cache": cache_name}
            fields = supported_fields(name, fields | {"max_new_tokens": 12, "seed": 3})
            try:
                out = paradec.generate(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), sampler=name, **fields)
            except ValueError as error:
                if "constraint=" not in str(error):
                    continue  # this combination is unsupported without a constraint too
                reason = NAMED_REFUSALS.get(name, "nothing")
                draws_nothing = reason.startswith("draws") and not temperature
                reasons = [REFUSED_POLICIES.get(policy, "nothing"), "nothing" if draws_nothing else reason]
                assert any(reason in str(error) for reason in reasons), error
                continue
            assert name not in NAMED_REFUSALS or "draws" in NAMED_REFUSALS[name] and not temperature
            assert policy not in REFUSED_POLICIES
            assert all(is_allowed(text) for text in out.text), out.text
            assert (out.log_weight is None) == (temperature == 0)


def test_tables_of_states_times_tokens_are_limited(bidirectional: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    request: dict[str, Any] = {"constraint": paradec.Regex("[ab]{100}|[0-9]*"), "max_new_tokens": 128}
    monkeypatch.setattr(spans, "MAX_TABLE_BYTES", 2**15)
    assert paradec.generate(bidirectional, [[1, 2]], block_length=8, **request).text
    monkeypatch.setattr(bidirectional.module, "forward", None)
    for more in ({"blocks": "whole"}, {"block_length": 8, "stop": paradec.Prophet()}):
        with pytest.raises(ValueError, match=r"constraint=Regex.* states times 129 tokens"):
            paradec.generate(bidirectional, [[1, 2]], **request, **more)


@pytest.mark.filterwarnings("ignore:.*no effect", "ignore:cache=")
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_patterns_and_requests(bidirectional: Model, data: st.DataObject) -> None:
    part = st.sampled_from(["a", "b", "[a-e]", "[0-9]", "12", "(?:yes|no)", r"\.", "x", "."])
    pieces = st.tuples(part, st.sampled_from(["", "", "?", "+", "*", "{2}", "{1,3}"])).map("".join)
    alternatives = st.lists(st.lists(pieces, min_size=1, max_size=4).map("".join), min_size=1, max_size=3)
    pattern = "|".join(data.draw(alternatives))
    request = data.draw(
        st.fixed_dictionaries(
            {
                "sampler": st.sampled_from(["threshold", "random", "entropy_bound", "credit", "low_confidence+margin"]),
                "cache": st.sampled_from(["none", "prefix", "dual", "dkv_decode"]),
                "block_length": st.sampled_from([3, 5, 32]), "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.5]),
                "top_p": st.sampled_from([None, 0.5]), "top_k": st.sampled_from([None, 2]),
                "guidance_scale": st.sampled_from([1.0, 1.5]), "eos_early_stop": st.booleans(),
                "stop": st.sampled_from([None, paradec.Prophet()]), "seed": st.integers(0, 99),
            }
        )
    )  # fmt: skip
    prompts = [[1, 2, 3], [4]]
    try:
        out = paradec.generate(bidirectional, prompts, constraint=paradec.Regex(pattern), max_new_tokens=10, **request)
    except ValueError as error:
        assert "the shortest text takes" in str(error) or "works with" in str(error), error
        return
    assert all(re.fullmatch(pattern, text, re.ASCII) for text in out.text), (pattern, request, out.text)


def test_several_tokens_of_a_step_are_drawn_jointly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent draws of {ab, ba} in one step would give aa or bb half of the time."""
    case = case_of("ab", 2, "ab|ba", rule={"name": "low_confidence", "steps": 1}, temperature=1.0)
    probabilities = all_runs(case, None, monkeypatch)
    assert {text: mass for text, (mass, _) in probabilities.items()} == pytest.approx({(0, 1): 0.5, (1, 0): 0.5})


def test_tokens_without_alternatives_are_written_without_a_forward(bidirectional: Model) -> None:
    pattern = r'\{"a": [0-9]\}'
    free = paradec.generate(bidirectional, [[1, 2]], max_new_tokens=8, sampler="low_confidence", eos_early_stop=False)
    request = {"max_new_tokens": 8, "sampler": "low_confidence", "constraint": paradec.Regex(pattern)}
    out = paradec.generate(bidirectional, [[1, 2]], **request)
    assert re.fullmatch(pattern, out.text[0]) and free.nfe == 8 and out.nfe < 8
    request = {"max_new_tokens": 3, "constraint": paradec.Choice(("yes",)), "trace": True}
    certain = paradec.generate(bidirectional, [[1, 2]], **request)
    assert certain.text == ["yes"] and certain.nfe == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_logits_raise_an_error(bad: float) -> None:
    case = case_of("ab", 2, "ab|ba", [[0.0] * 3, [bad, 0.0, 0.0]])
    sampler, model, state = start_case(case)
    proposal = sampler.step(model, state)
    refuses(lambda: sampler.commit(state, proposal), "NaN or infinite logits for row 0", FloatingPointError)
    case["model"]["bias"][1] = [-torch.inf, -torch.inf, 0.0]
    sampler, model, state = start_case(case)
    refuses(lambda: sampler.step(model, state), "excludes .* every text of the constraint", FloatingPointError)
