"""`paradec estimate`: the report of `paradec.estimate`, from options."""

from __future__ import annotations

import json

import pytest
from terminals import ok, on_terminal, refused

import paradec
from paradec.tools.estimation.estimate import estimate


def test_the_command_prints_the_report() -> None:
    request = ["--cache", "vicinity", "--cache-set", "prefix_look=4", "--batch", "8", "--tokens-per-forward", "3"]
    request += ["--device", "A100", "--price-per-hour", "2", "--block", "16", "--group", "2", "--efficiency", "0.4"]
    plan = paradec.caches.create("vicinity", prefix_look=4)
    found = estimate(
        "LLaDA-8B", cache=plan, batch=8, tokens_per_forward=3.0, device="a100", price_per_hour=2.0, block=16, group=2,
        efficiency=0.4,
    )  # fmt: skip
    assert ok("estimate", "LLaDA-8B", *request) == f"{found}\n"
    assert json.loads(ok("estimate", "LLaDA-8B", *request, "--json")) == json.loads(json.dumps(found.to_dict()))


def test_the_command_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_terminal(monkeypatch, 80, "estimate", "dream-7b", "--attention", "sparsed", "--prompt", "2000")
    assert text.strip() == str(estimate("Dream-7B", attention="sparsed", prompt=2000))


def test_the_command_refuses_in_one_line() -> None:
    assert "batch=0" in refused("estimate", "LLaDA-8B", "--batch", 0)
    assert "asks no hub" in refused("estimate", "someone/something")
    assert "look" in refused("estimate", "LLaDA-8B", "--cache", "dual", "--cache-set", "look=3")
    assert "--attention-set" in refused("estimate", "LLaDA-8B", "--attention-set", "select=0.5")
