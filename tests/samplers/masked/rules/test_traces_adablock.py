"""Traces of AdaBlock's public code for LLaDA and Dream without cache, replayed in float64 (those with caches are in
`test_traces_caches.py`): final tokens, the number of forwards, and what each of them evaluated and committed are the
reference's in every case.

In float32 (`-m full`) final tokens and the number of forwards are compared.
"""

from __future__ import annotations

import pytest
from replay import (
    PRECISIONS,
    assert_replayed,
    cache_of,
    decode,
    head_of,
    load_trace,
    model_of,
    request_of,
    trace_names,
)

NAMES = [name for name in trace_names("adablock", "adablock-dream") if cache_of(head_of(name)) == "none"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str, precision: str) -> None:
    trace = load_trace(name)
    exact = precision == "float64"
    sampler, arguments = request_of(trace)
    assert_replayed(decode(model_of(trace, precision), trace, sampler, alone=not exact, **arguments), exact)


def test_traces_have_adaptive_blocks() -> None:
    """The replays above are not all of fixed blocks."""
    lengths = [case["extra"]["block_history"] for name in NAMES for case in head_of(name)["cases"]]
    assert sum(len(set(history)) > 1 for history in lengths) >= 20
    assert any(max(history) > 16 or 1 in history for history in lengths)
