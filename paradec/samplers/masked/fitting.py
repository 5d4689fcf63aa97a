"""What of a request fits a masked sampler and a model: the pair itself, blocks, steps, cache, suffix and attention."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from paradec import attention as attentions
from paradec import caches
from paradec.caches.base import Cache
from paradec.caches.suffix import Suffix
from paradec.caches.table import REFUSED, verdict
from paradec.core.blocks import (
    LONGEST_BLOCK,
    POLICIES,
    AdaptiveBlocks,
    BlockPolicy,
    FixedBlocks,
    PipelinedBlocks,
    WholeCanvas,
)
from paradec.core.checks import check_choice, check_int, shown
from paradec.request import Request
from paradec.samplers.masked.state import block_counts
from paradec.samplers.masked.stopping import check_stop


def check_pair(sampler: Any, model: Any) -> None:
    """Raise unless the sampler can decode with the model at all."""
    sampler.check_model(model)
    facts = model.facts
    if facts.mask_token_id is None or facts.topology == "causal":
        raise ValueError(
            f"sampler {sampler.name!r} needs a model with a mask token; {facts.name} is taken for an autoregressive "
            f"one: mask_token_id={facts.mask_token_id}, topology={facts.topology!r}. If it was trained on masks, give "
            "paradec.wrap its mask_token_id, prediction and topology; else give one of family 'draft_verify', e.g. "
            "sampler='sjd'"
        )
    if (refused := sampler.needs.refusal(facts)) is not None:
        raise ValueError(f"sampler {sampler.name!r} does not work here: {refused}")
    if sampler.needs.mask_probes and not (model.supports_visibility and facts.prediction == "same"):
        raise ValueError(
            f"sampler {sampler.name!r} evaluates masks that the rest of the row does not see, which takes a "
            f"transformers decoder that predicts in place ('same'); {facts.name} is not one"
        )


def block_policy(
    sampler: Any, model: Any, blocks: str | BlockPolicy | None, block_length: int | None, holes: bool = False
) -> BlockPolicy:
    """The policy that was asked for, else the sampler's own, else the model's; a bidirectional model fills `holes` as
    one block. A policy's name (`paradec.core.blocks.POLICIES`) goes with a block_length."""
    named = isinstance(blocks, str)
    policy: BlockPolicy | None
    if isinstance(blocks, str):
        policy, block_length = _named_policy(sampler, model, blocks, block_length)
    else:
        policy = blocks
    if policy is not None and block_length is not None:
        raise ValueError(f"blocks={policy!r} and block_length={block_length!r} both cut the sequence; give one of them")
    if block_length is not None:
        check_int("block_length", block_length, low=1, high=LONGEST_BLOCK)
    if policy is None and not named:
        policy = sampler.blocks(block_length)
    if policy is None and block_length is not None:
        own = model.facts.block_length
        if own is None:
            return FixedBlocks(block_length)
        if own % block_length and block_length % own:
            raise ValueError(
                f"block_length={block_length} does not fit {model.facts.name}, which was trained with blocks of {own}; "
                f"give {own}, or a divisor or a multiple of it"
            )
        return FixedBlocks(block_length, align=model.facts.block_align)
    if policy is not None:
        if isinstance(policy, type) or not (hasattr(policy, "open") and hasattr(policy, "count")):
            raise ValueError(f"blocks={shown(policy)} must be a block policy, e.g. paradec.FixedBlocks(32)")
        if getattr(policy, "reads_logits", False) and sampler.needs.multi_step:
            raise ValueError(
                f"sampler {sampler.name!r} does not work with blocks={shown(policy)}: it drafts steps ahead, before "
                "the logits that say where a block ends; use paradec.FixedBlocks"
            )
        return policy.for_model(model) if hasattr(policy, "for_model") else policy
    if model.facts.block_length is not None:
        return FixedBlocks(model.facts.block_length, align=model.facts.block_align)
    if model.default_block_length is not None and not holes:
        return FixedBlocks(model.default_block_length)
    return WholeCanvas()


def _named_policy(
    sampler: Any, model: Any, name: str, block_length: int | None
) -> tuple[BlockPolicy | None, int | None]:
    """The policy of that name, or None and the length of its blocks."""
    check_choice("blocks", name, POLICIES)
    check_int("block_length", block_length, low=1, high=LONGEST_BLOCK, none=True)
    if name == "fixed":
        return None, block_length or model.facts.block_length or model.default_block_length or 32
    if name == "adaptive":
        own = sampler.blocks(block_length)
        if isinstance(own, AdaptiveBlocks):
            return own, None
        return AdaptiveBlocks() if block_length is None else AdaptiveBlocks(length=block_length), None
    if name == "pipelined":
        return PipelinedBlocks(block_length or model.facts.block_length or model.default_block_length or 32), None
    if block_length is not None:
        raise ValueError(f"block_length={block_length} has no meaning with blocks='whole'")
    return WholeCanvas(), None


def check_steps(
    request: Request, policy: BlockPolicy, starts: np.ndarray, lengths: np.ndarray, alone: bool = True
) -> None:
    """Raise ValueError where `steps` cannot be spread evenly over the blocks. alone: whether these are all rows; what
    is uneven because prompts differ in length is not refused."""
    if request.steps is None:
        return
    counts = block_counts(request.steps, policy, starts, lengths)
    count = int(counts.max())
    if request.steps % count and alone and (counts == count).all():
        raise ValueError(
            f"steps={request.steps} must be a multiple of the number of blocks ({count}): every block has as many"
        )
    if request.steps < count:
        raise ValueError(f"steps={request.steps} must be at least the number of blocks ({count})")


def cache_of(request: Request, sampler: Any, model: Any, blocks: BlockPolicy) -> Cache:
    """The cache, if it works with this sampler and model.

    Raises:
        ValueError: a pair that does not work; the message says why.
    """
    given = "none" if request.cache is None else request.cache
    cache: Cache = caches.create(given) if isinstance(given, str) else given
    if cache.facts.uses_store:
        found = verdict(sampler, cache, model.facts, stores=model.supports_store)
        if found.status == REFUSED:
            raise ValueError(f"cache={cache.name!r} does not work with sampler {sampler.name!r} here: {found.why}")
    if cache.facts.evaluates == "picks" and getattr(blocks, "reads_logits", False):
        raise ValueError(
            f"cache={cache.name!r} does not work with blocks={shown(blocks)}: it asks what will be committed before "
            "the logits that say where a block ends; use paradec.FixedBlocks or another cache"
        )
    if cache.facts.evaluates == "picks" and request.rng == "reference" and request.temperature > 0:
        raise ValueError(
            f"cache={cache.name!r} asks what will be committed before tokens are drawn, which rng='reference' draws "
            f"first from the same stream: use temperature=0 or rng='counter'"
        )
    return cache


def check_suffix(
    request: Request, sampler: Any, model: Any, cache: Cache, blocks: BlockPolicy, rows: int, gaps: bool
) -> None:
    """Raise ValueError where the request's suffix does not work; the message says why."""
    suffix = Suffix.of(request.suffix)
    assert suffix is not None  # asked for where there is one
    why = suffix.refusal(sampler, model, cache, gaps)
    if why is None and isinstance(blocks, WholeCanvas):
        why = "one block holds the whole answer, and nothing comes after it; give block_length"
    if why is None and check_stop(request.stop, sampler)[1]:
        why = f"stop={shown(request.stop)} reads everything after the block; leave it out"
    if why is None and request.rng == "reference" and suffix.density != "cut" and rows > 1:
        why = f"rng='reference' draws it for one row, and here are {rows}; use rng='counter'"
    if why is not None:
        raise ValueError(f"suffix={shown(suffix)} does not work here: {why}")


def attention_of(request: Request, sampler: Any, model: Any) -> Any:
    """The attention method, if it works with this sampler and model; None attends to everything. A model's own gives
    way, with a warning, where it does not work.

    Raises:
        ValueError: a method that was asked for and does not work; the message says why.
    """
    asked = request.attention
    if isinstance(asked, str) and asked != "dense":
        asked = attentions.create(asked)
    method = getattr(model, "default_attention", None) if asked is None else asked
    if method is None or isinstance(method, str):
        return None
    if isinstance(method, type) or not (hasattr(method, "begin") and hasattr(method, "refusal")):
        raise ValueError(
            f"attention={shown(method)} must be 'dense', one of {attentions.names()} or made by "
            "paradec.attention.create, e.g. paradec.SparseD()"
        )
    why = method.refusal(sampler, model)
    if why is None and (request.prefix is not None or request.share_prefix):
        why = "its lists are found in calls that evaluate whole rows, and a prefix that is taken over is not evaluated"
    if why is None and request.suffix is not None:
        why = "its lists are of whole rows, and with suffix=... most of a row does not exist yet"
    if why is None:
        return method
    text = f"attention={method.name!r} does not work with sampler {sampler.name!r} here: {why}"
    if asked is not None:
        raise ValueError(text)
    warnings.warn(f"{text}; every call attends to everything", stacklevel=2)
    return None
