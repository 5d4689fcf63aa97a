"""Token Recycling: its matrix and tree by hand, answers, batches; nothing of a row reaches another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eagle_drafters import NEGATIVE, PROMPTS, answers, tiny_base
from jacobi_runs import TableModel, exactness

import paradec
from paradec.cli.work import load_draft_model
from paradec.samplers.causal.drafts.text import TokenRecycling
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.speculative import Speculative
from paradec.samplers.causal.trees import tree_of


def sampler(tree: Any = (4, 2, 1), k: int = 8) -> Speculative:
    return Speculative(drafter=TokenRecycling(k=k, tree=tree), rule="naive")


def test_the_paper_s_tree() -> None:
    tree = tree_of("2.2.2")
    assert [tree.depths.count(depth) for depth in range(1, 8)] == [8, 21, 25, 15, 8, 3, 0]
    assert {(0,) * 6, (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0), (7, 0), (5, 0, 0), (1, 1, 0)} < set(tree.paths)
    assert TokenRecycling().tree == "2.2.2" and Speculative(drafter="token_recycling", rule="naive").tree == "2.2.2"


@pytest.mark.parametrize("tree", ["2.2.2", (3, 2, 2)])
def test_every_step_s_tree_and_matrix_are_those_of_a_plain_loop(tree: Any) -> None:
    model, method, known = TableModel.random(9, seed=3), sampler(tree), [{}, {}, {}]
    shape = tree_of(tree)
    state = method.start(model, [[2, 0], [4, 1, 3], [8]], max_new_tokens=14, seed=5)
    assert (state.memory["drafts"] == -1).all() and (state.memory["recycled"] == -1).all()
    while not state.done:
        rows, before = state.rows, state.memory["drafts"].clone()
        left = state.end - state.committed
        lasts = {row: int(state.canvas[row, state.committed[row] - 1]) for row in rows.tolist()}
        above = {row: state.canvas[row, : state.committed[row]].tolist() for row in rows.tolist()}
        method.commit(state, method.step(model, state))
        for row in rows.tolist():
            texts = {(): above[row]}
            for node, path in enumerate(((), *shape.paths)):
                token = lasts[row] if node == 0 else int(before[row, node])
                if token < 0 or len(path) >= left[row]:
                    continue
                if path:
                    texts[path] = [*texts[path[:-1]], token]
                text = texts[path]
                logits = model.table[text[-2] if len(text) > 1 else 9, text[-1]]
                known[row][token] = logits.topk(8).indices.tolist()
            for token in range(9):
                assert state.memory["recycled"][row, token].tolist() == known[row].get(token, [-1] * 8)
            if state.end[row] - state.committed[row] > 1:
                at = {(): int(state.canvas[row, state.committed[row] - 1])}
                for node, path in enumerate(shape.paths, start=1):
                    at[path] = known[row].get(at[path[:-1]], [-1] * 8)[path[-1]]
                    assert int(state.memory["drafts"][row, node]) == at[path]


@pytest.mark.parametrize("tree", ["2.2.2", (2, 1, 1)])
@pytest.mark.parametrize(
    "request_", [{"temperature": 0}, {"temperature": 0, "guidance_scale": 1.7, "negative_prompt": NEGATIVE}]
)
def test_greedy_answers_are_the_model_s(tree: Any, request_: dict[str, Any]) -> None:
    base, given = tiny_base(), {"max_new_tokens": 24, "seed": 3} | request_
    expected, alone = answers(SJD(window=1), base, PROMPTS, **given)
    found, state = answers(sampler(tree), base, PROMPTS, **given)
    assert found == expected and state.nfe.sum() < 0.8 * alone.nfe.sum() and not state.draft_nfe.any()


@pytest.mark.parametrize("what", ["temperature 1", pytest.param("all", marks=pytest.mark.full)])
def test_answers_have_the_model_s_distribution(what: str) -> None:
    model = TableModel.random(4, seed=4, sharpness=2.0)
    given = {"new": 6} | exactness.REQUESTS[what]
    found = exactness.test_case(sampler((2, 2, 1), k=3), model, 2000, seed=1, **given)
    assert min(found["p_values"]) > 0.01 / 4 and found["nfe"] < 6


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_twenty_thousand_answers_have_the_model_s_distribution(temperature: float) -> None:
    model = TableModel.random(5, seed=0)
    found = exactness.test_case(sampler("2.2.2"), model, 20_000, seed=9, temperature=temperature)
    assert min(found["p_values"]) > 0.01 / 4


def test_a_vocabulary_smaller_than_k_and_prompts_with_other_ids() -> None:
    model = TableModel.random(3, seed=1)
    state = sampler(k=8).start(model, [[2, 0]], max_new_tokens=8, temperature=0)
    state.canvas[0, 1] = 7  # an image model's prompt
    state.drafting.model.fill(state, np.arange(1))
    assert (state.memory["drafts"] == -1).all()
    state.canvas[0, 1] = 0
    while not state.done:
        method = sampler(k=8)
        method.commit(state, method.step(model, state))
    assert (state.memory["recycled"][..., 3:] == -1).all() and (state.memory["recycled"][..., :3] >= 0).any()


def test_settings_travel() -> None:
    data = sampler((3, 2), 5).to_dict()
    assert data["drafter"] == {"drafter": "token_recycling", "k": 5, "tree": (3, 2)}
    assert Speculative.from_dict(data) == sampler((3, 2), 5)
    assert paradec.Request(sampler=sampler()).to_dict()["sampler"]["drafter"]["k"] == 8
    assert load_draft_model("token_recycling", None) == "token_recycling"
