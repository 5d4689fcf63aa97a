"""Uniform diffusion of one row as a plain loop over the module of transformers.

Self-conditioning feeds back the logits of all positions that the prompt does not fix. Random numbers come from
`paradec.core.rng`, with the streams that the sampler documents."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from paradec.core import rng
from paradec.models.cache_argument import cache_keyword
from paradec.samplers.start import row_keys

Keep = Callable[[Tensor, Tensor, int], Tensor]
"""(distribution [C, vocabulary], free [C], step) -> whether the step keeps each position [C]. C: canvas length."""


def entropy_bound(bound: float) -> Keep:
    def keep(distribution: Tensor, free: Tensor, step: int) -> Tensor:
        entropy = torch.special.entr(distribution).sum(-1).masked_fill(~free, torch.inf)
        selected, spent = torch.zeros_like(free), 0.0
        for position in entropy.argsort(stable=True).tolist():
            if spent > bound or not free[position]:
                break
            selected[position], spent = True, spent + float(entropy[position])
        return selected

    return keep


def threshold(min_confidence: float) -> Keep:
    def keep(distribution: Tensor, free: Tensor, step: int) -> Tensor:
        best = distribution.amax(-1).masked_fill(~free, -1)
        selected = best >= min_confidence
        selected[best.argmax()] = True
        return selected & free

    return keep


def most_confident(steps: int) -> Keep:
    def keep(distribution: Tensor, free: Tensor, step: int) -> Tensor:
        count = -(-int(free.sum()) * step // steps)
        best = distribution.amax(-1).masked_fill(~free, -1)
        selected = torch.zeros_like(free)
        selected[best.argsort(descending=True, stable=True)[:count]] = True
        return selected

    return keep


@torch.no_grad()
def row(
    module: Any,
    prompt: list[int],
    new: int,
    keep: Keep,
    *,
    seed: int,
    steps: int,
    t_min: float = 0.4,
    t_max: float = 0.8,
    stability: int | None = 1,
    confidence: float = 0.005,
    ends: tuple[int, ...] = (),
    cut: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> tuple[list[int], list[int]]:
    """Decode one row: fill the holes (-1) of a prompt and add up to `new` tokens.

    keep: selects the positions that keep their token in a step; the other positions get new random tokens.
    cut: filters tempered logits [canvas length, vocabulary]. stability, confidence: a canvas ends early after this
    number of unchanged steps, if the mean entropy is below `confidence`. Returns prompt and answer, and the number of
    steps of each canvas."""
    size, vocab = module.config.canvas_length, module.config.text_config.vocab_size
    keys = torch.as_tensor(row_keys([seed], [prompt]))
    end = len(prompt) + new
    tokens = [*prompt, *[-1] * (new + size)]
    is_prompt = torch.tensor(tokens) >= 0
    total_steps, counts = 0, []

    def uniform(positions: Tensor, stream: int) -> Tensor:
        return rng.uniform(keys, torch.tensor([total_steps]), positions.unsqueeze(0), 1, stream)[0, :, 0]

    while -1 in tokens[:end]:
        start = tokens.index(-1)
        positions = torch.arange(start, start + size)
        pinned, fixed = is_prompt[positions], torch.tensor(tokens)[positions]
        cached = cache_keyword(module, DynamicCache(config=module.config.text_config))
        context = torch.tensor([tokens[:start]])
        noisy = torch.where(pinned, fixed, (uniform(positions, 4) * vocab).long())
        logits, previous_best, num_repeats = None, None, 0
        for step in range(1, steps + 1):
            if step == 1:
                module.model.encoder(input_ids=context, attention_mask=causal(module, start), **cached)
            # no logits are fed back at positions that the prompt fixes
            hook = module.model.decoder.self_conditioning.register_forward_pre_hook(
                lambda part, args, free=~pinned: (args[0], args[1] * free.unsqueeze(-1))
            )
            out = module(
                decoder_input_ids=noisy.unsqueeze(0),
                **cached,
                self_conditioning_logits=logits,
                self_conditioning_mask=None,
                decoder_position_ids=positions.unsqueeze(0),
            ).logits[0]
            hook.remove()
            temperature = t_min + (t_max - t_min) * (torch.tensor(steps - step + 1, dtype=torch.int32) / steps)
            tempered = cut(out / temperature)
            distribution = tempered.double().softmax(-1)
            best = torch.where(pinned, fixed, tempered.argmax(-1))
            selected = keep(distribution, ~pinned, step)
            total = tempered.softmax(-1).double().cumsum(-1)
            drawn = torch.searchsorted(total, uniform(positions, 0).unsqueeze(-1) * total[:, -1:], right=True)[:, 0]
            noise = (uniform(positions, 5) * vocab).long()
            noisy = torch.where(pinned, fixed, torch.where(selected, drawn, noise))
            is_repeated = previous_best is not None and torch.equal(best, previous_best)
            num_repeats = num_repeats + 1 if is_repeated else 0
            previous_best, logits, total_steps = best, tempered.to(module.dtype).unsqueeze(0), total_steps + 1
            mean = torch.special.entr(distribution).sum(-1)[~pinned].mean()
            if stability is not None and num_repeats >= stability and mean < confidence:
                break
        counts.append(step)
        tokens[start : start + size] = best.tolist()
        stops = [i for i in range(start, start + size) if tokens[i] in ends and i >= len(prompt)]
        if stops:
            return tokens[: min(stops[0] + 1, end)], counts
    return tokens[:end], counts


def causal(module: Any, length: int) -> dict[str, Tensor]:
    """Return attention masks [1, 1, length, length] for the encoder's two types of layers."""
    q, k = torch.arange(length).unsqueeze(1), torch.arange(length)
    window = module.config.text_config.sliding_window
    full = (k <= q)[None, None]
    return {"full_attention": full, "sliding_attention": full & (k > q - window)}
