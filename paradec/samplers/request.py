"""What a caller may set for one request, whatever the sampler; every argument is checked here, before any work."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec import attention as attentions
from paradec import caches
from paradec.blocks import LONGEST_BLOCK, POLICIES, AdaptiveBlocks, BlockPolicy, FixedBlocks, WholeCanvas
from paradec.caches.base import Cache
from paradec.caches.table import REFUSED, verdict
from paradec.checks import check_bool, check_choice, check_int, check_number, check_temperature, shown
from paradec.registry import unknown

MOST_STEPS = 1_000_000
LARGEST_GUIDANCE = 1e6


@dataclass(frozen=True)
class Request:
    """What a caller may set for one request, whatever the sampler. Validated when made.

    Args:
        temperature: 0 takes the best token; above (1e-6 to 1e6), tokens are drawn from softmax(logits / temperature).
        top_p, top_k: restrict the draw to the nucleus of this mass, then to this many words.
        guidance_scale: s in uncond + s (cond - uncond), where uncond has the prompt masked; 1 is off (LLaDA's
            cfg_scale w is s - 1). Words that a branch excludes (-inf) have the formula's limit
            (`paradec.samplers.statistics.guided`).
        eos_early_stop: end a row once an end token is final and nothing before it is undecided.
        logits_eos_inf: never propose an end token.
        holes_eos_inf: never propose an end token in a hole, which is a mask that something given follows.
        confidence_eos_eot_inf: commit end tokens after everything else. LLaDA's generate.py means this but, at
            temperature > 0, loses the effect for one of the two ids.
        suppress_tokens: ids that are never proposed. The mask id never is.
        steps: forward passes planned for a row, spread evenly over its blocks; None plans one token a step.
        rng: "counter" (reproducible per row) or "reference" (draws from the generator as the public code does).
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    guidance_scale: float = 1.0
    eos_early_stop: bool = True
    logits_eos_inf: bool = False
    holes_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    suppress_tokens: tuple[int, ...] = ()
    steps: int | None = None
    rng: str = "counter"

    def __post_init__(self) -> None:
        check_temperature("temperature", self.temperature)
        check_number("top_p", self.top_p, low=0, high=1, none=True, open_low=True)
        check_int("top_k", self.top_k, low=1, none=True)
        check_number("guidance_scale", self.guidance_scale, low=0, high=LARGEST_GUIDANCE)
        for name in ("eos_early_stop", "logits_eos_inf", "holes_eos_inf", "confidence_eos_eot_inf"):
            check_bool(name, getattr(self, name))
        check_int("steps", self.steps, low=1, high=MOST_STEPS, none=True)
        check_choice("rng", self.rng, ("counter", "reference"))


def make_request(given: dict[str, Any]) -> Request:
    """Validate what is left of a request's arguments."""
    allowed = [f.name for f in dataclasses.fields(Request)]
    for name in given:
        if name not in allowed:
            raise ValueError(unknown("argument", name, [*allowed, "max_new_tokens", "blocks", "block_length", "cache"]))
    if "suppress_tokens" in given:
        given = {**given, "suppress_tokens": _ids("suppress_tokens", given["suppress_tokens"])}
    return Request(**given)


def _ids(name: str, value: Any) -> tuple[Any, ...]:
    """A sequence of ids as a tuple; None is empty. Whether they are in the vocabulary is checked with the model."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set)):
        raise ValueError(f"{name}={shown(value)} must be a sequence of token ids")
    for entry in value:
        check_int(name, entry, low=0)
    return tuple(value)


def block_policy(
    sampler: Any, model: Any, blocks: str | BlockPolicy | None, block_length: int | None, holes: bool = False
) -> BlockPolicy:
    """The policy that was asked for, else the sampler's own, else the model's; a bidirectional model fills `holes` as
    one block. A policy's name (`paradec.blocks.POLICIES`) goes with a block_length."""
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
        return FixedBlocks(block_length, align="absolute")
    if policy is not None:
        if isinstance(policy, type) or not (hasattr(policy, "open") and hasattr(policy, "count")):
            raise ValueError(f"blocks={shown(policy)} must be a block policy, e.g. paradec.FixedBlocks(32)")
        if getattr(policy, "reads_logits", False) and sampler.drafts:
            raise ValueError(
                f"sampler {sampler.name!r} does not work with blocks={shown(policy)}: it drafts steps ahead, before "
                "the logits that say where a block ends; use paradec.FixedBlocks"
            )
        return policy.for_model(model) if hasattr(policy, "for_model") else policy
    if model.facts.topology == "block_causal":
        return FixedBlocks(model.facts.block_length, align="absolute")
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
    if block_length is not None:
        raise ValueError(f"block_length={block_length} has no meaning with blocks='whole'")
    return WholeCanvas(), None


def block_counts(steps: int, policy: BlockPolicy, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B] int64: how many blocks each row will have, to spread `steps` over. starts, lengths: [B] positions."""
    counts = [policy.count(int(start), int(length)) for start, length in zip(starts, lengths, strict=True)]
    if None in counts:
        raise ValueError(
            f"steps={steps} cannot be spread over {shown(policy)}: only decoding shows how many blocks there are; "
            "leave steps out"
        )
    return np.array(counts, np.int64)


def check_steps(request: Request, policy: BlockPolicy, starts: np.ndarray, lengths: np.ndarray) -> None:
    """Raise ValueError where `steps` cannot be spread evenly over the blocks."""
    if request.steps is None:
        return
    counts = block_counts(request.steps, policy, starts, lengths)
    count = int(counts.max())
    if request.steps % count and (counts == count).all():
        raise ValueError(
            f"steps={request.steps} must be a multiple of the number of blocks ({count}): every block has as many"
        )
    if request.steps < count:
        raise ValueError(f"steps={request.steps} must be at least the number of blocks ({count})")


def randomness(
    request: Request, seed: Any, generator: torch.Generator | None, rows: list[list[int]]
) -> tuple[torch.Generator | None, list[int]]:
    """The generator of `rng="reference"`, and one seed per row."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator={shown(generator)} must be a torch.Generator")
    if seed is not None and generator is not None:
        raise ValueError("give seed or generator, not both")
    if isinstance(seed, (Tensor, np.ndarray)):
        seed = seed.tolist()
    several = isinstance(seed, Sequence) and not isinstance(seed, (str, bytes))
    seeds = list(seed) if several else [seed] * len(rows)
    if len(seeds) != len(rows):
        raise ValueError(f"seed has {len(seeds)} entries for {len(rows)} rows; give one int, or one per row")
    for entry in seeds:
        check_int("seed", entry, low=0, high=2**63 - 1, none=not several)
    if request.rng == "reference":
        if len({len(row) for row in rows}) != 1:
            raise ValueError("rng='reference' needs rows of one length: the references know no padding")
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


def cache_of(cache: str | Cache | None, sampler: Any, model: Any, request: Request, blocks: BlockPolicy) -> Cache:
    """The cache, if it works with this sampler and model."""
    if cache is None:
        return caches.create("none")
    if isinstance(cache, str):
        cache = caches.create(cache)
    if not isinstance(cache, Cache):
        raise ValueError(f"cache={shown(cache)} must be one of {caches.names()} or made by paradec.caches.create")
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


def attention_of(attention: Any, sampler: Any, model: Any, shares: bool) -> Any:
    """The attention method, if it works with this sampler and model; None attends to everything.

    Args:
        attention: a method, a name, "dense", or None for the model's own. A model's own gives way, with a warning,
            where it does not work.
        shares: whether rows take over a prefix that no call evaluates.
    """
    own = getattr(model, "default_attention", None)
    if isinstance(attention, str) and attention != "dense":
        check_choice("attention", attention, ["dense", *attentions.names()])
        attention = attentions.create(attention)
    method = own if attention is None else attention
    if method is None or isinstance(method, str):
        return None
    if isinstance(method, type) or not (hasattr(method, "begin") and hasattr(method, "refusal")):
        raise ValueError(
            f"attention={shown(attention)} must be 'dense', one of {attentions.names()} or made by "
            "paradec.attention.create, e.g. paradec.SparseD()"
        )
    why = method.refusal(sampler, model)
    if why is None and shares:
        why = "its lists are found in calls that evaluate whole rows, and a prefix that is taken over is not evaluated"
    if why is None:
        return method
    text = f"attention={method.name!r} does not work with sampler {sampler.name!r} here: {why}"
    if attention is not None:
        raise ValueError(text)
    warnings.warn(f"{text}; every call attends to everything", stacklevel=2)
    return None
