"""Read recorded runs (traces) of the public reference implementations, and compare paradec's runs call by call.

A folder `golden/traces/<method>` holds one file per setting. Every setting, id and model name comes from the file, so
that `tests/replays.py` can replay other traces of the same form.

Models are float64 by default, because in float32 rounding decides between positions of nearly equal confidence, and
rounding differs between processors. `fp64_same` says that the reference made the same decisions in float64.

A case that departs from the recording where two scores differ by less than 1e-7 is a near tie. Any other departure is
refused if `fp64_same` is false, and wrong otherwise.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import find_checkpoint, golden, near_tie_or_refused, read_json, read_json_unrecorded, replay
from torch import Tensor

import paradec
from paradec import samplers
from paradec.caches.dual import DualCache
from paradec.caches.parts import range_parts
from paradec.caches.prefix import PrefixCache
from paradec.core.protocol import Commit, Sampler
from paradec.core.trace import Notes, Trace
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import MaskedSampler, View
from paradec.samplers.masked.state import MaskedState

TRACES = golden("traces") / "traces" if (golden("traces") / "traces").is_dir() else golden("traces")


def load_trace(name: str) -> Any:
    trace = read_json(TRACES / f"{name}.json")
    dict.__setitem__(trace, "file", name)
    return trace


def peek_trace(name: str) -> Any:
    """Read a trace to choose what to replay: reads of its fields are not recorded."""
    return read_json_unrecorded(TRACES / f"{name}.json")


def trace_names(*methods: str) -> list[str]:
    """Return the names "method/setting" of all traces of these methods."""
    return sorted(f"{m}/{p.stem}" for m in methods for p in (TRACES / m).glob("*.json"))


def checkpoint(name: str) -> Path:
    return find_checkpoint(name, "traces")


@functools.cache
def load_model(folder: Path, dtype: str, mask_token_id: int | None = None, eos_token_id: int | None = None) -> Model:
    """Load a model once. mask_token_id, eos_token_id: as in the recording."""
    model = paradec.load(folder, dtype=dtype, mask_token_id=mask_token_id)
    if eos_token_id is not None and eos_token_id not in model.facts.eos_token_ids:
        model.facts = dataclasses.replace(model.facts, eos_token_ids=(eos_token_id,))
    return model


def some_or_all(*numbers: int) -> list[Any]:
    """Return parameters of a test: indices of the cases to replay, modulo their count; and None for all (`full`)."""
    return [pytest.param(numbers, id="some"), pytest.param(None, id="all", marks=pytest.mark.full)]


def precisions(*numbers: int) -> list[Any]:
    """Return parameters (precision, numbers): these cases in float64, and all cases in both precisions (`full`)."""
    full = [pytest.param(dtype, None, id=dtype, marks=pytest.mark.full) for dtype in ("float64", "float32")]
    return [pytest.param("float64", numbers, id="some"), *full]


def select_cases(trace: dict, numbers: Sequence[int] | None) -> list[tuple[str, dict]]:
    """Return (name, case) pairs. numbers: indices, modulo the count, without cases that float64 changes; None: all."""
    cases = [(f"{trace['file']}, case {number}", case) for number, case in enumerate(trace["cases"])]
    if numbers is None:
        return cases
    cases = [(name, case) for name, case in cases if case.get("fp64_same", True)]
    return [cases[index] for index in sorted({number % len(cases) for number in numbers})] if cases else []


def select_covering_traces(names: Iterable[str], together: int = 2, load: Callable = peek_trace) -> list[str]:
    """Select a few traces that together contain every combination of `together` setting values of all the traces.

    Model, batch size and method count as settings. The selection is greedy, by new combinations per forward."""
    covered, forwards = {}, {}
    for name in names:
        trace = load(name)
        settings = trace["settings"] | {f"trace's {key}": trace.get(key) for key in ("model", "batch_size", "method")}
        values = sorted((key, json.dumps(value)) for key, value in settings.items())
        covered[name] = set(itertools.combinations(values, together))
        forwards[name] = sum(len(case["steps"]) for case in trace["cases"])
    uncovered = set().union(*covered.values())
    selected = []
    while uncovered:
        best = max(covered, key=lambda name: len(covered[name] & uncovered) / forwards[name])
        selected.append(best)
        uncovered -= covered[best]
    return sorted(selected)


def mark_others_full(names: Iterable[str], together: int = 2, load: Callable[[str], dict] = peek_trace) -> list[Any]:
    """Return all names as parameters of a test. Names that `select_covering_traces` does not select get `full`."""
    names = list(names)
    default = select_covering_traces(names, together, load)
    return [name if name in default else pytest.param(name, marks=pytest.mark.full) for name in names]


def model_of(trace: dict, precision: str = "float64") -> Model:
    return load_model(checkpoint(trace["model"]), precision, trace["mask_id"], trace["eos_id"])


def table_of(trace: dict) -> list[str] | None:
    """Return the text of every id, or None if the checkpoint has no file tokenizer_table.json."""
    path = checkpoint(trace["model"]) / "tokenizer_table.json"
    return read_json(path)["table"] if path.exists() else None


def text_of(trace: dict, answer: list[int]) -> str:
    strings, tokens = table_of(trace) or [], [*answer, trace["eos_id"]]
    return "".join(strings[token] for token in tokens[: tokens.index(trace["eos_id"])])


def assert_texts(trace: dict, case: dict) -> None:
    """Assert that a case's texts equal its decoded ids, and that `correct` marks the right answers."""
    if (table := table_of(trace)) is None:
        return
    begin = len(case["prompt_ids"][0])
    for row, ids in enumerate(case["final_ids"]):
        text = text_of(trace, ids[begin:])
        assert case["decoded"][row] == text and case["correct"][row] == (text == case["answer"][row])
        assert case["prompt"][row] == "".join(table[token] for token in case["prompt_ids"][row])


def cache_of(trace: dict) -> str:
    """Return the cache of a trace of Fast-dLLM or AdaBlock: "none", "prefix" or "dual"."""
    settings = trace["settings"]
    function = settings.get("function", "")
    if "dual_cache" in settings:
        # Fast-dLLM's block code for Dream always has a cache; AdaBlock has a dual cache or none
        other_cache = "prefix" if trace["method"] == "fastdllm-dream" else "none"
        return "dual" if settings["dual_cache"] else other_cache
    return next((cache for cache in ("prefix", "dual") if f"{cache}_cache" in function), "none")


def request_of(trace: dict) -> tuple[Sampler, dict]:
    """Return paradec's sampler and request for a trace of LLaDA, Dream, Fast-dLLM (both versions) or AdaBlock."""
    method, settings, cache = trace["method"], trace["settings"], cache_of(trace)
    request = {"temperature": settings["temperature"], "guidance_scale": 1 + settings.get("cfg_scale", 0.0)}
    request |= {} if cache == "none" else {"cache": cache}
    create = samplers.create
    if method.startswith("adablock"):
        sampler = create(
            "adablock",
            threshold=settings["threshold"],
            init_block_length=settings["init_block_length" if method == "adablock" else "block_length"],
            delimiter_threshold=settings["delimiter_threshold"],
            delimiters=settings["delimiter_ids"],
        )
        return sampler, request
    if "block_length" in settings:
        request["block_length"] = settings["block_length"]
    if method in ("llada", "fastdllm", "fastdllm-jun25"):
        if settings.get("threshold") is not None:
            return create("threshold", threshold=settings["threshold"]), request
        if settings.get("factor") is not None:
            return create("factor", factor=settings["factor"], reference_last_rank=True), request
        return create(settings["remasking"]), request | {"steps": settings["steps"]}
    request |= {"top_p": settings["top_p"], "top_k": settings["top_k"]}
    if settings["alg"] == "confidence_threshold":
        if cache == "none":
            request["steps"] = settings["steps"]
        quota = "carry" if cache == "none" else "none"
        return create("threshold", threshold=settings["threshold"], quota_per_step=quota), request
    extra = {} if settings["alg"] == "origin" else {"alg_temp": settings["alg_temp"]}
    return create(settings["alg"], eps=settings["eps"], **extra), request | {"steps": settings["steps"]}


@dataclass(frozen=True)
class Call:
    """One forward of one row."""

    evaluated: int
    """Number of evaluated positions, including the second guidance branch and drafts."""
    commits: frozenset[tuple[int, int]]
    """(position, token) pairs that became final."""


@dataclass
class Row:
    """One row of a case, decoded by paradec. `ours` contains only the calls that evaluated this row."""

    where: str
    name: str
    """Name of the case."""
    trace: dict
    case: dict
    prompt: int
    """Length of the prompt."""
    ours: list[Call]
    theirs: list[Call]
    tokens: list[int]
    final: list[int]
    nfe: int
    scores: list[dict[int, float]]
    """For each call in `ours`, candidate position -> score."""
    threshold: float | None

    @property
    def decided(self) -> list[Call]:
        """The reference's calls that committed at least one token."""
        return [call for call in self.theirs if call.commits]

    def gap(self) -> float:
        """Return `decision_gap` for the first call that departs from the reference."""
        ours = [(call.commits, scores) for call, scores in zip(self.ours, self.scores, strict=True) if call.commits]
        for (commits, scores), call in zip(ours, self.decided, strict=False):
            if commits != call.commits:
                return decision_gap(commits, call.commits, scores, self.threshold)
        return float("inf")

    def blocks(self, length: int) -> list[list[Call]]:
        """Group `ours` by block of `length` positions. Every call must have committed a token."""
        calls_by_block: dict[int, list[Call]] = defaultdict(list)
        for call in self.ours:
            calls_by_block[(min(call.commits)[0] - self.prompt) // length].append(call)
        return [calls_by_block[block] for block in sorted(calls_by_block)]


def decision_gap(
    ours: Iterable[tuple[int, int]],
    theirs: Iterable[tuple[int, int]],
    scores: dict[int, float],
    threshold: float | None,
) -> float:
    """Return how close the scores are that made two steps choose different positions.

    The distance of a position that only one step chose is the least distance of its score to the threshold and to the
    scores of positions that only the other step chose. The result is the largest distance of all such positions."""
    chosen, reference = {position for position, _ in ours}, {position for position, _ in theirs}
    bounds = [threshold] if threshold is not None else []
    gaps = [
        min((abs(scores[p] - bound) for bound in [*bounds, *(scores[b] for b in second - first if b in scores)]),
            default=float("inf"))
        for first, second in ((chosen, reference), (reference, chosen)) for p in first - second if p in scores
    ]  # fmt: skip
    return max(gaps, default=float("inf"))


@contextlib.contextmanager
def replay_checked(name: str, trace: dict, case: dict, gap: Callable[[], float]) -> Iterator[None]:
    """`replay` with `near_tie_or_refused`; afterwards check the recorded sizes, counts and texts of the case."""
    with replay(name):
        try:
            with near_tie_or_refused(gap, case):
                yield
        finally:
            check_case(trace, case)


def replay_rows(rows: list[Row]) -> contextlib.AbstractContextManager[None]:
    """Replay a case with all its rows."""
    return replay_checked(rows[0].name, rows[0].trace, rows[0].case, lambda: min(row.gap() for row in rows))


def replay_case(
    trace: dict, name: str, case: dict, pairs: Sequence[tuple[Any, Any]] = ()
) -> contextlib.AbstractContextManager[None]:
    """Replay a case of one row. pairs: (our call, the reference's call); the body of the `with` statement adds them."""

    def gap() -> float:
        for ours, theirs in pairs:
            if ours.commits != theirs.commits:
                return decision_gap(ours.commits, theirs.commits, ours.scores, trace["settings"].get("threshold"))
        return float("inf")

    return replay_checked(name, trace, case, gap)


def group_by_case(rows: list[Row]) -> list[list[Row]]:
    cases: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        cases[row.name].append(row)
    return list(cases.values())


def is_random(settings: dict) -> bool:
    """Return whether the reference drew random numbers for tokens or positions."""
    has_random_order = settings.get("remasking") == "random" or settings.get("alg") == "origin"
    return bool(has_random_order or settings.get("temperature") or settings.get("alg_temp"))


def decode(
    model: Model,
    trace: dict,
    sampler: Sampler,
    alone: bool = False,
    numbers: Sequence[int] | None = None,
    **request: Any,
) -> list[Row]:
    """Decode the prompts of a trace's cases; return paradec's and the reference's calls for each row.

    numbers: indices of the cases, None for all. alone: whether each case is decoded in a separate batch, as in the
    reference. Otherwise rows of equal length that draw no random numbers share a batch: in float64 no row changes."""
    selected = select_cases(trace, numbers)
    names, cases = [name for name, _ in selected], [case for _, case in selected]
    settings = trace["settings"]
    batches: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for number, case in enumerate(cases):
        for row, prompt in enumerate(case["prompt_ids"]):
            key = number if alone or is_random(trace["settings"]) else len(prompt)
            batches[key].append((number, row))
    options: dict[str, Any] = {"rng": "reference", "eos_early_stop": False, "trace": True} | request
    rows = []
    for members in batches.values():
        prompts = [cases[number]["prompt_ids"][row] for number, row in members]
        first = cases[members[0][0]]
        new = len(first["final_ids"][0]) - len(prompts[0])
        observed: list[Commit] = []

        def observe(state: Any, commit: Commit, observed: list[Commit] = observed) -> None:
            observed.append(commit)

        out = paradec.generate(
            model, prompts, sampler=sampler, max_new_tokens=new, seed=first["seed"], callback=observe, **options
        )
        steps: list[tuple[list[int], dict[int, set[tuple[int, int]]], dict[int, dict[int, float]]]] = [
            (step.forwarded, defaultdict(set), scores_of(c)) for step, c in zip(out.trace.steps, observed, strict=True)
        ]
        for (_, commits, _), step in zip(steps, out.trace.steps, strict=True):
            for index, position, token, _ in step.commits:
                commits[index].add((position, token))
        for index, (number, row) in enumerate(members):
            case = cases[number]
            rows.append(
                Row(
                    where=f"{names[number]}, row {row}",
                    name=names[number],
                    trace=trace,
                    case=case,
                    prompt=len(prompts[index]),
                    ours=[Call(n[index], frozenset(commits[index])) for n, commits, _ in steps if n[index]],
                    theirs=[_their_call(step, row, trace["batch_size"]) for step in case["steps"]],
                    tokens=out.sequences[index].tolist(),
                    final=case["final_ids"][row],
                    nfe=out.row_nfe[index],
                    scores=[scores[index] for n, _, scores in steps if n[index]],
                    threshold=settings.get("threshold"),
                )
            )
    assert all(row.nfe == len(row.ours) for row in rows)
    return rows


def scores_of(commit: Commit) -> dict[int, dict[int, float]]:
    """Return row -> candidate position -> score, of one step."""
    scores_by_row: dict[int, dict[int, float]] = defaultdict(dict)
    if commit.scores is not None and commit.positions is not None:
        for row, positions, scores in zip(commit.rows.tolist(), commit.positions, commit.scores, strict=True):
            scores_by_row[row] = dict(zip(positions.tolist(), scores.tolist(), strict=True))
    return scores_by_row


def check_case(trace: dict, case: dict) -> None:
    """Assert that a case's sizes, counts and texts are consistent."""
    settings, extra = trace["settings"], case.get("extra") or {}
    begin, rows = len(case["prompt_ids"][0]), len(case["final_ids"])
    assert rows == len(case["prompt_ids"]) == trace["batch_size"]
    assert settings.get("gen_length") in (None, len(case["final_ids"][0]) - begin)
    assert case["nfe"] == len(case["steps"])
    for step in case["steps"]:
        if "fed" in step:
            assert step["input_shape"][1] == sum(stop - start for start, stop in step["fed"])
    for count in ("nfe_history", "num_forwards"):
        if count in extra:
            assert np.sum(extra[count]) == case["nfe"]
    if "nfe_returned" in extra and trace["method"] != "dpad":  # DPad's code counts differently
        # d3LLM counts its last loop iteration, which may have no forward
        assert 0 <= np.sum(extra["nfe_returned"]) - case["nfe"] <= bool(settings.get("early_stop"))
    if "block_history" in extra:
        assert_block_history(case, begin)
    if "trajectory_step_map" in extra and settings.get("method") == "static":
        committing = [{position for _, position, _ in step["commit"]} for step in case["steps"] if step["commit"]]
        numbers = {position: number for number, positions in enumerate(committing) for position in positions}
        assert extra["trajectory_step_map"] == [[numbers[begin + index] for index in range(len(numbers))]]
    if "returned" in extra:
        for final, returned in zip(case["final_ids"], extra["returned"], strict=True):
            without_ends = [[token for token in row if token != trace["eos_id"]] for row in (final, returned)]
            assert without_ends[0] == without_ends[1]
    assert_texts(trace, case)


def assert_block_history(case: dict, begin: int) -> None:
    """Assert that the calls of every adaptive block commit inside the block."""
    steps = iter(case["steps"])
    for length, calls in zip(case["extra"]["block_history"], case["extra"]["nfe_history"], strict=True):
        for step in itertools.islice(steps, calls):
            assert all(begin <= position < begin + length for _, position, _ in step["commit"])
        begin += length
    assert begin == len(case["final_ids"][0])


def _their_call(step: dict, row: int, batch: int) -> Call:
    calls, tokens = step["input_shape"]
    commits = frozenset((position, token) for index, position, token in step["commit"] if index == row)
    return Call(calls * tokens // batch, commits)


def assert_replayed(rows: list[Row], exact: bool = True) -> None:
    """Assert that tokens and counts of calls are the reference's; if `exact`, also commits and evaluated positions."""
    for case_rows in group_by_case(rows):
        with replay_rows(case_rows):
            for row in case_rows:
                if exact:
                    assert_calls(row.ours, row.theirs, row.where)
                assert row.tokens == row.final, row.where
                assert row.nfe == len(row.theirs), row.where


def assert_calls(ours: list[Call], theirs: list[Call], where: str) -> None:
    for number, (call, reference) in enumerate(zip(ours, theirs)):
        assert call.evaluated == reference.evaluated, f"{where}, call {number}"
        assert sorted(call.commits) == sorted(reference.commits), f"{where}, call {number}"
    assert len(ours) == len(theirs), where


def assert_batches_move_together(rows: list[Row], block_length: int, exact: bool = True) -> None:
    """Like `assert_replayed`, for references in which all rows of a batch open their next block together."""
    for case_rows in group_by_case(rows):
        with replay_rows(case_rows):
            for row in case_rows:
                if exact:
                    assert_calls(row.ours, row.decided, row.where)
                assert row.tokens == row.final, row.where
            lengths = ([len(calls) for calls in row.blocks(block_length)] for row in case_rows)
            assert sum(map(max, zip(*lengths, strict=True))) == case_rows[0].case["nfe"], case_rows[0].where


def insert_idle_calls(row: Row, block_length: int, dual: bool) -> list[Call]:
    """Return the row's calls with an idle call after each call that alone fills a block, as in some public code."""
    calls = []
    for block in row.blocks(block_length):
        calls += block
        if len(block) == 1:
            start = min(block[0].commits)[0]
            calls.append(Call(block_length if dual else len(row.final) - start, frozenset()))
    return calls


def force_first_position(sampler: MaskedSampler) -> MaskedSampler:
    """Return a copy of `sampler` whose first step in a block commits only its first candidate, as in public code."""

    class FirstPositionFirst(type(sampler)):  # type: ignore[misc]
        def quota(self, state: MaskedState, rows: Any) -> Any:
            return state.block_step[rows] == 0, super().quota(state, rows)

        def select(self, view: View) -> Tensor:
            opens, quota = view.quota
            first = view.candidates & (view.candidates.cumsum(-1) == 1)
            by_rule = super().select(dataclasses.replace(view, quota=quota))
            return torch.where(torch.as_tensor(opens).unsqueeze(1), first, by_rule)

    return FirstPositionFirst(**{field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)})


def restrict_to_top_k(sampler: MaskedSampler) -> tuple[MaskedSampler, dict[str, int]]:
    """Return a copy of `sampler` whose confidence is computed among the 50 most likely tokens, and a request for it."""

    class TopK(type(sampler)):  # type: ignore[misc]
        needs = dataclasses.replace(type(sampler).needs, score_from="sampled")

    settings = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
    return TopK(**settings), {"top_k": 50}


class PrefixWithoutLeftPosition(PrefixCache):
    """A prefix cache that skips the position left of the block, whose shifted logits predict its first token."""

    def partial(self, state: Any, chosen: Any, picks: Any, most: int) -> Any:
        start, stop = self.range(state, state.window.rows[chosen])
        return range_parts(state, chosen, start, stop, "window", most, self.shape_multiple)


class DualWithoutLeftPosition(PrefixWithoutLeftPosition, DualCache):
    """A dual cache that does not evaluate the position left of the block."""


def cache_without_left_position(dual: bool) -> PrefixCache:
    return DualWithoutLeftPosition() if dual else PrefixWithoutLeftPosition()


@dataclass(frozen=True)
class Forward:
    """One forward of a case of one row: evaluated positions and commits."""

    positions: frozenset[int]
    commits: frozenset[tuple[int, int]]
    scores: dict[int, float] = field(default_factory=dict, compare=False)
    """Position -> score: in paradec's calls for all candidates, in the reference's only for committed positions."""


def recorded_forwards(case: dict, block: int | None = None) -> list[Forward]:
    """Return the reference's forwards. block: block length; drops commits after the first commit's block (padding)."""
    forwards = []
    for step in case["steps"]:
        fed = {position for start, stop in step["fed"] for position in range(start, stop)}
        commits = {(position, token) for _, position, token in step["commit"]}
        if block is not None:
            prompt = len(case["prompt_ids"][0])
            block_end = prompt + ((min(commits)[0] - prompt) // block + 1) * block
            commits = {(position, token) for position, token in commits if position < block_end}
        scores = dict(zip((position for _, position, _ in step["commit"]), step.get("conf", ()), strict=False))
        forwards.append(Forward(frozenset(fed), frozenset(commits), scores))
    return forwards


def assert_confidences(ours: list[Forward], theirs: list[Forward]) -> None:
    """Assert that scores of committed tokens equal the reference's, which are computed from float32 logits."""
    for forward, reference in zip(ours, theirs):
        for position, _ in forward.commits:
            if reference.scores.get(position) is not None:
                assert abs(forward.scores[position] - reference.scores[position]) < 1e-4, f"position {position}"


def decode_forwards(model: Model, sampler: Any, case: dict, **request: Any) -> tuple[list[Forward], list[int]]:
    """Decode a case of one row with paradec; return the forwards and the final row."""
    (prompt,) = case["prompt_ids"]
    new = len(case["final_ids"][0]) - len(prompt)
    options = {"rng": "reference", "eos_early_stop": False, "seed": case["seed"]} | request
    state, forwards = sampler.start(model, [prompt], max_new_tokens=new, **options), []
    with torch.inference_mode():
        while not state.done:
            proposal = sampler.step(model, state)
            (query,) = proposal.cost.queries
            commit = sampler.commit(state, proposal)
            chosen = commit.selected[0]
            pairs = zip(commit.positions[0, chosen].tolist(), commit.values[0, chosen].tolist(), strict=True)
            scores = scores_of(commit)[0]
            forwards.append(Forward(frozenset(query.positions[0].tolist()), frozenset(pairs), scores))
    return forwards, state.canvas[0].tolist()


HOSTILE = (
    "</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>", "<!--<script>", "@DATA@",
    "@TITLE@", "&lt;b&gt;", "\u2028\u2029", "\ud800", "${window.hacked = 1}", '"};window.hacked = 1;//',
)  # fmt: skip
SCRIPTS = ("שלום", "مرحبا", "👩‍👩‍👧", "日本", "e\u0301", "\n", " ", "\t", "naïve")


def hostile_trace() -> Trace:
    """A trace whose tokens, settings and rule names must be escaped in HTML."""
    settings = {"sampler": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}
    trace = Trace([[0, 1, *[99] * len(HOSTILE)]], settings, family="masked", mask_id=99)
    trace.texts = dict(enumerate(HOSTILE))
    for token in range(len(HOSTILE)):
        notes = Notes([1], [[(0, 12)]], [(2, 12)], rules={(0, token + 2): HOSTILE[token % 2]})
        trace.add([(0, token + 2, token, 0.5)], [12], HOSTILE[0], notes, 0.001)
    trace.images = ["javascript:window.hacked=1"]
    return trace


def scripts_trace() -> Trace:
    """A trace of mostly right-to-left text with emoji and invisible characters. The last character has two ids."""
    texts = [*SCRIPTS, "\ufffd", "\ufffd", "<mask>"]
    ids = [0, 1, 0, 1, *range(2, len(SCRIPTS)), 9, 10]
    trace = Trace([[0, 1, *[11] * len(ids)]], {"sampler": "by hand"}, family="masked", mask_id=11)
    trace.texts, trace.special = dict(enumerate(texts)), [11]
    for step, token in enumerate(ids):
        trace.add([(0, step + 2, token, 1.0)], [len(ids) + 2], "full", Notes([1]), 0.001)
    trace.joined = [[(len(ids), len(ids) + 2, "🦊")]]
    return trace
