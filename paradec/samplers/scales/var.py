"""VAR: one forward for each scale of the picture, all tokens of a scale drawn at once.

Tian et al., "Visual Autoregressive Modeling: Scalable Image Generation via Next-Scale Prediction", arXiv 2404.02905,
and its public code.
"""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.scales.base import ScaleSampler


@dataclass(frozen=True)
class VAR(ScaleSampler):
    """Per step, evaluate the next scale with the keys and values of earlier scales, and draw each of its tokens
    independently from the guided, filtered distribution.

    Settings are those of `ScaleSampler`. The authors' figures: guidance_scale=2.5, top_k=900, top_p=0.96; their demo:
    5, 900 and 0.95. Without guidance the unconditional half is not evaluated (the public code evaluates it always).
    """

    name = "var"
    paper = "VAR"
    arxiv = "2404.02905"
    summary = "a whole scale of the picture per forward, the coarsest first"
    presets = {"smooth": {"smooth": True}}
