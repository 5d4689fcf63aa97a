"""What a sampler asks of a model of continuous tokens, and what comes back. Data alone; it knows neither of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

Keys = list[tuple[Tensor, Tensor]]
"""Keys and values per layer, each [R, heads, n, head_dim]."""


@dataclass
class Kept:
    """What a full evaluation keeps for the local ones of its group, per branch and row."""

    encoder: Keys
    decoder: Keys


@dataclass
class ContinuousQuery:
    """One evaluation of encoder, decoder and head (`paradec.models.images.mar`). `B` rows; positions count row by row.

    Under guidance (`branches == 2`) the model evaluates every row a second time, without its class.
    """

    rows: np.ndarray
    """[B] int64, on the host."""
    tokens: Tensor
    """[B, N, channels]: what is encoded."""
    known: Tensor
    """[B, N] int64: where it is in the image."""
    targets: Tensor
    """[B, M] int64: positions that are decoded: all, or a group's."""
    columns: Tensor
    """[B, N] int64: where in `targets` the known ones are."""
    wanted: Tensor
    """[B, W] int64: where in `targets` the positions are that the head draws."""
    labels: Tensor
    """[B] int64."""
    noise: Tensor
    """[B, W, steps + 1, channels] float64 standard normal numbers for the head, with as many steps."""
    temperature: float
    guidance: float | None
    """The scale at this step; None evaluates one branch."""
    kept: Kept | None = None
    """What a local step reads; None evaluates everything."""
    drop: Tensor | None = None
    """[B, U] int64: positions whose keys and values a full step does not keep (the group's); None keeps nothing."""
    keep_buffer: bool = False
    """Whether the class tokens' keys and values are kept too; else local steps evaluate these again."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[B] int64, on the host: positions of the image decoded for each row in one branch."""
    kind: str = "full"
    sections: tuple[int, ...] | None = None
    """How many of the head's steps lie in each of as many equal parts of its training steps; None spaces all evenly."""


@dataclass
class TokenDistribution:
    """What a head's chain ended with: of each token and channel a normal distribution, all [..., channels]."""

    mean: Tensor
    """Of the last step: the token itself, since the last step adds no noise."""
    std: Tensor
    """Of the noise that the last step would add, times the temperature."""
    half_log_variance: Tensor
    """Half the logarithms of the variances of all other steps, summed; without the temperature."""


@dataclass
class ContinuousAnswer:
    """What comes back: tokens [B, W, channels], the head's conditions [R, W, width], what a full step kept, and the
    distribution that the tokens are the mean of."""

    tokens: Tensor
    conditions: Tensor
    kept: Kept | None
    distribution: TokenDistribution | None = None
