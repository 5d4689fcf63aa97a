"""The start of a masked decoding: a request meets a model, and becomes a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paradec.caches.base import Cache
from paradec.caches.kept import Reuse, plan_reuse
from paradec.caches.stored import StoredCache
from paradec.caches.suffix import Suffix
from paradec.core import rng
from paradec.core.blocks import PipelinedBlocks
from paradec.core.checks import check_int, check_memory
from paradec.core.facts import ModelFacts
from paradec.core.memory import Memory
from paradec.core.prompts import encode
from paradec.request import Request
from paradec.samplers.features.adaptive_blocks import AdaptiveBlockEnds
from paradec.samplers.features.decision_order import DecisionOrder
from paradec.samplers.features.early_stops import EarlyStops
from paradec.samplers.features.feature import Feature
from paradec.samplers.features.holes import Holes
from paradec.samplers.features.pipelined_blocks import OpenBlocks, check_pipelined
from paradec.samplers.features.prefix_reuse import PrefixReuse
from paradec.samplers.features.sparse_attention import SparseAttention
from paradec.samplers.features.suffix_window import SuffixWindow
from paradec.samplers.masked.commit import block_width
from paradec.samplers.masked.features import logprobs_features
from paradec.samplers.masked.fitting import attention_of, block_policy, cache_of, check_pair, check_steps, check_suffix
from paradec.samplers.masked.reference import ReferenceNumbers
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import EarlyRule, EndOfText, StopRule, StopStrings, check_stop
from paradec.samplers.starting import (
    answer_starts,
    new_tokens,
    padded,
    randomness,
    stop_strings_of,
    suppressed_ids,
    trace_of,
)


def start_state(sampler: Any, model: Any, prompt: Any, request: Request, attention_mask: Any) -> MaskedState:
    """Check what takes the model, then lay out the canvas: each row's prompt from position 0 (masks in it are holes to
    fill), masks after it.

    Raises:
        ValueError, TypeError: an argument that does not fit the model, the sampler or the prompts.
    """
    check_pair(sampler, model)
    facts, device = model.facts, model.device
    prompts = encode(model, prompt, attention_mask, request.chat)
    rows, mask = prompts.rows, facts.mask_id
    holes = any(mask in row for row in rows)
    new = new_tokens(model, rows, request.max_new_tokens, mask, "mask")
    policy = block_policy(sampler, model, request.blocks, request.block_length, holes)
    if isinstance(policy, PipelinedBlocks):
        check_pipelined(sampler, policy, request.steps)
    starts = np.array([row.index(mask) if mask in row else len(row) for row in rows], np.int64)
    answers, lengths = answer_starts(rows, mask), np.array([len(row) for row in rows], np.int64)
    gaps = bool((answers > starts).any())  # something given follows a mask
    check_steps(request, policy, starts, lengths + new, alone=not prompts.among)
    suppressed = _suppressed(request, facts, gaps)
    cache = cache_of(request, sampler, model, policy)
    sampler.check(facts, policy, cache, int((lengths + new - starts).max()))
    check_int("logprobs", request.logprobs, low=0, high=facts.vocab_size, none=True)
    generator, seeds = randomness(request, rows)
    stop_rules, early_rules = check_stop(request.stop, sampler)
    texts = stop_strings_of(request, model)
    reuse = _reuse(request, model, cache, rows, starts, sampler.needs.causal_keys)
    attention = attention_of(request, sampler, model)
    if request.suffix is not None:
        check_suffix(request, sampler, model, cache, policy, len(rows), gaps)

    ends = _ends(facts, starts, lengths, new)
    canvas = padded(rows, int(ends.max()), facts.fill_token_id)
    column = np.arange(canvas.shape[1])
    canvas[(column >= lengths[:, None]) & (column < ends[:, None])] = mask
    rules: list[StopRule] = [*stop_rules]
    if request.eos_early_stop and facts.eos_token_ids:
        rules.append(EndOfText(list(facts.eos_token_ids), mask, answers))
    if texts:
        rules.append(StopStrings(texts, model.tokenizer, mask, canvas, answers))
    sizes = {"position": canvas.shape[1], "vocab": facts.vocab_size, "window": 0}
    if sampler.needs.moves:
        sizes["steps"] = int(sampler.most_steps(np.array([block_width(policy)]))[0])
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
        suppressed=torch.tensor(suppressed, device=device) if suppressed else None,
        ends=torch.tensor(facts.eos_token_ids, dtype=torch.int64, device=device),
        revises=sampler.needs.revises,
        causal_keys=sampler.needs.causal_keys,
        stop_rules=tuple(rules),
        generator=generator,
    )
    _start_features(state, sampler, model, early_rules, reuse)
    _keep(state, sampler, model, request, attention)
    return state


def _ends(facts: ModelFacts, starts: np.ndarray, lengths: np.ndarray, new: int) -> np.ndarray:
    """[B] int64: positions of each row. Block-causal models were trained on whole blocks: the last one is decoded
    whole, and cut afterwards."""
    ends = lengths + new
    if facts.topology != "block_causal" or not new:
        return ends
    ends = facts.block_bounds(starts, ends, starts)[1]
    return ends if facts.max_length is None else np.minimum(ends, facts.max_length)


def _reuse(
    request: Request, model: Any, cache: Cache, rows: list[list[int]], starts: np.ndarray, causal_keys: bool
) -> Reuse | None:
    """What the request takes over of keys and values that there are."""
    prefix, share, keep = request.prefix, request.share_prefix, request.keep_prefix
    if prefix is None and share is False and keep is False:
        return None
    branches = 1 if request.guidance_scale == 1.0 else 2
    return plan_reuse(prefix, share, keep, model, cache, branches, rows, starts, causal_keys)


def _start_features(
    state: MaskedState, sampler: Any, model: Any, early: tuple[EarlyRule, ...], reuse: Reuse | None
) -> None:
    """Open the first blocks, with the features that the request needs."""
    shape, facts, request, features = tuple(state.canvas.shape), state.facts, state.request, dict[str, Feature]()
    if getattr(state.blocks, "reads_logits", False):
        features["adaptive_blocks"] = AdaptiveBlockEnds(np.zeros(state.batch, bool))
    if request.suffix is not None:
        suffix: Any = Suffix.of(request.suffix)
        features["suffix_window"] = SuffixWindow(suffix, np.zeros(shape, bool))
    if reuse is not None or request.keep_prefix:
        settled = np.zeros(state.batch, np.int64) if request.keep_prefix else None
        features["prefix_reuse"] = PrefixReuse(reuse, settled)
    if state.generator is not None:
        features["reference"] = ReferenceNumbers()
    if request.logprobs is not None or request.rollout:
        features |= logprobs_features(state, sampler, model)
    if early:
        reads = tuple(dict.fromkeys(name for rule in early for name in rule.reads))
        features["early_stops"] = EarlyStops(early, reads)
    if request.holes_eos_inf and facts.eos_token_ids and (state.answer_start > state.prompt_length).any():
        features["holes"] = Holes()
    if facts.topology == "causal_context":
        from paradec.samplers.masked.causal_context import CausalContext

        features["causal_context"] = CausalContext.of(sampler, state, early, request)
    if getattr(model, "reads_order", False):
        features["decision_order"] = DecisionOrder(torch.full(shape, -1, device=model.device))
    if request.constraint is not None:
        from paradec.samplers.masked.constrained import constrained  # for few requests

        features["constraint"] = constrained(sampler, model, state)
    if isinstance(state.blocks, PipelinedBlocks):
        features["pipelined_blocks"] = OpenBlocks()  # the last one: it moves the window
    state.start(features)


def _check_logits(state: MaskedState, model: Any) -> None:
    """Raise ValueError where the logits of the first step cannot fit.

    Left out: schedulers and engines, which have their logits already (no dtype).
    """
    dtype = getattr(model, "dtype", None)
    if dtype is None or state.done:
        return
    rows, width = state.branches * state.batch, state.window.positions.shape[1]
    needed = rows * width * state.facts.vocab_size * dtype.itemsize
    check_memory(needed, model.device, None, f"the logits of {rows} x {width} positions")


def _keep(state: MaskedState, sampler: Any, model: Any, request: Request, attention: Any) -> None:
    """Make what the request keeps outside of the canvas: store, what cache and attention keep, trace, a prefix."""
    cache, reuse = state.cache, state.reuse
    _check_logits(state, model)
    if isinstance(cache, StoredCache):
        rows, begin = state.branches * state.batch, 0 if reuse is None else reuse.start
        state.store = model.make_store(rows, state.canvas.shape[1], cache.store_dtype, cache.max_memory, start=begin)
    state.cache_state = cache.begin(state)
    if attention is not None:
        state.features["sparse_attention"] = SparseAttention(attention.begin(state, sampler.uses_steps))
    said = {"score": sampler.needs.score, "cache": cache.name, "mask_id": state.mask_id}
    state.trace = trace_of(sampler, request, state.canvas, state.length, **said)
    if state.trace is not None and isinstance(suffix := state.features.get("suffix_window"), SuffixWindow):
        state.trace.settings |= {"suffix": suffix.suffix.to_dict()}
    if isinstance(prefix := state.features.get("prefix_reuse"), PrefixReuse):
        prefix.fill_store(state, model)


def _suppressed(request: Request, facts: ModelFacts, holes: bool) -> list[int]:
    """Ids that are never proposed, beside the mask id, ascending. holes: whether something given follows a mask."""
    ends, suppressed = facts.eos_token_ids, set(suppressed_ids(request, facts))
    if len(suppressed | {facts.mask_id}) >= facts.vocab_size:
        raise ValueError(f"suppress_tokens excludes all {facts.vocab_size} tokens of the vocabulary")
    if request.holes_eos_inf and holes and len(suppressed | {facts.mask_id, *ends}) >= facts.vocab_size:
        raise ValueError("holes_eos_inf=True leaves no token for holes beside those of suppress_tokens")
    return sorted(suppressed)
