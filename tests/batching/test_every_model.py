"""Batches that are refilled over every kind of model that `generate` takes."""

from __future__ import annotations

from typing import Any

import pytest
from every_model import CANVAS, IMAGES, TEXT, shared
from image_families import MODELS as IMAGE_MODELS

import paradec
from paradec.batching.batch import Batch

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 3], [2], [5, 4, 3]]
pytestmark = pytest.mark.filterwarnings("ignore:cache=")
REFILLED = ("digits-maskgit", *IMAGE_MODELS)
"""Image models whose pictures `test_many_images.py` compares."""
OFTEN = ("llada", "Opaque", "Bert", "Qwen2 block_causal", "Llama causal", "llada2-tiny")


@pytest.mark.thinned
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.full) for k in TEXT])
def test_rows_are_those_of_generate(kind: str) -> None:
    model = shared(kind)
    request: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.7, "seed": 3, "eos_early_stop": False}
    if model.facts.topology == "causal":
        request |= {"sampler": paradec.samplers.create("sjd", window=4)}
    elif model.supports_store:
        request |= {"cache": "block" if model.facts.topology == "causal_context" else "dual", "block_length": 4}
    whole = paradec.generate(model, ROWS, **request)
    with Batch(model, batch_size=2, **request) as batch:
        tickets = [batch.add(row) for row in ROWS]
        while not all(ticket.done for ticket in tickets):
            batch.step()
    for index, ticket in enumerate(tickets):
        assert ticket.output is not None and ticket.output.error is None, ticket.output
        assert ticket.output.new_tokens[0].tolist() == whole.new_tokens[index].tolist()
        assert ticket.output.row_nfe[0] == whole.row_nfe[index]


@pytest.mark.parametrize("kind", [CANVAS, *(kind for kind in IMAGES if kind not in REFILLED)])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    model = shared(kind)
    with pytest.raises(TypeError, match="^generate_many takes .*: give it to "):
        paradec.generate_many(model, [ROWS])
    with pytest.raises(TypeError, match="^Batch takes .*: give it to "):
        Batch(model)


def test_masked_pictures_are_decoded_as_ids() -> None:
    model = shared("digits-maskgit")
    grid = model.grid()
    prompts = [model.request(label, grid).prompts[0] for label in (1, 7, 3)]
    request = {"sampler": "maskgit", "steps": 4, "temperature": 1.0, "seed": 5, "max_new_tokens": grid.length}
    request |= {"suppress_tokens": model.suppressed, "eos_early_stop": False}
    whole = paradec.generate(model, prompts, **request)
    with Batch(model, batch_size=2, **request) as batch:
        tickets = [batch.add(prompt) for prompt in prompts]
        while not all(ticket.done for ticket in tickets):
            batch.step()
    outs = [ticket.output for ticket in tickets]
    assert [out.error for out in outs] == [None] * 3
    assert [out.new_tokens[0].tolist() for out in outs] == whole.new_tokens.tolist()
