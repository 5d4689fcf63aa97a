"""Samplers of images as plain loops over one image and one token."""

import math
from typing import Any

import torch
from torch import Tensor

from paradec.core import rng
from paradec.models.images.continuous import TokenDistribution
from paradec.models.images.distilled_llamagen import DistilledLlamaGenModel
from paradec.models.images.lpd import LPDModel
from paradec.request import Request
from paradec.samplers.causal.state import NOISE_STREAM
from paradec.samplers.distributions import filtered_distribution


def distilled_stage(
    model: DistilledLlamaGenModel, label: int, x: Tensor, noise: Tensor, num_kept: int, split: int
) -> Tensor:
    """Do one call of a distilled student for one image: x, noise [tokens, code width] -> vectors of the same shape.

    num_kept: number of tokens at the start that the call keeps. split: tokens from this index on stay continuous."""
    inputs = torch.cat((x[:num_kept], noise[num_kept:])).unsqueeze(0)
    continuous, logits = (vectors[0] for vectors in model.module(torch.tensor([label]), inputs, num_kept))
    codes, vectors = model.codes(), []
    for index in range(len(x)):
        vector, best = continuous[index], int(logits[index].argmax())
        if index < num_kept:
            vector, best = inputs[0, index], int((codes - inputs[0, index]).norm(dim=-1).argmin())
        vectors.append(codes[best] if index < split else vector)
    return torch.stack(vectors)


def groups_of_one(model: LPDModel, label: int, codes: Tensor, order: Tensor, scale: float, grows: bool) -> Tensor:
    """Return guided logits [cells, codes]: row i predicts the i-th cell of `order`, given the cells before it.

    One call with groups of one cell, as in training. grows: whether the guidance scale grows linearly from 1."""
    size, none = order.shape[0], model.module.config.num_classes
    conditional, unconditional = (
        model.module(codes[None], torch.tensor([c]), order[None], (1,) * size)[0] for c in (label, none)
    )
    linear = 1 + (scale - 1) * torch.arange(size, dtype=conditional.dtype) / size
    scales = linear if grows else torch.full((size,), scale)
    return unconditional + scales.unsqueeze(1) * (conditional - unconditional)


def one_cell_per_call(model: LPDModel, label: int, order: Tensor, key: Tensor, request: Request, grows: bool) -> Tensor:
    """Sample one cell per call, with the random numbers that paradec assigns to the cell."""
    codes, count = torch.zeros(len(order), dtype=torch.int64), model.facts.vocab_size
    for rank, cell in enumerate(order.tolist()):
        logits = groups_of_one(model, label, codes, order, request.guidance_scale, grows)[rank]
        p = filtered_distribution(logits, request.temperature, request.top_k, request.top_p)
        drawn = rng.uniform(key[None], torch.tensor([0]), torch.tensor([[cell + 1]]), count + 1, NOISE_STREAM)
        noise = rng.gumbel(drawn)[0, 0, :count] if request.temperature else 0
        codes[cell] = (p.log() + noise).argmax()
    return codes


def density(y: list[float], mean: Tensor, std: Tensor) -> float:
    values = zip(y, mean.tolist(), std.tolist(), strict=True)
    return math.prod(math.exp(-(((v - m) / s) ** 2) / 2) / s for v, m, s in values)


def cspd_token(
    token: int, draft: TokenDistribution, target: TokenDistribution, u: float, redraw: Any, inner: float, rounds: int
) -> tuple[list[float], bool]:
    """Apply the corrected CSPD rule to one token; return its value, and whether the draft was accepted.

    u: uniform number. redraw: returns the noise and uniform number of a round. inner: temperature factor on the
    standard deviations. rounds: maximum number of redraws, after which the target's mean is returned."""
    (mq, sq), (mp, sp) = ((distribution.mean[token], distribution.std[token]) for distribution in (draft, target))
    x = mq.tolist()
    sigma = math.exp(float((target.half_log_variance[token] - draft.half_log_variance[token]).sum()))
    ratio = sigma * density(x, mp, sp * inner) / density(x, mq, sq * inner)
    if ratio > u:
        return x, True
    for number in range(rounds):
        noise, uniform = redraw(number, torch.tensor([token]))
        y = (mp + sp * noise[0]).tolist()
        p, q = density(y, mp, sp), density(y, mq, sq)
        if uniform.item() < max(p - q / sigma, 0) / p:
            return y, False
    return mp.tolist(), False
