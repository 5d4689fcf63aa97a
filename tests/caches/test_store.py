"""The key/value store: records, drafts over it, rows, memory."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny

from paradec.caches.store import store_bytes
from paradec.core.memory import check_memory
from paradec.core.query import Query, StoreCall


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_estimate_is_what_is_allocated(dtype: torch.dtype | None) -> None:
    model = tiny(3)
    store = model.make_store(2, 11, None if dtype is None else "bfloat16")
    positions = torch.arange(4).expand(2, 4)
    query = Query(torch.arange(2).numpy(), positions, positions, store=StoreCall(torch.arange(2), positions))
    model(query, store)
    assert store.nbytes == store_bytes(model.module.config, 2, 11, dtype or torch.float64)
    assert next(iter(store.layer_keys.values())).dtype == (dtype or torch.float64)
    store.release()
    assert store.nbytes == 0 and store.peak_bytes > 0 and not store.valid.any()


def test_a_store_beyond_the_machine_is_refused_before_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"would take .* more than this machine's memory .* narrower store_dtype"):
        tiny(1).make_store(10**6, 10**6)
    with pytest.raises(ValueError, match="more than max_memory"):
        check_memory(2048, torch.device("cpu"), 2047, "a store")
    check_memory(2048, torch.device("cpu"), 2048, "a store")
