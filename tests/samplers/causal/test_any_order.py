"""Causal samplers on any-order models: same tokens, or same distribution, as with one position per step."""

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters import exactness
from oracles.proteins import conditional, sequential
from places import GOLDEN
from small_models import piece
from torch import Tensor

import paradec
from paradec.core import orders, rng
from paradec.core.facts import ModelFacts
from paradec.core.orders import draws_from_keys
from paradec.core.query import Query, take_columns
from paradec.models.adapter import Opaque
from paradec.models.proteins.mpnn import MASK_ID, ProteinMPNNModel, load_protein_mpnn
from paradec.request import Request
from paradec.samplers.causal.state import NOISE_STREAM
from paradec.samplers.start import row_keys

NAMES = ("sjd", "scd", "jacobi")
GAPS = piece(40, 54, "gaps").coordinates.clone()
GAPS[[0, 7], 2] = torch.nan
PIECES = [piece(0, 11, "plain"), piece(20, 31, "two", chains="AAAAABBBBBB"), piece(40, 54, "gaps", coordinates=GAPS)]
PIECES += [piece(5, 6, "one"), piece(8, 10, "pair")]


@pytest.fixture(scope="module")
def model() -> ProteinMPNNModel:
    return load_protein_mpnn(GOLDEN / "proteins" / "small.pt", PIECES, dtype=torch.float64)


def draw_request(
    draw: random.Random, model: ProteinMPNNModel
) -> tuple[list[list[int]], dict[str, Any], Any, list[list[int]]]:
    """Draw prompts of several structures, a request, the field `order`, and a list of positions for each row."""
    prompts, listed_orders = [], []
    for _ in range(draw.randint(1, 4)):
        number = draw.randrange(len(PIECES))
        size = len(PIECES[number])
        fixed = draw.sample(range(size), draw.randint(0, size // 2))
        chains = "B" if number == 1 and draw.random() < 0.3 else None
        prompts.append(model.prompt(number, fixed=fixed if chains is None else (), chains=chains))
        positions = list(range(size))
        if draw.random() < 0.5:
            positions = [place for place in positions if prompts[-1][1 + place] == MASK_ID]
        listed_orders.append(draw.sample(positions, len(positions)))
    request = {"temperature": draw.choice((0.0, 0.05, 0.3, 1.0, 2.0)), "top_k": draw.choice((None, None, 3))}
    request |= {"top_p": draw.choice((None, None, 0.8)), "seed": draw.randrange(100)}
    request |= {"suppress_tokens": draw.choice(((), (1, 5, 9)))}
    return prompts, request, draw.choice(("random", "chain", listed_orders)), listed_orders


QUICK = [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*no effect at temperature 0")
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=() if first in QUICK else pytest.mark.full) for first in range(100)]
)
def test_jacobi_gives_the_tokens_of_one_position_per_step(model: ProteinMPNNModel, first: int) -> None:
    for number in range(5 * first, 5 * first + 5):
        draw = random.Random(number)
        prompts, request, order, listed_orders = draw_request(draw, model)
        sampler = paradec.samplers.create("jacobi", window=draw.choice((None, None, 1, 3)))
        out = paradec.generate(model, prompts, sampler=sampler, order=order, logprobs=0, **request)
        keys = torch.as_tensor(row_keys([request["seed"]] * len(prompts), prompts))
        for row, prompt in enumerate(prompts):
            size, tokens = len(prompt) - 1, out.sequences[row, -len(prompt) :].tolist()
            named_order = orders.create("raster" if order == "chain" else "random")
            groups = named_order.groups(1, size, draws_from_keys(keys[row : row + 1]))
            positions = listed_orders[row] if order is listed_orders else groups.order[0].tolist()
            expected, _ = sequential(model, prompt, positions, keys[row], Request(**request))
            assert tokens == expected, (number, row)
            assert out.row_nfe[row] <= prompt.count(MASK_ID)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_equal_conditional_ones_in_the_order_of_decoding(
    model: ProteinMPNNModel, name: str, temperature: float
) -> None:
    order = random.Random(4).sample(range(14), 14)
    request = {"sampler": name, "temperature": temperature, "order": order, "seed": 1, "logprobs": 2}
    out = paradec.generate(model, model.prompt("gaps"), **request)
    row = out.sequences[0].tolist()
    decided, total = [0, 7], 0.0
    for place in (place for place in order if place not in decided):
        masked = [token if at - 1 in (*decided, -1) else MASK_ID for at, token in enumerate(row)]
        total += float(conditional(model, masked, decided, place).log_softmax(-1)[row[1 + place]])
        decided = [*decided, place]
    assert out.logprobs.sums()[0] == pytest.approx(total, abs=1e-5) and total < -1
    assert out.logprobs.chosen[0, [0, 1, 8]].isnan().all()


def test_calls_evaluate_undecided_positions_and_the_last_decided_one(model: ProteinMPNNModel) -> None:
    prompt, request = model.prompt("gaps"), {"temperature": 0.5, "seed": 2, "trace": True}
    out = paradec.generate(model, prompt, sampler="jacobi", **request)
    remaining, evaluated = 12, 15
    for step in out.trace.steps:
        assert step.forwarded == [evaluated]
        remaining -= len(step.commits)
        evaluated = remaining + 1  # also the last decided token: it was not a draft, so no call has read it
    assert remaining == 0 and 1 < out.nfe < 12 and len(out.trace.steps[0].commits) == 1
    first, second = out.trace.steps[:2]
    assert not first.rejected and len(second.rejected) + len(second.commits) - 1 == 10
    one_by_one = paradec.generate(model, prompt, sampler=paradec.samplers.create("jacobi", window=1), **request)
    assert one_by_one.nfe == 12 and torch.equal(one_by_one.sequences, out.sequences)
    positions = {position for step in out.trace.steps for _, position, *_ in step.commits}
    assert positions == {*range(1, 15)} - {1, 8}


@pytest.mark.thinned
@pytest.mark.parametrize("order", ["listed", pytest.param("random", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [*NAMES, "maximal"])
def test_the_distribution_equals_that_of_one_position_per_step(model: ProteinMPNNModel, name: str, order: str) -> None:
    """Compare with the enumeration of all designs of four residues from three amino acids."""
    four_residues, letters, temperature = model.on(piece(12, 16, "four")), (9, 12, 15), 0.5
    prompt, size = four_residues.prompt(), 4
    suppressed = [token for token in range(20) if token not in letters]
    all_orders = [[2, 0, 3, 1]] if order == "listed" else list(itertools.permutations(range(size)))
    expected, independent = torch.zeros(3**size, dtype=torch.float64), torch.ones(3**size, dtype=torch.float64)
    for number, design in enumerate(itertools.product(letters, repeat=size)):
        for place in range(size):
            p = conditional(four_residues, prompt, [], place)[list(letters)].div(temperature).softmax(-1)
            independent[number] *= p[letters.index(design[place])]
        for places in all_orders:
            probability, row = 1.0, list(prompt)
            for k, place in enumerate(places):
                p = conditional(four_residues, row, list(places[:k]), place)[list(letters)].div(temperature).softmax(-1)
                probability *= float(p[letters.index(design[place])])
                row[1 + place] = design[place]
            expected[number] += probability / len(all_orders)
    count = 3_000 if order == "listed" else 100_000
    sampler = paradec.samplers.create("scd", refresh="maximal") if name == "maximal" else name
    request = {"temperature": temperature, "seed": 3, "suppress_tokens": suppressed, "num_return_sequences": count}
    request["order"] = all_orders[0] if order == "listed" else None
    out = paradec.generate(four_residues, prompt, sampler=sampler, **request)
    letter_index = torch.zeros(20, dtype=torch.int64)
    letter_index[list(letters)] = torch.arange(3)
    design_index = (letter_index[out.sequences[:, 1:]] * 3 ** torch.arange(size - 1, -1, -1)).sum(1)
    counts = torch.bincount(design_index, minlength=3**size)
    assert expected.sum() == pytest.approx(1) and (expected * count >= 5).sum() > 15
    assert exactness.p_value(counts.numpy(), expected.numpy()) > 1e-3
    assert exactness.p_value(counts.numpy(), independent.numpy()) < 1e-6
    assert max(out.row_nfe) <= size


class SumModel(Opaque):
    """A model whose logits are sums over the tokens that are decoded earlier. It supports no padding and no cache."""

    any_order = reads_order = True

    def __init__(self) -> None:
        facts = ModelFacts(vocab_size=7, mask_token_id=6, eos_token_ids=(5,), pad_token_id=4, name="sums")
        tokenizer = SimpleNamespace(
            decode=lambda ids, skip_special_tokens=False: "".join("abcde.?"[int(index)] for index in ids),
            chat_template=None,
        )
        super().__init__(torch.nn.Identity(), facts, tokenizer)
        draw = torch.Generator().manual_seed(0)
        self.first = torch.randn(12, 7, generator=draw, dtype=torch.float64)
        self.pairs = torch.randn(12, 7, 12, 7, generator=draw, dtype=torch.float64)
        self.calls: list[Query] = []

    def _logits(self, query: Query, store: Any) -> Tensor:
        assert store is None and query.valid is None and query.decided_at is not None
        self.calls.append(query)
        size = query.tokens.shape[1]
        known, place = query.tokens != 6, torch.arange(size)
        rank = torch.where(known, (query.decided_at + 1) * size + place, 10_000)
        is_earlier = (rank.unsqueeze(1) < rank.unsqueeze(2)).double()  # [row, position, earlier position]
        pairs = self.pairs[place, query.tokens][:, :, :size]  # [row, earlier position, position, vocabulary]
        logits = self.first[:size] + torch.einsum("rij,rjiv->riv", is_earlier, pairs)
        return logits if query.wanted is None else take_columns(logits, query.wanted)


def decode_in_order(model: SumModel, row: list[int], order: list[int], key: Tensor, temperature: float) -> list[int]:
    """Decode one position per step in `order`. Pad the answer after its leftmost end token."""
    row = list(row)
    decided = [position for position, token in enumerate(row) if token != 6]
    start = max((position + 1 for position in decided), default=0)
    for place in (place for place in order if row[place] == 6):
        logits = model.first[place] + sum(model.pairs[earlier, row[earlier], place] for earlier in decided)
        logits = logits.clone()
        logits[6] = -torch.inf
        noise = rng.gumbel(rng.uniform(key[None], torch.tensor([0]), torch.tensor([[place]]), 7, NOISE_STREAM))[0, 0]
        row[place] = int(((logits / temperature).log_softmax(-1) + noise).argmax())
        decided.append(place)
    end = next((position for position in range(start, len(row)) if row[position] == 5), None)
    return row if end is None else row[: end + 1] + [4] * (len(row) - end - 1)


@pytest.mark.parametrize("seed", range(6))
def test_rows_end_at_their_leftmost_end_token(seed: int) -> None:
    model, prompts = SumModel(), [[0, 6, 2], [6, 6, 1, 6], [3]]
    out = paradec.generate(model, prompts, sampler="jacobi", max_new_tokens=6, temperature=1.0, seed=seed)
    rows = [[*row, *[6] * 6] for row in prompts]
    keys = torch.as_tensor(row_keys([seed] * 3, prompts))
    num_ended = 0
    for number, row in enumerate(rows):
        groups = orders.create("random").groups(1, len(row), draws_from_keys(keys[number : number + 1]))
        expected = decode_in_order(model, row, groups.order[0].tolist(), keys[number], 1.0)
        assert out.sequences[number, -len(row) :].tolist() == expected
        num_ended += 4 in expected[len(prompts[number]) :]
        assert out.finished[number] == (5 in expected[len(prompts[number]) :])
    assert {len(query.tokens) for query in model.calls} == {1}


def test_stop_strings_streaming_and_infilling() -> None:
    model, streamed = SumModel(), []
    request = {"sampler": "jacobi", "temperature": 1.0, "seed": 5, "eos_early_stop": False}
    unstopped = paradec.generate(model, [0, 6, 6, 6, 6, 6, 6, 6, 6], **request)
    letters = "".join("abcde.?"[token] for token in unstopped.sequences[0].tolist())
    stop_string = letters[3:5]
    streamer = SimpleNamespace(put=lambda ids: streamed.append(ids.clone()), end=lambda: streamed.append(None))
    out = paradec.generate(model, [0, 6, 6, 6, 6, 6, 6, 6, 6], stop_strings=stop_string, streamer=streamer, **request)
    end = letters.index(stop_string, 1) + 2
    assert out.text == letters[:end] and out.finished == [True]
    expected = [0, *unstopped.sequences[0, 1:end].tolist()]
    assert torch.cat(streamed[:-1], 1)[0].tolist() == expected and streamed[-1] is None
    for seed in range(9):
        filled = paradec.infill(model, [0, 6, 6, 2, 6, 1], sampler="jacobi", temperature=2.0, seed=seed)
        assert filled.sequences[0, [0, 3, 5]].tolist() == [0, 2, 1] and not (filled.sequences == 5).any()
        assert len(filled.fills) == 2 and filled.tokens == [3]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_generate_many_do_not_depend_on_the_batch(model: ProteinMPNNModel, name: str) -> None:
    fixed = {2: (), 1: (0,), 4: (0,), 0: (3, 4), 3: ()}
    prompts = [model.prompt(number, fixed=fixed[number]) for number in (2, 1, 4, 3, 2, 0, 4, 1, 3)]
    request = {"sampler": name, "temperature": 0.8, "seed": 7, "logprobs": 0}
    together = paradec.generate(model, prompts, **request)
    for out in paradec.generate_many(model, prompts, batch_size=2, **request):
        assert out.error is None
        row = together.sequences[out.index, -len(prompts[out.index]) :]
        assert torch.equal(out.sequences[0, -len(row) :], row)
        assert out.logprobs.sums()[0] == pytest.approx(float(together.logprobs.sums()[out.index]), abs=1e-9)


def test_orders_survive_a_round_trip_through_to_dict() -> None:
    assert math.isclose(Request(order=[1, 0]).order[0], 1) and Request(order="random").to_dict() == {"order": "random"}
    assert Request(**Request.from_dict(Request(order=orders.create("random", sizes=2)).to_dict())).order.sizes == 2
