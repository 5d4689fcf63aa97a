"""Sampling of tokens by inverting cumulative sums of weights w: a uniform number u in (0, 1) draws the least k with
w_0 + ... + w_k > u sum(w). The sums of segments select a segment, then the weights of its tokens select the token. So
the vocabulary is read once. All paths draw the same tokens unless rounding moves a boundary (a cumulative sum) past
u sum(w). On the CPU, a draw within `MAX_ROUNDING` of a boundary is repeated in float64."""

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
    """Arguments of `rng.uniform` for the numbers that draw tokens. The numbers depend on neither batch nor path.

    keys: [R, 2] int64 keys of R rows (`paradec.samplers.start.row_keys`). steps: [R] int64.
    positions: [R, W] int64, for logits [R, W, V]; [R] for logits [R, V].
    temperature: of the draws; the statistics have a separate temperature. stream: as in `rng.uniform`."""

    keys: Tensor
    steps: Tensor
    positions: Tensor
    temperature: float = 1.0
    stream: int = rng.TOKEN_STREAM

    def uniform(self) -> Tensor:
        """One float64 number in (0, 1) per draw, in the shape of `positions`."""
        rows = len(self.positions)
        positions = self.positions.reshape(rows, -1)
        return rng.uniform(self.keys, self.steps, positions, 1, self.stream).view(self.positions.shape)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens [...] int64 from weights [..., V] with uniform numbers [...] in (0, 1), never a token of weight 0.
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
    """Draw tokens [...] int64 from `size` tokens in S segments, by the segments' sums [..., S].

    weights: a function from tokens [..., SEGMENT] int64 to their weights. redraw: a function from a mask [...] bool of
    the draws within `MAX_ROUNDING` of a boundary to new samples for them; used on the CPU only."""
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
    samples = (segment * SEGMENT + column).squeeze(-1).clamp_(max=size - 1)  # NaN weights exceed the last token
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
    # NaN weights would exceed the last index; the error for them is raised when the tokens are committed
    return torch.searchsorted(total, target, right=True).clamp(max=total.shape[-1] - 1)
