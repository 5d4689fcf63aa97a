"""What `paradec generate` and `paradec infill` do around a request: checks before a model is loaded, batches that fit
memory, and what is printed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paradec.attention.sparsed import AttentionCost
from paradec.blocks import LONGEST_BLOCK
from paradec.checks import check_int
from paradec.generate import Output
from paradec.prompts import Prompts, check_placeholder
from paradec.protocol import Interrupted
from paradec.request import FIELDS, Request

MOST_ROWS = 256
"""Rows decoded together at most: results are printed batch by batch, and larger ones gain little."""
CPU_BYTES = 2**30
"""What a batch may take on the CPU, where memory that is free is not known to be ours."""
LOGIT_BYTES = 24
"""Bytes that one logit takes, about: float32, and what is computed from it in float64."""
ACTIVATIONS = 24
"""Numbers of the hidden size that a position takes at once, about."""


def check_options(function: str, options: dict[str, Any], answers: int) -> None:
    """Check what can be checked without the model, which may take minutes to load.

    Args:
        function: "generate" or "infill". options: arguments of it. answers: per prompt.

    Raises:
        ValueError: an argument out of its range; the message names it.
    """
    Request(num_return_sequences=answers, **{name: value for name, value in options.items() if name in FIELDS})
    low = 1 if function == "generate" else 0
    check_int("max_new_tokens", options["max_new_tokens"], low=low, high=LONGEST_BLOCK, none=function == "generate")
    check_placeholder(options.get("mask"))


def rows_that_fit(model: Any, positions: int, branches: int) -> int:
    """How many rows of so many positions, each evaluated so many times, are decoded together; an estimate."""
    config = getattr(model.module, "config", None)
    hidden, layers = getattr(config, "hidden_size", None) or 1024, getattr(config, "num_hidden_layers", None) or 1
    numbers = hidden * (ACTIVATIONS + 2 * layers)  # keys and values of every layer
    row = branches * positions * (LOGIT_BYTES * model.facts.vocab_size + 4 * numbers)
    return max(1, min(MOST_ROWS, _free_bytes(model.device) // row))


def _free_bytes(device: torch.device) -> int:
    """Half of what is free on the device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return min(CPU_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return CPU_BYTES


def forwards(row_nfe: Sequence[int]) -> str:
    """ "3 forwards", or of several rows their sum and the longest: "9 forwards (longest row 4)"."""
    longest = f" (longest row {max(row_nfe)})" if len(row_nfe) > 1 else ""
    return count(sum(row_nfe), "forward") + longest


def count(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


@dataclass
class Answers:
    """What the batches of one command have given so far. Lists have an entry per answer."""

    single: bool
    """Whether one answer was asked for: then there are no lists in the report."""
    texts: list[Any] = field(default_factory=list)
    fills: list[Any] = field(default_factory=list)
    new_tokens: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    row_nfe: list[int] = field(default_factory=list)
    row_forwards: int = 0
    forwarded_tokens: int = 0
    seconds: float = 0.0
    attention: AttentionCost | None = None

    def add(self, output: Output, rows: Sequence[int]) -> None:
        """Add a batch's answers, of which `rows` are kept; what it cost counts for all of them."""

        def of(values: Any) -> list[Any]:
            listed = [values] if self.single else values
            return [listed[row] for row in rows]

        self.texts += of(output.text)
        if output.fills is not None:
            self.fills += of(output.fills)
        new = output.new_tokens.tolist()
        # without the padding after the end token
        self.new_tokens += [new[row][: output.tokens[row]] if output.finished[row] else new[row] for row in rows]
        for name in ("tokens", "finished", "row_nfe"):
            values = getattr(output, name)
            getattr(self, name).extend(values[row] for row in rows)
        for name in ("row_forwards", "forwarded_tokens", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(output, name))
        if output.attention is not None:
            self.attention = _joined(self.attention, output.attention, rows)

    def line(self, index: int) -> str:
        """That answer's text, with its number where there are several."""
        return self.texts[index] if self.single else f"[{index + 1}] {self.texts[index]}"

    def summary(self) -> str:
        """What they cost, in one line."""
        per_forward = sum(self.tokens) / max(1, sum(self.row_nfe))
        return (
            f"{count(sum(self.tokens), 'token')}, {forwards(self.row_nfe or [0])}, {per_forward:.1f} tokens per "
            f"forward, {self.seconds:.2f} s"
        )

    def report(self, sampler: Any, cache: str, interrupted: bool) -> dict[str, Any]:
        """The same as data."""

        def rows(values: list[Any]) -> Any:
            return values[0] if self.single else values

        found: dict[str, Any] = {"text": rows(self.texts)}
        found |= {"fills": rows(self.fills)} if self.fills else {"new_tokens": rows(self.new_tokens)}
        found |= {
            "tokens": rows(self.tokens),
            "finished": rows(self.finished),
            "nfe": max(self.row_nfe, default=0),
            "row_nfe": rows(self.row_nfe),
            "row_forwards": self.row_forwards,
            "forwarded_tokens": self.forwarded_tokens,
            "tokens_per_forward": sum(self.tokens) / max(1, sum(self.row_nfe)),
            "seconds": self.seconds,
            "sampler": sampler.to_dict(),
            "cache": cache,
            "interrupted": interrupted,
        }
        if self.attention is not None:
            found["attention"] = dataclasses.asdict(self.attention)
        return found


def _joined(before: AttentionCost | None, found: AttentionCost, rows: Sequence[int]) -> AttentionCost:
    """The costs of two batches, of the second those of `rows`; bytes are held one batch after the other."""
    changes: dict[str, Any] = {}
    for each in dataclasses.fields(found):
        value = getattr(found, each.name)
        if isinstance(value, list):
            changes[each.name] = ([] if before is None else getattr(before, each.name)) + [value[row] for row in rows]
    most = max(found.pattern_bytes, 0 if before is None else before.pattern_bytes)
    return dataclasses.replace(found, **changes, pattern_bytes=most)


def in_batches(
    decode: Callable[[Prompts], Output], prompts: Prompts, size: int
) -> Iterator[tuple[Prompts, Output, bool]]:
    """Decode `size` rows after the other, fewer where they do not fit. Yields each batch with its output and whether it
    was interrupted, which ends them."""
    first, interrupted = 0, False
    while first < len(prompts.rows) and not interrupted:
        batch = prompts.part(first, first + size)
        try:
            output = decode(batch)
        except Interrupted as interrupt:
            output, interrupted = interrupt.output, True
        except torch.OutOfMemoryError:
            if len(batch.rows) == 1:
                raise
            size = len(batch.rows) // 2
            continue
        yield batch, output, interrupted
        first += len(batch.rows)


def completed(output: Output) -> list[int]:
    """The rows of an interrupted batch that were done."""
    holes = output.filled.sum(1).tolist()
    rows = zip(output.finished, output.tokens, holes, strict=True)
    return [row for row, (finished, tokens, filled) in enumerate(rows) if finished or tokens == filled]


def repeats(prompts: Prompts, output: Output) -> bool:
    """Whether some prompt of a batch has several answers, and all of them are equal."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt, answer in zip(prompts.rows, output.sequences.tolist(), strict=True):
        found.setdefault(tuple(prompt), []).append(answer)
    equal = all(answer == answers[0] for answers in found.values() for answer in answers)
    return equal and any(len(answers) > 1 for answers in found.values())
