"""A sampler for GLM-Image's prior in `GlmImagePipeline`, in place of `vision_language_encoder.generate`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paradec.api.images import ImageOutput, build_output, picture_request
from paradec.core.checks import short_repr
from paradec.core.protocol import decode
from paradec.integrations.diffusers.hooks.hook import PipelineSession
from paradec.integrations.transformers import UNSUPPORTED
from paradec.models.images.glm_image import GlmImageModel

ENCODER = "vision_language_encoder"
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p")  # read from the encoder's generation config
DISABLED_SETTINGS: dict[str, Any] = UNSUPPORTED | {"repetition_penalty": 1.0, "typical_p": 1.0, "min_p": None}


@dataclass(frozen=True)
class PriorReport:
    """The latest run of a `PriorSession`."""

    runs: int
    prior: ImageOutput | None  # the prior's codes, forwards and seconds; None before the first run
    forecast: Any = None  # the report of the session on the pipeline's DiT

    @property
    def short(self) -> str:
        if self.prior is None:
            return "no run yet"
        prior = self.prior
        rows, tokens = prior.tokens.shape
        line = f"run {self.runs}: prior of {rows} x {tokens} tokens in {prior.nfe} forwards, {prior.seconds:.2f} s"
        return line if self.forecast is None else f"{line}; {self.forecast.short}"

    def __str__(self) -> str:
        return self.short if self.forecast is None else f"{self.short}\n{self.forecast}"


class PriorSession(PipelineSession):
    """Sampler on the prior of a GlmImagePipeline, from `paradec.accelerate(pipe, prior="scd")`. A context manager.

    prior: a sampler or its name, or a mapping with arguments of `paradec.generate_images` ("sampler", "temperature",
    "seed", ...); missing arguments come from the encoder's generation config. Raises TypeError for another pipeline;
    ValueError for an invalid argument, an unsupported generation config, or an encoder that has a session already.
    """

    def __init__(self, pipe: Any, prior: Any):
        encoder: Any = getattr(pipe, ENCODER, None)
        if type(encoder).__name__ != "GlmImageForConditionalGeneration":
            raise TypeError(
                f"prior={short_repr(prior)} is for GLM-Image: {type(pipe).__name__} has no {ENCODER} that is a "
                "GlmImageForConditionalGeneration"
            )
        if isinstance(getattr(vars(encoder).get("generate"), "__self__", None), PriorSession):
            raise ValueError(f"{ENCODER} has a session already; detach that one first")
        self.model, self.runs, self.forecast = GlmImageModel(encoder), 0, None
        self.arguments = dict(prior) if isinstance(prior, Mapping) else {"sampler": prior}
        self.latest: ImageOutput | None = None
        self._build_request(True)
        self.encoder = encoder
        encoder.generate = self.generate

    def _build_request(self, do_sample: bool) -> Any:
        config = self.model.module.generation_config
        for name, value in DISABLED_SETTINGS.items():
            if getattr(config, name, None) not in (None, value):
                raise ValueError(
                    f"{name}={short_repr(getattr(config, name))} of {ENCODER}'s generation config is unsupported"
                )
        if any(token in self.model.image_ids for token in getattr(config, "suppress_tokens", None) or ()):
            raise ValueError(f"suppress_tokens of {ENCODER}'s generation config must not contain codes")
        greedy = self.arguments.get("temperature", 1.0 if do_sample else 0.0) == 0
        defaults = {"temperature": 0.0} if greedy else {name: getattr(config, name, None) for name in SAMPLING_SETTINGS}
        return picture_request(self.model, {**defaults, **self.arguments})

    @torch.no_grad()
    def generate(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        images_per_sample: Tensor | None = None,
        pixel_values: Tensor | None = None,
        do_sample: bool = True,
        max_new_tokens: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Return [B, L + N] int64: prompts of L tokens and N image tokens. Without a seed, torch's generator draws one.

        Raises ValueError for an argument that the pipeline does not use, or grids of different sizes.
        """
        if image_grid_thw is None or any(value is not None for value in others.values()):
            unexpected = next((name for name, value in others.items() if value is not None), "image_grid_thw=None")
            raise ValueError(
                f"{unexpected}: {ENCODER}.generate is replaced for the pipeline's use only; detach the session first"
            )
        model = self.model
        prompts = model.insert_codes(input_ids, image_grid_thw, images_per_sample, pixel_values)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [ids[keep.bool()].tolist() for ids, keep in zip(prompts, mask, strict=True)]
        grid, sources = model.read_grids(rows, image_grid_thw, images_per_sample)
        if max_new_tokens is not None and max_new_tokens < grid.length:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least {grid.length}, the image's tokens")
        request = self._build_request(do_sample)
        if request.seed is None:
            request = replace(request, seed=int(torch.randint(2**63 - 1, (1,))))
        layout = model.lay_out(rows, sources, grid)
        sampler, start_time = request.sampler, time.perf_counter()
        state = model.begin(sampler, layout, grid, request)
        with state.release_stores_on_exit():
            decode(sampler, layout.model, state)
        self.latest, _ = build_output(model, state, grid, time.perf_counter() - start_time)
        self.runs += 1
        return torch.cat((input_ids, self.latest.tokens.to(input_ids)), 1)

    def report(self) -> PriorReport:
        return PriorReport(self.runs, self.latest, None if self.forecast is None else self.forecast.report())

    def detach(self) -> None:
        if getattr(vars(self.encoder).get("generate"), "__self__", None) is self:
            del self.encoder.generate
        if self.forecast is not None:
            self.forecast.detach()
