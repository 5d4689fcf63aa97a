"""Reading the traces of the public reference implementations, and comparing ours with them, call for call.

A folder `golden/traces/<method>` holds one file a setting. Tests take what they find there, and every setting, id and
model's name from the file itself, so that other traces of the same form can take their place: PARADEC_TRACES names
another folder of them. Checkpoints are looked for in it, beside it, and in tests/golden.

The models are float64 by default: float32 leaves positions that are equally sure to the last bits, which differ between
processors. `fp64_same` says of a case that the reference did the same in float64; the others hang on a near-tie of
float32, and are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from places import GOLDEN, golden
from torch import Tensor

import paradec
from paradec import samplers
from paradec.caches.dual import DualCache
from paradec.caches.parts import spans
from paradec.caches.prefix import PrefixCache
from paradec.core.protocol import Sampler
from paradec.models.adapter import Model
from paradec.samplers.masked.base import MaskedSampler, View
from paradec.samplers.masked.state import MaskedState

TRACES = golden("traces") / "traces" if (golden("traces") / "traces").is_dir() else golden("traces")

PRECISIONS = ["float64", pytest.param("float32", marks=pytest.mark.full)]
"""What the replays of all files are run in. In float32, near-ties decide which of equally sure positions is first."""


def load_trace(name: str) -> dict:
    """A trace file by "method/setting"."""
    return json.loads((TRACES / f"{name}.json").read_text())


@functools.cache
def models_of_methods() -> dict[str, set[str]]:
    """The names of the checkpoints that each folder of traces was recorded on."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in TRACES.glob("*/*.json"):
        trace = json.loads(path.read_text())
        if "cases" in trace:
            found[path.parent.name].add(trace["model"])
    return found


def trace_names(*methods: str) -> list[str]:
    """All "method/setting" names of the given methods."""
    return sorted(f"{m}/{p.stem}" for m in methods for p in (TRACES / m).glob("*.json"))


def checkpoint(name: str) -> Path:
    """The folder of a trace's model."""
    folders = [TRACES / name, TRACES.parent / name, *sorted(TRACES.parent.glob(f"*/{name}")), GOLDEN / name]
    return next((folder for folder in folders if (folder / "config.json").is_file()), folders[-1])


@functools.cache
def loaded(folder: Path, dtype: str) -> Model:
    """A model that tests share."""
    return paradec.load(folder, dtype=dtype)


def which(*numbers: int) -> list[Any]:
    """Parameters of a test: which cases of a file, of one with fewer others; and, marked `full`, all (None)."""
    return [pytest.param(numbers, id="some"), pytest.param(None, id="all", marks=pytest.mark.full)]


def some_cases(trace: dict, numbers: Sequence[int] | None) -> list[dict]:
    """These cases of a trace, or all, of those that are the same in float64."""
    cases = cases_of(trace)
    return cases if numbers is None else [cases[at] for at in sorted({number % len(cases) for number in numbers})]


def often(names: Iterable[str], together: int = 2, load: Callable[[str], dict] = load_trace) -> list[str]:
    """So many of the traces that every two values of settings that stand together anywhere do so in one of them
    (`together=1`: that every value is in one). Model, batch size and public code count as settings.

    Taken greedily: what adds most for its forwards comes first.
    """
    wanted, forwards = {}, {}
    for name in names:
        trace = load(name)
        settings = trace["settings"] | {f"trace's {key}": trace.get(key) for key in ("model", "batch_size", "method")}
        values = sorted((key, json.dumps(value)) for key, value in settings.items())
        wanted[name] = set(itertools.combinations(values, together))
        forwards[name] = sum(len(case["steps"]) for case in trace["cases"])
    left = set().union(*wanted.values())
    found = []
    while left:
        most = max(wanted, key=lambda name: len(wanted[name] & left) / forwards[name])
        found.append(most)
        left -= wanted[most]
    return sorted(found)


def others_are_full(names: Iterable[str], together: int = 2, load: Callable[[str], dict] = load_trace) -> list[Any]:
    """Parameters of a test: all names, marked `full` but for those that are replayed `often`."""
    names = list(names)
    kept = often(names, together, load)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.full) for name in names]


def model_of(trace: dict, precision: str = "float64") -> Model:
    """The model of a trace, which tests share."""
    return loaded(checkpoint(trace["model"]), precision)


def text_of(trace: dict, answer: list[int]) -> str:
    """What an answer reads as, up to its end."""
    strings = json.loads((checkpoint(trace["model"]) / "tokenizer_table.json").read_text())["table"]
    tokens = [*answer, trace["eos_id"]]
    return "".join(strings[token] for token in tokens[: tokens.index(trace["eos_id"])])


def cache_of(trace: dict) -> str:
    """The cache of a trace of Fast-dLLM or AdaBlock: "none", "prefix" or "dual"."""
    settings = trace["settings"]
    function = settings.get("function", "")
    if "dual_cache" in settings:
        # Fast-dLLM's code for blocks of Dream always has a cache, AdaBlock's a dual one or none
        other = "prefix" if trace["method"] == "fastdllm-dream" else "none"
        return "dual" if settings["dual_cache"] else other
    return next((cache for cache in ("prefix", "dual") if f"{cache}_cache" in function), "none")


def request_of(trace: dict) -> tuple[Sampler, dict]:
    """Our sampler and request, its cache included, for the settings of a trace of LLaDA, Dream, Fast-dLLM (both of its
    versions) or AdaBlock."""
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
        carries = "carry" if cache == "none" else "none"
        return create("threshold", threshold=settings["threshold"], quota_per_step=carries), request
    extra = {} if settings["alg"] == "origin" else {"alg_temp": settings["alg_temp"]}
    return create(settings["alg"], eps=settings["eps"], **extra), request | {"steps": settings["steps"]}


# ---- one row of a case, ours beside theirs --------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What one forward was, for one row."""

    evaluated: int
    """Positions, those of guidance's second branch and of drafts included."""
    commits: frozenset[tuple[int, int]]
    """(position, token) that it made final."""


@dataclass
class Row:
    """One row of a case. Calls in which it had no part are left out of ours."""

    where: str
    case: dict
    prompt: int
    """Length of its prompt."""
    ours: list[Call]
    theirs: list[Call]
    tokens: list[int]
    final: list[int]
    nfe: int

    @property
    def decided(self) -> list[Call]:
        """Their calls that committed something."""
        return [call for call in self.theirs if call.commits]

    def blocks(self, length: int) -> list[list[Call]]:
        """Our calls by the block of `length` positions that they worked on; each must have committed something."""
        found: dict[int, list[Call]] = defaultdict(list)
        for call in self.ours:
            found[(min(call.commits)[0] - self.prompt) // length].append(call)
        return [found[block] for block in sorted(found)]


def cases_of(trace: dict) -> list[dict]:
    """The cases that are the same in float64; skips the test where a file has none."""
    cases = [case for case in trace["cases"] if case.get("fp64_same")]
    if not cases:
        pytest.skip("all cases of this file hang on near-ties of float32")
    return cases


def draws(settings: dict) -> bool:
    """Whether the reference drew random numbers, for tokens or for the order of positions."""
    by_chance = settings.get("remasking") == "random" or settings.get("alg") == "origin"
    return bool(by_chance or settings.get("temperature") or settings.get("alg_temp"))


def decode(
    model: Model, trace: dict, sampler: Sampler, cases: list[dict] | None = None, alone: bool = False, **request: Any
) -> list[Row]:
    """Decode the prompts of a trace's cases, and lay each row beside the reference's.

    A row does not depend on its neighbours in float64, so those of one length that draw nothing share a batch; with
    `alone` a case has its own, as the reference had it.
    """
    cases = cases_of(trace) if cases is None else cases
    batches: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for number, case in enumerate(cases):
        for row, prompt in enumerate(case["prompt_ids"]):
            key = number if alone or draws(trace["settings"]) else len(prompt)
            batches[key].append((number, row))
    options: dict[str, Any] = {"rng": "reference", "eos_early_stop": False, "trace": True} | request
    found = []
    for members in batches.values():
        prompts = [cases[number]["prompt_ids"][row] for number, row in members]
        first = cases[members[0][0]]
        new = len(first["final_ids"][0]) - len(prompts[0])
        out = paradec.generate(model, prompts, sampler=sampler, max_new_tokens=new, seed=first["seed"], **options)
        steps = [(step.forwarded, defaultdict(set)) for step in out.trace.steps]
        for (_, commits), step in zip(steps, out.trace.steps, strict=True):
            for index, position, token, _ in step.commits:
                commits[index].add((position, token))
        for index, (number, row) in enumerate(members):
            case = cases[number]
            found.append(
                Row(
                    where=f"{trace['method']}/{trace['setting']}, case {number}, row {row}",
                    case=case,
                    prompt=len(prompts[index]),
                    ours=[Call(n[index], frozenset(commits[index])) for n, commits in steps if n[index]],
                    theirs=[_their_call(step, row, trace["batch_size"]) for step in case["steps"]],
                    tokens=out.sequences[index].tolist(),
                    final=case["final_ids"][row],
                    nfe=out.row_nfe[index],
                )
            )
    assert all(row.nfe == len(row.ours) for row in found)
    return found


def _their_call(step: dict, row: int, batch: int) -> Call:
    calls, tokens = step["input_shape"]
    commits = frozenset((position, token) for at, position, token in step["commit"] if at == row)
    return Call(calls * tokens // batch, commits)


def assert_replayed(rows: list[Row], exact: bool = True) -> None:
    """Final tokens and the number of calls are the reference's; `exact`: so is what every call evaluated and wrote."""
    for row in rows:
        assert row.tokens == row.final, row.where
        assert row.nfe == len(row.theirs), row.where
        if exact:
            assert_calls(row.ours, row.theirs, row.where)


def assert_calls(ours: list[Call], theirs: list[Call], where: str) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs)):
        assert one.evaluated == other.evaluated, f"{where}, call {number}"
        assert sorted(one.commits) == sorted(other.commits), f"{where}, call {number}"
    assert len(ours) == len(theirs), where


def assert_batches_move_together(rows: list[Row], block_length: int, exact: bool = True) -> None:
    """As `assert_replayed`, for references whose rows open their next block together: a row that has filled its block
    is in the calls until the others have, and commits nothing. Ours move on alone."""
    cases: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        assert row.tokens == row.final, row.where
        if exact:
            assert_calls(row.ours, row.decided, row.where)
        cases[id(row.case)].append(row)
    for together in cases.values():
        lengths = ([len(calls) for calls in row.blocks(block_length)] for row in together)
        assert sum(map(max, zip(*lengths, strict=True))) == together[0].case["nfe"], together[0].where


def with_idle_calls(row: Row, block_length: int, dual: bool) -> list[Call]:
    """Our calls as code makes them that looks what is left only after a second call: where the first one fills a block,
    that one has nothing to commit."""
    calls = []
    for block in row.blocks(block_length):
        calls += block
        if len(block) == 1:
            start = min(block[0].commits)[0]
            calls.append(Call(block_length if dual else len(row.final) - start, frozenset()))
    return calls


# ---- what the references do and ours does not -----------------------------------------------------------------------


def forced_first(sampler: MaskedSampler) -> MaskedSampler:
    """`sampler`, but that its first step in a block commits the block's first position, however unsure, and no other:
    what cached decoders of shifted models do in the public code, since their later calls have no logits for it."""

    class Forced(type(sampler)):  # type: ignore[misc]
        def quota(self, state: MaskedState, rows: Any) -> Any:
            return state.block_step[rows] == 0, super().quota(state, rows)

        def select(self, view: View) -> Tensor:
            opens, quota = view.quota
            first = view.candidates & (view.candidates.cumsum(-1) == 1)
            usual = super().select(dataclasses.replace(view, quota=quota))
            return torch.where(torch.as_tensor(opens).unsqueeze(1), first, usual)

    return Forced(**{field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)})


def of_the_likeliest(sampler: MaskedSampler) -> tuple[MaskedSampler, dict[str, int]]:
    """`sampler` and what else to ask for, as newer codes for Dream run on the defaults of transformers' generation
    config: probabilities are those among the 50 likeliest tokens, greedy or not."""

    class OfTheLikeliest(type(sampler)):  # type: ignore[misc]
        needs = dataclasses.replace(type(sampler).needs, score_from="sampled")

    settings = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
    return OfTheLikeliest(**settings), {"top_k": 50}


class WithoutLeft(PrefixCache):
    """`prefix`, but that calls within a block of a shifted model do not evaluate the position left of it: the block's
    first token must have been committed before."""

    def partial(self, state: Any, chosen: Any, picks: Any, most: int) -> Any:
        rows = state.window.rows[chosen]
        start, stop = self.range(state, rows)
        return spans(state, chosen, start, stop, "window", most, self.shape_multiple)


class WithoutLeftDual(WithoutLeft, DualCache):
    """The same of `dual`."""


def cache_without_left(dual: bool) -> PrefixCache:
    return WithoutLeftDual() if dual else WithoutLeft()


# ---- the positions themselves ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fed:
    """One forward of a case of one row: which positions it evaluated, and what it made final."""

    positions: frozenset[int]
    commits: frozenset[tuple[int, int]]


def their_feeds(case: dict, block: int | None = None) -> list[Fed]:
    """The reference's, of a trace that says `fed`. block: positions of a block, where what was written after the open
    one is to be left out (it fills rows up after an end token)."""
    found = []
    for step in case["steps"]:
        fed = {position for start, stop in step["fed"] for position in range(start, stop)}
        commits = {(at, token) for _, at, token in step["commit"]}
        if block is not None:
            prompt = len(case["prompt_ids"][0])
            last = prompt + ((min(commits)[0] - prompt) // block + 1) * block
            commits = {(at, token) for at, token in commits if at < last}
        found.append(Fed(frozenset(fed), frozenset(commits)))
    return found


def our_feeds(model: Model, sampler: Any, case: dict, **request: Any) -> tuple[list[Fed], list[int]]:
    """Ours of the same case, and the final row."""
    (prompt,) = case["prompt_ids"]
    new = len(case["final_ids"][0]) - len(prompt)
    options = {"rng": "reference", "eos_early_stop": False, "seed": case["seed"]} | request
    state, found = sampler.start(model, [prompt], max_new_tokens=new, **options), []
    with torch.inference_mode():
        while not state.done:
            proposal = sampler.step(model, state)
            (query,) = proposal.cost.queries
            commit = sampler.commit(state, proposal)
            chosen = commit.selected[0]
            written = zip(commit.positions[0, chosen].tolist(), commit.values[0, chosen].tolist(), strict=True)
            found.append(Fed(frozenset(query.positions[0].tolist()), frozenset(written)))
    return found, state.canvas[0].tolist()
