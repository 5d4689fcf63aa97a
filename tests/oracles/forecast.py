"""The denoising loop of diffusers, and the same loop with TaylorSeer forecasts of the model's output."""

import copy
from math import factorial
from typing import Any

import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor


def denoise(
    module: DiTTransformer2DModel, latent: Tensor, labels: list[int], scheduler: object, steps: int, scale: float = 1.0
) -> Tensor:
    """Run the loop of diffusers' DiTPipeline, and return the final latent. scale: guidance scale."""
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps)
    classes = torch.tensor(labels + ([1000] * len(labels) if scale != 1.0 else []))
    with torch.inference_mode():
        for t in scheduler.timesteps:
            inputs = torch.cat([latent, latent]) if scale != 1.0 else latent
            if hasattr(scheduler, "scale_model_input"):
                inputs = scheduler.scale_model_input(inputs, t)
            output = module(inputs, timestep=t.expand(len(inputs)), class_labels=classes).sample[:, :4]
            if scale != 1.0:
                conditional, unconditional = output.chunk(2)
                output = unconditional + scale * (conditional - unconditional)
            latent = scheduler.step(output, t, latent).prev_sample
    return latent


def forecast_loop(
    module: DiTTransformer2DModel,
    latent: Tensor,
    labels: list[int],
    scheduler: Any,
    steps: int,
    interval: int,
    order: int,
    first_enhance: int,
) -> tuple[Tensor, list[str]]:
    """Return the final latent and the kind of each step. Derivatives are finite differences of evaluated outputs."""
    counter, derivatives, last_full, kinds = 0, list[Tensor](), 0, list[str]()
    scheduler.set_timesteps(steps)
    classes = torch.tensor(labels)
    with torch.inference_mode():
        for step, t in enumerate(scheduler.timesteps):
            if step < first_enhance or counter == interval - 1:
                counter = 0
                output = module(latent, timestep=t.expand(len(labels)), class_labels=classes).sample[:, :4]
                new = [output]
                for i in range(order):
                    if i < len(derivatives) and step > first_enhance - 2:
                        new.append((new[i] - derivatives[i]) / (step - last_full))
                derivatives, last_full = new, step
                kinds.append("full")
            else:
                counter += 1
                output = sum(term * (step - last_full) ** i / factorial(i) for i, term in enumerate(derivatives))
                kinds.append("forecast")
            latent = scheduler.step(output, t, latent).prev_sample
    return latent, kinds
