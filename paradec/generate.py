"""`generate`: from a prompt to text, with any sampler, cache and block policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.attention.sparsed import AttentionCost, SparseD
from paradec.blocks import BlockPolicy
from paradec.caches.base import Cache
from paradec.caches.cost import CacheCost
from paradec.caches.kept import KeptPrefix
from paradec.checks import check_bool, check_int, check_model, shown
from paradec.prompts import Prompts, encode, right_aligned
from paradec.protocol import Commit, Interrupted, Sampler, State, decode
from paradec.samplers.masked.stopping import EarlyRule, StopRule
from paradec.streaming import check_streamer, stream
from paradec.trace import Trace

MADE = ("text", "codes", "masked image")
"""Kinds of model (`paradec.checks.MODELS`) that write ids without being told where a picture ends."""
MOST_ANSWERS = 1_000_000
"""Rows that one prompt can become."""


@dataclass
class Output:
    """What `generate` and `infill` return. `B` rows, prompts of up to `P` tokens, `N` new tokens (appended masks)."""

    text: str | list[str] | None
    """The answer up to its end token or with its stop string; where the prompt had masks in it, the completed text (the
    last turn of a chat). A string for one prompt, a list for several rows, None without a tokenizer."""
    sequences: Tensor
    """[B, P + N] int64: prompts (padded on the left to P) and answers; `sequences[:, P:]` is `new_tokens`."""
    new_tokens: Tensor
    """[B, N] int64: answers, padded after their end token. Positions still undecided (only after a callback or an
    interrupt ended the decoding early) hold the mask id."""
    attention_mask: Tensor
    """[B, P + N] int64: 0 on the padding of prompts."""
    filled: Tensor
    """[B, P + N] bool: the positions of `sequences` that were masks: holes of the prompt, and the new tokens."""
    row_nfe: list[int]
    """Forward calls that each row took part in."""
    row_forwards: int
    """Rows evaluated, all calls together (a guidance pair counts 2)."""
    forwarded_tokens: int
    """Positions evaluated, all rows together, padding excluded."""
    tokens: list[int]
    """Tokens that each row filled, its end token included and the padding after it excluded."""
    finished: list[bool]
    """Whether each row ended with an end token or a stop string."""
    seconds: float
    """Wall time of the decoding loop."""
    fills: list[str] | list[list[str]] | None = None
    """Where the prompt had masks in it: the text of each run of filled positions, in reading order, per row."""
    trace: Trace | None = None
    """What each step did, when asked for."""
    race_winner: int | None = None
    """With `race`: which of the copies this is; its row in `trace` and `cost`."""
    cost: CacheCost | None = None
    """Whole and partial forwards and positions evaluated, per row, and the bytes that the cache held."""
    attention: AttentionCost | None = None
    """What the calls attended to; None where all attended to everything."""
    prefix: KeptPrefix | None = None
    """With `keep_prefix`: keys and values of prompts and answers, for the `prefix` of the next request."""

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
    prefix: KeptPrefix | None = None,
    keep_prefix: bool = False,
    share_prefix: bool = False,
    attention: str | SparseD | None = None,
    blocks: str | BlockPolicy | None = None,
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
    holes_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
    suppress_tokens: Sequence[int] = (),
    stop_strings: str | Sequence[str] | None = None,
    stop: StopRule | EarlyRule | Sequence[StopRule | EarlyRule] | None = None,
    num_return_sequences: int = 1,
    race: int | None = None,
    chat: bool | None = None,
    streamer: Any = None,
    callback: Callable[[State, Commit], bool | None] | None = None,
    trace: bool = False,
    compile: bool = False,
) -> Output:
    """Decode answers to one prompt or a batch of unequal ones.

    Args:
        model: from `paradec.load` or `paradec.wrap`.
        prompt: text, a chat (list of {"role", "content"}), input ids, or a list of any one of these.
        input_ids: ids under their transformers name, instead of `prompt`. Where ids hold the mask id, those positions
            are filled as well, and everything else stays as it is (see `infill`).
        attention_mask: [B, L] 0/1 for 2-D ids, padded on the left or on the right.
        sampler: a name (`paradec.samplers.names()`), several that are joined ("credit+localleap", see
            `paradec.samplers.create`), or a sampler made with settings.
        cache: a name (`paradec.caches.names()`) or a cache; None recomputes everything at every step.
        prefix: the `prefix` of an earlier output, made with `keep_prefix`: what a row has in common with it is not
            evaluated again. Exact for block-causal models, approximate for others; `out.cost.reused_tokens` counts.
        keep_prefix: keep keys and values for the next turn, in `Output.prefix`.
        share_prefix: evaluate what all rows begin with once, and store it once; exact as for `prefix`.
        attention: "dense", "sparsed", or `paradec.SparseD(...)` with settings: long sequences attend to a part of
            themselves only (docs/attention.md); None is what the model was loaded with, "dense" as a rule.
            `Output.attention` says what was computed.
        blocks, block_length: how the answer is cut: a policy, the name of one ("fixed", "whole", "adaptive"; the
            length may go with it), or a fixed length; by default 32 for LLaDA, the whole canvas for Dream, the model's
            own blocks for block-causal models.
        steps: forwards planned per row, for samplers with a schedule; a multiple of the number of blocks.
        max_new_tokens: answer length; by default the checkpoint's generation_config.json, else 128; 0 where ids hold
            masks.
        temperature, top_p, top_k, guidance_scale, logits_eos_inf, holes_eos_inf, confidence_eos_eot_inf,
            suppress_tokens: see `paradec.samplers.request.Request`.
        seed: an int, or one per prompt or row. A row's numbers depend on its seed, prompt and positions, not on its
            neighbours.
        generator: a torch.Generator instead of a seed.
        rng: "counter", or "reference" to draw from the generator as the public reference code does.
        eos_early_stop: end a row at its end token, once everything before it is decided.
        stop_strings: a text or several; a row ends at the token that completes one of them in its answer, once
            everything before is decided. The token is kept, as in transformers, so that the answer ends with the text
            (or with a token that holds its end). Needs a tokenizer.
        stop: a stop rule or several, e.g. `paradec.Prophet()`; see `paradec.samplers.masked.stopping`.
        num_return_sequences: answers per prompt, in neighbouring rows; each draws its own random numbers.
        race: decode so many copies of one prompt side by side, each with its own random numbers, and return the one
            that ends first, the lowest of several (First Finish Search, arXiv 2505.18149). `row_forwards` and
            `forwarded_tokens` count all copies, and `cost` and `trace` have them all.
        chat: whether text becomes a user turn of the chat template; None does so when the tokenizer has one.
        streamer: transformers' streamer (`put`, `end`, and `put_draft` if it has that): see `paradec.streaming`.
        callback: `callback(state, commit)` after every step; returning True ends the decoding.
        trace: record every step in `Output.trace`.
        compile: on CUDA, take whole steps on the device and replay them as CUDA graphs
            (`paradec.samplers.masked.device_step`): the same tokens without the launches. The model keeps the graphs
            for requests of the same kind, until `clear_graphs(model)` of that module. A request that cannot be served
            so is decoded as usual, with one warning.

    Returns:
        An `Output`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` holds what was decoded.
    """
    check_model("generate", model, MADE)
    check_source(prompt, input_ids)
    method: Any = samplers.create(sampler) if isinstance(sampler, str) else sampler
    if not isinstance(method, Sampler):
        raise TypeError(f"sampler={shown(sampler)} must be a name or made by paradec.samplers.create")
    if method.family not in ("masked", "draft_verify"):
        raise ValueError(
            f"sampler {method.name!r} is of family {method.family!r}; generate takes 'masked' and 'draft_verify'"
        )
    if steps is not None and not method.uses_steps:
        warnings.warn(f"steps={steps} has no effect: sampler {method.name!r} has no schedule", stacklevel=2)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback={shown(callback)} must be callable")
    check_bool("trace", trace)
    check_bool("compile", compile)
    if compile and model.device.type != "cuda":
        raise ValueError(f"compile=True captures CUDA graphs, and the model is on {model.device}: leave compile out")
    check_int("num_return_sequences", num_return_sequences, low=1, high=MOST_ANSWERS)
    prompts = encode(model, prompt if input_ids is None else input_ids, attention_mask, chat)
    if race is not None:
        _check_race(race, prompts, num_return_sequences, streamer)
        num_return_sequences, prompts = race, replace(prompts, single=False)
    if num_return_sequences > 1:
        if isinstance(seed, (Tensor, np.ndarray)):
            seed = seed.tolist()
        if isinstance(seed, (list, tuple)) and len(seed) == len(prompts.rows):
            seed = [entry for entry in seed for _ in range(num_return_sequences)]
        prompts = prompts.repeated(num_return_sequences)
    if streamer is not None:
        check_streamer(streamer, len(prompts.rows))
    state: Any = method.start(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        blocks=blocks,
        block_length=block_length,
        cache=cache,
        prefix=prefix,
        keep_prefix=keep_prefix,
        share_prefix=share_prefix,
        attention=attention,
        seed=seed,
        generator=generator,
        trace=trace,
        stop_strings=stop_strings,
        stop=stop,
        steps=steps,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        guidance_scale=guidance_scale,
        rng=rng,
        eos_early_stop=eos_early_stop,
        logits_eos_inf=logits_eos_inf,
        holes_eos_inf=holes_eos_inf,
        confidence_eos_eot_inf=confidence_eos_eot_inf,
        suppress_tokens=suppress_tokens,
    )
    if hint := state.cache_advice():
        warnings.warn(hint, stacklevel=2)
    if race is not None:
        callback = _until_first(callback)
    loop = _device_loop(method, model, state, callback, streamer) if compile else decode
    begin = time.perf_counter()
    try:
        watched = nullcontext(callback) if streamer is None else stream(streamer, state, callback)
        with state.freed_store(), watched as after_commit:
            loop(method, model, state, after_commit)
            kept = state.kept_prefix(model)
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
        stopped.output = _output(model, state, prompts, time.perf_counter() - begin)
        if race is not None:
            stopped.output = _of_row(stopped.output, _first(state))
        raise stopped from interrupt
    if state.canvas.is_cuda:
        torch.cuda.synchronize(state.canvas.device)
    output = _output(model, state, prompts, time.perf_counter() - begin)
    output.prefix = kept
    if race is None:
        return output
    if race > 1 and (state.canvas == state.canvas[0]).all():
        warnings.warn(f"race={race} ran equal copies: give a temperature, or a sampler that draws", stacklevel=2)
    return _of_row(output, _first(state))


def infill(
    model: Any,
    prompt: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    mask: str = "<mask>",
    max_new_tokens: int = 0,
    holes_eos_inf: bool = True,
    chat: bool | None = None,
    **request: Any,
) -> Output:
    """Fill the masked tokens of a text; everything else stays as it is.

    >>> paradec.infill(model, "The cat <mask> on the <mask:2>.").text    # doctest: +SKIP

    A bidirectional model sees what stands on both sides of a hole. By default all holes are one block; with
    `block_length` blocks count from the first mask, and those without a mask are passed over (`steps` counts them all
    the same). An end token inside a hole would end nothing, given text comes after it, and would be left out of the
    text, like every special token: holes are filled without end tokens. Masks that nothing given follows, those of
    `max_new_tokens` among them, are an answer, which may end.

    Args:
        model: from `paradec.load` or `paradec.wrap`.
        prompt: text, a chat whose contents hold masks, input ids that hold the mask id, or a list of any one of these.
            Text is taken as it is (with the special tokens around it that a masked language model was trained on); a
            chat's last turn, if it is the assistant's, is the text that is completed.
        input_ids, attention_mask: as in `generate`.
        mask: the text that stands for one token to fill; "<mask:3>" and "<mask><mask><mask>" stand for three. A space
            before it is left to the model.
        max_new_tokens: masks appended after the text.
        holes_eos_inf: keep end tokens out of holes; False lets the model leave a part of a hole empty.
        chat: True makes text a user turn of the chat template.
        request: everything else that `generate` takes.

    Returns:
        An `Output`: `text` is the completed text, `fills` the text of each hole, `filled` where holes were.

    Raises:
        ValueError: a prompt without a mask, a model or tokenizer without a mask token. Otherwise as `generate`.
    """
    check_model("infill", model, MADE)
    check_source(prompt, input_ids)
    if model.facts.mask_token_id is None:
        raise ValueError(f"infill needs a model with a mask token; {model.facts.name} is autoregressive")
    prompts = encode(model, prompt if input_ids is None else input_ids, attention_mask, chat, placeholder=mask)
    for index, row in enumerate(prompts.rows):
        if model.facts.mask_token_id not in row:
            raise ValueError(f"the prompt of row {index} has nothing to fill; put {mask!r} or the mask id in it")
    return generate(model, prompts, max_new_tokens=max_new_tokens, holes_eos_inf=holes_eos_inf, **request)


def check_source(prompt: Any, input_ids: Any) -> None:
    """Raise ValueError unless exactly one is given."""
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either prompt or input_ids" + ("" if prompt is None else ", not both"))


def _device_loop(method: Any, model: Any, state: Any, callback: Any, streamer: Any) -> Callable[..., Any]:
    """The loop of a request with `compile`: on the device, or with one warning the plain one."""
    from paradec.samplers.masked import device_step

    reason = device_step.refusal(method, model, state)
    for name, given in (("a callback", callback), ("a streamer", streamer), ("a trace", state.trace)):
        if reason is None and given is not None:
            reason = f"{name} looks at every step"
    if reason is not None:
        warnings.warn(f"compile=True has no effect: {reason}", stacklevel=3)
        return decode

    def on_the_device(method: Any, model: Any, state: Any, after_commit: Any) -> None:
        try:
            device_step.decode(method, model, state)
        except device_step.NotCapturable as error:
            warnings.warn(f"compile=True has no effect: {error}", stacklevel=4)
            decode(method, model, state, after_commit)

    return on_the_device


def _check_race(race: Any, prompts: Prompts, answers: int, streamer: Any) -> None:
    check_int("race", race, low=1, high=MOST_ANSWERS)
    if len(prompts.rows) != 1:
        raise ValueError(f"race={race} takes one prompt; this request has {len(prompts.rows)}")
    if answers != 1:
        raise ValueError(f"race={race} returns one answer; num_return_sequences={answers} asks for more")
    if streamer is not None:
        raise ValueError(f"race={race} knows which copy to return when it ends; streamer has to be None")


def _until_first(callback: Callable[[State, Commit], bool | None] | None) -> Callable[[State, Commit], bool | None]:
    """A callback that calls `callback` and ends the decoding once a row has ended."""

    def after_commit(state: Any, commit: Commit) -> bool:
        return bool(callback is not None and callback(state, commit)) or not state.running.all()

    return after_commit


def _first(state: Any) -> int:
    """The row that ended, or else the one that is furthest; the lowest of several."""
    return int(np.where(state.running, state.decided, np.iinfo(np.int64).max).argmax())


def _of_row(output: Output, row: int) -> Output:
    """The output of one row of a race, with what all rows cost."""
    lists = ("row_nfe", "tokens", "finished")
    tensors = ("sequences", "new_tokens", "attention_mask", "filled")
    changes: dict[str, Any] = {name: [getattr(output, name)[row]] for name in lists}
    changes |= {name: getattr(output, name)[row : row + 1] for name in tensors}
    for name in ("text", "fills"):
        if getattr(output, name) is not None:
            changes[name] = getattr(output, name)[row]
    if output.prefix is not None:
        changes["prefix"] = output.prefix.row(row)
    return replace(output, **changes, race_winner=row)


def _output(model: Any, state: Any, prompts: Prompts, seconds: float) -> Output:
    """Read the canvas: rows that start at 0 become rows that end at the same column, padded on the left."""
    facts, width = state.facts, int(state.asked.max())
    ids, given = state.canvas.cpu()[:, :width], state.given.cpu()[:, :width]
    column, length, end = torch.arange(width), _column(state.asked), _column(state.end)
    undecided = state.undecided.cpu()[:, :width]
    filled = ~given & (column < length)
    # an end token counts behind everything given, and when nothing before it is undecided
    is_end = torch.isin(ids, torch.tensor(facts.eos_token_ids, dtype=torch.int64))
    is_end &= (column >= _column(state.answer_start)) & (column < end) & (undecided.int().cumsum(1) == 0)
    ended = is_end.any(1, keepdim=True)
    last = torch.where(ended, is_end.int().argmax(1, keepdim=True), width)
    counted = filled & ~undecided & (column <= last) & (column < end)
    read = ~undecided & (column < last) & (column < end)  # the end token itself is no text
    holes = any(facts.mask_token_id in row for row in prompts.rows)
    begin = _column(np.array(prompts.starts)) if holes else _column(state.answer_start)
    text: Any = None
    fills: Any = None
    if model.tokenizer is not None:
        text = [_decoded(model, row[wanted]) for row, wanted in zip(ids, read & (column >= begin))]
        if holes:
            fills = [[_decoded(model, row[a:b]) for a, b in _runs(hole)] for row, hole in zip(ids, filled)]
    sequences = right_aligned(ids, state.asked, facts.fill_token_id).to(state.canvas.device)
    return Output(
        text=text[0] if text and prompts.single else text,
        sequences=sequences,
        new_tokens=sequences[:, width - state.max_new_tokens :],
        attention_mask=right_aligned((column < length).long(), state.asked, 0).to(sequences.device),
        filled=right_aligned(filled, state.asked, False).to(sequences.device),
        row_nfe=state.nfe.tolist(),
        row_forwards=int(state.row_forwards.sum()),
        forwarded_tokens=int(state.forwarded_tokens.sum()),
        tokens=counted.sum(1).tolist(),
        finished=(ended.squeeze(1) | torch.as_tensor(state.stopped)).tolist(),
        seconds=seconds,
        fills=fills[0] if fills and prompts.single else fills,
        trace=state.trace,
        cost=CacheCost.of(state),
        attention=None if state.attention_state is None else state.attention_state.report(),
    )


def _column(array: np.ndarray) -> Tensor:
    """[B] on the host -> [B, 1]."""
    return torch.as_tensor(array).unsqueeze(1)


def _decoded(model: Any, ids: Tensor) -> str:
    mask = model.facts.mask_token_id
    return model.tokenizer.decode(ids if mask is None else ids[ids != mask], skip_special_tokens=True)


def _runs(flags: Tensor) -> list[tuple[int, int]]:
    """Start and end (exclusive) of every run of True in flags [L]."""
    edges = torch.cat((flags.new_zeros(1), flags, flags.new_zeros(1))).int().diff()
    return list(zip((edges > 0).nonzero().squeeze(1).tolist(), (edges < 0).nonzero().squeeze(1).tolist(), strict=True))
