"""Batches with rows that start and end at different times: each answer equals that of `generate`."""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from decoding import drain, nested_values, refuses, supported_fields
from every_model import CANVAS, IMAGES, TEXT, shared_model
from images import IMAGE_MODELS
from places import GOLDEN
from small_models import END, VOCAB, tiny
from structured import KINDS, tiny_with_texts

import paradec
from paradec import caches, samplers
from paradec.batching.batch import Batch
from paradec.batching.slots import Ticket
from paradec.caches.table import EXACT, REFUSED, prefix_verdict, verdict
from paradec.core.facts import ModelFacts
from paradec.core.rows import select_rows
from paradec.models.adapter import Model
from paradec.models.self_drafting import SelfDrafting
from paradec.samplers.causal.drafts.stopping import Unsure
from paradec.samplers.causal.drafts.text import PromptLookup, TokenRecycling
from paradec.samplers.causal.jacobi import Jacobi
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.speculative import Speculative
from paradec.samplers.causal.trees import DynamicTree

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:steps=", "ignore:seed=", "ignore:delimiters=")

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked" and name != "mar"]
CAUSAL = [name for name in samplers.names() if samplers.get(name).family == "draft_verify"]
TOPOLOGY = {"bidirectional same": ("bidirectional", "same"), "bidirectional shifted": ("bidirectional", "shifted")}
TOPOLOGY |= {"block_causal same": ("block_causal", "same"), "block_causal shifted": ("block_causal", "shifted")}


def paths_of_size(state: Any, sizes: set[int]) -> list[str]:
    """Return the paths of the state's arrays and lists whose shape contains one of the sizes."""
    shapes = ((path, (len(value),) if isinstance(value, list) else value.shape) for path, value in nested_values(state))
    return [path for path, shape in shapes if sizes & {*shape}]


def is_supported(sampler: str, cache: str, kind: str) -> bool:
    topology, prediction = TOPOLOGY[kind]
    length = 4 if topology == "block_causal" else None
    facts = ModelFacts(vocab_size=2, prediction=prediction, topology=topology, block_length=length)
    return verdict(samplers.get(sampler), caches.create(cache), facts).status != REFUSED


PRODUCT = itertools.product(TOPOLOGY, MASKED, caches.names())
COMBINATIONS = [(sampler, cache, kind) for kind, sampler, cache in PRODUCT if is_supported(sampler, cache, kind)]


def covering_combinations() -> set[tuple[str, str, str]]:
    """Return combinations with every sampler and every cache."""
    combinations = set()
    for index, name in enumerate(MASKED):
        matching = [c for c in COMBINATIONS if c[0] == name]
        combinations.add(matching[index * 7 % len(matching)])
    for index, name in enumerate(caches.names()):
        if not any(c[1] == name for c in combinations):
            matching = [c for c in COMBINATIONS if c[1] == name]
            combinations.add(matching[index * 5 % len(matching)])
    return combinations


DEFAULT_COMBINATIONS = covering_combinations()


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {}


def model_of(models: dict[str, Model], kind: str) -> Model:
    if kind not in models:
        topology, prediction = TOPOLOGY.get(kind, ("causal", "shifted"))
        models[kind] = tiny(2, topology=topology, prediction=prediction)
        torch.manual_seed(0)
        codes = torch.randn(VOCAB, 4, dtype=torch.float64)  # samplers for images compare tokens by their codes
        models[kind].codebook = lambda: codes  # type: ignore[attr-defined]
    return models[kind]


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    rows = [[draw.randrange(36) for _ in range(draw.randint(1, 9))] for _ in range(count - 1)]
    return [*rows, rows[1]]


def decode_in_batch(model: Model, rows: list[Any], lengths: list[int], **request: Any) -> list[Ticket]:
    with Batch(model, batch_size=3, **request) as batch:
        tickets = [batch.add(row, max_new_tokens=new) for row, new in zip(rows, lengths, strict=True)]
        ended: list[Ticket] = []
        while len(ended) < len(rows):
            assert batch.occupied <= 3
            ended += batch.step()
        assert batch.occupied == batch.waiting == 0
    assert sorted(ticket.number for ticket in ended) == list(range(len(rows)))
    return tickets


def assert_same(model: Model, rows: list[Any], lengths: list[int], tickets: list[Ticket], **request: Any) -> None:
    for new in sorted(set(lengths)):
        expected = paradec.generate(model, rows, max_new_tokens=new, **request)
        for index, ticket in enumerate(tickets):
            if lengths[index] != new:
                continue
            out = ticket.output
            assert out is not None and out.error is None, out
            assert out.new_tokens[0].tolist() == expected.new_tokens[index].tolist(), index
            assert out.row_nfe[0] == expected.row_nfe[index], index
            assert out.tokens[0] == expected.tokens[index] and out.finished[0] == expected.finished[index]
            if out.logprobs is not None:
                chosen = expected.logprobs.chosen[index, -out.logprobs.chosen.shape[1] :]
                assert torch.allclose(out.logprobs.chosen[0], chosen, rtol=0, atol=1e-9, equal_nan=True), index


def assert_all_fields_are_selected(model: Model, rows: list[Any], **request: Any) -> None:
    """Assert that after select_rows no field has the old number of rows, which differs from every other size."""
    sampler = request.pop("sampler")
    sampler = samplers.create(sampler) if isinstance(sampler, str) else sampler
    with torch.inference_mode():
        state = sampler.start(model, [*rows, *rows, *rows[:5]], max_new_tokens=4, **request)
        assert len(state.rows) == 19 and paths_of_size(state, {19, 38})
        for _ in range(2):
            sampler.commit(state, sampler.step(model, state))
            if not state.done:  # a state at its end keeps its last window
                assert paths_of_size(select_rows(state, np.array([3, 0, 5])), {19, 38}) == []


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "cache", "kind"),
    [pytest.param(*c, marks=() if c in DEFAULT_COMBINATIONS else pytest.mark.full) for c in COMBINATIONS],
)
def test_masked_rows(models: dict[str, Model], name: str, cache: str, kind: str) -> None:
    draw = random.Random(f"{name} {cache} {kind}")
    model = model_of(models, kind)
    rows, lengths = prompts(draw, 7), [draw.choice((4, 8)) for _ in range(7)]
    request: Any = {"sampler": name, "cache": cache, "block_length": 4, "temperature": draw.choice((0.0, 0.8))}
    request |= {"guidance_scale": draw.choice((1.0, 1.0, 1.5)), "seed": draw.randrange(2**31)}
    request |= {"logprobs": draw.choice((None, 2)) if name != "lopa" else None}  # lopa has no logprobs
    request = supported_fields(name, request)
    assert_all_fields_are_selected(model, rows, **request)
    tickets = decode_in_batch(model, rows, lengths, **request)
    assert_same(model, rows, lengths, tickets, **request)


WITHOUT_DRAFTER = [name for name in CAUSAL if name not in ("zipar", "speculative")]
"""Samplers without a drafter, except ZipAR, which decodes images with common steps for all rows."""
DRAFTING: dict[str, Any] = {
    "chain": {"window": 4},
    "chain that ends where the drafter is unsure": {"window": 6, "stop": Unsure(0.2)},
    "tree": {"tree": (2, 2, 1)},
    "dynamic tree": {"tree": {"nodes": 8, "depth": 3, "top_k": 3}, "rule": "naive"},
}
WITH_MORE_STATE = {
    "prompt lookup": Speculative(drafter=PromptLookup(5, 2)),
    "token recycling": Speculative(drafter=TokenRecycling(k=8, tree=(4, 2, 1)), rule="naive"),
    "pool": Jacobi(window=6, pool=3),
    "coupled siblings": SCD(window=6, refresh="maximal", siblings=3, branching=2),
    "siblings of noise": SCD(window=6, refresh="gumbel", siblings=3, branching=2),
}
"""Samplers with more state per row than by default."""


@pytest.mark.thinned
@pytest.mark.parametrize(("temperature", "guidance"), [(0.0, 1.0), (0.8, 1.5)])
@pytest.mark.parametrize("name", [*WITHOUT_DRAFTER, *DRAFTING, *WITH_MORE_STATE])
def test_causal_rows(models: dict[str, Model], name: str, temperature: float, guidance: float) -> None:
    model = model_of(models, "causal")
    model.self_drafting = SelfDrafting(4)
    draw = random.Random(f"{name} {temperature} {guidance}")
    rows, lengths = prompts(draw, 7), [draw.choice((3, 9)) for _ in range(7)]
    if name in DRAFTING:
        models.setdefault("drafter", tiny(1, topology="causal", prediction="shifted", seed=1))
        sampler = samplers.create("speculative", drafter=models["drafter"], **DRAFTING[name])
    else:
        sampler = WITH_MORE_STATE.get(name) or samplers.create(name, window=5)
    request = {"temperature": temperature, "guidance_scale": guidance, "seed": 5, "logprobs": 1, "sampler": sampler}
    assert_all_fields_are_selected(model, rows, **request)
    tickets = decode_in_batch(model, rows, lengths, **request)
    assert_same(model, rows, lengths, tickets, **request)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_with_texts()


def test_constrained_answers_equal_those_of_generate(model: Model) -> None:
    values = [value for value, _ in KINDS.values()]
    is_valid = [is_valid for _, is_valid in KINDS.values()]
    prompts = [[1 + number, 2, 3] for number in range(9)]
    request: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, "block_length": 5}
    constrained = [{"prompt": p, "constraint": values[number % 3], "seed": number} for number, p in enumerate(prompts)]
    for number, out in enumerate(paradec.generate_many(model, constrained, batch_size=4, **request)):
        expected = paradec.generate(model, **constrained[number], **request)
        assert out.text == expected.text and is_valid[number % 3](out.text)
        assert out.log_weight == pytest.approx(expected.log_weight)


def test_rows_that_are_complete_at_the_start(model: Model) -> None:
    with Batch(model, batch_size=2, max_new_tokens=4) as batch:
        tickets = [batch.add([1, 2], constraint=paradec.Choice(["yes"])) for _ in range(3)]
        longer = batch.add([1, 2], constraint=paradec.Regex("[0-9]+"))
        for _ in range(20):
            batch.step()
        assert [ticket.done and ticket.output.text for ticket in tickets] == ["yes"] * 3
        assert longer.done and re.fullmatch("[0-9]+", longer.output.text)


ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 3], [2], [5, 4, 3]]
DEFAULT_KINDS = ("llada", "Opaque", "Bert", "Qwen2 block_causal", "Llama causal", "llada2-tiny")


@pytest.mark.thinned
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in DEFAULT_KINDS else pytest.mark.full) for k in TEXT])
def test_rows_equal_those_of_generate(kind: str) -> None:
    model = shared_model(kind)
    request: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.7, "seed": 3, "eos_early_stop": False}
    if model.facts.topology == "causal":
        request |= {"sampler": paradec.samplers.create("sjd", window=4)}
    elif model.supports_store:
        request |= {"cache": "block" if model.facts.topology == "causal_context" else "dual", "block_length": 4}
    expected = paradec.generate(model, ROWS, **request)
    with Batch(model, batch_size=2, **request) as batch:
        tickets = [batch.add(row) for row in ROWS]
        while not all(ticket.done for ticket in tickets):
            batch.step()
    for index, ticket in enumerate(tickets):
        assert ticket.output is not None and ticket.output.error is None, ticket.output
        assert ticket.output.new_tokens[0].tolist() == expected.new_tokens[index].tolist()
        assert ticket.output.row_nfe[0] == expected.row_nfe[index]


@pytest.mark.parametrize("kind", [CANVAS, *(kind for kind in IMAGES if kind not in ("digits-maskgit", *IMAGE_MODELS))])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    model = shared_model(kind)
    refuses(lambda: paradec.generate_many(model, [ROWS]), "^generate_many takes .*: give it to ", TypeError)
    refuses(lambda: Batch(model), "^Batch takes .*: give it to ", TypeError)


REQUIRED_SETTINGS = {"speculative": {"drafter": tiny(1, topology="causal", prediction="shifted", seed=1)}}
MODELS = {
    "block_causal": tiny(2, "block_causal"),
    "causal": paradec.wrap(tiny(2).unwrap(), topology="causal", prediction="shifted", eos_token_id=END),
    "causal, which also fills masks": shared_model("nemotron causal"),
}


def random_ids(seed: int, count: int) -> list[int]:
    return torch.randint(0, 37, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests_of(model: Model) -> dict[str, dict[str, Any]]:
    requests = {}
    for name in samplers.names():
        if samplers.get(name).family not in ("masked", "draft_verify"):
            continue
        sampler = samplers.create(name, **REQUIRED_SETTINGS.get(name, {}))
        for cache in caches.names() if sampler.family == "masked" else [None]:
            request = {"sampler": sampler, "cache": cache}
            try:
                sampler.start(model, [[1, 2, 3]], max_new_tokens=4, cache=cache)
            except (TypeError, ValueError):  # an unsupported pair, covered by other tests
                continue
            requests[f"{name} {cache or ''}".strip()] = request
    return requests


def decode_pairs(model: Model, firsts: Mapping[str, Any], seconds: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return how many second prompts reused keys and values, and the pairs whose answers depend on the first prompt."""
    request, num_reused, differences = {"eos_early_stop": False, "seed": 1}, 0, []
    with Batch(model, batch_size=512, prefix_memory=10**9, **request) as batch:
        first = [batch.add(random_ids(i, 32), max_new_tokens=8, **firsts[name]) for i, name in enumerate(firsts)]
        drain(batch)
        texts = [ticket.output.sequences[0].tolist() for ticket in first]
        for number, (name, arguments) in enumerate(seconds.items(), 1000):
            prompts = [text + random_ids(number, 2) for text in texts]
            # alone=True, because otherwise equal prompts in one batch draw different numbers
            second = [batch.add(prompt, alone=True, max_new_tokens=4, **arguments) for prompt in prompts]
            drain(batch)
            expected = paradec.generate(model, prompts, max_new_tokens=4, **request, **arguments).sequences
            for before, row, output in zip(firsts, expected, [ticket.output for ticket in second], strict=True):
                num_reused += output.reused != [0]
                if output.error is not None or not torch.equal(output.sequences[0], row):
                    differences.append(f"{before} -> {name}: {output.error!r}, reused {output.reused}")
    return num_reused, differences


def shares_keys(model: Model, arguments: Mapping[str, Any]) -> bool:
    cache = arguments["cache"]
    return cache is None or prefix_verdict(caches.create(cache), model.facts).status == EXACT


def sample(names: Sequence[str], count: int, seed: int) -> list[str]:
    """Draw combinations of a sampler and a cache, with as many different samplers as possible."""
    occurrences, rank = Counter[str](), dict[str, int]()
    for name in random.Random(seed).sample(names, len(names)):
        sampler = name.split()[0]
        rank[name] = occurrences[sampler] = occurrences[sampler] + 1
    return sorted(rank, key=rank.__getitem__)[:count]


@pytest.mark.parametrize("kind", MODELS)
def test_a_second_prompt_has_the_answer_of_generate(kind: str) -> None:
    model = MODELS[kind]
    requests = {name: arguments for name, arguments in requests_of(model).items() if shares_keys(model, arguments)}
    count = min(12, math.ceil(len(requests) / math.sqrt(20)))
    firsts, seconds = ({name: requests[name] for name in sample([*requests], count, seed)} for seed in (1, 2))
    num_reused, differences = decode_pairs(model, firsts, seconds)
    assert num_reused > count and differences == []


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
def test_second_prompts_of_all_pairs_have_the_answers_of_generate(kind: str) -> None:
    requests = requests_of(MODELS[kind])
    assert decode_pairs(MODELS[kind], requests, requests)[1] == []


SOURCE = GOLDEN / "drafters" / "drafters"
SHARED = [7, 8, 9, 10] * 5
PROMPTS = [[5, 9, 2, 40, 7], [11], [3, 1], [*range(20, 31)], [*SHARED, 1], [*SHARED, 2], [6], [*SHARED, 3, 4]]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("eagle3-original", {}),
    ("eagle3-speculators", {"tree": (3, 2, 1)}),
    ("eagle3-speculators", {"tree": DynamicTree(8, 3, 3), "rule": "naive"}),
    ("dflash2-zlab", {}),
    ("dspark-rnn", {}),
    ("../mtp-2/model", {}),
]
QUICK = ((2, 1.0), (4, 1.5), (5, 1.0))


@pytest.fixture(scope="module")
def base() -> Model:
    return paradec.load(SOURCE / "base", dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "settings", "scale"),
    [  # by default a dynamic tree of EAGLE-3, DSpark and MTP
        pytest.param(*case, scale, marks=() if (number, scale) in QUICK else pytest.mark.full)
        for number, case in enumerate(CASES)
        for scale in (1.0, 1.5)
    ],
)
def test_rows_with_trained_drafters_equal_those_of_generate(
    name: str, settings: dict[str, Any], scale: float, base: Model
) -> None:
    if name.startswith("d"):
        pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")
    kind = "mtp" if "mtp" in name else None
    base = base if kind is None else paradec.load(SOURCE / name, dtype=torch.float64)
    drafter = paradec.load_drafter(SOURCE / name, base=base, kind=kind)
    sampler = paradec.samplers.Speculative(drafter=drafter, **settings)
    request = {"sampler": sampler, "temperature": 0.9, "guidance_scale": scale}
    lengths = [9, 4, 12, 7, 5, 9, 3, 6]
    with Batch(base, batch_size=3, **request) as batch:
        tickets = [batch.add(prompt, seed=row, max_new_tokens=lengths[row]) for row, prompt in enumerate(PROMPTS)]
        while not all(ticket.done for ticket in tickets):
            batch.step()
    for row, (prompt, ticket) in enumerate(zip(PROMPTS, tickets, strict=True)):
        expected = paradec.generate(base, [prompt], seed=row, max_new_tokens=lengths[row], **request)
        assert ticket.output is not None and torch.equal(ticket.output.new_tokens[0], expected.new_tokens[0])
        assert ticket.output.row_nfe == expected.row_nfe
