"""A diffusers pipeline for class-conditional DiTs (Peebles and Xie, arXiv 2212.09748) on pixels, with any number of
classes. (diffusers' `DiTPipeline` needs a VAE and 1000 classes.)"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, DiTTransformer2DModel, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number
from paradec.models.images.base import list_labels
from paradec.models.images.loading import packaged_path

OUTPUT_TYPES = ("pil", "np", "pt")


class PixelDiTPipeline(DiffusionPipeline):
    """Pictures from class labels: `PixelDiTPipeline.from_pretrained(folder)`.

    Args:
        transformer: a `DiTTransformer2DModel` over images in [-1, 1]; a learned variance in its output is dropped."""

    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer: DiTTransformer2DModel, scheduler: Any):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @classmethod
    def digits(cls, **options: Any) -> PixelDiTPipeline:
        """The small model of handwritten digits inside the package; `options` are those of `from_pretrained`."""
        return cls.from_pretrained(packaged_path("digits-dit"), **options)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | Sequence[int],
        guidance_scale: float = 2.0,
        num_inference_steps: int = 50,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Denoise one picture per label. Raises ValueError for an argument out of its range, before any work is done.

        guidance_scale: s in uncond + s (cond - uncond), both evaluated in one call; 1 is off.
        generator: for the initial noise and the scheduler's noise; one, or one per picture.
        latents: initial noise [B, C, H, W]; None draws it.
        output_type: "pil", "np" [B, H, W, C] or "pt" [B, C, H, W], both float in [0, 1]."""
        config = self.transformer.config
        labels = list_labels(class_labels, config.num_embeds_ada_norm)
        check_number("guidance_scale", guidance_scale, low=0)
        check_int("num_inference_steps", num_inference_steps, low=1)
        check_choice("output_type", output_type, OUTPUT_TYPES)
        shape = (len(labels), config.in_channels, config.sample_size, config.sample_size)
        device = self._execution_device
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=self.transformer.dtype)
        elif tuple(latents.shape) != shape:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; expected {shape}")
        self._guidance_scale = guidance_scale  # as in diffusers' pipelines; `paradec.tune_steps` reads it
        branches = 1 if guidance_scale == 1 else 2
        null = [config.num_embeds_ada_norm] * len(labels)
        conditions = torch.tensor(labels + null * (branches - 1), device=device)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        x = latents.to(device) * self.scheduler.init_noise_sigma
        takes_generator = "generator" in inspect.signature(self.scheduler.step).parameters
        options = {"generator": generator} if takes_generator and generator is not None else {}
        for t in self.progress_bar(self.scheduler.timesteps):
            model_input = self.scheduler.scale_model_input(torch.cat([x] * branches), t)
            output = self.transformer(model_input, timestep=t.expand(len(model_input)), class_labels=conditions).sample
            output = output[:, : config.in_channels]
            if branches == 2:
                conditional, unconditional = output.chunk(2)
                output = unconditional + guidance_scale * (conditional - unconditional)
            x = self.scheduler.step(output, t, x, return_dict=False, **options)[0]
        images: Any = (x.float() / 2 + 0.5).clamp(0, 1)
        self.maybe_free_model_hooks()
        if output_type != "pt":
            images = images.cpu().permute(0, 2, 3, 1).numpy()
            images = self.numpy_to_pil(images) if output_type == "pil" else images
        return ImagePipelineOutput(images=images) if return_dict else (images,)
