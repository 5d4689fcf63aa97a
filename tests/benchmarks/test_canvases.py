"""The benchmark of canvases at small size: what it counts, against a loop of its own and the outputs' own counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import load_script

import paradec

canvases = load_script("benchmarks/canvases.py")


@pytest.fixture(scope="module")
def module() -> Any:
    return canvases.small_module(vocab=64, canvas=8, hidden=32)


def test_calls_are_counted_where_they_happen(module: Any) -> None:
    """Rows in all calls are those that the output counts row by row; outside of the block nothing is counted."""
    model = paradec.wrap(module, eos_token_id=[], pad_token_id=canvases.PAD)
    with canvases.Counted(module) as counted:
        out = canvases.ours(model, module, "early", 0)
    calls, rows, encodings = counted.counts().tolist()
    assert rows == sum(out.denoising_calls) and sum(counted.rows["encoder"]) == sum(out.encoder_calls)
    assert max(out.denoising_calls) <= calls < rows and canvases.CANVASES <= encodings
    canvases.ours(model, module, "early", 1)
    assert counted.counts().tolist() == [calls, rows, encodings]
    model.unwrap()


def test_lock_step_counts_the_longest_row_of_each_canvas() -> None:
    paths = canvases.Paths()
    paths.steps = {0: [3, 9], 1: [5, 2], 2: [4]}
    assert paths.lock_step(rows=3).tolist() == [14, 42, 2]


def test_paths_are_the_steps_of_every_canvas(module: Any) -> None:
    model = paradec.wrap(module, eos_token_id=canvases.ENDS, pad_token_id=canvases.PAD)
    paths = canvases.Paths()
    out = canvases.ours(model, module, "early", 0, paths)
    model.unwrap()
    assert [sum(paths.steps[row]) for row in range(8)] == out.denoising_calls
    assert any(out.finished) and {len(row) for row in paths.steps.values()} != {canvases.CANVASES}


def test_rows_go_on_where_lock_step_waits(module: Any) -> None:
    """What the table's bars rest on, at small size: fewer rows, the same ones for every wait, fewer encodings."""
    entries = canvases.schedule(module, turns=1, seeds=(0,), waits=(0, 2), settlings=("early",))
    assert [(entry["settles"], entry["ends"]) for entry in entries] == [("early", False), ("early", True)]
    for entry in entries:
        now, later = entry["encode_wait"]
        assert now["rows"] == later["rows"] <= entry["same_paths_in_lock_step"]["rows"]
        assert now["encoder_calls"] >= later["encoder_calls"] >= canvases.CANVASES
        assert entry["transformers"]["rows"] == 8 * entry["transformers"]["decoder_calls"]
        assert entry["cpu_ratio"]["low"] > 0
    first = entries[0]
    assert first["transformers"]["encoder_calls"] == canvases.CANVASES and first["encode_wait"][0]["rows_fewer"] > 1.1


def test_a_step_of_each_is_taken_apart() -> None:
    found = canvases.cost(turns=2, vocab=600, canvas=8, hidden=32, widths=(16,))
    assert [entry["kept"] for entry in found["steps"]] == [0.25, 1.0]
    for entry in found["steps"]:
        assert min(entry["ours_ms"].values()) > 0 and set(entry["ours_parts_ms"]) & {"soft embeddings"}
        assert entry["transformers_with_soft_ms"] > entry["transformers_ms"]["median"]
    # the share that is said to be kept is
    logits = canvases.logits_of(600, 8, 0.25)
    entropy = torch.distributions.Categorical(logits=logits / 0.6).entropy()[0]
    assert int((entropy < 1e-6).sum()) == 2 and (entropy[2:] > 1).all()


@pytest.mark.full
def test_peaks_hold_logits_at_least() -> None:
    unit = 4 * 20_000 * 32
    for who in ("ours", "transformers"):
        found = canvases.peak_alone(who, 1, 20_000, 32, 32)
        assert found["peak"] == max(found["stages"].values()) > unit and "model" in found["stages"]
