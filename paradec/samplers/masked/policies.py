"""Block policies by name and as JSON data; checks of `steps` against the number of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_choice, check_int, short_repr
from paradec.core.registry import to_data
from paradec.samplers.features.adaptive_blocks import AdaptiveBlocks
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks
from paradec.samplers.masked.blocks import LONGEST_BLOCK, FixedBlocks, WholeCanvas

POLICIES = {"fixed": FixedBlocks, "whole": WholeCanvas, "adaptive": AdaptiveBlocks, "pipelined": PipelinedBlocks}


def parse_policy(name: str, value: Any) -> Any:
    """Check a request's field `blocks`, and turn data from `policy_to_data` into a policy. Raises ValueError."""
    if isinstance(value, Mapping):
        settings = dict(value)
        policy = settings.pop(name, None)
        check_choice(name, policy, POLICIES)
        try:
            return POLICIES[policy](**{key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})
        except TypeError as error:
            raise ValueError(f"{name}={short_repr(dict(value))}: {error}") from None
    if isinstance(value, str):
        check_choice(name, value, POLICIES)
    return value


def policy_to_data(value: Any) -> Any:
    """Turn a policy into JSON data; return a policy's name unchanged. Raises ValueError for a custom policy."""
    for name, policy_class in POLICIES.items():
        if type(value) is policy_class:
            return {"blocks": name} | {f.name: to_data(getattr(value, f.name)) for f in fields(value) if f.init}
    if not isinstance(value, str):
        raise ValueError(f"blocks={short_repr(value)} is a custom policy and cannot be saved: leave it out")
    return value


def policy_by_name(
    sampler: Any, model: Any, name: str, block_length: int | None
) -> tuple[BlockPolicy | None, int | None]:
    """Return (policy, None) for a name, or (None, block length) for "fixed". Raises ValueError for a bad length."""
    check_choice("blocks", name, POLICIES)
    check_int("block_length", block_length, low=1, high=LONGEST_BLOCK, none=True)
    if name == "fixed":
        return None, block_length or model.facts.block_length or model.default_block_length or 32
    if name == "adaptive":
        policy = sampler.blocks(block_length)
        if isinstance(policy, AdaptiveBlocks):
            return policy, None
        return AdaptiveBlocks() if block_length is None else AdaptiveBlocks(length=block_length), None
    if name == "pipelined":
        return PipelinedBlocks(block_length or model.facts.block_length or model.default_block_length or 32), None
    if block_length is not None:
        raise ValueError(f"block_length={block_length} does not work with blocks='whole': leave one of them out")
    return WholeCanvas(), None


def count_blocks(steps: int, policy: BlockPolicy, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Count each row's blocks from `starts` to `lengths`: [B] int64. Raises ValueError if the number is unknown."""
    counts = [policy.count(int(start), int(length)) for start, length in zip(starts, lengths, strict=True)]
    if None in counts:
        raise ValueError(f"steps={steps} needs a known number of blocks, not {short_repr(policy)}: leave steps out")
    return np.array(counts, np.int64)


def check_steps(steps: int, counts: np.ndarray, parts: str, is_whole_batch: bool = True) -> None:
    """Raise ValueError if `steps` cannot be spread evenly over the `counts` [B] parts ("blocks" or "canvases") of each
    row. Uneven steps are allowed if rows have different counts or, with is_whole_batch=False, if more may join."""
    count = int(counts.max())
    if steps % count and is_whole_batch and (counts == count).all():
        raise ValueError(f"steps={steps} must be a multiple of the number of {parts} ({count})")
    if steps < count:
        raise ValueError(f"steps={steps} must be at least the number of {parts} ({count})")
