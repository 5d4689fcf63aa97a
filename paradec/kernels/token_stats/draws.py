"""Draws of tokens by the inverse of the cumulative sums, with one uniform number u a draw: the least k with w_0 + ... +
w_k > u sum(w).

Sums of stretches of tokens say which stretch k is in, the weights of that stretch alone which token: the vocabulary is
read once. All paths draw the same tokens unless u is as near to a boundary as weights are rounded; on the CPU, within
`ROUNDED` of a boundary, the weights are computed again in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core import rng

SEGMENT = 256
"""Tokens that are summed before one of them is looked for."""
BELOW_ONE = 1 - 2.0**-53
"""53 random bits may round to 1, which lies past the last token."""
ROUNDED = 1e-7
"""More than float32 weights move a boundary between two of 126,464 tokens: 4e-8 was seen. One draw in 40 is so near to
a boundary where all tokens are almost equally likely, few otherwise."""


@dataclass(frozen=True)
class TokenDraws:
    """Numbers of draws: a position takes one number of `rng.uniform`, whatever the batch and the path.

    Args:
        keys: [R, 2] int64 row keys (`paradec.samplers.start.row_keys`).
        steps: [R] int64.
        positions: [R, W] int64, for logits [R, W, V]; [R] for logits [R, V].
        temperature: tokens are drawn from softmax(logits / temperature), whatever the temperature of the statistics.
        stream: of `rng.uniform`.
    """

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
    """Draw from weights [..., V] (not normalised) with one number [...] in (0, 1) each: [...] int64. A token without
    weight is never drawn. Segments are summed in the weights' type, their sums and the tokens of the chosen one in
    float64."""
    size = weights.shape[-1]
    if size <= 4 * SEGMENT:
        total = weights.cumsum(-1, dtype=torch.float64)
        return _first_beyond(total, uniform.unsqueeze(-1).clamp(max=BELOW_ONE) * total[..., -1:]).squeeze(-1)
    return locate(segment_sums(weights), uniform, size, lambda tokens: weights.gather(-1, tokens))


def segment_sums(weights: Tensor) -> Tensor:
    """Weights [..., V], summed in their own type by segments: [..., S]. Each sum is that of one row's tokens, in an
    order that depends neither on other rows nor on the number of threads."""
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
    """`draw` from `size` tokens, given the sums of segments [..., S]. weights: of tokens [..., SEGMENT] int64, not
    normalised. redraw: makes the draws [N] of rows [...] bool whose number is within `ROUNDED` of a boundary, on the
    CPU."""
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
    samples = (segment * SEGMENT + column).squeeze(-1).clamp_(max=size - 1)  # the clamp is as in `_first_beyond`
    if redraw is not None and sums.is_cpu:
        beyond = cumulative.gather(-1, column) - segment_target
        distance = (
            torch.minimum(beyond, segment_weights.gather(-1, column) - beyond)
            * segment_sum
            / (cumulative[..., -1:] * total[..., -1:])
        )
        if (is_close := distance.squeeze(-1) < ROUNDED).any():
            samples[is_close] = redraw(is_close)
    return samples


def _first_beyond(total: Tensor, target: Tensor) -> Tensor:
    """The first entry of cumulative sums [..., N] that is larger than target [..., 1]: [..., 1]."""
    # the clamp is for NaN weights, which a commit refuses
    return torch.searchsorted(total, target, right=True).clamp(max=total.shape[-1] - 1)
