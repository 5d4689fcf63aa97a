"""Start of a request of the masked family."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paradec.caches.base import Cache
from paradec.caches.kept_prefix import Reuse, plan_reuse
from paradec.caches.none import NoCache
from paradec.caches.stored import StoredCache
from paradec.caches.suffix import Suffix
from paradec.caches.table import make_cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_int, short_repr
from paradec.core.logprobs import LogProbs
from paradec.core.memory import Memory, check_memory
from paradec.core.prompts import encode
from paradec.request import Request
from paradec.samplers.features.adaptive_blocks import AdaptiveBlockEnds
from paradec.samplers.features.decision_order import DecisionOrder
from paradec.samplers.features.early_stops import EarlyRule, EarlyStops, split_stop_rules
from paradec.samplers.features.holes import Holes
from paradec.samplers.features.logprobs import RecordedLogProbs
from paradec.samplers.features.pipelined_blocks import OpenBlocks, PipelinedBlocks, check_pipelined
from paradec.samplers.features.prefix_reuse import PrefixReuse
from paradec.samplers.features.rollouts import RecordedRollout
from paradec.samplers.features.sparse_attention import SparseAttention, find_attention
from paradec.samplers.features.stop_strings import StopStrings
from paradec.samplers.features.suffix_window import SuffixWindow, check_suffix
from paradec.samplers.features.token_controls import TokenControls
from paradec.samplers.masked.blocks import LONGEST_BLOCK, EndOfText, FixedBlocks, WholeCanvas, open_blocks
from paradec.samplers.masked.policies import check_steps, count_blocks, policy_by_name
from paradec.samplers.masked.reference import ReferenceNumbers
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.start import answer_starts, count_new, make_seeds, make_trace, pad_rows, row_keys, suppressed_ids

MAX_UNCHECKED = 2**24
"""Bytes of logits up to which free memory is not checked."""


def start_state(sampler: Any, model: Any, prompt: Any, request: Request, attention_mask: Any) -> MaskedState:
    """Check a request, and make its state: each row is a prompt, then masks. Raises ValueError or TypeError."""
    check_pair(sampler, model)
    facts, device = model.facts, model.device
    prompts = encode(model, prompt, attention_mask, request.chat)
    rows, mask_id = prompts.rows, facts.mask_id
    num_new = count_new(model, rows, request.max_new_tokens, mask_id, "mask")
    has_masks = any(mask_id in row for row in rows)
    policy = choose_policy(sampler, model, request.blocks, request.block_length, has_masks)
    if isinstance(policy, PipelinedBlocks):
        check_pipelined(sampler, policy, request.steps)
    starts = np.array([row.index(mask_id) if mask_id in row else len(row) for row in rows], np.int64)
    answer_start, lengths = answer_starts(rows, mask_id), np.array([len(row) for row in rows], np.int64)
    has_holes = bool((answer_start > starts).any())  # masks before a prompt token
    excludes_ends = request.holes_eos_inf and has_holes
    if request.steps is not None:
        counts = count_blocks(request.steps, policy, starts, lengths + num_new)
        check_steps(request.steps, counts, "blocks", is_whole_batch=not prompts.joins_batch)
    suppressed = suppressed_ids(request, facts, [mask_id, *(facts.eos_token_ids if excludes_ends else ())])
    cache: Cache = NoCache()
    if request.cache not in (None, "none"):
        cache = make_cache(request, sampler, model, policy)
    sampler.check(facts, policy, cache, int((lengths + num_new - starts).max()))
    check_int("logprobs", request.logprobs, low=0, high=facts.vocab_size, none=True)
    generator, seeds = make_seeds(request, rows)
    stop_rules: list[Any] = []
    early_rules: tuple[EarlyRule, ...] = ()
    if request.stop is not None:
        token_rules, early_rules = split_stop_rules(request.stop, sampler)
        stop_rules += token_rules
    if request.stop_strings:
        stop_rules.append(StopStrings.from_request(request, model, answer_start, mask_id))
    reuse = attention = None
    if request.prefix is not None or request.share_prefix or request.keep_prefix:
        prefix, share, keep = request.prefix, request.share_prefix, request.keep_prefix
        branches, causal_keys = 1 if request.guidance_scale == 1.0 else 2, sampler.needs.causal_keys
        reuse = plan_reuse(prefix, share, keep, model, cache, branches, rows, starts, causal_keys)
    if request.attention is not None or getattr(model, "default_attention", None) is not None:
        attention = find_attention(request, sampler, model)
    if request.suffix is not None:
        check_suffix(request, sampler, model, cache, policy, len(rows), has_holes, bool(early_rules))

    row_ends = lengths + num_new
    if facts.topology == "block_causal" and num_new:  # decode the whole last block; `requested_end` cuts it off
        row_ends = np.minimum(facts.block_bounds(starts, row_ends, starts)[1], facts.max_length or LONGEST_BLOCK)
    canvas = pad_rows(rows, int(row_ends.max()), mask_id)
    canvas[np.arange(canvas.shape[1]) >= row_ends[:, None]] = facts.fill_token_id
    is_prompt = (np.arange(canvas.shape[1]) < lengths[:, None]) & (canvas != mask_id)
    if request.eos_early_stop and facts.eos_token_ids:
        stop_rules.append(EndOfText(list(facts.eos_token_ids), mask_id, answer_start))
    specs = sampler.memory()
    sizes = {"position": canvas.shape[1], "vocab": facts.vocab_size, "window": 0}
    if sampler.needs.moves:
        sizes["steps"] = int(sampler.max_steps(np.array([policy.length]))[0])  # type: ignore[attr-defined]
    state = MaskedState(
        batch=len(rows),
        memory=Memory.allocate(specs, len(rows), sizes, device) if specs else Memory(),
        facts=facts,
        request=request.without_objects(),
        cache=cache,
        blocks=policy,
        pads=model.pads,
        canvas=torch.as_tensor(canvas, device=device),
        is_prompt=torch.as_tensor(is_prompt, device=device),
        prompt_length=starts,
        answer_start=answer_start,
        length=row_ends,
        requested_end=lengths + num_new,
        max_new_tokens=num_new,
        keys=torch.as_tensor(row_keys(seeds, rows, prompts.copy_indices), device=device),
        suppressed=torch.tensor(suppressed, device=device) if suppressed else None,
        ends=torch.tensor(facts.eos_token_ids, dtype=torch.int64, device=device),
        revises=sampler.needs.revises,
        causal_keys=sampler.needs.causal_keys,
        stop_rules=tuple(stop_rules),
        generator=generator,
    )
    if request.steps is not None:
        state.steps_per_block = -(-request.steps // count_blocks(request.steps, policy, starts, row_ends))
    state.features = _make_features(state, sampler, model, early_rules, reuse)
    open_blocks(state, np.arange(state.batch))
    dtype = getattr(model, "dtype", None)  # None for schedulers and engines, whose caller allocates the logits
    if dtype is not None and not state.done:
        num_rows, width = state.branches * state.batch, state.window.positions.shape[1]
        if (num_bytes := num_rows * width * facts.vocab_size * dtype.itemsize) > MAX_UNCHECKED:
            check_memory(num_bytes, model.device, None, f"the logits of {num_rows} x {width} positions")
    if isinstance(cache, StoredCache):
        count, begin = state.branches * state.batch, 0 if reuse is None else reuse.start
        state.store = model.make_store(count, canvas.shape[1], cache.store_dtype, cache.max_memory, start=begin)
    state.cache_state = cache.begin(state)
    if attention is not None:
        state.features["sparse_attention"] = SparseAttention(attention.begin(state, sampler.uses_steps))
    if request.trace:
        details = {"score": sampler.needs.score, "cache": cache.name, "mask_id": mask_id}
        state.trace = make_trace(sampler, request, state.canvas, state.length, **details)
        if state.trace is not None and request.suffix is not None:
            state.trace.settings |= {"suffix": state.features["suffix_window"].suffix.to_dict()}
    if reuse is not None:
        state.features["prefix_reuse"].fill_store(state, model)
    return state


def check_pair(sampler: Any, model: Any) -> None:
    """Raise TypeError or ValueError if the sampler cannot decode with the model."""
    sampler.check_model(model)
    facts = model.facts
    if facts.mask_token_id is None or facts.topology == "causal":
        raise ValueError(
            f"sampler {sampler.name!r} needs a model with a mask token; {facts.name} has mask_token_id="
            f"{facts.mask_token_id}, topology={facts.topology!r}: pass these to paradec.wrap, or use sampler='sjd'"
        )
    why = sampler.needs.why_unsupported(facts)
    if sampler.needs.mask_probes and not (model.supports_visibility and facts.prediction == "same"):
        why = why or (
            "it evaluates masks that other positions do not attend to, which needs a transformers decoder that "
            f"predicts in place ('same'); {facts.name} is not such a model"
        )
    if why is not None:
        raise ValueError(f"sampler {sampler.name!r} does not work here: {why}")


def choose_policy(
    sampler: Any, model: Any, blocks: str | BlockPolicy | None, block_length: int | None, has_masks: bool = False
) -> BlockPolicy:
    """Choose the block policy: the request's, else the sampler's, else the model's. has_masks: whether prompts contain
    masks. Raises ValueError for an unfit policy or length."""
    facts, policy = model.facts, blocks
    if isinstance(policy, str):
        policy, block_length = policy_by_name(sampler, model, policy, block_length)
    if policy is not None and block_length is not None:
        raise ValueError(f"blocks={policy!r} and block_length={block_length!r} both cut the sequence; give one of them")
    if block_length is not None:
        check_int("block_length", block_length, low=1, high=LONGEST_BLOCK)
    if policy is None and not isinstance(blocks, str):
        policy = sampler.blocks(block_length)
    if policy is None and block_length is not None:
        if facts.block_length is None:
            return FixedBlocks(block_length)
        if facts.block_length % block_length and block_length % facts.block_length:
            raise ValueError(
                f"block_length={block_length} does not fit {facts.name}, which was trained with blocks of "
                f"{facts.block_length}; give {facts.block_length}, or a divisor or a multiple of it"
            )
        return FixedBlocks(block_length, align=facts.block_align)
    if policy is not None:
        if isinstance(policy, type) or not (hasattr(policy, "open") and hasattr(policy, "count")):
            raise ValueError(f"blocks={short_repr(policy)} must be a block policy, e.g. paradec.FixedBlocks(32)")
        if getattr(policy, "reads_logits", False) and sampler.needs.multi_step:
            raise ValueError(f"sampler {sampler.name!r} needs paradec.FixedBlocks, not blocks={short_repr(policy)}")
        return policy.for_model(model) if hasattr(policy, "for_model") else policy
    if facts.block_length is not None:
        return FixedBlocks(facts.block_length, align=facts.block_align)
    if model.default_block_length is not None and not has_masks:
        return FixedBlocks(model.default_block_length)
    return WholeCanvas()


def _make_features(
    state: MaskedState, sampler: Any, model: Any, early_rules: tuple[EarlyRule, ...], reuse: Reuse | None
) -> dict[str, Any]:
    """Make the features of a request, in the order in which the loop calls them."""
    shape, facts, request, features = tuple(state.canvas.shape), state.facts, state.request, dict[str, Any]()
    if getattr(state.blocks, "reads_logits", False):
        features["adaptive_blocks"] = AdaptiveBlockEnds(np.zeros(state.batch, bool))
    if request.suffix is not None:
        suffix: Any = Suffix.from_value(request.suffix)
        features["suffix_window"] = SuffixWindow(suffix, np.zeros(shape, bool))
    if reuse is not None or request.keep_prefix:
        num_reusable = np.zeros(state.batch, np.int64) if request.keep_prefix else None
        features["prefix_reuse"] = PrefixReuse(reuse, num_reusable)
    if state.generator is not None:
        features["reference"] = ReferenceNumbers()
    if request.logprobs is not None or request.rollout:
        features["logprobs"] = RecordedLogProbs(LogProbs.empty(shape[0], shape[1], request.logprobs or 0, model.device))
    if request.rollout:
        features["rollout"] = RecordedRollout.from_request(sampler, model, state)
    if early_rules:
        reads = tuple(dict.fromkeys(name for rule in early_rules for name in rule.reads))
        features["early_stops"] = EarlyStops(early_rules, reads)
    if request.holes_eos_inf and facts.eos_token_ids and (state.answer_start > state.prompt_length).any():
        features["holes"] = Holes()
    if facts.topology == "causal_context":
        from paradec.samplers.masked.causal_context import CausalContext

        features["causal_context"] = CausalContext.from_request(sampler, state, early_rules, request)
    if getattr(model, "reads_order", False):
        features["decision_order"] = DecisionOrder(torch.full(shape, -1, device=model.device))
    if (controls := TokenControls.from_request(sampler, model, request, in_order=False)) is not None:
        features["controls"] = controls
    if request.constraint is not None:
        from paradec.samplers.features.constraints import MaskedConstraint  # few requests need it

        features["constraint"] = MaskedConstraint.from_request(sampler, model, state)
    if isinstance(state.blocks, PipelinedBlocks):
        features["pipelined_blocks"] = OpenBlocks()  # last, since it moves the window
    return features
