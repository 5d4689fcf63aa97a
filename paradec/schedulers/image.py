"""Schedulers for pipelines that decode images as masked tokens: diffusers' AmusedPipeline and its variants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from paradec.core.checks import check_int, check_temperature
from paradec.core.facts import ModelFacts
from paradec.samplers.masked.rules.recap import Recap
from paradec.schedulers.base import PipelineModel, SamplerScheduler

CALL_TEMPERATURE = (2, 0)
"""AmusedPipeline's default of `temperature`."""


@dataclass
class ImageSchedulerOutput(BaseOutput):
    """Result of a step. The fields are those of diffusers' `AmusedSchedulerOutput`, in the shape of `sample`."""

    prev_sample: Tensor
    """int64: the tokens after the step."""
    pred_original_sample: Tensor
    """int64: the candidates at masks, and the decided tokens elsewhere."""


class ImageScheduler(SamplerScheduler):
    """A masked sampler with the methods of `AmusedScheduler`.

    Config: the sampler's settings, `mask_token_id` (required; the pipeline's scheduler has it), and `temperature`, with
    which tokens are drawn (0 takes the likeliest). The pipeline's argument `temperature` (noise on the confidence) only
    causes a warning: set `choice_temperature` in the config.

    The first step after `set_timesteps` starts an image. Tokens that are not masked stay (image to image, inpainting);
    the sampler fills the masks in the remaining steps. `generator` (or a list, one per image) draws each image's seed.
    """

    family_settings: ClassVar[Mapping[str, Any]] = {"mask_token_id": None, "temperature": 1.0}
    pipelines = "AmusedPipeline"

    def _setup(self) -> None:
        if self.config.mask_token_id is None:
            raise ValueError(
                f"mask_token_id=None: {type(self).__name__} needs the mask's id; "
                f"{type(self).__name__}.from_config(pipe.scheduler.config) reads it"
            )
        check_int("mask_token_id", self.config.mask_token_id, low=0)
        check_temperature("temperature", self.config.temperature)
        super()._setup()

    def set_timesteps(
        self,
        num_inference_steps: int,
        temperature: float | Sequence[float] = CALL_TEMPERATURE,
        device: str | torch.device | None = None,
    ) -> None:
        """Begin a run of `num_inference_steps` steps (at least 1). `temperature` only causes a warning. Raises
        ValueError for a value out of its range."""
        self._start_run()
        check_int("num_inference_steps", num_inference_steps, low=1)
        self.timesteps = torch.arange(num_inference_steps, device=device).flip(0)
        self.sampler = self.make_sampler()
        self._state = self._last_tokens = None
        self._warned_arguments = set()
        value = tuple(temperature) if isinstance(temperature, Sequence) else temperature
        if value != CALL_TEMPERATURE:
            self._warn_call("temperature", value, f"its config has choice_temperature={self.config.choice_temperature}")

    @torch.no_grad()
    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        starting_mask_ratio: float = 1.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> ImageSchedulerOutput | tuple[Tensor, Tensor]:
        """Take one step of the sampler.

        Args:
            model_output: [B, C, H, W] logits of the codebook after guidance, or [B, n, C] for flat samples.
            timestep: number of steps after this one.
            sample: [B, H, W] or [B, n] int64 tokens and masks.
            starting_mask_ratio: has no effect; the sampler counts the masks.

        Raises ValueError for an argument out of its range, FloatingPointError for NaN or infinite logits, RuntimeError
        if the run belongs to another thread.
        """
        self._check_thread()
        is_flat = isinstance(sample, Tensor) and sample.ndim == 2
        shape = "[batch, positions]" if is_flat else "[batch, height, width]"
        self._check_tokens(model_output, sample, shape, 2 if is_flat else 3)
        logits = model_output if is_flat else model_output.flatten(2).transpose(1, 2)
        tokens = sample.flatten(1)
        if self._state is None or self._last_tokens is None or not torch.equal(self._last_tokens, tokens):
            self._open(logits, tokens, int(timestep) + 1, generator, None if is_flat else sample.shape[1:])
        mask, state = self.config.mask_token_id, self._state
        best_tokens = torch.where(tokens == mask, logits.argmax(-1), tokens)
        tokens_after = tokens.clone()
        if state is not None and not state.done:
            num_missing = state.facts.vocab_size - logits.shape[-1]
            padded = torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf) if num_missing else logits
            proposal, rows = self._commit(self.sampler_of_image, state, padded)
            tokens_after[self._rows] = state.canvas
            best_tokens[rows, proposal.positions] = torch.where(proposal.available, proposal.values, proposal.current)
        self._last_tokens = tokens_after
        values = (tokens_after.view_as(sample), best_tokens.view_as(sample))
        return ImageSchedulerOutput(*values) if return_dict else values

    def _open(
        self,
        logits: Tensor,
        tokens: Tensor,
        steps: int,
        generator: torch.Generator | Sequence[torch.Generator] | None,
        grid: Sequence[int] | None,
    ) -> None:
        """Start the sampler on the rows that have masks, for `steps` steps."""
        mask = self.config.mask_token_id
        self._rows = (tokens == mask).any(1).nonzero().squeeze(1)
        self._state = None
        if not len(self._rows):
            return
        self.sampler_of_image = self.sampler
        if grid is not None and getattr(self.sampler, "height", 0) is None:
            size: dict[str, Any] = {"height": int(grid[0]), "width": int(grid[1])}
            self.sampler_of_image = dataclasses.replace(self.sampler, **size)
        seed = None
        if isinstance(generator, Sequence):
            draws = [int(torch.randint(2**62, (1,), generator=g, device=g.device)) for g in generator]
            seed, generator = [draws[row] for row in self._rows.tolist()], None
        facts = ModelFacts(max(logits.shape[-1], mask + 1), mask, name="the pipeline's model")
        self._model = PipelineModel(facts, tokens.device)
        self._state = self.sampler_of_image.start(
            self._model,
            tokens[self._rows],
            blocks="whole",
            steps=steps,
            temperature=self.config.temperature,
            generator=generator,
            seed=seed,
            eos_early_stop=False,
        )

    def add_noise(self, sample: Tensor, timesteps: int | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Mask tokens at random (image to image), each with the probability that the cosine schedule leaves it masked
        after this timestep. sample: int64 tokens of any shape. timesteps: one of `self.timesteps`."""
        index = int((self.timesteps == int(timesteps)).nonzero())
        probability = math.cos((index + 1) / len(self.timesteps) * math.pi / 2)
        device = sample.device if generator is None else generator.device
        is_masked = torch.rand(sample.shape, generator=generator, device=device).to(sample.device) < probability
        return sample.masked_fill(is_masked, self.config.mask_token_id)


class MaskGITScheduler(ImageScheduler, sampler="maskgit"):
    """MaskGIT: growing numbers of tokens with the highest noisy confidence (arXiv 2202.04200). AmusedScheduler's key
    `masking_schedule` is called `schedule`."""

    renamed_keys = {"masking_schedule": "schedule"}


class HaltonScheduler(ImageScheduler, sampler="halton"):
    """Halton-MaskGIT: tokens along a low-discrepancy sequence (arXiv 2503.17076)."""


class LPDScheduler(ImageScheduler, sampler="lpd"):
    """LPD's order: groups near decided tokens and far from each other (arXiv 2507.01957)."""


class RecapScheduler(ImageScheduler, sampler="recap"):
    """ReCAP: the positions of a group of steps are chosen together (arXiv 2505.19089). This scheduler alone saves no
    computation. For that, use `paradec.accelerate(pipe, paradec.samplers.create("recap"))`."""

    def targets(self) -> Tensor | None:
        """Return [B, n] bool: the positions whose logits the next step reads. None: all positions."""
        state = self._state
        if state is None or self._last_tokens is None or state.done:
            return None
        method = self.sampler_of_image
        assert isinstance(method, Recap)
        picks = torch.as_tensor(method.targets(state), device=state.canvas.device)
        if not bool((picks >= 0).any(1).all()):
            return None
        is_target = torch.zeros_like(self._last_tokens, dtype=torch.bool)
        rows = self._rows[torch.as_tensor(state.window.rows, device=self._rows.device)].unsqueeze(1)
        is_target[rows.expand_as(picks)[picks >= 0], picks[picks >= 0]] = True
        return is_target
