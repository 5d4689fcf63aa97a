"""Traces of AdaBlock's public code for LLaDA and Dream (without cache), replayed token for token.

Final tokens and forwards are equal in every case, and so is what every step commits, but for `nocache_init16_top1`: at
threshold 1 a step commits the one best position, and many end-of-text positions are equally sure to the last bits,
which differ between processors (as with the quota rules in `test_traces.py`). There a floor is asserted.
"""

from __future__ import annotations

import pytest
from replay import compare, load_trace, trace_names

from paradec import samplers

NAMES = trace_names("adablock", "adablock-dream")


def test_all_traces_are_there() -> None:
    assert len(NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str, request: pytest.FixtureRequest) -> None:
    trace = load_trace(name)
    settings = trace["settings"]
    model = request.getfixturevalue(trace["model"].removesuffix("-tiny"))
    length = settings["init_block_length" if trace["method"] == "adablock" else "block_length"]
    sampler = samplers.create(
        "adablock",
        threshold=settings["threshold"],
        init_block_length=length,
        delimiter_threshold=settings["delimiter_threshold"],
        delimiters=settings["delimiter_ids"],
    )
    cases = [case for case in trace["cases"] if case["fp64_same"]]
    assert len(cases) == 15
    if settings["threshold"] == 1:
        cases = cases[::3]  # 32 forwards each
    found = [compare(model, case, name, sampler) for case in cases]
    assert all(c.tokens_equal for c in found)
    assert [c.nfe for c in found] == [c.reference_nfe for c in found]
    if settings["threshold"] == 1:
        assert sum(c.steps_equal for c in found) >= 0.75 * sum(c.steps for c in found)
    else:
        assert all(c.steps_equal == c.steps for c in found)


def test_traces_have_adaptive_blocks() -> None:
    """The replays above are not all of fixed blocks."""
    lengths = [case["extra"]["block_history"] for name in NAMES for case in load_trace(name)["cases"]]
    assert sum(len(set(history)) > 1 for history in lengths) >= 20
    assert any(max(history) > 16 for history in lengths) or any(1 in history for history in lengths)
