"""Suffix windows and the cache d2 in requests of every kind: threads, prefixes that are kept or shared, unequal rows,
templates, refilled batches, streams, low precision, a mask with id 0. The oracle is the row alone, or no cache."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tiny_models import MASK, tiny

import paradec
from paradec import Suffix, caches, samplers

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

NEW = 10
WITH = [name for name in caches.names() if caches.get(name).facts.suffixes]
WINDOWS = [None, Suffix(0), Suffix(5), Suffix(7, "gaussian"), Suffix(8, "uniform", count=3)]
PAIRS = [(cache, window) for cache in WITH for window in WINDOWS]
SOME = [pair for at, pair in enumerate(PAIRS) if at % 4 == 0]
"""Every cache and every window at least once; the others are for the long run."""
EACH = [
    pytest.param(*pair, marks=() if pair in SOME else pytest.mark.full, id=f"{pair[0]}-{pair[1]}") for pair in PAIRS
]
ROWS = [[1], [2, 3], [4] * 13, [5, 6, 7]]
HOLES = [
    [1, 2, *[MASK] * 8, 5, 6, *[MASK] * 8, 7, 8],
    [*[MASK] * 6, 3],
    [4, MASK],
    [9, *[MASK] * 11, 2, 2, MASK, 3],
]
ASKED: dict[str, Any] = {"max_new_tokens": NEW, "block_length": 4, "eos_early_stop": False, "seed": 3}


def rows_of(out: Any) -> list[list[int]]:
    """What each row holds, without padding."""
    return [ids[there.bool()].tolist() for ids, there in zip(out.sequences, out.attention_mask, strict=True)]


def assert_alone(out: Any, model: Any, prompts: list[list[int]], asked: dict[str, Any]) -> None:
    for row, prompt in enumerate(prompts):
        alone = paradec.generate(model, [prompt], **asked)
        assert rows_of(alone) == [rows_of(out)[row]]
        assert alone.cost.forwarded_tokens == [out.cost.forwarded_tokens[row]]


@pytest.mark.thinned
@pytest.mark.parametrize("new", [1, 3, NEW])
@pytest.mark.parametrize(("cache", "window"), EACH)
def test_unequal_rows(cache: str, window: Any, new: int) -> None:
    asked = ASKED | {"cache": cache, "suffix": window, "temperature": 0.1, "max_new_tokens": new}
    model = tiny(2)
    assert_alone(paradec.generate(model, ROWS, **asked), model, ROWS, asked)


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "window"), EACH)
def test_templates(cache: str, window: Any) -> None:
    model = tiny(2, prediction="shifted")
    for new in (0, 9):
        asked = ASKED | {"cache": cache, "suffix": window, "temperature": 0.1, "max_new_tokens": new}
        out = paradec.generate(model, HOLES, **asked)
        assert_alone(out, model, HOLES, asked)
        for given, row in zip(HOLES, rows_of(out), strict=True):
            assert MASK not in row
            assert [token for token, old in zip(row, given, strict=False) if old != MASK] == [
                old for old in given if old != MASK
            ]


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "window"), EACH)
def test_a_batch_that_is_refilled(cache: str, window: Any) -> None:
    model = tiny(2, prediction="shifted")
    asked = {name: value for name, value in ASKED.items() if name != "max_new_tokens"}
    asked |= {"cache": cache, "suffix": window, "temperature": 0.1}
    rows = [([1, 2, 3], 5), ([4], 20), ([5] * 9, 1), (HOLES[0], 0), ([6, 7], 13), (HOLES[1], 4), ([8], 30)]
    prompts = [{"prompt": ids, "max_new_tokens": new} for ids, new in rows]
    seen = set()
    for out in paradec.generate_many(model, prompts, batch_size=2, errors="raise", **asked):
        ids, new = rows[out.index]
        alone = paradec.generate(model, [ids], max_new_tokens=new, **asked)
        assert rows_of(out) == rows_of(alone)
        assert out.cost.forwarded_tokens == alone.cost.forwarded_tokens and out.row_nfe == alone.row_nfe
        seen.add(out.index)
    assert len(seen) == len(rows)


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", ["same", "shifted"])
@pytest.mark.parametrize(("cache", "window"), [each for each in EACH if each.values[0] != "none"])
def test_prefixes_that_are_shared_and_kept(cache: str, window: Any, prediction: str) -> None:
    """With one layer keys and values are those of their own token, so that nothing but the cost may change."""
    model = tiny(1, prediction=prediction)
    asked = ASKED | {"cache": cache, "suffix": window, "sampler": "low_confidence"}
    rows = [[*range(1, 11), 11], [*range(1, 11), 12, 13], [*range(1, 11), 14, 15, 16]]
    shared = paradec.generate(model, rows, share_prefix=True, **asked)
    plain = paradec.generate(model, rows, **asked)
    assert rows_of(shared) == rows_of(plain)
    assert sum(shared.cost.forwarded_tokens) < sum(plain.cost.forwarded_tokens)
    first = paradec.generate(model, rows, keep_prefix=True, **asked)
    turn = [[*row, 7, 8] for row in rows_of(first)]
    second = paradec.generate(model, turn, prefix=first.prefix, **asked)
    plain = paradec.generate(model, turn, **asked)
    assert rows_of(second) == rows_of(plain)
    assert sum(second.cost.forwarded_tokens) < sum(plain.cost.forwarded_tokens)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_state_of_d2_goes_on_as_its_copies_do(window: Any) -> None:
    model, sampler = tiny(2), samplers.create("threshold", threshold=0.4)
    state = sampler.start(model, ROWS, cache=caches.create("d2", current_k=3), suffix=window, **ASKED)
    for _ in range(3):
        sampler.commit(state, sampler.step(model, state))
    others = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    evaluated = []
    for each in (state, *others):
        count = 0
        while not each.done:
            proposal = sampler.step(model, each)
            count += sum(len(query.rows) * query.positions.shape[1] for query in proposal.cost.queries)
            sampler.commit(each, proposal)
        evaluated.append(count)
    assert all(torch.equal(each.canvas, state.canvas) for each in others)
    assert len(set(evaluated)) == 1
