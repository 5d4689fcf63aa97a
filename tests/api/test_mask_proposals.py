"""No sampler writes the mask id, even where a model finds it the best token of every position."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fitting import MASKED, fits, taken
from tiny_models import MASK, VOCAB, tiny
from torch import nn

import paradec
from paradec import samplers
from paradec.models.adapter import Model
from paradec.models.own_drafts import OwnDrafts

PROMPTS = [[1, 3, 5], [7, 9]]
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "guidance_scale": 1.5},
]
MODELS = {
    "bidirectional": ("bidirectional", "same"),
    "bidirectional shifted": ("bidirectional", "shifted"),
    "block_causal": ("block_causal", "same"),
    "block_causal shifted": ("block_causal", "shifted"),
    "causal_context": ("causal_context", "same"),
    "causal": ("causal", "shifted"),
}
CAUSAL = [name for name in samplers.names() if samplers.get(name).family == "draft_verify" and name != "zipar"]
"""ZipAR decodes pictures alone."""
pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=", "ignore:steps=")


@functools.cache
def model_of(kind: str) -> Model:
    """A random model that gives the mask nearly all of the probability."""
    topology, prediction = MODELS[kind]
    model = tiny(1, topology, prediction)
    if topology.startswith("causal"):
        model.own_drafts = OwnDrafts(4)
    model.codebook = lambda: torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(0))  # type: ignore[attr-defined]

    def prefer_mask(module: nn.Module, args: Any, output: Any) -> None:
        output.logits = output.logits + 20.0 * (torch.arange(VOCAB) == MASK)

    model.module.register_forward_hook(prefer_mask)
    return model


def assert_never_written(model: Model, sampler: Any, prompts: Any = PROMPTS, **request: Any) -> None:
    out = paradec.generate(model, prompts, sampler=sampler, seed=1, eos_early_stop=False, **request)
    assert not (out.sequences == model.facts.mask_id).any(), request


def masked_pairs() -> list[tuple[str, str]]:
    """Every masked sampler with one of the kinds that it works with, in turn."""
    pairs = []
    for index, name in enumerate(MASKED):
        needs = samplers.get(name).needs
        kinds = [kind for kind in MODELS if kind != "causal" and fits(name, model_of(kind))]
        if needs.multi_step or needs.mask_probes:  # refused where a block's first token needs a step of its own
            kinds = [kind for kind in kinds if kind != "causal_context"]
        pairs.append((name, kinds[index % len(kinds)]))
    return pairs


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "kind"), masked_pairs())
def test_masked_samplers(name: str, kind: str) -> None:
    for request in REQUESTS:
        assert_never_written(model_of(kind), name, max_new_tokens=6, **taken(name, request))
    if "rng" not in samplers.get(name).unsupported and not samplers.get(name).needs.multi_step:
        assert_never_written(model_of(kind), name, [[1, 3], [7, 9]], max_new_tokens=6, rng="reference")


@pytest.mark.parametrize("name", CAUSAL)
def test_samplers_of_causal_models(name: str) -> None:
    model = model_of("causal")
    sampler = samplers.create(name, **({"drafter": model} if name == "speculative" else {}))
    for request in REQUESTS:
        assert_never_written(model, sampler, max_new_tokens=6, **taken(sampler, request))


@pytest.mark.parametrize("kind", ["block_causal", "block_causal shifted", "causal", "causal_context"])
@pytest.mark.parametrize("settings", [{}, {"rule": "match", "threshold": 0.5}], ids=str)
def test_self_speculation(kind: str, settings: dict[str, Any]) -> None:
    sampler = samplers.create("self_speculative", **settings)
    for request in REQUESTS[: 2 if kind.startswith("block_causal") else 3]:
        assert_never_written(model_of(kind), sampler, max_new_tokens=6, **request)
