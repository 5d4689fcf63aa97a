"""Drafting methods: prompt lookup, n-gram pools, token recycling, and rules that stop a draft early."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from drafters import NEGATIVE, VOCAB, TableModel, decode_answers, exactness, tiny_base
from drafters import PROMPTS as TEXTS
from images import tiny_llamagen
from places import GOLDEN
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import paradec
from paradec.cli.work import load_draft_model
from paradec.samplers.causal.drafts.stopping import Unconfident, Unsure
from paradec.samplers.causal.drafts.text import PromptLookup, TokenRecycling, look_up
from paradec.samplers.causal.jacobi import Jacobi, find_longest_path, make_pool_layout
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.speculative import Speculative
from paradec.samplers.causal.trees import parse_tree

PROMPTS = [[3, 1, 4, 1, 0, 3, 1], [2, 2], [4], [0, 3, 1, 3, 2, 4, 2, 0, 3]]
"""Prompts of different lengths; some contain repetitions, which prompt lookup needs."""


def lookup_sampler(count: int = 5, size: int = 2) -> Speculative:
    return paradec.samplers.create("speculative", drafter=PromptLookup(count, size))


class Suppress:
    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.tokens] = -torch.inf
        return scores


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("ends", "forbidden"), [([], []), ([3], []), ([3, 0], [1])])
def test_drafts_of_prompt_lookup_equal_transformers_candidates(size: int, ends: Any, forbidden: Any) -> None:
    generator = torch.Generator().manual_seed(size)
    length = torch.randint(1, 24, (200, 1), generator=generator)
    tokens = torch.randint(0, 5, (200, 24), generator=generator)
    usable = ~torch.isin(tokens, torch.tensor(forbidden, dtype=torch.int64))
    drafts, count = look_up(tokens, length, usable, torch.tensor(ends, dtype=torch.int64), size, 6)
    processor: Any = Suppress(forbidden)
    settings = {"num_output_tokens": 6, "max_matching_ngram_size": size, "max_length": 100, "vocab_size": 5}
    eos_token_id = torch.tensor(ends) if ends else None
    theirs = PromptLookupCandidateGenerator(eos_token_id=eos_token_id, logits_processor=processor, **settings)
    for row in range(200):
        ids = tokens[row : row + 1, : int(length[row])]
        expected = theirs.get_candidates(ids)[0][0, ids.shape[1] :].tolist()
        assert drafts[row, : count[row]].tolist() == expected and not drafts[row, count[row] :].any()
    assert 0 < int((count == 0).sum()) < 150 and int((count > 1).sum()) > 20


def test_tokens_and_forwards_of_prompt_lookup_equal_those_of_transformers() -> None:
    base, calls = tiny_base(), []
    hook = base.module.model.register_forward_pre_hook(lambda *_: calls.append(0))
    saved = 0
    for prompt in PROMPTS:
        calls.clear()
        settings = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2, "do_sample": False}
        ids = torch.tensor([prompt])
        expected = base.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, **settings)
        count = len(calls)
        out = paradec.generate(base, [prompt], sampler=lookup_sampler(), max_new_tokens=20, temperature=0)
        assert out.new_tokens[0].tolist() == expected[0, len(prompt) :].tolist() and out.nfe == count
        saved += 20 - count
    hook.remove()
    assert saved > 8


@pytest.mark.parametrize("request_name", ["temperature 1", "all"])
def test_answers_have_the_model_s_distribution(request_name: str) -> None:
    model = exactness.TableModel.random(5, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "PROMPTS", ([2, 0, 2, 0], [4, 1, 3, 1, 4, 1]))
        result = exactness.test_case(lookup_sampler(3), model, 4000, seed=5, **exactness.REQUESTS[request_name])
    assert min(result["p_values"]) > 0.01 / 4 and result["nfe"] < 4


def test_suppressed_tokens_and_ids_outside_the_vocabulary_are_not_drafted() -> None:
    base = tiny_base()
    request = {"max_new_tokens": 12, "suppress_tokens": (1,), "temperature": 0}
    out = paradec.generate(base, PROMPTS, sampler=lookup_sampler(), **request)
    plain = paradec.generate(base, PROMPTS, sampler=paradec.samplers.create("sjd", window=1), **request)
    assert out.new_tokens.tolist() == plain.new_tokens.tolist()
    state = lookup_sampler().start(base, [[VOCAB - 1, 0, VOCAB - 1, 0]], max_new_tokens=6)
    state.canvas[0, [0, 2]] = VOCAB + 3
    PromptLookup(5, 1).fill(state, np.arange(1))
    assert state.num_drafts.tolist() == [0]  # the id after the matching 0 is outside the vocabulary


def test_find_longest_path_equals_a_plain_loop() -> None:
    """Compare, on random drafts and sampled tokens, with a walk from the root along every branch."""
    generator, tree, width = torch.Generator().manual_seed(0), make_pool_layout(5, 3, 2), 5
    drafts = torch.randint(-1, 3, (300, 11), generator=generator)
    tokens = torch.randint(0, 3, (300, 11), generator=generator)
    depth, node = find_longest_path(tree, drafts, tokens)
    paths = [[0, *range(1, width)], *([0, node_index, node_index + 1] for node_index in (5, 7, 9))]
    lengths = set()
    for row in range(300):
        walks = []
        for path in paths:
            accepted = 0
            while accepted + 1 < len(path) and drafts[row, path[accepted + 1]] == tokens[row, path[accepted]]:
                accepted += 1
            walks.append(path[: accepted + 1])
        best = max(walks, key=len)
        assert int(depth[row]) == len(best) - 1 and node[row].tolist() == [*best, *range(len(best), width)]
        lengths.add((len(best), best[-1] >= width))
    assert {(2, True), (3, True), (4, False)} <= lengths


@pytest.mark.thinned
@pytest.mark.parametrize(
    "request_", [{"temperature": 0}, {"temperature": 0.8, "top_k": 3}, {"guidance_scale": 1.7, "logprobs": 2}]
)
@pytest.mark.parametrize("settings", [{"pool": 1, "ngram": 2}, {"pool": 4, "ngram": 4, "pool_size": 8}])
def test_an_ngram_pool_changes_no_token_and_saves_forwards(settings: dict[str, Any], request_: dict[str, Any]) -> None:
    base = tiny_base()
    request = {"max_new_tokens": 24, "seed": 3} | request_
    request |= {"negative_prompt": NEGATIVE} if "guidance_scale" in request_ else {}
    expected, alone = decode_answers(Jacobi(window=6), base, TEXTS, **request)
    tokens, state = decode_answers(Jacobi(window=6, **settings), base, TEXTS, **request)
    assert tokens == expected and state.nfe.sum() < alone.nfe.sum()
    if state.logprobs is not None:
        for name in ("chosen", "best"):
            values, expected_values = (getattr(run.logprobs, name) for run in (state, alone))
            torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-9, equal_nan=True)


def test_answers_with_a_pool_have_the_model_s_distribution() -> None:
    model = exactness.TableModel.random(3, seed=4, sharpness=2.0)
    result = exactness.test_case(Jacobi(window=3, pool=2, ngram=3, pool_size=6), model, 3000, seed=1, new=6)
    assert min(result["p_values"]) > 0.01 / 2 and result["nfe"] < 6


@pytest.mark.full
def test_images_with_a_pool_are_the_same_in_fewer_forwards() -> None:
    model = paradec.load("digits-ar")
    request = {"class_labels": range(10), "seed": 77, "output_type": "latent"}
    alone = paradec.generate_images(model, sampler=Jacobi(), **request)
    pooled = paradec.generate_images(model, sampler=Jacobi(pool=4), **request)
    assert (pooled.tokens != alone.tokens).sum() <= 4  # float32: rounding may decide near-ties differently
    assert np.sum(pooled.row_nfe) < np.sum(alone.row_nfe)


def test_a_pool_changes_no_token_of_llamagen_with_guidance() -> None:
    model = tiny_llamagen()
    request = {"class_labels": [3, 7], "temperature": 0.5, "guidance_scale": 2.0, "seed": 2, "output_type": "latent"}
    out = paradec.generate_images(model, sampler=Jacobi(pool=2, ngram=3), **request)
    assert torch.equal(out.tokens, paradec.generate_images(model, sampler=Jacobi(), **request).tokens)


def recycling_sampler(tree: Any = (4, 2, 1), k: int = 8) -> Speculative:
    return Speculative(drafter=TokenRecycling(k=k, tree=tree), rule="naive")


def test_the_default_tree_of_token_recycling_is_the_paper_s() -> None:
    tree = parse_tree("2.2.2")
    assert [tree.depths.count(depth) for depth in range(1, 8)] == [8, 21, 25, 15, 8, 3, 0]
    assert {(0,) * 6, (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0), (7, 0), (5, 0, 0), (1, 1, 0)} < set(tree.paths)
    assert TokenRecycling().tree == "2.2.2" and Speculative(drafter="token_recycling", rule="naive").tree == "2.2.2"


@pytest.mark.parametrize("tree", ["2.2.2", (3, 2, 2)])
def test_trees_and_matrices_of_token_recycling_equal_a_plain_loop(tree: Any) -> None:
    model, method, known = TableModel.random(9, seed=3), recycling_sampler(tree), [{}, {}, {}]
    shape = parse_tree(tree)
    state = method.start(model, [[2, 0], [4, 1, 3], [8]], max_new_tokens=14, seed=5)
    assert (state.memory["drafts"] == -1).all() and (state.memory["recycled"] == -1).all()
    while not state.done:
        rows, before = state.rows, state.memory["drafts"].clone()
        remaining = state.end - state.committed
        last_tokens = {row: int(state.canvas[row, state.committed[row] - 1]) for row in rows.tolist()}
        committed_ids = {row: state.canvas[row, : state.committed[row]].tolist() for row in rows.tolist()}
        method.commit(state, method.step(model, state))
        for row in rows.tolist():
            texts = {(): committed_ids[row]}
            for node, path in enumerate(((), *shape.paths)):
                token = last_tokens[row] if node == 0 else int(before[row, node])
                if token < 0 or len(path) >= remaining[row]:
                    continue
                if path:
                    texts[path] = [*texts[path[:-1]], token]
                text = texts[path]
                logits = model.table[text[-2] if len(text) > 1 else 9, text[-1]]
                known[row][token] = logits.topk(8).indices.tolist()
            for token in range(9):
                assert state.memory["recycled"][row, token].tolist() == known[row].get(token, [-1] * 8)
            if state.end[row] - state.committed[row] > 1:
                token_of = {(): int(state.canvas[row, state.committed[row] - 1])}
                for node, path in enumerate(shape.paths, start=1):
                    token_of[path] = known[row].get(token_of[path[:-1]], [-1] * 8)[path[-1]]
                    assert int(state.memory["drafts"][row, node]) == token_of[path]


@pytest.mark.parametrize("request_name", ["temperature 1", pytest.param("all", marks=pytest.mark.full)])
def test_answers_of_recycled_tokens_have_the_model_s_distribution(request_name: str) -> None:
    model = TableModel.random(4, seed=4, sharpness=2.0)
    request_ = {"new": 6} | exactness.REQUESTS[request_name]
    result = exactness.test_case(recycling_sampler((2, 2, 1), k=3), model, 2000, seed=1, **request_)
    assert min(result["p_values"]) > 0.01 / 4 and result["nfe"] < 6


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_twenty_thousand_answers_have_the_model_s_distribution(temperature: float) -> None:
    model = TableModel.random(5, seed=0)
    result = exactness.test_case(recycling_sampler("2.2.2"), model, 20_000, seed=9, temperature=temperature)
    assert min(result["p_values"]) > 0.01 / 4


def test_token_recycling_with_a_vocabulary_smaller_than_k_and_prompt_ids_outside_it() -> None:
    model = TableModel.random(3, seed=1)
    state = recycling_sampler(k=8).start(model, [[2, 0]], max_new_tokens=8, temperature=0)
    state.canvas[0, 1] = 7  # image models can have such ids in the prompt
    state.drafting.model.fill(state, np.arange(1))
    assert (state.memory["drafts"] == -1).all()
    state.canvas[0, 1] = 0
    while not state.done:
        method = recycling_sampler(k=8)
        method.commit(state, method.step(model, state))
    assert (state.memory["recycled"][..., 3:] == -1).all() and (state.memory["recycled"][..., :3] >= 0).any()


MODEL = TableModel.random(5, seed=0)
DRAFTER = TableModel.random(5, seed=1, near=MODEL)
RECORDED = GOLDEN / "drafters" / "drafters"


def stop_at_high_tokens(q: Tensor, drafts: Tensor) -> Tensor:
    """A stopping rule: no draft follows a draft with an id of at least 2."""
    return drafts[:, -1] >= 2


STOPPING_RULES = [Unsure(0.5), Unsure(0.6, product=True, least=2), stop_at_high_tokens]


@pytest.mark.parametrize("rule", STOPPING_RULES)
def test_answers_of_stopped_drafts_have_the_model_s_distribution(rule: Any) -> None:
    result = exactness.test_case(Speculative(drafter=DRAFTER, window=5, stop=rule), MODEL, 3000, seed=2, new=5)
    assert min(result["p_values"]) > 0.01 / 6 and result["nfe"] < 4.5


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rule", STOPPING_RULES)
def test_twenty_thousand_answers_of_stopped_drafts_have_the_model_s_distribution(rule: Any, temperature: float) -> None:
    sampler = Speculative(drafter=DRAFTER, window=4, stop=rule)
    result = exactness.test_case(sampler, MODEL, 20_000, seed=9, temperature=temperature)
    assert min(result["p_values"]) > 0.01 / 12


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", STOPPING_RULES)
def test_windows_end_after_the_draft_at_which_the_rule_stops(rule: Any, temperature: float) -> None:
    method, width = Speculative(drafter=DRAFTER, window=6, stop=rule), 6
    state = method.start(MODEL, [[2, 0], [4, 1, 3], [1]], max_new_tokens=17, seed=5, temperature=temperature)
    lengths, draft_nfe, was_stepped = set(), np.zeros(3, np.int64), np.array([True] * 3)
    while not state.done:
        for row in state.rows.tolist():
            slots = min(width, int(state.length[row] - state.committed[row]))
            text, expected = state.canvas[row, : state.committed[row]].tolist(), 0
            drafts, q = state.memory["drafts"][row], []
            for slot in range(slots - 1):
                last_two = [5, *text][-2], text[-1]
                q.append((DRAFTER.table[last_two] / (temperature or 1)).softmax(-1))
                text.append(int(drafts[slot]))
                expected = slot + 1
                if rule(torch.stack(q).unsqueeze(0), drafts[:expected].unsqueeze(0)):
                    break
            if slots > 1:
                assert state.num_drafts[row] == expected
                lengths.add(expected)
                assert state.draft_nfe[row] - draft_nfe[row] == expected or not was_stepped[row]
        was_stepped, draft_nfe = np.isin(np.arange(3), state.rows), state.draft_nfe.copy()
        proposal = method.step(MODEL, state)
        evaluated = np.minimum(state.num_slots(state.rows), 1 + state.num_drafts[state.rows])
        assert proposal.available.sum(1).tolist() == evaluated.tolist()
        method.commit(state, proposal)
    assert len(lengths) > 1


@pytest.mark.parametrize("name", ["eagle3-original", "dflash2-zlab", "dspark-vanilla"])
def test_stopping_rules_with_drafters_that_read_hidden_states(name: str) -> None:
    pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")
    base = paradec.load(RECORDED / "base", dtype=torch.float64)
    drafter = paradec.load_drafter(RECORDED / name, base=base)
    request = {"max_new_tokens": 12, "temperature": 0, "seed": 1}
    expected, _ = decode_answers(SJD(window=1), base, TEXTS, **request)
    unstopped = decode_answers(Speculative(drafter=drafter), base, TEXTS, **request)[1]
    tokens, state = decode_answers(Speculative(drafter=drafter, stop=stop_at_high_tokens), base, TEXTS, **request)
    assert tokens == expected and state.forwarded_tokens.sum() < unstopped.forwarded_tokens.sum()


def test_windows_end_where_the_recorded_confidence_is_below_the_threshold() -> None:
    pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")
    from safetensors.torch import load_file

    cases = json.loads((RECORDED / "cases.json").read_text())
    tensors = load_file(RECORDED / "cases.safetensors")
    base = paradec.load(RECORDED / "base", dtype=torch.float64)
    num_inside = 0
    for key, case in cases.items():
        if f"{key}/confidence_logit" not in tensors or case["temperature"] != 0:
            continue
        drafter = paradec.load_drafter(RECORDED / case["drafter"], base=base)
        confidence = tensors[f"{key}/confidence_logit"].double().sigmoid()
        for threshold in (0.0, float(confidence[1:].median()) + 1e-4, float(confidence[1:].min()) + 1e-4):
            method, ids = Speculative(drafter=drafter, stop=Unconfident(threshold)), tensors["ids"].tolist()
            state = method.start(base, [ids[: case["anchor"]]], max_new_tokens=20, temperature=0)
            proposal = method.step(base, state)
            state.ends = state.ends[:0]
            proposal.values[0, 0] = ids[case["anchor"]]  # commit the recorded token instead of the model's token
            proposal.quantities["p"][0, 0] = torch.nn.functional.one_hot(proposal.values[0, 0], 64)
            method.commit(state, proposal)
            assert state.memory["drafts"][0, : len(case["drafts"])].tolist() == case["drafts"]
            expected = 1 + int((confidence[1:] >= threshold).long().cumprod(0).sum())
            assert state.num_drafts[0] == expected
            num_inside += 1 < expected < len(confidence)
    assert num_inside


# (settings, name of a setting, entries of the saved setting)
SAVED = [
    ({"drafter": PromptLookup(7, 3)}, "drafter", {"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 3}),
    ({"drafter": TokenRecycling(5, (3, 2)), "rule": "naive"}, "drafter", {"k": 5, "tree": (3, 2)}),
    ({"drafter": "prompt_lookup"}, "drafter", {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}),
    ({"drafter": "token_recycling", "rule": "naive"}, "drafter", {"k": 8, "tree": "2.2.2"}),
    ({"drafter": DRAFTER, "stop": "unsure"}, "stop", Unsure().to_dict()),
    ({"drafter": DRAFTER, "stop": Unsure(0.3, product=True)}, "stop", Unsure(0.3, product=True).to_dict()),
]


@pytest.mark.parametrize(("settings", "name", "expected"), SAVED)
def test_drafters_and_stopping_rules_are_saved(settings: dict[str, Any], name: str, expected: dict[str, Any]) -> None:
    method = Speculative(**settings)
    data = method.to_dict()
    assert expected.items() <= data[name].items()
    assert Speculative(**settings | {name: data[name]}) == method
    assert Speculative(drafter=DRAFTER, stop=stop_at_high_tokens).to_dict()["stop"] == "stop_at_high_tokens"
    assert load_draft_model("token_recycling", None) == "token_recycling"
