"""What rules have in common that decide inside a call whether the rest of a transformer's blocks is evaluated.

Such a rule reads what the first blocks (the probe) or a table of earlier runs say of this step. All blocks between the
probe and the last ones are evaluated or forecast together, as one residual (`where="stack"`). Every call of a step
(guidance in two calls) decides for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from paradec.samplers.forecast.refresh import Rule


@dataclass(eq=False)
class ProbeState:
    """What a rule knows of one call of a step. Steps are counted from 0."""

    index: int = 0
    """The step that is being called."""
    total: int | None = None
    """Solver steps of the run, where they are known."""
    first: int = 0
    """Steps of the scheduler that the run leaves out at its start (image to image)."""
    skipped: int = 0
    """Forecasts since the latest evaluation."""
    skips: int = 0
    """Forecasts of the run."""
    error: float = 0.0
    """What a rule has summed since the latest evaluation."""
    product: float = 1.0
    """What a rule has multiplied since then."""
    latent: Tensor | None = None
    """What the transformer was given in this call [B, ...]."""
    level: float = 0.0
    """The noise level of this step, where the rule reads `noise_levels`."""
    nodes: tuple[int, ...] = ()
    """The latest two steps that were evaluated, newest first."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Features of earlier calls."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def finished(self, full: bool) -> None:
        """The step is decided."""
        self.skipped = 0 if full else self.skipped + 1
        self.skips += not full
        if full:
            self.nodes = (self.index, *self.nodes)[:2]


@dataclass(frozen=True)
class Probe(Rule):
    """Base of the rules. A subclass implements `is_full`."""

    where = "stack"
    filters: ClassVar[bool] = False
    """Whether `ProbeState.latent` must have rows and columns."""
    whole: ClassVar[bool] = False
    """Whether the residual is that of all blocks, the probe's among them, so that a forecast replaces these too."""

    @property
    def how(self) -> str:
        """How the residual is forecast unless the sampler says: as published."""
        return "reuse"

    @property
    def head(self) -> int:
        """Blocks that are evaluated at every step, before the decision."""
        return 0

    @property
    def tail(self) -> int:
        """Blocks that are evaluated at every step, after what is forecast."""
        return 0

    def is_full(self, state: ProbeState, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        """Whether the blocks after the probe are evaluated in this call. Keeps in `state` what later calls need.

        Args:
            first: [B, ...] hidden states before the first block.
            probe: [B, ...] hidden states after the probe; None without one.
            forced: the answer is yes, whatever is measured: nothing is kept yet, say.
        """
        raise NotImplementedError

    def check_model(self, module: nn.Module) -> None:
        """Raise ValueError if the rule cannot serve this transformer."""

    def noise_levels(self, scheduler: Any) -> Sequence[float]:
        """The noise level of each step of a run, where the rule reads them; else nothing.

        scheduler: the pipeline's, before or in a run; None for a transformer by itself.

        Raises:
            ValueError: the rule cannot serve such a scheduler.
        """
        return ()

    def forecast_at(self, state: ProbeState) -> float:
        """The step for which the residual is forecast in this call: as a rule, the one that is called."""
        return state.index

    def evaluated(self, state: ProbeState, residual: Tensor) -> None:
        """Take note of what was added to the hidden states [B, ...] in this call, by the blocks that were evaluated."""
