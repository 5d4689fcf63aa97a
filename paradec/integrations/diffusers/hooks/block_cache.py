"""Block cache for LLaDA2Pipeline: finished blocks are evaluated once (Fast-dLLM v2, arXiv 2509.26328).

The cache is exact for block-causal models; other models raise ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ModuleUtilsMixin

from paradec.core.checks import check_int
from paradec.integrations.diffusers.hooks.hook import PipelineSession
from paradec.models.base import Model
from paradec.models.cache_argument import cache_argument, cache_keyword

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # as a share of the largest logit; narrower dtypes get 0.1


@dataclass
class BlockCacheReport:
    """Counts since a `BlockCache` was attached."""

    calls: int = 0
    evaluated: int = 0  # evaluated positions, over all rows
    whole: int = 0  # positions that would have been evaluated without the cache
    bytes: int = 0  # maximum size of keys and values

    short = property(str, doc="The report in one line, as `str`.")

    def __str__(self) -> str:
        share = self.evaluated / self.whole if self.whole else 1.0
        return (
            f"{self.calls} calls, {self.evaluated} of {self.whole} positions evaluated ({share:.0%}); keys and values "
            f"took {self.bytes / 1e6:.1f} MB at most"
        )


class BlockCache(PipelineSession, nn.Module):
    """Block cache on a LLaDA2Pipeline, from `paradec.accelerate(pipe, cache="block")`. A context manager.

    It replaces `pipe.model` and forwards its attributes. A call evaluates only positions that are not in a transformers
    `DynamicCache`: at first all, later a newly finished block and the open block. Raises TypeError for another
    pipeline; ValueError for a model without a key/value cache, or if a test with random tokens shows that blocks attend
    to later blocks, or that the cache changes logits.
    """

    def __init__(self, pipe: Any):
        super().__init__()
        model, scheduler = getattr(pipe, "model", None), getattr(pipe, "scheduler", None)
        config = getattr(scheduler, "config", {})
        if not isinstance(model, nn.Module) or "block_length" not in config:
            raise TypeError(
                "cache='block' is for LLaDA2Pipeline, with a model and a scheduler with a block_length, not for "
                f"{type(pipe).__name__}"
            )
        if isinstance(model, BlockCache):
            raise ValueError(f"{type(pipe).__name__} has a block cache already; detach that session first")
        if cache_argument(model) is None:
            raise ValueError(
                f"cache='block' needs a model that takes a key/value cache; {type(model).__name__} does not. Convert "
                "a model that paradec loaded or wrapped with BlockCausalModule(model), of "
                "paradec.integrations.diffusers.hooks.block_cache"
            )
        self.pipe, self.inner = pipe, model
        self.checked_lengths: set[int] = set()  # block lengths that passed the check
        self.counts = BlockCacheReport()
        # of the n positions before the open block: cache of keys and values; tokens and mask [2, B, n]
        self.prefix: tuple[Any, Tensor] | None = None
        self._check_block_causal(int(config["block_length"]))
        pipe.model = self

    def report(self) -> BlockCacheReport:
        return self.counts

    def detach(self) -> None:
        if self.pipe.model is self:
            self.pipe.model = self.inner
        self.prefix = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    @torch.no_grad()
    def _check_block_causal(self, block: int) -> None:
        """Raise ValueError unless the model is block-causal with this block length, and a cache keeps its logits."""
        model, device = self.inner, next(self.inner.parameters()).device
        vocab: Any = getattr(getattr(model, "config", None), "vocab_size", None)
        check_int("model.config.vocab_size", vocab, low=1)
        generator = torch.Generator().manual_seed(0)
        first, second, third = (torch.randint(vocab, (1, block), generator=generator).to(device) for _ in range(3))
        positions = torch.arange(2 * block, device=device).unsqueeze(0)

        def logits(input_ids: Tensor, cache: Any = None) -> Tensor:
            options = {} if cache is None else {"use_cache": True, **cache_keyword(model, cache)}
            mask, ids = torch.ones_like(positions), positions[:, -input_ids.shape[1] :]
            output: Tensor = model(input_ids, attention_mask=mask, position_ids=ids, **options).logits
            return output

        cache = DynamicCache()
        full_logits = logits(torch.cat((first, second), 1))
        logits(torch.cat((first, third), 1), cache)
        if not len(cache) or cache.get_seq_length() != 2 * block:
            raise ValueError(f"{type(model).__name__} did not write to the key/value cache that cache='block' passes")
        first_logits = logits(torch.cat((first, third), 1))[:, :block]
        cache.crop(-block)
        cached_logits = logits(second, cache)
        tolerance = TOLERANCE.get(full_logits.dtype, 0.1) * full_logits.abs().max()
        if (first_logits - full_logits[:, :block]).abs().max() > tolerance:
            raise ValueError(
                f"cache='block' is exact only for block-causal models: in {type(model).__name__} a block's logits "
                f"depend on the block to its right at block_length={block}"
            )
        if (cached_logits[:, -block:] - full_logits[:, block:]).abs().max() > tolerance:
            raise ValueError(
                f"{type(model).__name__} has other logits with a key/value cache than without: with a cache it may "
                "mask inside its block (causally, for example); cache='block' cannot be used"
            )
        self.checked_lengths.add(block)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        """Evaluate the positions that are not cached, and return the open block's logits. Raises ValueError if the
        block length has changed, and the model is not block-causal with the new one."""
        block = read_block_length(self.pipe.scheduler)
        if block not in self.checked_lengths:
            self._check_block_causal(block)
        inputs = torch.stack((input_ids, attention_mask))
        prefix, self.prefix = self.prefix, None  # if the call raises, its incomplete cache is not used again
        if prefix is None or not torch.equal(prefix[1], inputs[..., :-block][..., : prefix[1].shape[-1]]):
            prefix = DynamicCache(), inputs[..., :0]
        cache, start = prefix[0], prefix[1].shape[-1]
        output = self.inner(
            input_ids[:, start:],
            attention_mask=attention_mask,
            position_ids=position_ids[:, start:],
            use_cache=True,
            **cache_keyword(self.inner, cache),
        )
        report = self.counts
        layers = [layer for layer in cache.layers if layer.keys is not None]
        report.bytes = max(report.bytes, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers))
        cache.crop(-block)
        self.prefix = cache, inputs[..., :-block]
        report.calls += 1
        report.whole += input_ids.numel()
        report.evaluated += input_ids[:, start:].numel()
        return SimpleNamespace(logits=output.logits[:, -block:])


class BlockCausalModule(ModuleUtilsMixin, nn.Module):
    """Adapter of a block-causal paradec model to the interface of LLaDA2Pipeline's model.

    model: from `paradec.load` or `paradec.wrap`. Raises ValueError unless its topology is "block_causal" and its
    prediction "same".
    """

    def __init__(self, model: Model):
        super().__init__()
        facts = model.facts
        if facts.topology != "block_causal" or facts.prediction != "same" or facts.prompt_aligned:
            alignment = ", in blocks from the prompt's end" if facts.prompt_aligned else ""
            raise ValueError(
                f"{facts.name} is {facts.topology}, predicting {facts.prediction!r}{alignment}; LLaDA2Pipeline needs "
                "block_causal models that predict in place ('same'), with blocks from position 0"
            )
        self.model, self.config, self.block_length = model.module, model.module.config, facts.block_unit
        self.whole_blocks = facts.whole_blocks

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        """Return the logits at `position_ids` [B, Q]. attention_mask: [B, K] over cached and new keys, 0 for padding.
        Raises ValueError for an incomplete block if the model chooses experts for whole blocks."""
        if self.whole_blocks and position_ids.shape[1] % self.block_length:
            raise ValueError(
                f"a call of {position_ids.shape[1]} positions splits a block of {self.block_length}, and the model "
                f"chooses experts for whole blocks; give the pipeline block_length={self.block_length}, or a multiple"
            )
        keys = torch.arange(attention_mask.shape[1], device=input_ids.device)
        visible = (position_ids // self.block_length)[:, :, None] >= (keys // self.block_length)[None, None]
        visible = visible & attention_mask[:, None, :].bool()
        # left padding attends to no key: let it attend to itself, so that its softmax is defined
        visible |= (position_ids[:, :, None] == keys) & ~visible.any(-1, keepdim=True)
        return self.model(
            input_ids=input_ids,
            attention_mask=visible[:, None],
            position_ids=position_ids,
            use_cache=use_cache,
            **cache_keyword(self.model, past_key_values),
        )


def read_block_length(scheduler: Any) -> int:
    """Read the block length of a scheduler's run. Raises ValueError if it is unknown."""
    attributes = vars(scheduler)
    if "block_length" in attributes:
        return int(attributes["block_length"])
    if attributes.get("_transfer_schedule") is not None:  # diffusers' number of positions to commit in each step
        return int(attributes["_transfer_schedule"].sum())
    raise ValueError(f"{type(scheduler).__name__} does not have its block length; use one of paradec.schedulers")
