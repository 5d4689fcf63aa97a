"""All registered samplers on answers and prompts that are shorter than trees, draft windows, blocks or caches."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from decoding import supported_fields
from drafters import decode_answers, eagle_weights, exactness, tiny_base, write_drafter
from small_models import tiny
from torch import Tensor

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.protocol import Sampler, decode
from paradec.models.adapter import Model
from paradec.models.images.grid import Grid
from paradec.request import Request
from paradec.samplers.causal.drafting import DraftingSampler
from paradec.samplers.causal.trees import DynamicTree

PROMPTS = [[3], [2, 1], [4, 0, 1]]
LONG = [0, 3, 1, 3, 2, 4, 2, 1, 1, 0, 3, 2]
"""A further row, which makes the canvas longer than the depth of any tree."""
NEGATIVE = [[1], [3, 2, 1], [0, 2], [4]]
MAX_NEW = 6
DEEP = (2, 1, 1, 1, 1, 1, 1, 1)
PATHS = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0))
TREES: dict[str, Any] = {
    "chain": {"window": 9},
    "children per depth": {"tree": DEEP},
    "paths": {"tree": PATHS},
    "mc_sim_7b_63": {"tree": "mc_sim_7b_63"},
    "dynamic": {"tree": DynamicTree(nodes=6, depth=8, top_k=3)},
}
EAGLE = ("chain", "children per depth", "dynamic")

PLAIN: dict[str, Any] = {
    "defaults": {},
    "resample": {"refresh": "resample", "init": "repeat_horizontal"},
    "maximal": {"refresh": "maximal", "init": "sample_horizontal"},
    "gumbel": {"refresh": "gumbel", "init": "repeat_horizontal", "window": 3},
    "keep": {"refresh": "keep", "init": "sample_horizontal", "guess_distribution": "one_hot"},
}
"""Settings of samplers without a drafter, by name. Samplers that lack a setting are skipped."""
SHAPES = PLAIN | TREES
CAUSAL = [name for name in samplers.names() if samplers.get(name).family == "draft_verify"]
CAUSAL.remove("self_speculative")  # needs other models


def list_cases() -> list[tuple[str, str, str]]:
    """List (sampler, drafter, key of SHAPES) for every sampler that decodes text; lossy samplers have fewer cases."""
    result = []
    for name in CAUSAL:
        kind = samplers.get(name)
        if name == "zipar":  # zipar works only on image grids
            continue
        if not getattr(kind, "needs_drafter", False):
            shapes = PLAIN if kind.lossless else ["defaults"]
            result += [(name, "none", shape) for shape in shapes if fits(name, shape)]
        if issubclass(kind, DraftingSampler):
            result += [(name, "table", shape) for shape in (TREES if kind.lossless else EAGLE)]
            result += [(name, "eagle", shape) for shape in EAGLE]
            result += [(name, "llama", "dynamic")] if kind.lossless else []
    return result


def fits(name: str, shape: str) -> bool:
    try:
        samplers.create(name, **SHAPES[shape])
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    base = tiny_base()
    eagle = paradec.load_drafter(
        write_drafter(tmp_path_factory.mktemp("eagle") / "drafter", *eagle_weights()), base=base
    )
    base.codebook = base.token_embeddings
    table = exactness.TableModel.random(5, seed=0)
    small = exactness.TableModel.random(5, seed=1, near=table)
    result = {"none": (table, None), "table": (table, small), "eagle": (base, eagle)}
    return result | {"llama": (base, tiny_base(layers=1))}


def create_sampler(name: str, drafter: Any, shape: str) -> Sampler:
    settings, allowed = dict(SHAPES[shape]), samplers.get(name).settings()
    if shape in TREES:
        settings["drafter"] = drafter
    if isinstance(settings.get("tree"), DynamicTree) and "rule" in allowed:
        settings["rule"] = "naive"
    if "k" in allowed:
        settings["k"] = 2
    return samplers.create(name, **settings)


def next_logits(model: Any, ids: list[int]) -> Tensor:
    """Return the logits [V] after `ids` from one plain forward."""
    if isinstance(model, exactness.TableModel):
        return model.table[ids[-2] if len(ids) > 1 else len(model.table) - 1, ids[-1]]
    with torch.inference_mode():
        return model.module(torch.tensor([ids])).logits[0, -1]


def greedy(model: Any, prompt: list[int], negative: list[int], scale: float) -> list[int]:
    ids: list[int] = []
    for _ in range(MAX_NEW):
        logits = next_logits(model, prompt + ids)
        if scale != 1:
            other = next_logits(model, negative + ids)
            logits = other + scale * (logits - other)
        ids.append(int(logits.argmax()))
    return ids


@pytest.fixture(scope="module")
def plain(models: dict[str, tuple[Any, Any]]) -> dict[tuple[str, float], list[list[int]]]:
    """Return greedy answers of MAX_NEW tokens to PROMPTS and LONG; shorter answers are their prefixes."""
    return {
        (kind, scale): [greedy(model, *pair, scale) for pair in zip([*PROMPTS, LONG], NEGATIVE, strict=True)]
        for (kind, (model, _)), scale in itertools.product(models.items(), (1.0, 2.0))
    }


def guidance_arguments(scale: float, rows: int) -> dict[str, Any]:
    return {} if scale == 1 else {"guidance_scale": scale, "negative_prompt": NEGATIVE[:rows]}


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "drafter", "shape"), list_cases())
def test_temperature_0_is_greedy_decoding(
    name: str, drafter: str, shape: str, models: dict[str, tuple[Any, Any]], plain: dict[Any, list[list[int]]]
) -> None:
    model, small = models[drafter]
    sampler = create_sampler(name, small, shape)
    for new in range(1, MAX_NEW + 1) if sampler.lossless and drafter != "none" else (2, 5):
        scale = 2.0 if new in (1, 4, 5) else 1.0
        expected = [ids[:new] for ids in plain[drafter, scale]]
        for rows in ([PROMPTS, PROMPTS[:1]][new % 2], [*PROMPTS, LONG]):
            request = guidance_arguments(scale, len(rows)) | {"max_new_tokens": new, "temperature": 0, "seed": 0}
            actual, state = decode_answers(sampler, model, rows, **request)
            assert actual == expected[: len(rows)], (new, len(rows))
            assert np.sum(state.accepted, 0).tolist() == [new] * len(rows)


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "drafter", "shape"), list_cases())
def test_drafted_rows_do_not_depend_on_their_neighbours(name: str, drafter: str, shape: str, models: Any) -> None:
    model, small = models[drafter]
    sampler = create_sampler(name, small, shape)
    for new, scale in ((2, 1.0), (3, 1.7)) if sampler.lossless and drafter != "none" else ((3, 1.7),):
        request: dict[str, Any] = {"max_new_tokens": new, "temperature": 1.0, "guidance_scale": scale}
        actual = []
        for rows in (PROMPTS[:1], PROMPTS * 6, [*PROMPTS * 6, LONG]):
            if scale != 1:
                request["negative_prompt"] = [[2, 1]] * len(rows)
            actual.append(decode_answers(sampler, model, rows, seed=list(range(len(rows))), **request)[0])
        alone, short, with_long = actual
        assert alone == short[:1] and short == with_long[:-1], new


GRIDS = [
    Grid(1, 1, image_ids=range(2, 5)),
    Grid(1, 3, image_ids=range(2, 5), tail=(1,)),
    Grid(3, 1, image_ids=range(2, 5), row_end=0),
    Grid(2, 2, image_ids=range(2, 5), row_end=0, head=(1,), tail=(1, 0)),
]


@pytest.mark.thinned
@pytest.mark.parametrize("name", CAUSAL)
def test_small_pictures_at_temperature_0(name: str, models: dict[str, tuple[Any, Any]]) -> None:
    model, small = models["table"]
    kind = samplers.get(name)
    shapes = ["children per depth", "dynamic"] if issubclass(kind, DraftingSampler) else ["defaults"]
    if fits(name, "resample"):
        vertical = [{"init": init} for init in ("repeat_vertical", "sample_vertical")]
    else:
        vertical = []
    every = [create_sampler(name, small, shape) for shape in shapes]
    every += [samplers.create(name, **settings) for settings in vertical if not getattr(kind, "needs_drafter", False)]
    for sampler, (index, grid) in itertools.product(every, enumerate(GRIDS)):
        allowed, expected, scale = grid.allowed(5), [], (1.0, 2.0)[index % 2]
        for prompt, negative in zip((PROMPTS[0], LONG), NEGATIVE, strict=False):
            ids: list[int] = []
            for forced in grid.layout.tolist():
                logits = next_logits(model, prompt + ids)
                if scale != 1:
                    other = next_logits(model, negative + ids)
                    logits = other + scale * (logits - other)
                ids.append(forced if forced >= 0 else int(logits.masked_fill(~allowed, -torch.inf).argmax()))
            expected.append(ids)
        for rows in (PROMPTS[:1], [PROMPTS[0], LONG]):
            request = {"grid": grid, "temperature": 0, "seed": 0, **guidance_arguments(scale, len(rows))}
            actual, _ = decode_answers(sampler, model, rows, **request)
            assert actual == expected[: len(rows)], (sampler, grid)


@pytest.mark.thinned
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("new", [1, 2])
def test_short_answers_have_the_distribution_of_the_model(shape: str, new: int, models: Any) -> None:
    model, small = models["table"]
    state = create_sampler("speculative", small, shape).start(model, [PROMPTS[0]] * 3000, max_new_tokens=new, seed=new)
    decode(create_sampler("speculative", small, shape), model, state)
    answers, distribution = exactness.exact_distribution(model, PROMPTS[0], new, Request(temperature=1.0), NEGATIVE[0])
    counts = exactness.count_answers(state.canvas[:, 1:], answers, 5)
    assert exactness.p_value(counts, distribution.numpy()) > 0.01 / (2 * len(TREES))


MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
KINDS = list(itertools.product(("bidirectional", "block_causal"), ("same", "shifted")))
REQUESTS: list[dict[str, Any]] = [
    {"max_new_tokens": 1, "block_length": 4, "temperature": 0.8},
    {"max_new_tokens": 2, "block_length": 2, "temperature": 0.8, "guidance_scale": 1.5},
    {"max_new_tokens": 3, "block_length": 2, "temperature": 0.0},
    {"max_new_tokens": 3, "block_length": 4, "temperature": 0.8, "eos_early_stop": False},
    {"max_new_tokens": 2, "block_length": 1, "temperature": 0.0, "guidance_scale": 1.5},
]


@pytest.fixture(scope="module")
def masked_models() -> dict[tuple[str, str], Model]:
    return {kind: tiny(1, *kind) for kind in KINDS}


@pytest.mark.thinned
@pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=")
@pytest.mark.parametrize("name", MASKED)
def test_masked_answers_shorter_than_a_block(name: str, masked_models: dict[tuple[str, str], Model]) -> None:
    sampler, turn = samplers.create(name), MASKED.index(name)
    rows = [[5], [6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    fitting = {
        cache: [
            kind
            for kind, model in masked_models.items()
            if verdict(sampler, caches.create(cache), model.facts).status != REFUSED
        ]
        for cache in caches.names()
    }
    checked = 0
    for cache in [cache for cache, kinds in fitting.items() if kinds][turn % 2 :: 2]:
        kinds = fitting[cache]
        turn += 1
        model, request = masked_models[kinds[turn % len(kinds)]], REQUESTS[turn % len(REQUESTS)]
        request = supported_fields(name, request | {"cache": cache})
        state = sampler.start(model, rows, seed=[1, 2, 3], **request)
        fixed = ~state.undecided
        before = state.canvas.clone()
        decode(sampler, model, state)
        assert not state.undecided.any() and torch.equal(state.canvas[fixed], before[fixed])
        assert state.progress[0] == state.progress[1]
        index = turn % 2  # one of the two short rows
        alone = sampler.start(model, rows[index : index + 1], seed=index + 1, **request)
        decode(sampler, model, alone)
        stop = int(state.requested_end[index])
        assert alone.canvas[0, :stop].tolist() == state.canvas[index, :stop].tolist(), cache
        assert (alone.nfe[0], alone.end[0]) == (state.nfe[index], state.end[index]), cache
        assert alone.forwarded_tokens[0] == state.forwarded_tokens[index], cache
        checked += 1
    assert checked
