"""Keys and values that the rows of a batch leave for each other."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from batches import drained
from every_model import shared
from tiny_models import END, tiny

import paradec
from paradec import caches, samplers
from paradec.batching import Batch
from paradec.caches.table import EXACT, prefix_verdict
from paradec.models.adapter import Model

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:seed=", "ignore:delimiters=")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "speculative": {"drafter": tiny(1, topology="causal", prediction="shifted", seed=1)}
}
"""Of samplers that cannot be made without any."""
MODELS = {
    "block_causal": tiny(2, "block_causal"),
    "causal": paradec.wrap(tiny(2).unwrap(), topology="causal", prediction="shifted", eos_token_id=END),
    "causal, which also fills masks": shared("nemotron causal"),
}


def words(seed: int, count: int) -> list[int]:
    return torch.randint(0, 37, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests_of(model: Model) -> dict[str, dict[str, Any]]:
    """Requests of every registered sampler and cache that work on this model, by name."""
    requests = {}
    for name in samplers.names():
        if samplers.get(name).family not in ("masked", "draft_verify"):
            continue
        sampler = samplers.create(name, **SETTINGS.get(name, {}))
        for cache in caches.names() if sampler.family == "masked" else [None]:
            request = {"sampler": sampler, "cache": cache}
            try:
                sampler.start(model, [[1, 2, 3]], max_new_tokens=4, cache=cache)
            except (TypeError, ValueError):  # the pair is refused, which other tests are about
                continue
            requests[f"{name} {cache or ''}".strip()] = request
    return requests


def differing(model: Model, firsts: Mapping[str, Any], seconds: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many second prompts took keys and values over, and the pairs whose second answer is not that of the prompt
    alone. Each first prompt has words of its own, and each second one goes on after a first answer."""
    request, reused, differences = {"eos_early_stop": False, "seed": 1}, 0, []
    with Batch(model, batch_size=512, prefix_memory=10**9, **request) as batch:
        first = [
            batch.add(words(at, 32), max_new_tokens=8, **arguments) for at, arguments in enumerate(firsts.values())
        ]
        drained(batch)
        texts = [ticket.output.sequences[0].tolist() for ticket in first]
        for number, (name, arguments) in enumerate(seconds.items(), 1000):
            prompts = [text + words(number, 2) for text in texts]
            # alone: two of these prompts may be equal, and equal ones draw apart
            second = [batch.add(prompt, alone=True, max_new_tokens=4, **arguments) for prompt in prompts]
            drained(batch)
            alone = paradec.generate(model, prompts, max_new_tokens=4, **request, **arguments).sequences
            for before, row, output in zip(firsts, alone, [ticket.output for ticket in second], strict=True):
                reused += output.reused != [0]
                if output.error is not None or not torch.equal(output.sequences[0], row):
                    differences.append(f"{before} -> {name}: {output.error!r}, reused {output.reused}")
    return reused, differences


def shares_keys(model: Model, arguments: Mapping[str, Any]) -> bool:
    """Whether such a request may share keys and values with others on this model."""
    cache = arguments["cache"]
    return cache is None or prefix_verdict(caches.create(cache), model.facts).status == EXACT


def sample(names: Sequence[str], count: int, seed: int) -> list[str]:
    """`count` names of pairs; every sampler has one before any has two."""
    seen, rank = Counter[str](), dict[str, int]()
    for name in random.Random(seed).sample(names, len(names)):
        sampler = name.split()[0]
        rank[name] = seen[sampler] = seen[sampler] + 1
    return sorted(rank, key=rank.__getitem__)[:count]


@pytest.mark.parametrize("kind", MODELS)
def test_a_second_prompt_is_answered_as_if_it_were_alone(kind: str) -> None:
    model = MODELS[kind]
    every = {name: arguments for name, arguments in requests_of(model).items() if shares_keys(model, arguments)}
    count = math.ceil(len(every) / math.sqrt(20))
    firsts, seconds = ({name: every[name] for name in sample([*every], count, seed)} for seed in (1, 2))
    reused, differences = differing(model, firsts, seconds)
    assert reused > count and differences == []


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
def test_every_ordered_pair_is_answered_as_if_alone(kind: str) -> None:
    every = requests_of(MODELS[kind])
    assert differing(MODELS[kind], every, every)[1] == []
