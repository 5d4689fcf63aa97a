"""Every kind of model in every entry point: it decodes, or an error names the given and the allowed kinds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from images import FAMILIES
from small_models import END, tiny, tiny_gemma
from torch import nn

import paradec
import paradec.models
from paradec import samplers
from paradec.core.checks import MODELS
from paradec.core.family_queries import CausalQuery
from paradec.models.adapter import Model


def causal() -> Model:
    return paradec.wrap(tiny(1).unwrap(), topology="causal", prediction="shifted", eos_token_id=END)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    from pipelines import dit_pipeline

    result: dict[str, Any] = {name: make() for name, make in FAMILIES.items()}
    result |= {"masked text": tiny(1), "causal text": causal(), "pipeline": dit_pipeline()}
    result["canvas"] = paradec.wrap(tiny_gemma())
    result |= {"module": result["causal text"].module, "name": "digits-ar", "none": None, "class": type(result["mar"])}
    return result


KINDS = {
    "llamagen": "image", "llamagen of captions": "image", "nar": "neighbour image",
    "distilled llamagen": "distilled image", "distilled var": "distilled image", "emu3": "image", "chameleon": "image",
    "janus": "image", "glm_image": "image", "uvit": "codes", "masked image": "masked image", "mar": "continuous image",
    "var": "scale image", "lpd": "grouped image", "diffusion": "latent", "masked text": "text", "causal text": "text",
    "canvas": "canvas",
}  # fmt: skip
NO_MODELS = {"pipeline": "a DiTPipeline", "module": "a LlamaForCausalLM", "name": "'digits-ar'", "none": "None"}
NO_MODELS |= {"class": "<class 'paradec.models.images.mar.MARModel'>"}


def assert_refused(call: Callable[[Any], Any], given: Any, kind: str | None, words: str, *allowed: str) -> None:
    """Assert a TypeError that names the kind of `given` (or `words` if it is no model) and the allowed kinds."""
    module = getattr(given, "module", None)
    calls: list[int] = []
    if isinstance(module, nn.Module):
        module.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(TypeError) as raised:
        call(given)
    text = str(raised.value)
    assert "\n" not in text and len(text) < 300
    for name in allowed:
        assert MODELS[name][0] in text
    if kind is None:
        assert f", not {words}" in text
    else:
        description, home = MODELS[kind]
        assert text.endswith(f" is {description}: give it to {home}")
        assert getattr(getattr(given, "facts", None), "name", "DiffusionModel") in text
    assert not calls


@pytest.mark.thinned
@pytest.mark.parametrize("name", samplers.names())
def test_every_sampler_refuses_wrong_kinds_of_models(models: dict[str, Any], name: str) -> None:
    kind = samplers.get(name)
    assert kind.models and set(kind.models) <= set(MODELS)
    sampler = samplers.create(name, drafter=causal()) if name == "speculative" else samplers.create(name)
    prompt: Any = torch.zeros(1, 4, 8, 8) if kind.family == "forecast" else 1 if kind.family == "continuous" else [1]
    extra = {"scheduler": None} if kind.family == "forecast" else {}

    def start(model: Any) -> Any:
        return sampler.start(model, prompt, **extra)

    for entry, model_kind in KINDS.items():
        if model_kind not in kind.models:
            assert_refused(start, models[entry], model_kind, "", *kind.models)
    for entry, words in NO_MODELS.items():
        assert_refused(start, models[entry], None, words, *kind.models)


ENTRIES: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "generate": (("text", "canvas", "codes", "masked image"), lambda model: paradec.generate(model, [1])),
    "generate with drafts": (("text",), lambda model: paradec.generate(model, [1], sampler="sjd")),
    "infill": (("text", "canvas", "codes", "masked image"), lambda model: paradec.infill(model, [1])),
    "generate_images": (
        (
            *("image", "masked image", "grouped image", "continuous image", "scale image"),
            *("neighbour image", "distilled image"),
        ),
        lambda model: paradec.generate_images(model, class_labels=1),
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_refuses_wrong_kinds_of_models(models: dict[str, Any], entry: str) -> None:
    allowed, call = ENTRIES[entry]
    for name, kind in KINDS.items():
        if kind not in allowed:
            assert_refused(call, models[name], kind, "", *allowed)
    for name, words in NO_MODELS.items():
        assert_refused(call, models[name], None, words, *allowed)


WITHOUT_PLAIN_QUERIES = ("continuous image", "distilled image", "grouped image", "scale image", "latent")
"""Kinds without plain queries: they work on latents, on scales, or only with a store."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if KINDS[name] not in WITHOUT_PLAIN_QUERIES])
def test_embeddings_and_hidden_states_of_image_models(models: dict[str, Any], name: str) -> None:
    model = models[name]
    embeddings = model.token_embeddings()
    assert embeddings.shape[0] == model.facts.vocab_size and embeddings.ndim == 2
    assert len(embeddings.detach().unique(dim=0)) == len(embeddings)
    if KINDS[name] in ("image", "neighbour image"):
        captions = torch.randn(3, 16, dtype=torch.float64) if "captions" in name else [[1, 2, 3]]
        side = 32 if name == "emu3" else None  # Emu3's default grid is too long for the small model
        negative = {"negative_prompt": [[1]]} if name == "emu3" else {}
        request = model.request(1 if name in ("llamagen", "nar") else captions, model.grid(side, side), **negative)
        model, ids = request.model, torch.tensor(request.prompts.rows)
    else:
        ids = torch.tensor([[model.class_token(1), *range(16)]])
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    query = CausalQuery(rows=np.array([0]), tokens=ids, positions=positions, keep_hidden=True)
    logits = model(query)
    assert query.hidden.shape == (*ids.shape, model.hidden_size)
    assert torch.equal(model.head(query.hidden), logits)
