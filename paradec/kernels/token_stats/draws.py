"""Sampling by inverting cumulative sums, with one uniform number u: the least k with w_0 + ... + w_k > u sum(w). The
sums of segments select a segment, then its weights select the token. So the vocabulary is read once. All paths draw the
same tokens unless u is within rounding of a boundary. On the CPU, a draw within `MAX_ROUNDING` of a boundary is
repeated in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core import rng

SEGMENT = 256
"""Tokens per segment."""
BELOW_ONE = 1 - 2.0**-53
"""Upper bound of u: 53 random bits may round to 1."""
MAX_ROUNDING = 1e-7
"""Bound of the float32 error of a boundary, as a share of the total weight (measured: 4e-8 for 126,464 tokens). At most
one draw in 40 is this close to a boundary."""


@dataclass(frozen=True)
class TokenDraws:
    """Inputs of the uniform numbers (`rng.uniform`) that draw tokens, independent of the batch and the path.

    keys: [R, 2] int64 row keys (`paradec.samplers.start.row_keys`). steps: [R] int64.
    positions: [R, W] int64, for logits [R, W, V]; [R] for logits [R, V].
    temperature: of the draws; independent of the statistics' temperature. stream: of `rng.uniform`."""

    keys: Tensor
    steps: Tensor
    positions: Tensor
    temperature: float = 1.0
    stream: int = rng.TOKEN_STREAM

    def uniform(self) -> Tensor:
        """One number in (0, 1) per draw, shaped as the positions, float64."""
        rows = len(self.positions)
        positions = self.positions.reshape(rows, -1)
        return rng.uniform(self.keys, self.steps, positions, 1, self.stream).view(self.positions.shape)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token [...] int64 from weights [..., V] with one number [...] in (0, 1); never a token of weight 0.
    Segments are summed in the weights' dtype; cumulative sums are float64."""
    size = weights.shape[-1]
    if size <= 4 * SEGMENT:
        total = weights.cumsum(-1, dtype=torch.float64)
        return _first_beyond(total, uniform.unsqueeze(-1).clamp(max=BELOW_ONE) * total[..., -1:]).squeeze(-1)
    return locate(segment_sums(weights), uniform, size, lambda tokens: weights.gather(-1, tokens))


def segment_sums(weights: Tensor) -> Tensor:
    """Sum weights [..., V] by segments in their own dtype: [..., S]. The order of summation is always the same."""
    num_full = weights.shape[-1] // SEGMENT * SEGMENT
    sums = weights[..., :num_full].unflatten(-1, (num_full // SEGMENT, SEGMENT)).sum(-1)
    if num_full < weights.shape[-1]:
        last = pad(weights[..., num_full:], (0, num_full + SEGMENT - weights.shape[-1]))
        sums = torch.cat((sums, last.sum(-1, True)), -1)
    return sums


def locate(
    sums: Tensor,
    uniform: Tensor,
    size: int,
    weights: Callable[[Tensor], Tensor],
    redraw: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Draw from `size` tokens by sums of segments [..., S].

    weights: returns the weights of tokens [..., SEGMENT] int64. redraw: called on the CPU with a mask [...] bool of the
    draws within `MAX_ROUNDING` of a boundary; returns new ones."""
    uniform = uniform.unsqueeze(-1).clamp(max=BELOW_ONE)
    total = sums.cumsum(-1, dtype=torch.float64)
    target = uniform * total[..., -1:]
    segment = _first_beyond(total, target)
    segment_sum = sums.gather(-1, segment)
    fraction = ((target - total.gather(-1, segment) + segment_sum) / segment_sum).clamp(0, BELOW_ONE)  # of the segment
    tokens = segment * SEGMENT + torch.arange(SEGMENT, device=sums.device)
    segment_weights = weights(tokens.clamp(max=size - 1))
    if size % SEGMENT:
        segment_weights = segment_weights.masked_fill(tokens >= size, 0)
    cumulative = segment_weights.cumsum(-1, dtype=torch.float64)
    segment_target = fraction * cumulative[..., -1:]
    column = _first_beyond(cumulative, segment_target)
    samples = (segment * SEGMENT + column).squeeze(-1).clamp_(max=size - 1)  # for NaN weights, as in `_first_beyond`
    if redraw is not None and sums.is_cpu:
        beyond = cumulative.gather(-1, column) - segment_target
        distance = (
            torch.minimum(beyond, segment_weights.gather(-1, column) - beyond)
            * segment_sum
            / (cumulative[..., -1:] * total[..., -1:])
        )
        if (is_close := distance.squeeze(-1) < MAX_ROUNDING).any():
            samples[is_close] = redraw(is_close)
    return samples


def _first_beyond(total: Tensor, target: Tensor) -> Tensor:
    """First entry of cumulative sums [..., N] above target [..., 1]: [..., 1]."""
    # the clamp is for NaN weights; a commit raises an error for them
    return torch.searchsorted(total, target, right=True).clamp(max=total.shape[-1] - 1)
