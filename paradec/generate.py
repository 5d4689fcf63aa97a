"""`generate`: from a prompt to text, with any sampler, cache and block policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.blocks import BlockPolicy
from paradec.caches.base import Cache
from paradec.checks import check_bool, shown
from paradec.protocol import Commit, Interrupted, Sampler, State, decode
from paradec.trace import Trace


@dataclass
class Output:
    """What `generate` returns. `B` rows, prompts of up to `P` tokens, `N` new tokens."""

    text: str | list[str] | None
    """The answer up to its end token: a string for one prompt, a list for a batch, None without a tokenizer."""
    sequences: Tensor
    """[B, P + N] int64: prompts (padded on the left to P) and answers; `sequences[:, P:]` is `new_tokens`."""
    new_tokens: Tensor
    """[B, N] int64: answers, padded after their end token. Positions still undecided (only after a callback or an
    interrupt ended the decoding early) hold the mask id."""
    attention_mask: Tensor
    """[B, P + N] int64: 0 on the padding of prompts."""
    row_nfe: list[int]
    """Forward calls that each row took part in."""
    row_forwards: int
    """Rows evaluated, all calls together (a guidance pair counts 2)."""
    forwarded_tokens: int
    """Positions evaluated, all rows together, padding excluded."""
    tokens: list[int]
    """Tokens of each answer, its end token included and the padding after it excluded."""
    finished: list[bool]
    """Whether each row ended with an end token."""
    seconds: float
    """Wall time of the decoding loop."""
    trace: Trace | None = None
    """What each step did, when asked for."""

    @property
    def nfe(self) -> int:
        """Number of function evaluations: forward calls of the row that took part in most."""
        return max(self.row_nfe)

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens per forward call, mean over all rows' calls; padding after the end does not count."""
        return sum(self.tokens) / max(1, sum(self.row_nfe))


def generate(
    model: Any,
    prompt: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    sampler: str | Sampler = "threshold",
    cache: str | Cache | None = None,
    blocks: BlockPolicy | None = None,
    block_length: int | None = None,
    steps: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    guidance_scale: float = 1.0,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    rng: str = "counter",
    eos_early_stop: bool = True,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
    suppress_tokens: Sequence[int] = (),
    chat: bool | None = None,
    callback: Callable[[State, Commit], bool | None] | None = None,
    trace: bool = False,
) -> Output:
    """Decode answers to one prompt or a batch of unequal ones.

    Args:
        model: from `paradec.load` or `paradec.wrap`.
        prompt: text, a chat (list of {"role", "content"}), input ids, or a list of any one of these.
        input_ids: ids under their transformers name, instead of `prompt`.
        attention_mask: [B, L] 0/1 for 2-D ids, padded on the left or on the right.
        sampler: a name (`paradec.samplers.names()`) or a sampler made with settings.
        cache: a name (`paradec.caches.names()`) or a cache; None recomputes everything at every step.
        blocks, block_length: how the answer is cut, a policy or a fixed length; by default 32 for LLaDA, the whole
            canvas for Dream, the model's own blocks for block-causal models.
        steps: forwards planned per row, for samplers with a schedule; a multiple of the number of blocks.
        max_new_tokens: answer length; by default the checkpoint's generation_config.json, else 128.
        temperature, top_p, top_k, guidance_scale, logits_eos_inf, confidence_eos_eot_inf, suppress_tokens: see
            `paradec.samplers.masked.Request`.
        seed: an int, or one per row. A row's numbers depend on its seed, prompt and positions, not on its neighbours.
        generator: a torch.Generator instead of a seed.
        rng: "counter", or "reference" to draw from the generator as the public reference code does.
        eos_early_stop: end a row at its end token, once everything before it is decided.
        chat: whether text becomes a user turn of the chat template; None does so when the tokenizer has one.
        callback: `callback(state, commit)` after every step; returning True ends the decoding.
        trace: record every step in `Output.trace`.

    Returns:
        An `Output`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` holds what was decoded.
    """
    if not callable(model) or not hasattr(model, "facts"):
        raise TypeError(f"model={shown(model)} must come from paradec.load or paradec.wrap")
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either prompt or input_ids" + ("" if prompt is None else ", not both"))
    method = samplers.create(sampler) if isinstance(sampler, str) else sampler
    if not isinstance(method, Sampler):
        raise TypeError(f"sampler={shown(sampler)} must be a name or made by paradec.samplers.create")
    if method.family != "masked":
        raise ValueError(f"sampler {method.name!r} is of family {method.family!r}; generate takes the 'masked' family")
    if steps is not None and not method.uses_steps:
        warnings.warn(f"steps={steps} has no effect: sampler {method.name!r} has no schedule", stacklevel=2)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback={shown(callback)} must be callable")
    check_bool("trace", trace)
    single = _is_single(prompt if input_ids is None else input_ids)
    state = method.start(
        model,
        prompt if input_ids is None else input_ids,
        attention_mask=attention_mask,
        chat=chat,
        max_new_tokens=max_new_tokens,
        blocks=blocks,
        block_length=block_length,
        cache=cache,
        seed=seed,
        generator=generator,
        trace=trace,
        steps=steps,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        guidance_scale=guidance_scale,
        rng=rng,
        eos_early_stop=eos_early_stop,
        logits_eos_inf=logits_eos_inf,
        confidence_eos_eot_inf=confidence_eos_eot_inf,
        suppress_tokens=suppress_tokens,
    )
    begin = time.perf_counter()
    try:
        decode(method, model, state, callback)
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
        stopped.output = _output(model, state, single, time.perf_counter() - begin)
        raise stopped from interrupt
    if state.canvas.is_cuda:
        torch.cuda.synchronize(state.canvas.device)
    return _output(model, state, single, time.perf_counter() - begin)


def _is_single(prompt: Any) -> bool:
    """Whether one prompt was given rather than a batch (one row of a batch is still a batch)."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, (Tensor, np.ndarray)):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], (int, np.integer, dict))


def _output(model: Any, state: Any, single: bool, seconds: float) -> Output:
    """Read the canvas: rows that start at 0 become prompts padded on the left, and answers of one length."""
    facts, canvas = state.facts, state.canvas
    batch, device = state.batch, canvas.device
    prompt_width, new = int(state.prompt_length.max()), int((state.length - state.prompt_length).max())
    # column c of the output is position c - (P - p) of a row whose prompt has p tokens
    source = torch.arange(prompt_width + new, device=device) - torch.as_tensor(
        prompt_width - state.prompt_length, device=device
    ).unsqueeze(1)
    sequences = canvas.gather(1, source.clamp(min=0)).masked_fill(source < 0, facts.fill_token_id)
    new_tokens = sequences[:, prompt_width:]
    ids = new_tokens.cpu()
    is_end = torch.isin(ids, torch.tensor(facts.eos_token_ids, dtype=torch.int64))
    decided = ids != facts.mask_token_id
    # an end token counts only when nothing before it is undecided
    is_end &= (~decided).int().cumsum(1) == 0
    finished = is_end.any(1)
    first_end = torch.where(finished, is_end.int().argmax(1), new)
    before_end = torch.arange(new) <= first_end.unsqueeze(1)
    tokens = (decided & before_end).sum(1)
    text: str | list[str] | None = None
    if model.tokenizer is not None:
        texts = [
            model.tokenizer.decode(ids[r][decided[r]][: int(first_end[r])], skip_special_tokens=True)
            for r in range(batch)
        ]
        text = texts[0] if single else texts
    return Output(
        text=text,
        sequences=sequences,
        new_tokens=new_tokens,
        attention_mask=(source >= 0).long(),
        row_nfe=state.nfe.tolist(),
        row_forwards=int(state.row_forwards.sum()),
        forwarded_tokens=int(state.forwarded_tokens.sum()),
        tokens=tokens.tolist(),
        finished=finished.tolist(),
        seconds=seconds,
        trace=state.trace,
    )
