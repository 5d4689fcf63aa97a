"""What an estimate says, as data and in words: at most 80 columns, wherever it is printed."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any

from paradec.tools.estimation.costs import Memory, Parts

WIDTH = 80
NAMES = ("weights", "store", "attention", "head", "statistics", "activations", "communication", "overhead")


@dataclass(frozen=True)
class Step:
    """The forwards of one kind, of a whole answer."""

    kind: str
    """"whole" (every position of the rows) or "part" (over a store)."""
    count: int
    """How many there are."""
    positions: float
    """Evaluated of each row, on average."""
    parts: Parts
    """Seconds of one of them, on average."""


@dataclass(frozen=True)
class Estimate:
    """What decoding a batch takes: a calculation, nothing was run (but for the probe of this machine).

    `str()` of it is the report that the command prints, at most 80 columns wide.
    """

    model: str
    parameters: int
    active_parameters: int
    """Weights that one token is multiplied with."""
    device: str
    measured: bool
    """Whether a probe measured the device; else times follow from published peaks, and are bounds."""
    dtype: str
    batch: int
    prompt: int
    answer: int
    block: int
    """Positions of a block; of causal models the tokens that a forward verifies."""
    cache: str
    attention: str
    group: int
    efficiency: float
    tokens_per_forward: float
    """Of each row, as it comes out: a step stays in its block."""
    forwards: int
    """Per answer."""
    steps: tuple[Step, ...]
    """Those that evaluate whole rows first."""
    step: Parts
    """Seconds of a step, over all of them."""
    seconds: float
    """Until the batch's answers are there."""
    tokens_per_second: float
    """Of all rows together."""
    memory: Memory
    """On each device."""
    largest_batch: int
    """Rows that fit; 0 where not even one does."""
    price_per_hour: float | None
    """Of one device, in whatever currency it was given."""
    cost_per_million: float | None
    """Of a million tokens, for the whole group; None without a price."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, with what the numbers are."""
        origin = "rates that a probe measured" if self.measured else "published peaks: a bound, where efficiency is 1"
        said = {"what": f"a calculation from {origin}"}
        memory = dataclasses.asdict(self.memory) | {"total": self.memory.total, "fits": self.memory.fits}
        steps = [dataclasses.asdict(step) | {"seconds": step.parts.total} for step in self.steps]
        step = dataclasses.asdict(self.step) | {"total": self.step.total}
        return said | dataclasses.asdict(self) | {"steps": steps, "step": step, "memory": memory}

    def __str__(self) -> str:
        return report(self)


def report(found: Estimate) -> str:
    """An estimate in words and a table."""
    where = found.device if found.group == 1 else f"{found.group} x {found.device}"
    size = _count(found.parameters)
    active = "" if found.active_parameters > 0.8 * found.parameters else f", {_count(found.active_parameters)} active"
    causal = found.cache == "its own"
    # of causal models what is called a block is the tokens that a forward verifies
    cut = f"{found.block} verified a forward" if causal else f"blocks of {found.block}"
    lines = _wrapped(f"{found.model} ({size} parameters{active}, {found.dtype}) on {where}")
    lines += _wrapped(
        f"batch {found.batch}, {found.prompt} + {found.answer} tokens, {cut}, cache {found.cache}, attention "
        f"{found.attention}, {found.tokens_per_forward:.2f} tokens per forward"
    )
    lines += ["", *_table(found), ""]
    memory = found.memory
    usable = _bytes(memory.available)
    fits = f"fits the {usable} to use" if memory.fits else f"DOES NOT FIT the {usable} to use"
    lines += _entry(
        "memory",
        f"weights {_bytes(memory.weights)}, store {_bytes(memory.store)}, logits {_bytes(memory.logits)}, activations "
        f"{_bytes(memory.activations)}; together {_bytes(memory.total)}, which {fits}; largest batch "
        f"{found.largest_batch}",
    )
    lines += _entry(
        "speed",
        f"{_rate(found.tokens_per_second)} tokens per second, {_seconds(found.seconds)} per answer, "
        f"{_rate(1 / found.step.total)} forwards per second",
    )
    if found.cost_per_million is not None:
        price = f"{found.cost_per_million:,.4g} per million tokens at {found.price_per_hour:g} per device and hour"
        lines += _entry("cost", price)
    lines += ["", *_wrapped(caveat(found))]
    return "\n".join(lines)


def caveat(found: Estimate) -> str:
    """What the numbers are, in words."""
    if found.measured:
        return (
            "This is a calculation from rates that a probe measured here and now. No step was run, and what else runs "
            "on the machine changes it."
        )
    if found.efficiency == 1:
        return (
            "This is a calculation from published peaks, and a bound: nothing was run. Published runs reach 15 to "
            "67 % of it (docs/performance.md); an efficiency takes a share."
        )
    return (
        f"This is a calculation from published peaks, of which {found.efficiency:.0%} are taken as reached. Nothing "
        "was run."
    )


def _table(found: Estimate) -> list[str]:
    """Milliseconds of a step by what they go into: of the steps of each kind, and of all."""
    columns = [(f"{step.kind} rows" if step.kind == "whole" else "a part", step.parts) for step in found.steps]
    if len(columns) > 1:
        columns.append(("mean", found.step))
    heads = [f"{'ms per step':15}", *(f"{name:>12}" for name, _ in columns), f"{'share':>8}"]
    lines = ["".join(heads)]
    counts = [f"{step.count:,d} x {step.positions:,.0f}" for step in found.steps]
    lines.append("".join([f"{'  x positions':15}", *(f"{count:>12}" for count in counts)]))
    total = found.step.total
    for name in NAMES:
        values = [getattr(parts, name) for _, parts in columns]
        if any(values):
            share = getattr(found.step, name) / total
            lines.append("".join([f"{name:15}", *(f"{_ms(value):>12}" for value in values), f"{share:>8.1%}"]))
    lines.append("".join([f"{'together':15}", *(f"{_ms(parts.total):>12}" for _, parts in columns)]))
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def _entry(title: str, text: str) -> list[str]:
    return textwrap.wrap(f"{title:10}{text}", WIDTH, subsequent_indent=" " * 10)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:.1f} kB" if count else "none"


def _count(number: int) -> str:
    for letter, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
