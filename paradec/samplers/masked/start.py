"""The start of a masked decoding: a request meets a model, and becomes a state."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from paradec import attention as attentions
from paradec import caches
from paradec.caches.base import Cache
from paradec.caches.kept import plan_reuse
from paradec.caches.stored import StoredCache
from paradec.caches.suffix import Suffix
from paradec.caches.table import REFUSED, verdict
from paradec.core import rng
from paradec.core.adaptive_blocks import AdaptiveBlocks
from paradec.core.block_policies import POLICIES
from paradec.core.blocks import LONGEST_BLOCK, BlockPolicy, FixedBlocks, WholeCanvas
from paradec.core.checks import check_choice, check_int, shown
from paradec.core.facts import ModelFacts
from paradec.core.logprobs import LogProbs
from paradec.core.memory import Memory
from paradec.core.pipelined_blocks import PipelinedBlocks
from paradec.core.prompts import encode
from paradec.core.trace import Trace
from paradec.request import Request, randomness, stop_texts
from paradec.samplers.masked.pipeline import check_pipelined
from paradec.samplers.masked.prefix_reuse import take_over
from paradec.samplers.masked.state import MaskedState, block_counts
from paradec.samplers.masked.stop_strings import StopStrings
from paradec.samplers.masked.stopping import EndOfText, StopRule, check_stop


def start_state(sampler: Any, model: Any, prompt: Any, request: Request, attention_mask: Any) -> MaskedState:
    """Check what takes the model, then lay out the canvas: each row's prompt from position 0 (masks in it are holes to
    fill), masks after it.

    Raises:
        ValueError, TypeError: an argument that does not fit the model, the sampler or the prompts.
    """
    _check_pair(sampler, model)
    facts, device = model.facts, model.device
    prompts = encode(model, prompt, attention_mask, request.chat)
    rows, mask = prompts.rows, facts.mask_id
    holes = any(mask in row for row in rows)
    new = _new_tokens(model, rows, request.max_new_tokens, holes)
    policy = block_policy(sampler, model, request.blocks, request.block_length, holes)
    if isinstance(policy, PipelinedBlocks):
        check_pipelined(sampler, policy, request.steps)
    # where decoding starts, and where text begins that nothing given follows
    starts = np.array([row.index(mask) if mask in row else len(row) for row in rows], np.int64)
    answers = np.array([next((i + 1 for i in range(len(r) - 1, -1, -1) if r[i] != mask), 0) for r in rows], np.int64)
    lengths = np.array([len(row) for row in rows], np.int64)
    check_steps(request, policy, starts, lengths + new, alone=not prompts.among)
    suppressed = _suppressed(request, facts, holes=bool((answers > starts).any()))
    cache = cache_of(request, sampler, model, policy)
    sampler.check(facts, policy, cache, int((lengths + new - starts).max()))
    check_int("logprobs", request.logprobs, low=0, high=facts.vocab_size, none=True)
    generator, seeds = randomness(request, rows)
    stop_rules, early_rules = check_stop(request.stop, sampler)
    texts = stop_texts(request.stop_strings)
    if texts and model.tokenizer is None:
        raise ValueError(f"stop_strings={shown(request.stop_strings)} needs a tokenizer; {facts.name} has none")
    branches = 1 if request.guidance_scale == 1.0 else 2
    reuse = None
    if request.prefix is not None or request.share_prefix is not False or request.keep_prefix is not False:
        reuse = plan_reuse(
            request.prefix, request.share_prefix, request.keep_prefix, model, cache, branches, rows, starts
        )
    attention = attention_of(request, sampler, model)
    if request.suffix is not None:
        _check_suffix(request, sampler, model, cache, policy, len(rows), gaps=bool((answers > starts).any()))

    ends = lengths + new
    if facts.topology == "block_causal" and new:
        # such models were trained on whole blocks: the last one is decoded whole, and cut afterwards
        ends = facts.block_bounds(starts, ends, starts)[1]
        if facts.max_length is not None:
            ends = np.minimum(ends, facts.max_length)
    longest = int(ends.max())
    canvas = np.full((len(rows), longest), facts.fill_token_id, np.int64)
    column = np.arange(longest)
    canvas[(column >= lengths[:, None]) & (column < ends[:, None])] = mask
    canvas[column < lengths[:, None]] = np.concatenate(rows)
    rules: list[StopRule] = [*stop_rules]
    end_tokens = list(facts.eos_token_ids)
    if request.eos_early_stop and end_tokens:
        rules.append(EndOfText(end_tokens, mask, answers if holes else None))
    if texts:
        rules.append(StopStrings(texts, model.tokenizer, mask, canvas, answers))
    sizes = {"position": longest, "vocab": facts.vocab_size, "window": 0}
    state = MaskedState(
        batch=len(rows),
        memory=Memory(sampler.memory(), len(rows), sizes, device),
        facts=facts,
        request=request.without_objects(),
        cache=cache,
        blocks=policy,
        pads=model.pads,
        canvas=torch.as_tensor(canvas, device=device),
        given=torch.as_tensor((column < lengths[:, None]) & (canvas != mask), device=device),
        prompt_length=starts,
        answer_start=answers,
        length=ends,
        asked=lengths + new,
        max_new_tokens=new,
        keys=torch.as_tensor(rng.row_keys(seeds, rows, prompts.before), device=device),
        generator=generator,
        suppressed=torch.tensor(suppressed, device=device) if suppressed else None,
        ends=torch.tensor(end_tokens, dtype=torch.int64, device=device),
        revises=sampler.revises,
        decided_at=torch.full(canvas.shape, -1, device=device) if getattr(model, "reads_order", False) else None,
        stop_rules=tuple(rules),
        early_rules=early_rules,
    )
    if isinstance(cache, StoredCache):
        begin = 0 if reuse is None else reuse.start
        state.store = model.make_store(
            branches * state.batch, longest, cache.store_dtype, cache.max_memory, start=begin
        )
    state.cache_state = cache.begin(state)
    if attention is not None:
        state.attention_state = attention.begin(state, sampler.uses_steps)
    if request.trace:
        start = [canvas[r, : ends[r]].tolist() for r in range(len(rows))]
        state.trace = Trace(
            canvas=start,
            settings=sampler.to_dict() | request.sampling() | _said_of(request),
            family=sampler.family,
            score=sampler.score,
            cache=cache.name,
            mask_id=mask,
        )
    if request.logprobs is not None:
        state.logprobs = LogProbs.empty(len(rows), longest, request.logprobs, device)
    if request.keep_prefix:
        state.settled = np.zeros(state.batch, np.int64)
    if reuse is not None:
        take_over(state, reuse, model)
    return state


def _check_pair(sampler: Any, model: Any) -> None:
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
    if sampler.mask_probes and not (model.supports_visibility and facts.prediction == "same"):
        raise ValueError(
            f"sampler {sampler.name!r} evaluates masks that the rest of the row does not see, which takes a "
            f"transformers decoder that predicts in place ('same'); {facts.name} is not one"
        )


def _new_tokens(model: Any, rows: list[list[int]], asked: int | None, holes: bool) -> int:
    """How many masks are appended to every row."""
    facts, new = model.facts, asked
    if new is None:
        new = 0 if holes else model.default_max_new_tokens
    check_int("max_new_tokens", new, low=0 if holes else 1)
    for index, row in enumerate(rows):
        if not new and facts.mask_id not in row:
            raise ValueError(f"the prompt of row {index} has no mask to fill; give it one, or max_new_tokens above 0")
    longest = max(map(len, rows)) + new
    facts.check_length(longest, new)
    return new


def _suppressed(request: Request, facts: ModelFacts, holes: bool) -> list[int]:
    """Ids that are never proposed, beside the mask id, ascending. holes: whether something given follows a mask."""
    for token in request.suppress_tokens:
        check_int("suppress_tokens", token, low=0, high=facts.vocab_size - 1)
    ends = facts.eos_token_ids
    suppressed = {*request.suppress_tokens, *(ends if request.logits_eos_inf else ())}
    if len(suppressed | {facts.mask_id}) >= facts.vocab_size:
        raise ValueError(f"suppress_tokens excludes all {facts.vocab_size} tokens of the vocabulary")
    if request.holes_eos_inf and holes and len(suppressed | {facts.mask_id, *ends}) >= facts.vocab_size:
        raise ValueError("holes_eos_inf=True leaves no token for holes beside those of suppress_tokens")
    return sorted(suppressed)


def block_policy(
    sampler: Any, model: Any, blocks: str | BlockPolicy | None, block_length: int | None, holes: bool = False
) -> BlockPolicy:
    """The policy that was asked for, else the sampler's own, else the model's; a bidirectional model fills `holes` as
    one block. A policy's name (`paradec.core.block_policies.POLICIES`) goes with a block_length."""
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
        if getattr(policy, "reads_logits", False) and sampler.multi_step:
            raise ValueError(
                f"sampler {sampler.name!r} does not work with blocks={shown(policy)}: it drafts steps ahead, before "
                "the logits that say where a block ends; use paradec.FixedBlocks"
            )
        return policy.for_model(model) if hasattr(policy, "for_model") else policy
    if model.facts.topology == "block_causal":
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
    if cache.uses_store:
        found = verdict(sampler, cache, model.facts, stores=model.supports_store)
        if found.status == REFUSED:
            raise ValueError(f"cache={cache.name!r} does not work with sampler {sampler.name!r} here: {found.why}")
    if cache.evaluates == "picks" and getattr(blocks, "reads_logits", False):
        raise ValueError(
            f"cache={cache.name!r} does not work with blocks={shown(blocks)}: it asks what will be committed before "
            "the logits that say where a block ends; use paradec.FixedBlocks or another cache"
        )
    if cache.evaluates == "picks" and request.rng == "reference" and request.temperature > 0:
        raise ValueError(
            f"cache={cache.name!r} asks what will be committed before tokens are drawn, which rng='reference' draws "
            f"first from the same stream: use temperature=0 or rng='counter'"
        )
    return cache


def _said_of(request: Request) -> dict[str, Any]:
    """What a trace says of the suffix."""
    suffix = Suffix.of(request.suffix)
    return {} if suffix is None else {"suffix": suffix.to_dict()}


def _check_suffix(
    request: Request, sampler: Any, model: Any, cache: Cache, blocks: BlockPolicy, rows: int, gaps: bool
) -> None:
    """Raise ValueError where the request's suffix does not work; the message says why."""
    suffix = Suffix.of(request.suffix)
    if suffix is None:
        return
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
