"""WINO, LLaDA2.1's editing and Saber, which remask or replace decided tokens."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from oracles.masked import HOLE, editing, saber, wino
from small_models import MASK, tiny
from torch import Tensor

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.facts import ModelFacts
from paradec.core.query import Query, take_columns
from paradec.samplers.masked.loop import MaskedSampler, Needs, Revision, View

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=")

REVISING = ["wino", "editing", "saber"]
VOCAB, REACH = 8, 16
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 0, 1], [2]]
NEW, SEEDS = 12, 8


class AdditiveModel:
    """A model whose logits are sums over visible tokens of vectors that depend on token and distance."""

    tokenizer, pads, supports_store, supports_visibility = None, True, False, True
    default_max_new_tokens, default_block_length = NEW, None
    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, seed: int = 0, scale: float = 0.5, ends: tuple[int, ...] = ()):
        self.facts = ModelFacts(vocab_size=VOCAB + 1, mask_token_id=HOLE, eos_token_ids=ends, name="the sum")
        generator = torch.Generator().manual_seed(seed)
        size = (REACH, VOCAB + 1, VOCAB + 1)
        self.table = scale * torch.randn(size, dtype=torch.float64, generator=generator)
        self.vectors = self.table.tolist()

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        distance = (query.positions.unsqueeze(1) - query.positions.unsqueeze(2)) % REACH
        visible = torch.ones_like(distance, dtype=torch.bool) if query.visible is None else query.visible
        if query.valid is not None:
            visible = visible & query.valid.unsqueeze(1)
        vectors = self.table[distance, query.tokens.unsqueeze(1).expand_as(distance)]
        return take_columns((vectors * visible.unsqueeze(-1)).sum(2), query.wanted)

    def read(self, at: int, columns: list[tuple[int, int]]) -> list[float]:
        """Probabilities of the tokens at position `at`, which sees the (position, token) columns."""
        logits = [0.0] * VOCAB
        for position, token in columns:
            for token_id, value in enumerate(self.vectors[(position - at) % REACH][token][:VOCAB]):
                logits[token_id] += value
        weights = [math.exp(z - max(logits)) for z in logits]
        return [w / math.fsum(weights) for w in weights]


def split_into_blocks(prompt: list[int], block: int) -> list[range]:
    return [range(s, min(s + block, len(prompt) + NEW)) for s in range(len(prompt), len(prompt) + NEW, block)]


# (sampler, oracle, settings)
CASES: list[tuple[str, Callable[..., Iterator[None]], dict]] = [
    ("wino", wino, {}),
    ("wino", wino, {"threshold": 0.3, "threshold_back": 0.6, "cap_share": 0.5, "cap_low": 2, "cap_high": 3}),
    ("editing", editing, {"max_post_steps": 3}),
    ("editing", editing, {"threshold": 0.5, "editing_threshold": 0.8}),
    ("saber", saber, {}),
    ("saber", saber, {"minimum": 1, "remask_share": 0.6}),
    ("saber", saber, {"minimum": 5}),
    ("saber", saber, {"minimum": 2, "remask_share": 0.0}),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "loop", "settings"), CASES)
def test_samplers_equal_the_oracles(name: str, loop: Callable[..., Iterator[None]], settings: dict) -> None:
    sampler = samplers.create(name, **settings)
    memory: dict = {"num_remasked": 0, "num_stable": 0}
    for seed in range(SEEDS):
        model, block = AdditiveModel(seed), (5, 12)[seed % 2]
        out = paradec.generate(model, PROMPTS, sampler=sampler, block_length=block, max_new_tokens=NEW, trace=True)
        for index, prompt in enumerate(PROMPTS):
            row, expected = prompt + [HOLE] * NEW, []
            memory["confidence"] = {}
            for positions in split_into_blocks(prompt, block):
                for _ in loop(model, row, positions, memory, sampler.to_dict()):
                    expected.append(list(row))
            assert [out.trace.replay(step + 1)[index] for step in range(out.row_nfe[index])] == expected
            assert out.new_tokens[index].tolist() == row[len(prompt) :]
    assert (memory["num_remasked"] == 0) == (settings.get("remask_share") == 0)  # only a share of 0 remasks no position
    if settings.get("max_post_steps"):
        blocks = sum(len(split_into_blocks(prompt, (5, 12)[seed % 2])) for seed in range(SEEDS) for prompt in PROMPTS)
        assert 0 < memory["num_stable"] < blocks  # some blocks become stable, others reach the maximum number of steps


def steps_of(sampler: Any, model: Any, rows: list[list[int]], **request: Any) -> Iterator[tuple[Any, Any]]:
    """Decode; yield the state and the proposal of each step before its commit."""
    state = sampler.start(model, rows, max_new_tokens=NEW, eos_early_stop=False, **request)
    while not state.done:
        with torch.no_grad():
            proposal = sampler.step(model, state)
        yield state, proposal
        sampler.commit(state, proposal)


ROWS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14]]
EAGER = {"threshold": 0.05, "threshold_back": 0.4, "cap_low": 1, "cap_high": 3}


@pytest.mark.thinned
@pytest.mark.parametrize("topology", ["bidirectional", "block_causal"])
@pytest.mark.parametrize("guidance_scale", [1.0, 1.5])
def test_winos_shadow_positions_attend_to_all_but_their_own_token(topology: str, guidance_scale: float) -> None:
    model, compared = tiny(3, topology), 0
    request = {"block_length": 4, "guidance_scale": guidance_scale}
    for state, proposal in steps_of(samplers.create("wino", **EAGER), model, ROWS, **request):
        for index, row in enumerate(proposal.rows):
            length = int(state.length[row])
            block = list(range(state.block_start[row], state.block_end[row]))
            positions = [*range(length), *block]
            visible = torch.zeros(len(positions), len(positions), dtype=torch.bool)
            for q, position in enumerate(positions):
                for k, seen_position in enumerate(positions):
                    is_visible = q >= length or k < length  # only shadows attend to shadows
                    is_visible = is_visible and not (q >= length and k < length and position == seen_position)
                    visible[q, k] = is_visible and (topology == "bidirectional" or seen_position // 4 <= position // 4)
            ids = torch.cat((state.canvas[row, :length], torch.full((len(block),), MASK)))
            is_prompt = torch.cat((state.is_prompt[row, :length], torch.zeros(len(block), dtype=torch.bool)))
            arguments = {"position_ids": torch.tensor([positions]), "attention_mask": visible[None, None]}
            branches = [
                model.module(input_ids=tokens[None], use_cache=False, **arguments).logits[0]
                for tokens in (ids, ids.masked_fill(is_prompt, MASK))
            ]
            logits = branches[1] + guidance_scale * (branches[0] - branches[1])
            logits[:, MASK] = -torch.inf
            p = logits.softmax(-1)
            current = proposal.current[index, : len(block)]
            decided = current != MASK
            shadow = p[length:].gather(1, current[:, None])[:, 0]
            actual = proposal.updates["shadow_confidence"][index, : len(block)]
            torch.testing.assert_close(actual[decided], shadow[decided])
            torch.testing.assert_close(proposal.scores[index, : len(block)], p[block].amax(-1))
            compared += int(decided.sum())
    assert compared > 30


WINO = samplers.get("wino")
STORED = [name for name in caches.names()[1:] if verdict(WINO, caches.create(name), ModelFacts(2)).status != REFUSED]


@pytest.mark.parametrize("name", STORED)
def test_winos_shadows_with_a_cache_are_exact_with_one_layer(name: str) -> None:
    """Keys of shadows are not stored, and a shadow does not attend to the stored key of its position."""
    model, sampler = tiny(1), samplers.create("wino", **EAGER)
    runs = (steps_of(sampler, model, ROWS, block_length=4, cache=cache) for cache in (name, "none"))
    steps = 0
    for (state, ours), (plain, theirs) in zip(*runs, strict=True):
        assert torch.equal(state.canvas, plain.canvas)
        available = ours.available
        torch.testing.assert_close(ours.scores[available], theirs.scores[available])
        torch.testing.assert_close(ours.updates["shadow_confidence"], theirs.updates["shadow_confidence"])
        store = state.store
        stale = store.valid & (store.token_at_write[:, : store.slots] != state.canvas[:, store.start :])
        for row in ours.rows:
            assert not stale[row, state.block_start[row] : state.block_end[row]].any()
        steps += 1
    assert steps > 5


def test_shadows_are_exact_on_block_causal_models_with_their_cache() -> None:
    model = tiny(2, "block_causal")
    arguments = {"sampler": "wino", "max_new_tokens": NEW, "block_length": 4, "trace": True}
    plain = paradec.generate(model, ROWS, **arguments)
    for cache in ("block", "prefix", "dual"):
        out = paradec.generate(model, ROWS, cache=cache, **arguments)
        assert torch.equal(out.sequences, plain.sequences) and out.row_nfe == plain.row_nfe
        assert out.forwarded_tokens < plain.forwarded_tokens


def test_winos_shadow_positions_are_counted_as_evaluated() -> None:
    model = tiny(1)
    out = paradec.generate(model, [[1, 2, 3]], sampler="wino", max_new_tokens=8, block_length=4, eos_early_stop=False)
    assert out.forwarded_tokens == out.nfe * (3 + 8 + 4)


@dataclass(frozen=True)
class Undoing(MaskedSampler):
    """Commit two positions per step, and remask everything in every step."""

    name = "undoing"
    slack: int = 0
    needs = Needs(decided_logits=True)

    def select(self, view: View) -> Tensor:
        return view.top(view.scores, torch.full((len(view.scores),), 2))

    def revise(self, view: View, selected: Tensor) -> Revision:
        return Revision(remask=view.editable, hold_block=torch.ones(len(selected), dtype=torch.bool))

    def max_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        return masks_at_open + self.slack


@pytest.mark.parametrize("slack", [0, 1, 7])
def test_remasking_leaves_enough_steps_to_fill_the_block(slack: int) -> None:
    """`Undoing` takes the maximum number of steps in every block, and leaves no mask."""
    out = paradec.generate(AdditiveModel(), PROMPTS, sampler=Undoing(slack=slack), max_new_tokens=NEW, block_length=4)
    assert out.row_nfe == [3 * (4 + slack)] * 3
    assert not (out.new_tokens == HOLE).any()


@pytest.mark.parametrize("name", REVISING)
def test_an_end_token_ends_the_row_only_when_it_is_stable(name: str) -> None:
    """A row ends inside a block when a step changes nothing up to and including its end token."""
    num_inside = 0
    for seed in range(8):
        model = AdditiveModel(seed, ends=(7,))
        out = paradec.generate(model, PROMPTS, sampler=name, max_new_tokens=NEW, block_length=6, trace=True)
        for index, prompt in enumerate(PROMPTS):
            canvases = [out.trace.replay(step)[index] for step in range(out.row_nfe[index] + 1)]
            for step, canvas in enumerate(canvases):
                answer = canvas[len(prompt) :]
                end = next((i for i, token in enumerate(answer) if token in (7, HOLE)), None)
                if end is None or answer[end] == HOLE:
                    continue
                up_to = len(prompt) + end + 1
                block = range(start := len(prompt) + end // 6 * 6, start + 6)
                is_unchanged = step and canvases[step - 1][:up_to] == canvas[:up_to]
                if step < out.row_nfe[index]:
                    assert not is_unchanged
                elif any(canvas[i] == HOLE for i in block):
                    assert is_unchanged
                    num_inside += 1
    assert num_inside
