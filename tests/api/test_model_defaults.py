"""The default sampler, cache and block length of requests, by the model's topology."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused
from small_models import tiny, tiny_gemma

import paradec
from paradec.cli.work import prepare
from paradec.request import Request

PROMPT = [3, 1, 4, 1, 5]
CHOICES = [
    ("bidirectional", "same", "threshold", "dual", 32),
    ("bidirectional", "shifted", "threshold", "dual", 32),
    ("block_causal", "same", "threshold", "block", None),
    ("causal_context", "same", "threshold", "block", None),
    ("causal", "shifted", "sjd", "causal", None),
]


def prepare_chat(model: Any, explicit: set[str], monkeypatch: Any, choose: bool = True, **options: Any) -> Any:
    monkeypatch.setattr(paradec, "load", lambda *_, **__: model)
    values = {"model": "any", "preset": None, "sampler": "threshold", "set_": None, "dtype": None, "device": None}
    values |= {"cache": "none", "max_new_tokens": 8, "temperature": 0.0, "suffix": None} | options
    return prepare("generate", None, explicit, use_defaults=choose, **values)


@pytest.mark.parametrize(("topology", "prediction", "sampler", "cache", "block_length"), CHOICES)
def test_chat_and_serve_choose_defaults_by_topology(
    topology: str, prediction: str, sampler: str, cache: str, block_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(2, topology, prediction)
    work = prepare_chat(model, set(), monkeypatch)
    assert (work.method.name, work.cache_name, model.default_block_length) == (sampler, cache, block_length)
    option = {} if cache == "causal" else {"cache": cache}
    expected = paradec.generate(model, PROMPT, sampler=sampler, max_new_tokens=8, block_length=block_length, **option)
    assert torch.equal(work.run(PROMPT, lambda *_: None).new_tokens, expected.new_tokens)


def test_explicit_options_are_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for explicit, cache in (({"cache"}, "none"), ({"cache"}, "prefix")):
        work = prepare_chat(tiny(1), explicit, monkeypatch, cache=cache)
        work.choose_cache()
        assert work.cache_name == cache
    Request(sampler="credit", cache="prefix", block_length=4).save(tmp_path / "saved.json")
    work = prepare_chat(tiny(1), set(), monkeypatch, preset=tmp_path / "saved.json")
    assert (work.method.name, work.cache_name, work.request["block_length"]) == ("credit", "prefix", 4)
    work = prepare_chat(tiny(1), {"sampler"}, monkeypatch, sampler="wino")
    assert (work.method.name, work.cache_name) == ("wino", "dual")
    work = prepare_chat(tiny(1), set(), monkeypatch, choose=False)  # like `paradec generate`
    assert (work.cache_name, work.model.default_block_length) == ("none", None)


def test_causal_models_decode_without_a_sampler_argument() -> None:
    model = tiny(2, "causal", "shifted")
    outputs = [paradec.generate(model, PROMPT, max_new_tokens=12, **option) for option in ({}, {"sampler": "sjd"})]
    assert torch.equal(outputs[0].new_tokens, outputs[1].new_tokens) and outputs[0].nfe == outputs[1].nfe
    batch = list(paradec.generate_many(model, [PROMPT, PROMPT[:2]], max_new_tokens=12))
    assert torch.equal(batch[0].new_tokens, outputs[0].new_tokens)
    with pytest.raises(ValueError, match="needs a model with a mask token"):
        paradec.generate(model, PROMPT, sampler="threshold", max_new_tokens=12)


def test_canvas_models_decode_without_a_sampler_argument() -> None:
    model = paradec.wrap(tiny_gemma())
    request = {"max_new_tokens": 8, "seed": 1}
    first = paradec.generate(model, PROMPT, **request)
    second = paradec.generate(model, PROMPT, sampler="diffusion_gemma", **request)
    assert torch.equal(first.new_tokens, second.new_tokens)


def test_chat_refuses_two_models_and_unknown_ones() -> None:
    assert "both name the model" in refused("chat", "here", "--model", "there")
    assert "nowhere" in refused("chat", "./nowhere")
