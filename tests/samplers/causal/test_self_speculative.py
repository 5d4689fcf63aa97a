"""Self-speculation: recorded runs of Nemotron-Labs-Diffusion and SDAR; equality with token-by-token decoding.

The recordings are in `tests/golden/autumn`."""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.causal import blocks_of_one, next_token
from places import GOLDEN
from recorded import find_checkpoint, golden, is_packaged, read_json, read_json_unrecorded, replay_with_margin
from small_models import END, MASK, VOCAB, tiny
from structured import add_letter_tokenizer, assert_constrained_decoding
from torch import Tensor

import paradec
from paradec.models.base import Model
from paradec.models.self_drafting import SelfDrafting
from paradec.samplers.causal.self_speculative import SelfSpeculative

PROMPTS = [[3, 1, 2, 5], [4], [2, 6, 1, 7, 9, 8, 3, 3, 5]]
pytestmark = pytest.mark.filterwarnings("ignore:seed=")


@functools.cache
def load_model(folder: Path, **options: Any) -> Model:
    return paradec.load(folder, dtype="float64", **options)


@functools.cache
def causal(seed: int = 0) -> Model:
    """A random causal model with a mask token."""
    torch.manual_seed(seed)
    facts = {"topology": "causal", "prediction": "shifted", "eos_token_id": END, "mask_token_id": MASK}
    model = paradec.wrap(tiny(2).unwrap(), **facts)
    model.self_drafting = SelfDrafting(4)
    return model


class RecordedUniform:
    """Replacement for `state.uniform` that returns the reference's numbers in the order in which it used them."""

    def __init__(self, state: Any, numbers: list[float], rule: str):
        self.state, self.numbers, self.rule, self.used = state, numbers, rule, 0

    def __call__(self, rows: Any, positions: Tensor, count: int, stream: int, ahead: Any = None) -> Tensor:
        width = positions.shape[1]
        unused = torch.tensor([*self.numbers[self.used :], *[0.5] * (width + 3)], dtype=torch.float64)
        if count == 1:  # for drafts; with the match rule, the last committed token also used a number
            skipped = int(self.rule == "match")
            self.used += width + skipped
            return unused[skipped : skipped + width].view(1, -1, 1)
        # numbers for fresh tokens, acceptance and residuals: the reference takes the next number for each use
        return torch.stack((unused[:width], unused[:width], unused[1 : width + 1]), 1)[None]

    def advance(self, count: int) -> None:
        """Advance after a step that committed `count` tokens."""
        drafts = int(self.drafted)
        if self.rule == "match":
            self.used += drafts + 1
        else:
            self.used += count if count > drafts else count + 1


def recorded_runs(mode: str) -> list[Any]:
    parameters = []
    for path in sorted(golden("autumn").glob("nld/traces/*.json")):
        if read_json_unrecorded(path)["mode"] == mode:
            parameters.append(pytest.param(path, id=path.stem))
    return parameters


@pytest.mark.thinned
@pytest.mark.parametrize("path", recorded_runs("spec"))
def test_recorded_rounds(path: Path) -> None:
    trace = read_json(path)
    settings = trace["settings"]
    threshold = settings.get("threshold") or None
    rule = settings.get("rule", "ratio") if threshold is None else "match"
    for topology in (None, "causal"):
        model = load_model(find_checkpoint(trace["model"], "autumn"), topology=topology)
        for number, case in enumerate(trace["cases"]):
            with replay_with_margin(f"{path.stem}, case {number}", case):
                has_adapter = settings.get("adapter", True)
                sampler = SelfSpeculative(settings["block"], rule=rule, threshold=threshold, adapter=has_adapter)
                new, begin = case["max_new_tokens"], len(case["prompt_ids"])
                ends = settings.get("eos", 0) is not None
                request = {"temperature": settings["temperature"], "eos_early_stop": ends}
                state = sampler.start(model, [case["prompt_ids"]], max_new_tokens=new, **request)
                uniform = None
                if "uniforms" in case:
                    uniform = RecordedUniform(state, case["uniforms"], rule)
                    state.uniform = uniform  # type: ignore[method-assign]
                    state.allowed = None  # the published loop keeps the mask's probability
                rounds, calls = [], 0
                while not state.done:
                    drafts = state.memory.read(state.rows)["drafts"][0, : int(state.num_drafts[0])].tolist()
                    rounds.append((drafts, int(state.committed[0])))
                    if uniform is not None:
                        uniform.drafted = int(state.num_drafts[0])
                    proposal = sampler.step(model, state)
                    if uniform is not None:  # count used numbers before the next drafts are drawn
                        draft = sampler.draft_window

                        def count_numbers(state: Any, *args: Any, draft: Any = draft, uniform: Any = uniform) -> None:
                            uniform.advance(int(state.accepted[-1][0]))
                            draft(state, *args)

                        object.__setattr__(sampler, "draft_window", count_numbers)
                    sampler.commit(state, proposal)
                    if uniform is not None:
                        object.__delattr__(sampler, "draft_window")
                    calls += 1
                answer = state.canvas[0, begin : int(state.end[0])].tolist()
                # near the end paradec's windows are shorter, which shifts the use of random numbers
                num_compared = new
                if uniform is not None:
                    starts = [start for _, start in rounds if begin + new - start >= sampler.window]
                    num_compared = max(starts) - begin
                assert answer[:num_compared] == case["tokens"][:new][:num_compared]
                num_committed = [int(step[0]) for step in state.accepted]
                if uniform is not None:
                    rounds = [(drafts, start) for drafts, start in rounds if start <= begin + num_compared]
                    num_committed = num_committed[: len(rounds)]
                for (drafts, committed), theirs in zip(rounds[1:], case["rounds"], strict=False):
                    assert committed - 1 == theirs["start"]
                    assert drafts == theirs["block"][1:] or not drafts
                recorded = [1, *(entry["accepted"] + 1 for entry in case["rounds"])]
                assert num_committed[:-1] == recorded[: len(num_committed) - 1] and len(num_committed) <= len(recorded)
                if uniform is None and drafts:
                    assert state.draft_nfe[0] == sum(entry["drafts"] for entry in case["rounds"][: calls - 1])
                expected = [[0, begin, 1, 1, 0]]
                for entry in case["rounds"]:
                    start, width = entry["start"], len(entry["block"])
                    expected += [[start, width, 0, 0, int(has_adapter)]] * entry["drafts"] + [[start, width, 1, 1, 0]]
                assert case["calls"] == expected and case["forwards"] == len(expected)
                round_tokens = [token for entry in case["rounds"] for token in entry["tokens"]]
                assert round_tokens[: len(case["tokens"]) - 1] == case["tokens"][1:]
                if "ar_tokens" in case:
                    equals_ar = case["ar_tokens"][:new] == case["tokens"][: min(new, len(case["ar_tokens"]))]
                    assert case["equals_ar"] == equals_ar


def greedy_files() -> list[Any]:
    files = sorted(golden("autumn").glob("s2d2/*.json"))
    paths = [path for path in files if any("block1_tokens" in case for case in read_json_unrecorded(path)["cases"])]
    marks = [(pytest.mark.full,) if index % 2 == 0 else () for index in range(len(paths))]
    return [pytest.param(path, id=path.stem, marks=mark) for path, mark in zip(paths, marks, strict=True)]


@pytest.mark.parametrize("path", greedy_files())
def test_sdar_decodes_as_in_blocks_of_one(path: Path) -> None:
    trace = read_json(path)
    folder = find_checkpoint(trace["model"], "autumn")
    model = load_model(folder, block_length=trace["settings"]["block_length"], mask_token_id=trace["mask_id"])
    stops, num_accepted = set(trace["stop_ids"]), 0
    for number, case in enumerate(trace["cases"]):
        with replay_with_margin(f"{path.stem}, case {number}", case):
            request = {"temperature": 0, "max_new_tokens": case["max_new_tokens"], "eos_early_stop": False}
            out = paradec.generate(model, [case["prompt_ids"]], sampler="self_speculative", **request)
            expected = case["block1_tokens"]
            assert out.new_tokens[0, : len(expected)].tolist() == expected
            assert len(expected) == case["max_new_tokens"] or expected[-1] in stops
            tokens, round_tokens = case["tokens"], [token for entry in case["rounds"] for token in entry["tokens"]]
            assert round_tokens[: len(tokens)] == tokens and tokens[: len(expected)] == expected
            assert case["calls"] == 1 + 3 * len(case["rounds"])
            starts = [entry["start"] - case["rounds"][0]["start"] for entry in case["rounds"]]
            lengths = [len(entry["tokens"]) for entry in case["rounds"]]
            assert starts == [sum(lengths[:index]) for index in range(len(lengths))]
            for entry in case["rounds"]:
                count = entry["accepted"]
                assert entry["tokens"][:count] == entry["drafts"][:count] and len(entry["tokens"]) <= count + 1
            num_accepted += case["max_new_tokens"] - out.nfe
    assert num_accepted or not is_packaged("autumn")


MODELS: dict[str, Any] = {"causal": causal, "same": lambda: tiny(2, "block_causal")}
MODELS["shifted"] = lambda: tiny(2, "block_causal", "shifted")


@pytest.mark.thinned
@pytest.mark.parametrize("count", [12, pytest.param(170, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens_equal_those_of_token_by_token_decoding(kind: str, count: int) -> None:
    model, draw = MODELS[kind](), random.Random(count)
    assert model.pads and model.supports_store
    token_ids = [token for token in range(VOCAB) if token not in (MASK, END)]
    num_accepted = 0
    for number in range(count):
        rows = [draw.choices(token_ids, k=draw.randint(1, 9)) for _ in range(draw.randint(1, 3))]
        new, threshold = draw.randint(1, 12), draw.choice((None, 0.1, 0.5))
        rule = "match" if threshold is not None else draw.choice(("ratio", "match"))
        sampler = SelfSpeculative(draw.choice((None, 1, 2, 5)), rule=rule, threshold=threshold)
        request = {"temperature": 0, "max_new_tokens": new, "eos_early_stop": False}
        out = paradec.generate(model, rows, sampler=sampler, **request)
        assert out.new_tokens.tolist() == [blocks_of_one(model, row, new) for row in rows], (number, sampler)
        num_accepted += sum(new - nfe for nfe in out.row_nfe)
    assert num_accepted > 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "settings", [{}, {"rule": "match"}, {"rule": "match", "threshold": 0.2}, {"window": 2}], ids=str
)
@pytest.mark.full
def test_answers_have_the_distribution_of_token_by_token_decoding(kind: str, settings: dict[str, Any]) -> None:
    model, rows, temperature = MODELS[kind](), 6000, 0.6
    suppressed = [token for token in range(VOCAB) if token not in (1, 2, 3, 5)]
    request = {"temperature": temperature, "max_new_tokens": 3, "suppress_tokens": suppressed, "eos_early_stop": False}
    out = paradec.generate(model, [PROMPTS[0]] * rows, sampler=SelfSpeculative(**settings), seed=1, **request)
    counts = np.zeros((4, 4))
    ids = [1, 2, 3, 5]
    for first, second in out.new_tokens[:, :2].tolist():
        counts[ids.index(first), ids.index(second)] += 1
    expected = np.zeros((4, 4))
    p_first = next_token(model, PROMPTS[0], ids, temperature)
    for index, token in enumerate(ids):
        expected[index] = p_first[index] * next_token(model, [*PROMPTS[0], token], ids, temperature)
    from scipy import stats

    assert stats.chisquare(counts.ravel(), expected.ravel() * rows).pvalue > 1e-3


def test_the_adapter_changes_only_the_drafts() -> None:
    folder = next(iter(sorted(path.parent for path in (GOLDEN / "autumn" / "nld").glob("*/config.json"))))
    model = load_model(folder)
    before = {name: weight.clone() for name, weight in model.module.named_parameters()}
    prompt = [token for token in range(20, 30) if token != model.facts.mask_id]
    canvases, drafts = [], []
    for adapter in (True, False):
        state = SelfSpeculative(adapter=adapter).start(model, [prompt], max_new_tokens=20, temperature=0)
        sampler, draft_steps = SelfSpeculative(adapter=adapter), []
        while not state.done:
            sampler.commit(state, sampler.step(model, state))
            draft_steps.append(state.memory["drafts"].tolist())
        canvases.append(state.canvas.tolist())
        drafts.append(draft_steps)
    assert canvases[0] == canvases[1]
    assert drafts[0] != drafts[1]
    assert all(torch.equal(before[name], weight) for name, weight in model.module.named_parameters())
    assert not any(part._forward_hooks for name, part in model.module.named_modules() if name.endswith("o_proj"))


@pytest.mark.thinned
@pytest.mark.parametrize("settings", [{}, {"rule": "match", "threshold": 0.5}])
def test_constrained_answers_have_the_distribution_of_token_by_token_decoding(settings: dict[str, Any]) -> None:
    model = add_letter_tokenizer(causal(42), 20)
    sampler = paradec.samplers.create("self_speculative", window=4, **settings)
    assert max(assert_constrained_decoding(sampler, model, "(a|bx)yz[cd](efg)?", 9, 400).row_nfe) < 9
