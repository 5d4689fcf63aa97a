"""What `estimate` counts with a suffix window is what decoding evaluates."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny

import paradec
from paradec.caches import create
from paradec.caches.suffix import Suffix
from paradec.tools.estimation.courses import masked_course
from paradec.tools.estimation.shapes import shape_of


@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "d2"])
def test_positions_are_those_of_a_decoding(cache: str) -> None:
    """One token a step, left to right."""
    model, prompt, answer, block = tiny(1), 3, 24, 4
    suffix = Suffix(6)
    plan: Any = create("d2", current_k=3) if cache == "d2" else create(cache)
    course = masked_course(shape_of(model), plan, None, prompt, answer, block, 1.0, suffix)
    counted = sum(each.positions * count for each, count in course.items())
    asked: dict[str, Any] = {"max_new_tokens": answer, "block_length": block, "suffix": suffix, "cache": plan}
    out = paradec.generate(model, [[1, 2, 3]], sampler="low_confidence", eos_early_stop=False, **asked)
    if cache == "d2":  # which masks are near depends on the order
        assert counted == pytest.approx(out.forwarded_tokens, rel=0.25)
    else:
        assert counted == out.forwarded_tokens


def test_a_window_makes_a_long_answer_cheaper() -> None:
    asked: dict[str, Any] = {"prompt": 128, "answer": 1024, "cache": "prefix", "device": "h100"}
    plain, cut = paradec.estimate("LLaDA-8B", **asked), paradec.estimate("LLaDA-8B", suffix=64, **asked)
    assert cut.seconds < plain.seconds and cut.forwards == plain.forwards


@pytest.mark.parametrize(
    ("model", "asked", "message"),
    [
        ("LLaDA2.0-mini", {}, "sees nothing after its block anyway"),
        ("LLaDA-8B", {"cache": "dkv_decode"}, "cache='dkv_decode' counts on all of a row"),
        ("LLaDA-8B", {"attention": "sparsed"}, "of whole rows"),
    ],
)
def test_refusals(model: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paradec.estimate(model, suffix=64, **asked)
