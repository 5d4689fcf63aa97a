"""Shared steps of all families at the start of a request: lengths, suppressed ids, seeds, random keys and trace."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int
from paradec.core.facts import ModelFacts
from paradec.core.protocol import Sampler
from paradec.core.trace import Trace
from paradec.request import Request


def count_new(model: Any, rows: list[list[int]], max_new_tokens: int | None, hole: int, name: str) -> int:
    """Count the positions to append to every row: `max_new_tokens`; None: the model's default, or 0 if a row has holes
    (positions to fill). hole: their id. name: word for a hole in messages. Raises ValueError for a number out of its
    range, a row without positions to fill, or a row that is too long for the model."""
    has_holes = any(hole in row for row in rows)
    num_new = max_new_tokens if max_new_tokens is not None else 0 if has_holes else model.default_max_new_tokens
    check_int("max_new_tokens", num_new, low=0 if has_holes else 1)
    for index, row in enumerate(rows):
        if not num_new and hole not in row:
            raise ValueError(f"the prompt of row {index} has no {name} to fill; give it one, or max_new_tokens above 0")
    model.facts.check_length(max(map(len, rows)) + num_new, num_new)
    return num_new


def answer_starts(rows: list[list[int]], hole: int) -> np.ndarray:
    """Find the position after the last prompt token of each row: [B] int64."""
    return np.array([next((i + 1 for i in range(len(r) - 1, -1, -1) if r[i] != hole), 0) for r in rows], np.int64)


def suppressed_ids(request: Request, facts: ModelFacts, unused: Collection[int] = ()) -> list[int]:
    """List the ids that are never drawn, ascending. Raises ValueError if only tokens in `unused` can be drawn."""
    suppressed = facts.textless_ids if request.suppress_tokens is None else request.suppress_tokens
    for token in suppressed:
        check_int("suppress_tokens", token, low=0, high=facts.vocab_size - 1)
    ids = {*suppressed, *(facts.eos_token_ids if request.logits_eos_inf else ())}
    if len(ids.union(unused)) >= facts.vocab_size:
        raise ValueError(
            f"suppress_tokens excludes all {facts.vocab_size} tokens; allow one (logits_eos_inf=True and "
            "holes_eos_inf=True also exclude end tokens)"
        )
    return sorted(ids)


def make_seeds(request: Request, rows: list[list[int]]) -> tuple[torch.Generator | None, list[int]]:
    """Make the generator of `rng="reference"` (else None), and seeds [B]. Raises ValueError for unfit seeds or rows."""
    seed, generator = request.seed, request.generator
    seeds: list[Any] = list(seed) if isinstance(seed, Sequence) else [seed] * len(rows)
    if len(seeds) != len(rows):
        raise ValueError(f"seed has {len(seeds)} entries for {len(rows)} rows; give one int, or one per row")
    if request.rng == "reference":
        if len({len(row) for row in rows}) != 1:
            raise ValueError("rng='reference' needs rows of one length: the public codes have no padding")
        if generator is None:
            if len(set(seeds)) != 1:
                raise ValueError("rng='reference' draws all rows from one stream; give one seed, not one per row")
            generator = torch.Generator()
            generator.manual_seed(torch.initial_seed() if seeds[0] is None else int(seeds[0]))
        return generator, [0] * len(rows)
    if seeds[0] is None:
        device = None if generator is None else generator.device
        drawn = torch.randint(2**63 - 1, (1,), generator=generator, device=device)
        seeds = [int(drawn)] * len(rows)
    return None, [int(entry) for entry in seeds]


def row_keys(
    seeds: Sequence[int], prompts: Sequence[Sequence[int]], copy_indices: Sequence[int] | None = None
) -> np.ndarray:
    """Hash each row's seed, prompt and number of equal rows before it (`copy_indices`; None: counted) to a 64-bit key,
    [B, 2] int64. So a row has the same random numbers in any batch, but copies of a prompt have different numbers."""
    copies: dict[tuple[int, tuple[int, ...]], int] = {}
    keys = []
    for row, (seed, prompt) in enumerate(zip(seeds, prompts, strict=True)):
        identity = (int(seed), tuple(prompt))
        copy = copies[identity] = copies.get(identity, -1) + 1
        if copy_indices is not None:
            copy = copy_indices[row]
        data = np.asarray([seed, copy, *prompt], dtype=np.int64).tobytes()
        keys.append(np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), dtype="<u4").astype(np.int64))
    return np.stack(keys)


def make_row_keys(
    request: Request, rows: list[list[int]], device: torch.device, copy_indices: Sequence[int] | None = None
) -> tuple[Tensor, list[int]]:
    """Return the rows' `row_keys` on the device, and their seeds [B]."""
    _, seeds = make_seeds(request, rows)
    return torch.as_tensor(row_keys(seeds, rows, copy_indices), device=device), seeds


def pad_rows(rows: list[list[int]], columns: int, fill: int) -> np.ndarray:
    """Pad rows with `fill` at their end: [B, columns] int64."""
    array = np.full((len(rows), columns), fill, np.int64)
    for row, ids in zip(array, rows, strict=True):
        row[: len(ids)] = ids
    return array


def make_trace(sampler: Sampler, request: Request, canvas: Tensor, ends: np.ndarray, **details: Any) -> Trace | None:
    """Make the request's trace, or None. canvas: [B, L], at the start. ends: [B]. details: arguments of `Trace`."""
    if not request.trace:
        return None
    rows = [row[:end] for row, end in zip(canvas.tolist(), ends.tolist(), strict=True)]
    return Trace(rows, sampler.to_dict() | request.sampling(), family=sampler.family, **details)
