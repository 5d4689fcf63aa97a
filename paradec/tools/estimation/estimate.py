"""`estimate`: time, memory and cost of decoding on a device, by arithmetic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import paradec.attention as attention_methods
from paradec import caches, samplers
from paradec.attention.sparsed import SparseD
from paradec.caches.base import Cache
from paradec.caches.stored import STORE_DTYPES
from paradec.caches.suffix import Suffix
from paradec.caches.table import REFUSED, verdict
from paradec.core.checks import check_int, check_number, shown
from paradec.tools.estimation.costs import Parts, forward_cost, memory_of
from paradec.tools.estimation.courses import Evaluation, causal_course, masked_course
from paradec.tools.estimation.devices import ITEM_BYTES, PROBED, Device, check_dtype, published
from paradec.tools.estimation.result import Estimate, Step
from paradec.tools.estimation.shapes import Shape, shape_of

LONGEST = 2**20
"""Positions of a prompt."""
MOST_NEW = 2**16
"""Tokens of an answer; every step is followed."""
MOST_ROWS = 2**20


def estimate(
    config_or_model: Any,
    *,
    device: str | Device = "h100",
    batch: int = 1,
    prompt: int = 512,
    answer: int = 256,
    cache: str | Cache = "none",
    attention: str | SparseD | None = None,
    suffix: Suffix | int | str | None = None,
    tokens_per_forward: float = 1.0,
    price_per_hour: float | None = None,
    block: int | None = None,
    dtype: str | None = None,
    group: int = 1,
    efficiency: float = 1.0,
) -> Estimate:
    """Calculate what decoding takes on a device: time per step and what it goes into, memory, tokens per second, cost.

    Every forward takes, for each of its parts, its operations over the device's rate or its bytes over the bandwidth,
    whichever is longer (Williams et al., "Roofline", Communications of the ACM 52(4), 2009). The positions that a step
    evaluates are those of the cache's own plan, followed over an answer whose tokens come evenly and from left to
    right. Of a mixture of experts the tokens' own experts are computed, and those that a batch is expected to choose
    are read. Published peaks give a bound that nothing reaches: docs/performance.md lays it beside published figures.

    Args:
        config_or_model: a config.json or a checkpoint's folder, a model, a configuration of transformers, a `Shape`, or
            "LLaDA-8B", "Dream-7B", "LLaDA2.0-mini". Masked and causal language models; nothing is downloaded.
        device: "h100", "h200", "a100", "l4", "rtx4090", "mi300x" by their published peaks; "cpu" probes this machine
            for about ten seconds, once per process and dtype; or a `paradec.tools.estimation.devices.Device`.
        batch: rows decoded together.
        prompt, answer: tokens of each row.
        cache: a name, or a cache with its settings. Causal models keep their own.
        attention: "sparsed", or one with its settings; None attends to everything.
        suffix: masks after the open block that are evaluated, as `paradec.Request` has it; None is all of them.
        tokens_per_forward: positions of a row that a step makes final, on average, from 1 to `block`. (What
            `paradec compare` reports leaves out what comes after the end of an answer; here there is none.)
        price_per_hour: of one device.
        block: positions of a block; None is the model's own default (32 for LLaDA, the whole answer for Dream). Of a
            causal model the tokens that a forward verifies, 1 by default. One is open at a time: how many
            `paradec.PipelinedBlocks` have open only decoding shows (give what they evaluate together). Blocks counted
            from a prompt's end (D2F's) are taken for such as are counted from position 0.
        dtype: "bfloat16", "float16" or "float32"; None is the configuration's, else bfloat16.
        group: devices that share every matrix (tensor parallel).
        efficiency: the share of the device's rates that is reached, in (0, 1]; 1 is the bound.

    Raises:
        ValueError, CheckpointError, TypeError: an argument out of its range, a model or cache that this is not for.
    """
    _check_numbers(batch, prompt, answer, group, block, tokens_per_forward, efficiency, price_per_hour)
    if dtype is not None:
        check_dtype(dtype)
    sparse, plan, window = _attention(attention), _cache(cache), Suffix.of(suffix)
    found, shape = _device(device), shape_of(config_or_model)
    dtype = dtype or shape.dtype or "bfloat16"
    check_dtype(dtype)
    _check(shape, plan, sparse, prompt, answer, group)
    _check_suffix(shape, plan, sparse, window)
    width = _block(shape, block, answer, tokens_per_forward)
    found = _checked_device(found, dtype, group)

    causal, decided = shape.topology == "causal", _decided(shape, prompt, answer)
    known = (prompt, decided, width, tokens_per_forward)
    course = causal_course(*known) if causal else masked_course(shape, plan, sparse, *known, window)
    stores = causal or plan.facts.uses_store
    kept = getattr(plan, "store_dtype", None) if stores else None
    times = {
        each: forward_cost(shape, found, dtype, batch, each, group, stores, kept).scaled(1 / efficiency)
        for each in course
    }
    forwards = sum(course.values())
    total = sum((times[each].scaled(count) for each, count in course.items()), Parts())

    largest, wanted = max(each.positions for each in course), max(each.wanted for each in course)
    sizes = (prompt + decided, largest, wanted, group, stores, kept)
    one, two = (memory_of(shape, found, dtype, rows, *sizes) for rows in (1, 2))
    room = one.available - one.weights
    speed = batch * answer / total.total
    return Estimate(
        model=shape.name,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        device=found.name,
        measured=found.measured,
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        answer=answer,
        block=width,
        cache="its own" if causal else plan.name,
        attention="dense" if sparse is None else sparse.name,
        group=group,
        efficiency=efficiency,
        tokens_per_forward=decided / forwards,
        forwards=forwards,
        steps=_steps(course, times),
        step=total.scaled(1 / forwards),
        seconds=total.total,
        tokens_per_second=speed,
        memory=memory_of(shape, found, dtype, batch, *sizes),
        largest_batch=int(max(0.0, min(MOST_ROWS, room / (two.total - one.total)))),
        price_per_hour=price_per_hour,
        cost_per_million=None if price_per_hour is None else price_per_hour * group / 3600 / speed * 1e6,
    )


def _check_numbers(
    batch: Any, prompt: Any, answer: Any, group: Any, block: Any, tokens_per_forward: Any, efficiency: Any, price: Any
) -> None:
    """Raise ValueError for an argument of `estimate` that is out of its range."""
    check_int("batch", batch, low=1, high=MOST_ROWS)
    check_int("prompt", prompt, low=1, high=LONGEST)
    check_int("answer", answer, low=1, high=MOST_NEW)
    check_int("group", group, low=1, high=1024)
    check_int("block", block, low=1, none=True)
    check_number("tokens_per_forward", tokens_per_forward, low=1, high=MOST_NEW)
    check_number("efficiency", efficiency, low=0, high=1, open_low=True)
    check_number("price_per_hour", price, low=0, none=True)


def _decided(shape: Shape, prompt: int, answer: int) -> int:
    """Tokens that are decoded: block-causal models decode whole blocks; what comes after the answer is thrown away."""
    unit = shape.block_length or 1 if shape.topology == "block_causal" else 1
    whole = answer + -(prompt + answer) % unit
    return whole if shape.max_length is None else min(whole, shape.max_length - prompt)


def _steps(course: Counter[Evaluation], times: dict[Evaluation, Parts]) -> tuple[Step, ...]:
    """The forwards by kind, those of whole rows first."""
    found = []
    for kind in ("whole", "part"):
        counts = {each: count for each, count in course.items() if each.kind == kind}
        many = sum(counts.values())
        if many:
            positions = sum(each.positions * count for each, count in counts.items()) / many
            parts = sum((times[each].scaled(count) for each, count in counts.items()), Parts()).scaled(1 / many)
            found.append(Step(kind, many, positions, parts))
    return tuple(found)


def _device(device: Any) -> Device | None:
    """The device; None for this machine's processor, which is probed once all else is known to be right."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device={shown(device)} must be a name or a paradec.tools.estimation.devices.Device")
    return None if device.lower() == PROBED else published(device)


def _cache(cache: Any) -> Any:
    if isinstance(cache, str):
        return caches.create(cache)
    if not isinstance(cache, Cache):
        raise TypeError(f"cache={shown(cache)} must be a name or a cache (paradec.caches)")
    return cache


def _attention(attention: Any) -> SparseD | None:
    if attention is None or attention == "dense":
        return None
    found = attention_methods.create(attention) if isinstance(attention, str) else attention
    if not isinstance(found, SparseD):
        raise TypeError(f"attention={shown(attention)} must be 'sparsed', 'dense' or a paradec.SparseD")
    return found


def _check_suffix(shape: Shape, cache: Any, sparse: SparseD | None, suffix: Suffix | None) -> None:
    """Raise ValueError where a model, cache or attention cannot have this suffix."""
    if shape.topology != "bidirectional":
        why = f"{shape.name} sees nothing after its block anyway"
    elif not cache.facts.suffixes:
        why = f"cache={cache.name!r} counts on all of a row"
    else:
        why = "" if sparse is None else "the lists of 'sparsed' are of whole rows"
    if suffix is not None and why:
        raise ValueError(f"suffix={shown(suffix)} does not work here: {why}")


def _check(shape: Shape, cache: Any, sparse: SparseD | None, prompt: int, answer: int, group: int) -> None:
    """Raise ValueError for what a model cannot be decoded with."""
    if shape.max_length is not None and prompt + answer > shape.max_length:
        raise ValueError(
            f"prompt={prompt} + answer={answer} = {prompt + answer} is longer than {shape.name} takes "
            f"({shape.max_length})"
        )
    if group > shape.heads:
        raise ValueError(f"group={group} is more than the {shape.heads} heads of {shape.name}, which it shares out")
    if shape.topology == "causal":
        if cache.facts.uses_store:
            raise ValueError(f"cache={cache.name!r} is for masked models; {shape.name} is causal and keeps its own")
        if sparse is not None:
            raise ValueError(f"attention='sparsed' is for full attention, and {shape.name} is causal")
        return
    # the sampler of which caches ask least: it previews what a step will decide
    said = verdict(samplers.get("random"), cache, shape)
    if said.status == REFUSED:
        raise ValueError(f"cache={cache.name!r} does not work with {shape.name}: {said.why}")
    kept = getattr(cache, "store_dtype", None)
    if kept is not None and kept not in ITEM_BYTES:
        allowed = ", ".join(map(repr, (each for each in STORE_DTYPES if each in ITEM_BYTES)))
        raise ValueError(f"store_dtype={kept!r} is not estimated; allowed: {allowed}")
    if sparse is not None and shape.topology != "bidirectional":
        topology = shape.topology.replace("_", "-")
        raise ValueError(f"attention='sparsed' is for full attention, and {shape.name} is {topology}")


def _block(shape: Shape, block: int | None, answer: int, tokens_per_forward: float) -> int:
    """Positions of a block.

    Raises:
        ValueError: fewer than the tokens that a forward decides, or blocks that are not those of the model.
    """
    own = shape.block_length
    default = 1 if shape.topology == "causal" else shape.default_block_length or own or answer
    width = default if block is None else block
    if shape.topology == "block_causal" and own is not None:
        if own % width and width % own:
            raise ValueError(
                f"block={width} does not fit {shape.name}, which was trained with blocks of {own}: give one that "
                "divides it, or a multiple"
            )
    else:
        width = min(width, answer)
    if tokens_per_forward > width:
        raise ValueError(
            f"tokens_per_forward={tokens_per_forward:g} is more than a forward can decide: block={width} tokens"
        )
    return width


def _checked_device(device: Device | None, dtype: str, group: int) -> Device:
    """The device, which is measured here if it is None. Raises ValueError where it lacks what is asked of it."""
    if device is None:
        from paradec.tools.estimation.probe import probed

        device = probed(dtype)
    if dtype not in device.flops:
        raise ValueError(f"dtype={dtype!r} was not measured on {device.name}; it knows {', '.join(device.flops)}")
    if group > 1 and not device.link:
        raise ValueError(f"group={group} needs a device with a link to others; {device.name} has none")
    return device
