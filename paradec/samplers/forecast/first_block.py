"""Rules that compare what the first blocks add with what they added at the latest evaluation: FBCache and DBCache.

FBCache is ParaAttention's First Block Cache, as in diffusers (`FirstBlockCacheConfig`); DBCache is cache-dit's, with
its names. Both come from code; neither has a paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.samplers.forecast.refresh import Probe, RunProgress, integer, number, relative_change


@dataclass(frozen=True)
class FirstBlock(Probe):
    """Evaluate the blocks after the first one when its residual has changed: FBCache.

    The relative L1 change is taken since the latest evaluation, over the whole call (all its rows together), in the
    model's own type. The names and the default are diffusers'; pipelines of few steps (8 or less) hardly ever skip.

    Args:
        threshold: a larger change asks for an evaluation; 0 always evaluates.
        first_enhance: solver steps at the start that are all evaluated.
    """

    threshold: float = number(0.05, low=0)
    first_enhance: int = integer(1, low=1)

    name = "first_block"
    head = 1

    def is_full(self, state: RunProgress, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        assert probe is not None
        residual = (probe - first).detach()
        full = forced or state.index < self.first_enhance or self.threshold == 0
        full = full or relative_change(residual, state.memory["residual"]) > self.threshold
        if full:
            state.memory["residual"] = residual
        return full


@dataclass(frozen=True)
class DBCache(Probe):
    """FBCache with more blocks before and after what is skipped, and bounds on skipping: cache-dit's DBCache.

    All blocks are one stack, as cache-dit has it for FLUX; of some other models it lets each list of blocks decide for
    itself.

    Args:
        Fn_compute_blocks: first blocks, evaluated at every step.
        Bn_compute_blocks: last blocks, evaluated at every step.
        residual_diff_threshold: relative L1 change at which a step is evaluated; 0 always evaluates, from 1 on there
            is no such change.
        max_warmup_steps: steps at the start that are all evaluated.
        max_cached_steps: skipped steps of a run; -1 sets no bound.
        max_continuous_cached_steps: skipped steps in a row; -1 sets no bound.
    """

    Fn_compute_blocks: int = integer(8, low=1)
    Bn_compute_blocks: int = integer(0, low=0)
    residual_diff_threshold: float = number(0.08, low=0)
    max_warmup_steps: int = integer(8, low=0)
    max_cached_steps: int = integer(-1, low=-1)
    max_continuous_cached_steps: int = integer(-1, low=-1)

    name = "dbcache"

    @property
    def head(self) -> int:
        return self.Fn_compute_blocks

    @property
    def tail(self) -> int:
        return self.Bn_compute_blocks

    def is_full(self, state: RunProgress, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        assert probe is not None
        residual, threshold = (probe - first).detach(), self.residual_diff_threshold
        full = (
            forced
            or state.index < self.max_warmup_steps
            or 0 <= self.max_cached_steps <= state.skips
            or 0 <= self.max_continuous_cached_steps <= state.forecasts
            or threshold == 0
        )
        if not full and threshold < 1:
            full = not relative_change(residual, state.memory["residual"]) < threshold
        if full:
            state.memory["residual"] = residual
        return full
