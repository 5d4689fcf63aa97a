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
from paradec.schedulers.base import Host, SamplerScheduler

CALL_TEMPERATURE = (2, 0)
"""What AmusedPipeline passes where its caller says nothing."""


@dataclass
class ImageSchedulerOutput(BaseOutput):
    """What a step made of an image; the fields of diffusers' `AmusedSchedulerOutput`, both in the shape of `sample`."""

    prev_sample: Tensor
    """int64: the tokens after the step."""
    pred_original_sample: Tensor
    """int64: the candidates, and what is decided."""


class ImageScheduler(SamplerScheduler):
    """A sampler of the masked family with `AmusedScheduler`'s calls.

    Config: the sampler's own settings, `mask_token_id` (needed; the config of the pipeline's scheduler has it) and
    `temperature`, at which tokens are drawn (0 takes the best). The `temperature` of the pipeline's call, which is the
    noise on the confidence, has no effect, and a warning says so: that is `choice_temperature` in the config.

    The first step after `set_timesteps` opens an image; what is not masked then is kept (image to image, inpainting),
    and the schedule runs over the masks and the steps that are left. Random numbers come from a seed that is drawn from
    `generator` once per image (or from one generator per image).
    """

    family_settings: ClassVar[Mapping[str, Any]] = {"mask_token_id": None, "temperature": 1.0}
    pipelines = "AmusedPipeline"

    def _setup(self) -> None:
        if self.config.mask_token_id is None:
            raise ValueError(
                f"mask_token_id=None: {type(self).__name__} needs the mask's id; "
                f"{type(self).__name__}.from_config(pipe.scheduler.config) takes it over"
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
        """Begin a run. Called by the pipeline.

        Args:
            num_inference_steps: T, at least 1.
            temperature: no effect; see the class.

        Raises:
            ValueError: out of range.
        """
        self._claim()
        check_int("num_inference_steps", num_inference_steps, low=1)
        self.timesteps = torch.arange(num_inference_steps, device=device).flip(0)
        self.sampler = self.make_sampler()
        self._state = self._written = None
        self._ignored = set()
        given = tuple(temperature) if isinstance(temperature, Sequence) else temperature
        if given != CALL_TEMPERATURE:
            self._warn_call("temperature", given, f"its config has choice_temperature={self.config.choice_temperature}")

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
        """One step and commit of the sampler.

        Args:
            model_output: [B, C, H, W] logits of the codebook, after guidance ([B, n, C] where `sample` is flat).
            timestep: T - 1 down to 0.
            sample: [B, H, W] (or [B, n]) int64 tokens; masks are undecided.
            starting_mask_ratio: no effect: the masks are counted.

        Raises:
            ValueError: an argument out of its range. FloatingPointError: NaN or infinite logits. RuntimeError: another
                thread's run is going on with this scheduler.
        """
        self._check_thread()
        flat = isinstance(sample, Tensor) and sample.ndim == 2
        shape = "[batch, positions]" if flat else "[batch, height, width]"
        self._check_tokens(model_output, sample, shape, 2 if flat else 3)
        logits = model_output if flat else model_output.flatten(2).transpose(1, 2)
        tokens = sample.flatten(1)
        if self._state is None or self._written is None or not torch.equal(self._written, tokens):
            self._open(logits, tokens, int(timestep) + 1, generator, None if flat else sample.shape[1:])
        mask, state = self.config.mask_token_id, self._state
        guess = torch.where(tokens == mask, logits.argmax(-1), tokens)
        after = tokens.clone()
        if state is not None and not state.done:
            missing = state.facts.vocab_size - logits.shape[-1]
            padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
            proposal, rows = self._commit(self.sampler_of_image, state, padded)
            after[self._rows] = state.canvas
            guess[rows, proposal.positions] = torch.where(proposal.available, proposal.values, proposal.current)
        self._written = after
        values = (after.view_as(sample), guess.view_as(sample))
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
            drawn = [int(torch.randint(2**62, (1,), generator=g, device=g.device)) for g in generator]
            seed, generator = [drawn[row] for row in self._rows.tolist()], None
        facts = ModelFacts(max(logits.shape[-1], mask + 1), mask, name="the pipeline's model")
        self._host = Host(facts, tokens.device)
        self._state = self.sampler_of_image.start(
            self._host,
            tokens[self._rows],
            blocks="whole",
            steps=steps,
            temperature=self.config.temperature,
            generator=generator,
            seed=seed,
            eos_early_stop=False,
        )

    def add_noise(self, sample: Tensor, timesteps: int | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Mask tokens at random, as many as the cosine schedule has left after this timestep (image to image).

        Args:
            sample: int64 tokens of any shape. timesteps: one of `self.timesteps`.
        """
        index = int((self.timesteps == int(timesteps)).nonzero())
        share = math.cos((index + 1) / len(self.timesteps) * math.pi / 2)
        device = sample.device if generator is None else generator.device
        masked = torch.rand(sample.shape, generator=generator, device=device).to(sample.device) < share
        return sample.masked_fill(masked, self.config.mask_token_id)


class MaskGITScheduler(ImageScheduler, sampler="maskgit"):
    """MaskGIT: the most confident tokens with some noise, in numbers that grow from step to step (arXiv 2202.04200).

    AmusedScheduler's `masking_schedule` is `schedule` here.
    """

    renamed = {"masking_schedule": "schedule"}


class HaltonScheduler(ImageScheduler, sampler="halton"):
    """Halton-MaskGIT: tokens in the order of a low-discrepancy sequence (arXiv 2503.17076)."""


class LPDScheduler(ImageScheduler, sampler="lpd"):
    """LPD's order: groups of tokens near what is decided and far from each other (arXiv 2507.01957)."""


class RecapScheduler(ImageScheduler, sampler="recap"):
    """ReCAP: groups of steps whose tokens are chosen at once (arXiv 2505.19089).

    By itself it gives ReCAP's images, and the pipeline evaluates the whole model at every step;
    `paradec.accelerate(pipe, paradec.samplers.create("recap"))` also hooks the model, for the speed.
    """

    def targets(self) -> Tensor | None:
        """[B, n] bool: the positions that the coming step reads; None is all of them."""
        state = self._state
        if state is None or self._written is None or state.done:
            return None
        method = self.sampler_of_image
        assert isinstance(method, Recap)
        picks = torch.as_tensor(method.targets(state), device=state.canvas.device)
        if not bool((picks >= 0).any(1).all()):
            return None
        found = torch.zeros_like(self._written, dtype=torch.bool)
        rows = self._rows[torch.as_tensor(state.window.rows, device=self._rows.device)].unsqueeze(1)
        found[rows.expand_as(picks)[picks >= 0], picks[picks >= 0]] = True
        return found
