"""Suffix windows, outside which the model does not see masks: equality with a plain loop, and evaluated positions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from small_models import MASK, full_mask, tiny, wrap_kind

import paradec
from paradec import PipelinedBlocks, Suffix, caches, samplers
from paradec.caches.suffix import SUFFIX_STREAM
from paradec.core import rng
from paradec.models.adapter import Model
from paradec.samplers.start import row_keys

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

ROWS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14]]
NEW, BLOCK = 20, 4
REQUEST = {"max_new_tokens": NEW, "block_length": BLOCK, "eos_early_stop": False, "seed": 3}
SUFFIX_CACHES = [name for name in caches.names() if caches.get(name).facts.supports_suffix]
FULL = pytest.mark.full
SUFFIXES = [Suffix(0), Suffix(6), Suffix(10, "gaussian"), Suffix(10, "uniform", count=3)]


def answers(out: Any) -> list[list[int]]:
    return [row[-NEW:].tolist() for row in out.sequences]


def masks_in_window(suffix: Suffix, prompt: list[int], end: int, length: int) -> list[int]:
    """Return the masks that the model sees after a block that ends at `end`; a random number per mask decides."""
    after = list(range(end, min(end + suffix.window, length)))
    if suffix.density == "cut" or not after:
        return after
    key = torch.as_tensor(row_keys([REQUEST["seed"]], [prompt]))
    step = torch.tensor([end - BLOCK])
    numbers = rng.uniform(key, step, torch.tensor([after]), 1, SUFFIX_STREAM)[0, :, 0].tolist()
    if suffix.density == "uniform":
        return sorted(sorted(after, key=lambda p: numbers[p - end])[: suffix.count])
    scale, step_size = 2.0 if suffix.scale is None else suffix.scale, suffix.k_sigma / max(suffix.window - 1, 1)
    odds = [scale * math.exp(-((d * step_size) ** 2) / 2) / math.sqrt(2 * math.pi) for d in range(len(after))]
    return [position for position, number, odd in zip(after, numbers, odds, strict=True) if number < odd]


def plain_loop(model: Model, prompt: list[int], suffix: Suffix) -> list[int]:
    """Decode the most confident token of the block in each step. The model does not see masks outside the window."""
    row, length = [*prompt, *[MASK] * NEW], len(prompt) + NEW
    for start in range(len(prompt), length, BLOCK):
        end = start + BLOCK
        present = [*range(end), *masks_in_window(suffix, prompt, end, length)]
        for _ in range(BLOCK):
            ids = torch.tensor([[row[position] for position in present]])
            with torch.no_grad():
                mask, position_ids = full_mask(len(present)), torch.tensor([present])
                logits = model.module(ids, attention_mask=mask, position_ids=position_ids).logits[0]
            logits[:, MASK] = -torch.inf
            confidence, tokens = logits.softmax(-1).max(-1)
            best = max((p for p in range(start, end) if row[p] == MASK), key=lambda p: (float(confidence[p]), -p))
            row[best] = int(tokens[best])
    return row[len(prompt) :]


@pytest.mark.thinned
@pytest.mark.parametrize("suffix", SUFFIXES, ids=str)
def test_suffix_windows_equal_a_plain_loop(suffix: Suffix) -> None:
    model = tiny(2)
    out = paradec.generate(model, ROWS, sampler="low_confidence", suffix=suffix, **REQUEST)
    assert answers(out) == [plain_loop(model, prompt, suffix) for prompt in ROWS]
    assert answers(out) != answers(paradec.generate(model, ROWS, sampler="low_confidence", **REQUEST))


@pytest.mark.thinned
@pytest.mark.parametrize("cache", SUFFIX_CACHES)
@pytest.mark.parametrize("prediction", ["same", pytest.param("shifted", marks=FULL)])
@pytest.mark.parametrize("window", [NEW - BLOCK, *(pytest.param(n, marks=FULL) for n in (NEW, 10**6))])
def test_a_window_that_covers_the_answer_changes_nothing(cache: str, prediction: str, window: int) -> None:
    model = tiny(3, prediction=prediction)
    cache = caches.create("vicinity", prefix_look=2, after_look=2, warmup_steps=0) if cache == "vicinity" else cache
    request = REQUEST | {"sampler": "threshold", "cache": cache, "temperature": 0.5}
    plain = paradec.generate(model, ROWS, **request)
    for suffix in (Suffix(window), Suffix(window, "uniform", count=window)):
        out = paradec.generate(model, ROWS, suffix=suffix, **request)
        assert answers(out) == answers(plain)
        assert out.cost == plain.cost


@pytest.mark.parametrize("cache", SUFFIX_CACHES)
def test_masks_outside_the_window_are_neither_evaluated_nor_attended_to(cache: str) -> None:
    model, sampler = tiny(2), samplers.create("low_confidence")
    state = sampler.start(model, ROWS, cache=cache, suffix=Suffix(9, "uniform", count=4), **REQUEST)
    num_skipped = 0
    while not state.done:
        present = state.present.copy()
        proposal = sampler.step(model, state)
        for query in proposal.cost.queries:
            for row, positions in zip(query.rows, query.positions, strict=True):
                assert present[row, positions].all()
                num_skipped += state.length[row] - len(set(positions.tolist()))
        if state.store is not None:
            assert not (state.store.valid.numpy() & ~present).any()
        sampler.commit(state, proposal)
    assert num_skipped > 0


@pytest.mark.thinned
@pytest.mark.parametrize("cache", SUFFIX_CACHES)
def test_prompt_tokens_after_the_window_are_context(cache: str) -> None:
    model = tiny(3)
    prompt = [1, 2, *[MASK] * 8, 5, 6, *[MASK] * 8, 7, 8]
    request = {"max_new_tokens": 0, "block_length": 4, "suffix": 2, "cache": cache, "sampler": "low_confidence"}
    first = paradec.generate(model, [prompt], **request).sequences[0]
    changed = paradec.generate(model, [[*prompt[:-1], 9]], **request).sequences[0]
    assert first[:10].tolist() != changed[:10].tolist()
    wide = paradec.generate(model, [prompt], **request | {"suffix": 64}).sequences
    assert torch.equal(wide, paradec.generate(model, [prompt], **request | {"suffix": None}).sequences)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_number_of_evaluated_positions(cache: str) -> None:
    prompt_length, new, window = 3, 40, 6
    request = REQUEST | {"max_new_tokens": new, "sampler": "low_confidence", "cache": cache, "suffix": window}
    out = paradec.generate(tiny(1), [[1, 2, 3]], **request)
    total = 0
    for start in range(prompt_length, prompt_length + new, BLOCK):
        num_after = min(window, prompt_length + new - start - BLOCK)
        partial = {"none": start + BLOCK + num_after, "prefix": BLOCK + num_after, "dual": BLOCK}[cache]
        total += start + BLOCK + num_after + (BLOCK - 1) * partial
    assert out.cost.forwarded_tokens == [total]


@pytest.mark.parametrize(("prediction", "nearest"), [("same", 0.798), ("shifted", 0.638)])
def test_the_gaussian_density_equals_the_papers(prediction: str, nearest: float) -> None:
    p = Suffix(256, "gaussian").probabilities(prediction, 256)
    assert p.shape == (256,) and p[0] == pytest.approx(nearest, abs=1e-3)
    assert p[-1] == pytest.approx(p[0] * math.exp(-8), rel=1e-9)
    assert (np.diff(p) < 0).all()


@pytest.mark.parametrize(
    ("short_form", "suffix"),
    [
        (64, Suffix(64)),
        ("64", Suffix(64)),
        ("cut:32", Suffix(32)),
        ("gaussian:256", Suffix(256, "gaussian")),
        ("uniform:32:8", Suffix(32, "uniform", count=8)),
    ],
)
def test_short_forms(short_form: Any, suffix: Suffix) -> None:
    assert paradec.Request(suffix=short_form).suffix == suffix


def test_models_without_position_ids_may_have_a_cut_window() -> None:
    out = paradec.generate(wrap_kind("Opaque"), [[1, 2]], suffix=4, block_length=4, max_new_tokens=12, sampler="random")
    assert out.cost.forwarded_tokens == [4 * (10 + 14 + 14)]


@pytest.mark.thinned
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_the_window_begins_after_the_last_open_block(cache: str) -> None:
    model, window = tiny(2), 3
    rule = samplers.create("entropy_threshold", threshold=1.0)
    request = {"max_new_tokens": 24, "blocks": PipelinedBlocks(4, add=0.5), "sampler": rule, "cache": cache, "seed": 1}
    request |= {"eos_early_stop": False, "trace": True}
    plain = paradec.generate(model, ROWS, **request)
    assert answers(paradec.generate(model, ROWS, suffix=24, **request)) == answers(plain)
    cut = paradec.generate(model, ROWS, suffix=window, **request)
    num_pipelined_steps = 0
    for row, prompt in enumerate(ROWS):
        for step in cut.trace.steps:
            if step.blocks[row] is None:
                continue
            start, end = step.blocks[row]
            num_pipelined_steps += end - start > 4
            last = max(stop for _, stop in step.evaluated[row])
            assert last == min(end + window, len(prompt) + 24) or cache == "dual" and last <= end + window
        assert answers(paradec.generate(model, [prompt], suffix=window, **request)) == [answers(cut)[row]]
    assert num_pipelined_steps
