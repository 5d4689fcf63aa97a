"""Continuous tokens (MAR, arXiv 2406.11838, section 3): query, answer, and the head that draws tokens from noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paradec.core.checks import check_int

Keys = list[tuple[Tensor, Tensor]]
"""Keys and values per layer, each [R, heads, n, head_dim]."""


@dataclass
class ReusedKeys:
    """Keys and values of a full step, for each branch and row. Local steps of the same group reuse them."""

    encoder: Keys
    decoder: Keys


@dataclass
class ContinuousQuery:
    """One call of encoder, decoder and head (`paradec.models.images.mar`) for `B` rows. A full step decodes all
    positions (in raster order), a local step one group. With `branches == 2` every row also runs without its class."""

    rows: np.ndarray
    """[B] int64, on the host."""
    tokens: Tensor
    """[B, N, channels]: tokens to encode."""
    known: Tensor
    """[B, N] int64: positions of `tokens` in the image."""
    targets: Tensor
    """[B, M] int64: positions to decode."""
    columns: Tensor
    """[B, N] int64: indices in `targets` of the known positions."""
    wanted: Tensor
    """[B, W] int64: indices in `targets` of the positions that the head draws."""
    labels: Tensor
    """[B] int64."""
    noise: Tensor
    """[B, W, steps + 1, channels] float64 standard normal numbers for `steps` steps of the head."""
    temperature: float
    guidance: float | None
    """The scale at this step; None evaluates one branch."""
    reused_keys: ReusedKeys | None = None
    """Keys and values that a local step reads; None for a full step."""
    drop: Tensor | None = None
    """[B, U] int64: the group's positions, which a full step leaves out of the keys that it returns; None: no keys."""
    keep_buffer: bool = False
    """Whether local steps reuse the class tokens' keys and values too, instead of evaluating class tokens again."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[B] int64, on the host: number of the image's positions decoded for each row in one branch."""
    kind: str = "full"
    sections: tuple[int, ...] | None = None
    """Number of the head's steps in each of several equal sections of the training steps; None: one section."""


@dataclass
class TokenDistribution:
    """The normal distribution of the head's last step for each token and channel; all fields are [..., channels]."""

    mean: Tensor
    """The token itself: the last step adds no noise."""
    std: Tensor
    """Standard deviation of the noise that the last step would add, times the temperature."""
    half_log_variance: Tensor
    """Half the logarithm of the variance, without the temperature, summed over all steps except the last."""


@dataclass
class ContinuousAnswer:
    """Tokens [B, W, channels], the head's conditions [branches * B, W, width], the keys and values of a full step, and
    the distribution of the tokens."""

    tokens: Tensor
    conditions: Tensor
    reused_keys: ReusedKeys | None
    distribution: TokenDistribution | None = None


TRAINED_STEPS = 1000


class DiffusionHead(nn.Module):
    """Draws a token from noise and the decoder's state: DDPM over some of the 1000 steps of a cosine schedule, with a
    learned variance between its two bounds (Nichol and Dhariwal, arXiv 2102.09672)."""

    def __init__(self, channels: int, condition: int, width: int, depth: int):
        super().__init__()
        self.channels = channels
        self.net = HeadNetwork(channels, condition, width, depth)

    def sample(
        self, condition: Tensor, noise: Tensor, temperature: float = 1.0, guidance: float | None = None
    ) -> Tensor:
        """Draw tokens [n, channels]; arguments as for `distribution`."""
        return self.distribution(condition, noise, temperature, guidance).mean

    def distribution(
        self,
        condition: Tensor,
        noise: Tensor,
        temperature: float = 1.0,
        guidance: float | None = None,
        sections: tuple[int, ...] | None = None,
    ) -> TokenDistribution:
        """Draw n tokens; they are the mean of the returned distribution.

        condition: [n, width], or with guidance [2 n, width], the unconditional ones last.
        noise: [n, steps + 1, channels] standard normal: the initial x, then one row per step (the last is not used).
            Draws have its dtype, float32 at least.
        temperature: factor of the noise of each step, but not of the initial noise.
        guidance: s in uncond + s (cond - uncond), applied only to the predicted noise; None: no second branch.
        sections: as `ContinuousQuery.sections`; they sum up to `steps`."""
        times, table = solver(sections or (noise.shape[1] - 1,))
        x = noise[:, 0]
        half_log_variance = torch.zeros_like(x)
        for index in range(len(times))[::-1]:
            branches = 1 if guidance is None else 2
            time = torch.full((len(x) * branches,), float(times[index]), device=x.device, dtype=x.dtype)
            output = self.net(x.repeat(branches, 1).to(condition.dtype), time, condition).to(x.dtype)
            epsilon, variance = output.chunk(2, -1)
            if guidance is not None:
                (epsilon, uncond), variance = epsilon.chunk(2), variance.chunk(2)[0]
                epsilon = uncond + guidance * (epsilon - uncond)
            coefficients = {name: float(column[index]) for name, column in table.items()}
            fraction = (variance + 1) / 2
            log_variance = fraction * coefficients["log_beta"] + (1 - fraction) * coefficients["log_posterior"]
            std = temperature * torch.exp(0.5 * log_variance)
            x_start = coefficients["inverse_signal"] * x - coefficients["noise_factor"] * epsilon
            x = coefficients["start_factor"] * x_start + coefficients["x_factor"] * x
            if index:
                x = x + std * noise[:, len(times) - index]
                half_log_variance += 0.5 * log_variance
        return TokenDistribution(x, std, half_log_variance)


@lru_cache(maxsize=16)
def solver(sections: tuple[int, ...]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Compute the evaluated training steps, ascending, and the coefficients of each. Raises ValueError for a section
    without steps, or with more steps than training steps.

    sections: number of evenly spaced steps in each of several equal sections of the training steps."""
    times: list[int] = []
    start = 0
    for section_index, steps in enumerate(sections):
        size = TRAINED_STEPS // len(sections) + (section_index < TRAINED_STEPS % len(sections))
        check_int("steps", steps, low=1, high=size)
        stride = (size - 1) / (steps - 1) if steps > 1 else 1.0
        times += [start + round(index * stride) for index in range(steps)]
        start += size

    def alpha_bar(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    grid = np.arange(TRAINED_STEPS)
    betas = np.array([min(1 - alpha_bar((t + 1) / TRAINED_STEPS) / alpha_bar(t / TRAINED_STEPS), 0.999) for t in grid])
    alphas_cumprod = np.cumprod(1 - betas)[times]
    alphas_cumprod_prev = np.append(1.0, alphas_cumprod[:-1])
    betas = 1 - alphas_cumprod / alphas_cumprod_prev  # between evaluated times
    posterior = betas * (1 - alphas_cumprod_prev) / (1 - alphas_cumprod)
    table = {
        "log_beta": np.log(betas),
        # the variance of the first step is 0; that of the second step replaces it
        "log_posterior": np.log(np.append(posterior[1] if len(times) > 1 else betas[0], posterior[1:])),
        "inverse_signal": np.sqrt(1 / alphas_cumprod),
        "noise_factor": np.sqrt(1 / alphas_cumprod - 1),
        "start_factor": betas * np.sqrt(alphas_cumprod_prev) / (1 - alphas_cumprod),
        "x_factor": (1 - alphas_cumprod_prev) * np.sqrt(1 - betas) / (1 - alphas_cumprod),
    }
    return times, table


class HeadNetwork(nn.Module):
    """Residual MLP blocks, modulated by time and condition: [n, channels] -> noise and variance [n, 2 * channels]."""

    def __init__(self, channels: int, condition: int, width: int, depth: int):
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.final_layer = HeadOutput(width, 2 * channels)

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        x, y = self.input_proj(x), self.time_embed(time) + self.cond_embed(condition)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)


class TimeEmbedding(nn.Module):
    """Sines and cosines of 128 frequencies, and two layers."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=time.device, dtype=time.dtype) / 128)
        angles = time.unsqueeze(-1) * frequencies
        weight: Any = self.mlp[0].weight
        return self.mlp(torch.cat((angles.cos(), angles.sin()), -1).to(weight.dtype))


class HeadBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, -1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class HeadOutput(nn.Module):
    def __init__(self, width: int, channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, -1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)
