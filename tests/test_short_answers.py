"""Answers and prompts shorter than what a step looks at: than a tree or a window of drafts, a block, what a cache keeps.

Properties over the registry: samplers and caches that are added later are covered without a test of their own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_eagle import answers, checkpoint, exactness, tiny_base, write
from tiny_models import tiny
from torch import Tensor

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.models.adapter import Model
from paradec.models.grid import Grid
from paradec.prompts import Prompts
from paradec.protocol import Sampler, decode
from paradec.samplers.drafting import DraftingSampler
from paradec.samplers.multi_draft import DynamicTree
from paradec.samplers.request import Request

PROMPTS = [[3], [2, 1], [4, 0, 1]]
LONG = [0, 3, 1, 3, 2, 4, 2, 1, 1, 0, 3, 2]
"""A neighbour that makes the canvas longer than any tree is deep."""
NEGATIVE = [[1], [3, 2, 1], [0, 2], [4]]
DEEP = (2, 1, 1, 1, 1, 1, 1, 1)
PATHS = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0))
TREES: dict[str, Any] = {
    "chain": {"window": 9},
    "children per depth": {"tree": DEEP},
    "paths": {"tree": PATHS},
    "mc_sim_7b_63": {"tree": "mc_sim_7b_63"},
    "dynamic": {"tree": DynamicTree(nodes=12, depth=8, top_k=3)},
}
EAGLE = ("chain", "children per depth", "dynamic")

DRAFTED = [name for name in samplers.names() if samplers.get(name).family == "draft_verify"]


def ways() -> list[tuple[str, str, str]]:
    """(sampler, drafter, drafts): every sampler that drafts by itself, and with both kinds of drafters."""
    found = []
    for name in DRAFTED:
        kind = samplers.get(name)
        if not getattr(kind, "needs_drafter", False):
            found.append((name, "", ""))
        if issubclass(kind, DraftingSampler):
            found += [(name, "table", shape) for shape in TREES]
            found += [(name, "eagle", shape) for shape in EAGLE]
    return found


WAYS = ways()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """The model and its drafter, by the drafter's kind."""
    base = tiny_base()
    eagle = paradec.load_drafter(write(tmp_path_factory.mktemp("eagle") / "drafter", *checkpoint()), base=base)
    base.codebook = base.token_embeddings
    table = exactness.TableModel.random(5, seed=0)
    return {"table": (table, exactness.TableModel.random(5, seed=1, near=table)), "eagle": (base, eagle)}


def made(name: str, drafter: Any, shape: str) -> Sampler:
    kind = samplers.get(name)
    settings = dict(TREES[shape]) | {"drafter": drafter} if shape else {}
    if isinstance(settings.get("tree"), DynamicTree) and "rule" in kind.settings():
        settings["rule"] = "naive"
    if "k" in kind.settings():
        settings["k"] = 2
    return samplers.create(name, **settings)


def next_logits(model: Any, ids: list[int]) -> Tensor:
    """[V], without a line of the samplers' or the store's."""
    if isinstance(model, exactness.TableModel):
        return model.table[ids[-2] if len(ids) > 1 else len(model.table) - 1, ids[-1]]
    with torch.inference_mode():
        return model.module(torch.tensor([ids])).logits[0, -1]


def greedy(model: Any, prompt: list[int], new: int, negative: list[int], scale: float) -> list[int]:
    """Token by token, every forward from nothing."""
    ids: list[int] = []
    for _ in range(new):
        logits = next_logits(model, prompt + ids)
        if scale != 1:
            other = next_logits(model, negative + ids)
            logits = other + scale * (logits - other)
        ids.append(int(logits.argmax()))
    return ids


def guided(scale: float, rows: int) -> dict[str, Any]:
    return {} if scale == 1 else {"guidance_scale": scale, "negative_prompt": NEGATIVE[:rows]}


# ---- drafts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "drafter", "shape"), [way for way in WAYS if way[0] != "zipar"])
def test_temperature_0_is_greedy_decoding(
    name: str, drafter: str, shape: str, models: dict[str, tuple[Any, Any]]
) -> None:
    """Alone, in a batch of short rows, and beside a longer row; with guidance whose prompts have other lengths. The
    lossy methods have nothing to give at temperature 0."""
    model, small = models[drafter or "table"]
    sampler = made(name, small, shape)
    for new in range(1, 7) if sampler.lossless else (1, 4):
        scale = (1.0, 2.0)[new in (1, 3, 4)]
        expected = [greedy(model, p, new, n, scale) for p, n in zip([*PROMPTS, LONG], NEGATIVE, strict=True)]
        request = {"max_new_tokens": new, "temperature": 0, "seed": 0}
        for rows in ([PROMPTS[:1], PROMPTS][new % 2], [*PROMPTS, LONG]):
            found, state = answers(sampler, model, rows, **request, **guided(scale, len(rows)))
            assert found == expected[: len(rows)], (new, len(rows))
            assert np.sum(state.accepted, 0).tolist() == [new] * len(rows)


@pytest.mark.parametrize(("name", "drafter", "shape"), [way for way in WAYS if way[0] != "zipar"])
def test_a_row_of_drafts_has_the_tokens_that_it_has_alone(
    name: str, drafter: str, shape: str, models: dict[str, tuple[Any, Any]]
) -> None:
    """At temperature 1, where the drafts that are made decide which token is drawn."""
    model, small = models[drafter or "table"]
    sampler = made(name, small, shape)
    rows, seeds = PROMPTS * 4, list(range(12))
    for new, scale in ((1, 1.0), (2, 1.0), (4, 1.7)):
        request = {"max_new_tokens": new, "temperature": 1.0}
        negative = {} if scale == 1 else {"guidance_scale": scale, "negative_prompt": [[2, 1]] * 12}
        short, _ = answers(sampler, model, rows, seed=seeds, **request, **negative)
        if negative:
            negative["negative_prompt"] = [[2, 1]] * 13
        beside, _ = answers(sampler, model, [*rows, LONG], seed=[*seeds, 99], **request, **negative)
        assert beside[:12] == short, new
        if negative:
            negative["negative_prompt"] = [[2, 1]]
        alone, _ = answers(sampler, model, PROMPTS[:1], seed=[3], **request, **negative)
        assert alone[0] == short[3], new
