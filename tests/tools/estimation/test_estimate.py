"""`paradec.estimate` as a whole: what it refuses, what follows from what, and what it prints."""

from __future__ import annotations

import copy
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import tiny

import paradec
from paradec.tools.estimation import probe as probing
from paradec.tools.estimation.devices import ITEM_BYTES, PUBLISHED
from paradec.tools.estimation.estimate import estimate
from paradec.tools.estimation.probe import Prober, probe
from paradec.tools.estimation.result import Estimate
from paradec.tools.estimation.shapes import BUILT_IN

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch": 0}, "batch=0 must be an integer from 1"),
    ({"batch": 2.0}, "batch=2.0"),
    ({"prompt": 0}, "prompt=0"),
    ({"answer": -1}, "answer=-1"),
    ({"group": True}, "group=True"),
    ({"group": 33}, "group=33 is more than the 32 heads of LLaDA-8B"),
    ({"block": 0}, "block=0"),
    ({"tokens_per_forward": 0.5}, r"tokens_per_forward=0.5 must be a number in \[1"),
    ({"tokens_per_forward": 33}, "tokens_per_forward=33 is more than a forward can decide: block=32"),
    ({"tokens_per_forward": float("nan")}, "tokens_per_forward=nan"),
    ({"efficiency": 0}, r"efficiency=0 must be a number in \(0, 1\]"),
    ({"efficiency": 1.5}, "efficiency=1.5"),
    ({"price_per_hour": -1}, "price_per_hour=-1"),
    ({"dtype": "int8"}, "dtype.*int8"),
    ({"dtype": "float64"}, "dtype.*float64"),
    ({"device": "h1000"}, "device.*h1000.*h100"),
    ({"device": 3}, "device=3 must be a name"),
    ({"cache": "duel"}, "cache.*duel.*dual"),
    ({"cache": 3}, "cache=3 must be a name"),
    ({"cache": "block"}, "cache='block' does not work with LLaDA-8B: it needs a block-causal or causal-context model"),
    ({"cache": "recap"}, "cache='recap' does not work"),
    ({"cache": paradec.caches.create("dual", store_dtype="float64")}, "store_dtype='float64' is not estimated"),
    ({"attention": "sparse"}, "attention.*sparse"),
    ({"attention": 3}, "attention=3"),
    ({"prompt": 4000, "answer": 97}, r"prompt=4000 \+ answer=97 = 4097 is longer than LLaDA-8B takes \(4096\)"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_wrong_arguments_are_named_before_anything_is_measured(arguments: dict[str, Any], said: str) -> None:
    before = probing._probed.cache_info().misses
    with pytest.raises((ValueError, TypeError), match=said) as caught:
        estimate("LLaDA-8B", **{"device": "cpu"} | arguments)
    assert "\n" not in str(caught.value) and probing._probed.cache_info().misses == before


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="block=24 does not fit LLaDA2.0-mini, which was trained with blocks of 32"):
        estimate("LLaDA2.0-mini", block=24)
    with pytest.raises(
        ValueError, match="attention='sparsed' is for full attention, and LLaDA2.0-mini is block-causal"
    ):
        estimate("LLaDA2.0-mini", attention="sparsed")
    causal = tiny(2, "causal")
    with pytest.raises(ValueError, match="is causal and keeps its own"):
        estimate(causal, cache="dual", dtype="float32", prompt=32, answer=32)
    with pytest.raises(ValueError, match="attention='sparsed' is for full attention"):
        estimate(causal, attention="sparsed", dtype="float32", prompt=32, answer=32)
    with pytest.raises(ValueError, match="dtype: 'float64'"):
        estimate(causal)


def test_time_follows_from_the_steps() -> None:
    found = estimate("LLaDA-8B", cache="dual", batch=4, tokens_per_forward=4, price_per_hour=3.0, group=2)
    assert found.forwards == sum(step.count for step in found.steps) == 64
    assert found.seconds == pytest.approx(sum(step.count * step.parts.total for step in found.steps))
    assert found.step.total == pytest.approx(found.seconds / 64)
    assert found.tokens_per_second == pytest.approx(4 * 256 / found.seconds)
    # two devices at 3 an hour each, for as long as a million tokens take
    assert found.cost_per_million == pytest.approx(2 * 3.0 * (1e6 / found.tokens_per_second) / 3600)
    assert estimate("LLaDA-8B").cost_per_million is None
    whole, part = found.steps
    assert (whole.kind, whole.count, whole.positions) == ("whole", 8, 768)
    assert (part.kind, part.count, part.positions) == ("part", 56, 32) and part.parts.total < whole.parts.total


def test_efficiency_stretches_everything() -> None:
    bound, half = (estimate("Dream-7B", cache="prefix", block=32, efficiency=share) for share in (1, 0.5))
    assert half.seconds == pytest.approx(2 * bound.seconds) and half.step.store == pytest.approx(2 * bound.step.store)
    assert half.memory == bound.memory


@pytest.mark.parametrize(
    "request_", [{"cache": "dual"}, {"group": 2, "cache": "prefix"}, {"device": "l4"}, {}], ids=str
)
def test_the_largest_batch_is_the_last_that_fits(request_: dict[str, Any]) -> None:
    found = estimate("LLaDA-8B", **request_)
    assert found.largest_batch > 0 and found.memory.fits
    for batch, fits in ((found.largest_batch, True), (found.largest_batch + 1, False)):
        assert estimate("LLaDA-8B", **request_, batch=batch).memory.fits == fits


def test_a_model_that_does_not_fit() -> None:
    found = estimate("LLaDA-8B", device="rtx4090", dtype="float32")
    assert found.largest_batch == 0 and not found.memory.fits
    assert "DOES NOT FIT" in str(found) and "largest batch 0" in " ".join(str(found).split())
    assert estimate("LLaDA-8B", device="rtx4090", dtype="float32", group=2).largest_batch > 0


def test_more_of_what_saves_saves_more() -> None:
    """What everyone knows: caches and tokens per forward make answers faster, batches tokens cheaper."""

    def seconds(**request: Any) -> float:
        return estimate("LLaDA-8B", **request).seconds

    assert seconds(cache="dual") < seconds(cache="prefix") < seconds()
    assert seconds(tokens_per_forward=4) < seconds(tokens_per_forward=2) < seconds()
    assert seconds(device="h200", cache="dual") < seconds(cache="dual") < seconds(device="a100", cache="dual")
    assert seconds(attention="sparsed", prompt=3000) < seconds(prompt=3000)
    speed = [estimate("LLaDA-8B", cache="dual", batch=batch).tokens_per_second for batch in (1, 8, 64)]
    assert speed == sorted(speed)


def test_causal_models_take_a_forward_a_token_or_verify_drafts() -> None:
    model = tiny(2, "causal")
    plain = estimate(model, dtype="float32", prompt=16, answer=32)
    assert (plain.forwards, plain.cache, plain.block) == (32, "its own", 1)
    drafted = estimate(model, dtype="float32", prompt=16, answer=32, block=5, tokens_per_forward=3.1)
    assert drafted.forwards == 11 and "5 verified a forward" in " ".join(str(drafted).split())


def lines(found: Estimate) -> list[str]:
    return str(found).splitlines()


WIDE: list[dict[str, Any]] = [
    {"cache": "dual", "price_per_hour": 12345.678, "group": 16, "batch": 100_000, "answer": 3000, "prompt": 1000},
    {"cache": "vicinity", "tokens_per_forward": 31.9, "attention": "sparsed", "device": "mi300x"},
    {"cache": "none", "device": "l4", "efficiency": 0.123456, "batch": 2**20, "dtype": "float32"},
    {"answer": 1, "prompt": 1},
]


@pytest.mark.parametrize("request_", WIDE, ids=[str(index) for index in range(len(WIDE))])
def test_reports_fit_eighty_columns_and_say_what_they_are(request_: dict[str, Any]) -> None:
    found = estimate("LLaDA-8B", **request_)
    assert max(map(len, lines(found))) <= 80 and "This is a calculation from published peaks" in str(found)
    assert f"{1e3 * found.step.total:,.3f}" in str(found)
    shown = {line.split()[0] for line in lines(found) if line}
    for name in ("weights", "head", "statistics", "activations"):
        assert name in shown
    assert ("communication" in shown) == (found.group > 1) and ("store" in shown) == (found.cache != "none")
    assert ("cost" in shown) == (found.price_per_hour is not None)


def test_the_same_as_data() -> None:
    found = estimate("LLaDA2.0-mini", cache="block", price_per_hour=2)
    data = json.loads(json.dumps(found.to_dict()))
    assert "calculation" in data["what"] and data["tokens_per_second"] == found.tokens_per_second
    assert data["step"]["total"] == pytest.approx(sum(v for k, v in data["step"].items() if k != "total"))
    assert data["memory"]["fits"] is True and data["steps"][0]["parts"]["weights"] > 0
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found


def test_threads_do_not_meet() -> None:
    caches = ["none", "dual", "prefix", "dkv_decode"] * 2
    alone = [estimate("LLaDA-8B", cache=cache).seconds for cache in caches]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda cache: estimate("LLaDA-8B", cache=cache).seconds, caches)] == alone


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_a_probe_measures_what_an_estimate_needs() -> None:
    """The first turn counts for nothing, and one of three that is slow for no more than that."""
    pieces, calls, late = len(probing.ROWS) + len(probing.QUERIES) + 3, 0, 0.0

    def clock() -> float:
        nonlocal calls, late
        late += 1000 * (calls % 2 and calls // (2 * pieces) in (0, 3))
        calls += 1
        return time.perf_counter() + late

    before, torch_state = torch.get_num_threads(), torch.random.get_rng_state()
    device = probe("float32", seconds=0, clock=clock)
    assert calls == 4 * 2 * pieces and device.overhead < 1
    assert device.measured and torch.get_num_threads() == before
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert device.memory > 1e8 and device.overhead > 0
    rates = [rate for _, rate in device.products["float32"]]
    assert min(rates) > 1e6 and max(rates) == device.flops["float32"] > 2 * rates[0]  # rows share what is read
    found = estimate(tiny(2), device=device, dtype="float32", prompt=32, answer=32, cache="dual")
    assert found.measured and found.step.overhead > 0 and "rates that a probe measured" in str(found)
    with pytest.raises(ValueError, match="dtype='bfloat16' was not measured on this machine"):
        estimate("LLaDA-8B", device=device)
    with pytest.raises(ValueError, match="group=2 needs a device with a link"):
        estimate(tiny(2), device=device, dtype="float32", prompt=32, answer=32, group=2)


def test_a_probe_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="seconds=-1"):
        probe(seconds=-1)
    with pytest.raises(ValueError, match="dtype"):
        probe("int8")
    with pytest.raises(RuntimeError, match=r"turn\(\)"):
        Prober("float32").device()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_estimates_are_near_measured_steps(dtype: str) -> None:
    """Within a factor of 1.7, on a machine that does other things as well; benchmarks/estimate.py says how near."""
    from scripts import load_script

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        script = load_script("benchmarks/estimate.py")
        prober, measured = Prober(dtype, time.process_time), script.Steps(script.SHAPES[1], dtype)
        for turn in range(6):
            prober.turn()
            measured.turn(count=turn > 0)
        size = measured.size
        found = estimate(
            measured.model, device=prober.device(), batch=size["rows"], prompt=size["prompt"], answer=size["answer"],
            block=size["block"], cache="dual",
        )  # fmt: skip
        for step in found.steps:
            took = sorted(measured.seconds[step.kind])[2]
            assert took / 1.7 < step.parts.total < 1.7 * took
    finally:
        torch.set_num_threads(threads)


def test_every_device_model_and_dtype_is_estimated() -> None:
    for name in PUBLISHED:
        for model in BUILT_IN:
            for dtype in ITEM_BYTES:
                found = estimate(model, device=name, dtype=dtype, prompt=64, answer=64)
                assert 0 < found.tokens_per_second < 1e6 and found.device == PUBLISHED[name].name
