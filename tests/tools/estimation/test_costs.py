"""The arithmetic of a forward, held to operations that torch counts and bytes that modules and stores have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

import paradec
from paradec.tools.estimation.costs import LATENCY, Parts, communication, forward_cost, memory_of
from paradec.tools.estimation.courses import Evaluation
from paradec.tools.estimation.devices import PUBLISHED, Device, published
from paradec.tools.estimation.shapes import BUILT_IN, Shape, shape_of

ENDLESS = 1e300
COUNTS = Device("a device of one operation a second", ENDLESS, ENDLESS, {"float32": 1.0})
MOVES = Device("a device of one byte a second", ENDLESS, 1.0, {"float32": ENDLESS})


def llama(**sizes: Any) -> torch.nn.Module:
    config = LlamaConfig(
        **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False}
        | sizes
    )
    config._attn_implementation = "eager"  # whose products are seen one by one
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("sizes", [{}, {"num_key_value_heads": 4}, {"head_dim": 16}, {"num_hidden_layers": 1}])
def test_operations_are_those_that_torch_counts(sizes: dict[str, Any]) -> None:
    module, ids = llama(**sizes), torch.zeros(2, 7, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(ids, attention_mask=torch.zeros(2, 1, 7, 7))
    parts = forward_cost(shape_of(module), COUNTS, "float32", 2, Evaluation("whole", 7, 7, 7))
    assert parts.weights + parts.attention + parts.head == counter.get_total_flops()
    few = forward_cost(shape_of(module), COUNTS, "float32", 2, Evaluation("whole", 7, 3, 7))
    assert few.head == parts.head * 3 / 7 and few.weights == parts.weights


def test_a_mixture_computes_what_its_tokens_chose() -> None:
    shape = BUILT_IN["LLaDA2.0-mini"]
    found = forward_cost(shape, COUNTS, "float32", 3, Evaluation("part", 5, 5, 64))
    assert found.weights + found.head == pytest.approx(2 * 15 * shape.active_parameters)
    one, many = (forward_cost(shape, MOVES, "float32", 1, Evaluation("part", n, n, 64)).weights for n in (1, 100_000))
    every = shape.parameters - 2 * shape.head_weights
    chosen = shape.mixtures * shape.experts_per_token * shape.expert_weights
    assert one == pytest.approx(4 * (shape.always_weights + chosen)) and many == pytest.approx(4 * every)


def test_bytes_are_those_of_the_weights() -> None:
    module = llama()
    found = forward_cost(shape_of(module), MOVES, "float32", 1, Evaluation("part", 1, 1, 1))
    layers = sum(p.nbytes for name, p in module.named_parameters() if ".layers." in name and p.ndim > 1)
    assert (found.weights, found.head) == (layers, module.lm_head.weight.nbytes)


@pytest.mark.parametrize("rows", [1, 3])
def test_store_and_weights_take_what_decoding_holds(rows: int) -> None:
    model = tiny(2)
    out = paradec.generate(
        model, [[7, 8, 9, 10]] * rows, cache=paradec.caches.create("dual", store_dtype="float32"), max_new_tokens=8,
        block_length=4, eos_early_stop=False,
    )  # fmt: skip
    assert out.cost is not None
    said = paradec.estimate(model, batch=rows, prompt=4, answer=8, block=4, cache="dual", dtype="float32")
    assert said.memory.store == out.cost.store_bytes
    assert said.memory.weights == pytest.approx(4 * sum(p.numel() for p in model.module.parameters()), rel=0.02)
    kept = paradec.caches.create("dual", store_dtype="float16")
    half = paradec.estimate(model, batch=rows, prompt=4, answer=8, block=4, cache=kept, dtype="float32")
    assert half.memory.store == said.memory.store / 2 and half.step.store < said.step.store


def test_store_and_attention_do_not_wait_for_each_other() -> None:
    """Keys and values are read while scores are computed: together the longer of the two."""
    shape = BUILT_IN["LLaDA-8B"]
    for positions, seen in ((1, 4096), (4096, 4096)):
        each = Evaluation("part", positions, 1, seen)
        stored = forward_cost(shape, PUBLISHED["h100"], "bfloat16", 1, each, stores=True)
        moved = 2 * 32 * 32 * 128 * (positions + seen) * 2 / 3.35e12
        scored = 4 * 32 * 32 * 128 * positions * seen / 989.4e12
        assert stored.store == pytest.approx(moved)
        assert stored.store + stored.attention == pytest.approx(max(moved, scored))
        plain = forward_cost(shape, PUBLISHED["h100"], "bfloat16", 1, each)
        assert (plain.store, plain.attention) == (0, pytest.approx(max(moved, scored)))


@pytest.mark.parametrize(
    ("model", "device", "milliseconds"),
    [("LLaDA-8B", "h100", 4.64), ("LLaDA-8B", "h200", 3.24), ("LLaDA-8B", "a100", 7.6), ("Dream-7B", "h100", 4.24),
     ("Dream-7B", "h200", 2.96)],
)  # fmt: skip
def test_bounds_that_were_worked_out_by_hand(model: str, device: str, milliseconds: float) -> None:
    """32 tokens over 1024 kept positions: weights, output matrix and store, all read at full bandwidth."""
    parts = forward_cost(
        BUILT_IN[model], PUBLISHED[device], "bfloat16", 1, Evaluation("part", 32, 32, 1024), stores=True
    )
    assert 1e3 * (parts.weights + parts.head + parts.store + parts.attention) == pytest.approx(milliseconds, rel=0.02)


def test_sparse_attention_reads_its_share() -> None:
    shape = BUILT_IN["LLaDA-8B"]
    full, part = (
        forward_cost(shape, COUNTS, "float32", 1, Evaluation("whole", 64, 32, 64, share)) for share in (1.0, 0.25)
    )
    assert part.attention == full.attention / 4 and part.weights == full.weights


def test_groups_share_matrices_and_wait_for_each_other() -> None:
    shape, device, each = BUILT_IN["Dream-7B"], PUBLISHED["h100"], Evaluation("part", 32, 32, 512)
    one, two, eight = (forward_cost(shape, device, "bfloat16", 1, each, group, True) for group in (1, 2, 8))
    assert (two.weights, two.head) == (one.weights / 2, one.head / 2) and one.communication == 0
    # four heads of keys and values: eight devices keep one each, so that each is kept twice
    assert eight.store == one.store / 4 and two.store == one.store / 2
    # a ring: everyone sends everything but its own part, once to sum and once to hand out; logits only the latter
    sent = sum(2 * 32 * 3584 / 8 for _ in range(2 * (8 - 1)))
    gathered = 2 * 32 * 152064 / 8 * (8 - 1)
    waits = 2 * 28 * (LATENCY + sent / 450e9) + LATENCY + gathered / 450e9
    assert eight.communication == pytest.approx(waits)
    assert communication(shape, device, 32, 1.0, 2, 1) == 0


def test_rates_between_what_was_measured() -> None:
    curve = ((1.0, 10.0), (4.0, 20.0), (16.0, 80.0))
    device = Device("", 1, 1, {"float32": 99.0}, products={"float32": curve})
    rates = [device.product_rate("float32", rows) for rows in (0.5, 1, 2, 4, 8, 16, 500)]
    assert rates == pytest.approx([10, 10, math.sqrt(200), 20, 40, 80, 80])
    assert device.attention_rate("float32", 3) == 99


def test_parts_add_up() -> None:
    parts = Parts(*range(1, 9))
    assert parts.total == 36 and (parts + parts.scaled(2)).total == 108


def test_memory_by_hand() -> None:
    shape = Shape("", 2, 16, 4, 2, 4, 24, 100)
    found = memory_of(shape, PUBLISHED["l4"], "float16", 3, 10, 7, 5, group=1, stores=True)
    assert found.store == 2 * 2 * 3 * 2 * 4 * 11 * 2  # with a slot for padding
    assert found.logits == 2 * 3 * 5 * 100 * 2
    assert found.available == 0.9 * 24e9 and found.fits
    assert found.total == found.weights + found.store + found.logits + found.activations


def test_devices_by_name() -> None:
    assert published("RTX 4090") is published("rtx-4090") is PUBLISHED["rtx4090"]
    for device in PUBLISHED.values():  # every one has what an estimate asks for, in SI units, and says where from
        assert 1e10 < device.memory < 1e12 and 1e11 < device.bandwidth < 1e13 and device.source
        assert device.flops["float32"] < device.flops["bfloat16"] == device.flops["float16"]
        assert not device.measured and device.overhead == 0
    with pytest.raises(ValueError, match="device"):
        published("h1000")
