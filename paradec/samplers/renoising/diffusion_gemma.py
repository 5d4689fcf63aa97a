"""DiffusionGemma, as transformers' `DiffusionGemmaGenerationMixin.generate`; EB-Sampler's rule (arXiv 2505.24857)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import check_number
from paradec.samplers.masked.rules.entropy_bound import EntropyBound
from paradec.samplers.renoising.base import CanvasSampler


@dataclass(frozen=True)
class DiffusionGemma(CanvasSampler):
    """Sort positions by entropy; keep the longest prefix whose sum, without the largest, is at most `entropy_bound`.

    With `rng="reference"` rows advance in lock step, and draw from one generator as transformers' `generate` does after
    `torch.manual_seed`; otherwise each row advances by itself. Unlike in transformers, prompts are not padded, the
    answer is cut to `max_new_tokens`, and a row that has ended is not evaluated.

    Args:
        entropy_bound: in nats; None uses the value in the model's generation_config.json, or 0.1.
        max_denoising_steps, t_min, t_max, stability_threshold, confidence_threshold: as in transformers, see
            `CanvasSampler`. (transformers stops no canvas early if a threshold is None; here, set early_stop=False.)
    """

    entropy_bound: float | None = None

    name = "diffusion_gemma"
    paper = "EB-Sampler"
    arxiv = "2505.24857"
    summary = "on canvases of noise: keep positions within an entropy bound, renew others, close when nothing changes"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("entropy_bound", self.entropy_bound, low=0, none=True)

    def rule_for(self, defaults: Mapping[str, Any]) -> EntropyBound:
        return EntropyBound(gamma=defaults["entropy_bound"] if self.entropy_bound is None else self.entropy_bound)
