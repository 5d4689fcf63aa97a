"""Ids that a tokenizer has no text for, where a model has more rows of embeddings than the tokenizer has tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from byte_tokenizers import tokenizer_of
from canvases import tiny_module
from causal_models import tiny_llama
from hosting import Engine
from tiny_models import tiny

import paradec
from paradec.integrations.engines.hosted import Hosted
from paradec.models.adapter import Model

SIZE = 24
END, MASK = SIZE - 2, SIZE - 1
TOKENIZER = tokenizer_of([*(f"w{number} " for number in range(END)), "<end>", "<mask>"])
PROMPTS = [[1, 3, 5], [7, 9], [2]]
DRAWN: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3, "eos_early_stop": False}


def model_of(kind: str, tokenizer: Any = TOKENIZER) -> Model:
    """A model with 40 ids or more."""
    own: dict[str, Any] = {"tokenizer": tokenizer, "eos_token_id": (END,)}
    if kind == "causal":
        return paradec.wrap(tiny_llama(vocab=40), topology="causal", prediction="shifted", **own)
    if kind == "canvas":
        return paradec.wrap(tiny_module(), **own)
    block = 4 if kind == "block_causal" else None
    own |= {"mask_token_id": MASK, "prediction": "same"}
    return paradec.wrap(tiny(2).module, topology=kind, block_length=block, **own)


def drawn(model: Model, **request: Any) -> torch.Tensor:
    """The ids [N] that `generate` draws; rows of a batch, which takes no canvases, draw the same."""
    request = DRAWN | request
    if model.facts.topology == "causal":
        request["sampler"] = "sjd"
    if model.facts.topology == "canvas":  # whose sampler has temperatures of its own
        del request["temperature"]
    ids = paradec.generate(model, input_ids=PROMPTS, **request).new_tokens.reshape(-1)
    if model.facts.topology == "canvas":
        return ids
    many = paradec.generate_many(model, PROMPTS, batch_size=2, **request)
    assert torch.equal(torch.cat([each.new_tokens.reshape(-1) for each in many]), ids)
    return ids


@pytest.mark.parametrize("kind", ["bidirectional", "block_causal", "causal", "canvas"])
def test_they_are_not_drawn_unless_asked_for(kind: str) -> None:
    model = model_of(kind)
    assert drawn(model).max() < SIZE
    assert drawn(model, suppress_tokens=()).max() >= SIZE
    text = drawn(model, suppress_tokens=range(SIZE))  # all that has a text: codes of pictures are asked for so
    assert text.min() >= SIZE
    assert drawn(model, suppress_tokens=[3]).max() >= SIZE
    assert drawn(model_of(kind, None)).max() >= SIZE


def test_the_text_has_every_token() -> None:
    out = paradec.generate(model_of("bidirectional"), input_ids=PROMPTS[0], **DRAWN, logits_eos_inf=True)
    assert isinstance(out.text, str) and out.text.count("w") == 12


def test_ends_beyond_the_tokenizer_are_drawn() -> None:
    facts: dict[str, Any] = {"mask_token_id": MASK, "prediction": "same", "topology": "bidirectional"}
    ends = tuple(range(SIZE, 41, 2))
    model = paradec.wrap(tiny(2).module, tokenizer=TOKENIZER, eos_token_id=ends, **facts)
    beyond = {*drawn(model, max_new_tokens=60).tolist()} - {*range(SIZE)}
    assert beyond and beyond <= {*ends}


def test_rows_inside_an_engine_draw_what_generate_draws() -> None:
    model = model_of("block_causal")
    engine = Engine(model, Hosted("threshold", model.facts))
    engine.add("row", PROMPTS[0], 12, **{name: value for name, value in DRAWN.items() if name != "max_new_tokens"})
    while not engine.hosted.done("row"):
        engine.round(["row"])
    answer = engine.hosted.answer("row")
    assert answer == paradec.generate(model, input_ids=PROMPTS[0], **DRAWN).new_tokens[0].tolist()
    assert max(answer) < SIZE
