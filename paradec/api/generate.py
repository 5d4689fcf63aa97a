"""`generate`: from a prompt to text, with any sampler, cache and block policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.api.progress import bar
from paradec.api.streaming import check_streamer, stream
from paradec.attention.sparsed import AttentionCost
from paradec.caches.cost import CacheCost
from paradec.caches.kept import KeptPrefix
from paradec.core.checks import check_model, count
from paradec.core.contract import TextState
from paradec.core.logprobs import LogProbs
from paradec.core.prompts import Prompts, encode, right_aligned
from paradec.core.protocol import Commit, Interrupted, State, decode
from paradec.core.trace import Trace, drawing
from paradec.core.trace_texts import name_tokens
from paradec.request import FIELDS, Arguments, Preset, Request, takes_arguments, warn_of_unused

MADE = ("text", "canvas", "codes", "masked image")
"""Kinds of model (`paradec.core.checks.MODELS`) that write ids without being told where a picture ends."""
MOST_SHOWN = 100
"""Characters of a text that an output's `repr` shows."""


COUNTED = ("encoder_calls", "denoising_calls")
"""What states of canvases count besides."""


@dataclass(repr=False)
class Output:
    """What `generate` and `infill` return. `B` rows, prompts of up to `P` tokens, `N` new tokens (appended masks)."""

    text: str | list[str] | None
    """The answer up to its end token or with its stop string; where the prompt had masks in it, the completed text (the
    last turn of a chat). A string for one prompt, a list for several rows, None without a tokenizer."""
    sequences: Tensor
    """[B, P + N] int64: prompts (padded on the left to P) and answers; `sequences[:, P:]` is `new_tokens`."""
    new_tokens: Tensor
    """[B, N] int64: answers, padded after their end token. Positions still undecided (only after a callback or an
    interrupt ended the decoding early) hold the mask id; in an open canvas the best tokens of its last step."""
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
    encoder_calls: list[int] | None = None
    """On models with canvases: of each row's forward calls those that encoded what was final."""
    denoising_calls: list[int] | None = None
    """On models with canvases: of each row's forward calls those that its open canvas needed. (In lock step, with
    `rng="reference"`, a row takes part in more.)"""
    draft_nfe: list[int] | None = None
    """Forward calls of the model that drafts, for each row; None where there is none."""
    logprobs: LogProbs | None = None
    """With `logprobs`: of every filled position of `sequences`, as the step that wrote it had them."""
    index: int | None = None
    """From `generate_many`: which prompt this answers, from 0."""
    id: Any = None
    """From `generate_many`: what the caller named the prompt."""
    error: Exception | None = None
    """From `generate_many`: why there is no whole answer; the other fields hold what was decoded until then."""

    @property
    def nfe(self) -> int:
        """Number of function evaluations: forward calls of the row that took part in most."""
        return max(self.row_nfe)

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens per forward call, mean over all rows' calls; padding after the end does not count."""
        return sum(self.tokens) / max(1, sum(self.row_nfe))

    @property
    def tokens_per_denoising_call(self) -> list[float] | None:
        """On models with canvases: answer tokens of each row per call that its canvases needed, encoding left out.
        (transformers' `tokens_per_forward` counts all tokens of whole canvases that are not the padding's id.)"""
        if self.denoising_calls is None:
            return None
        return [tokens / max(1, calls) for tokens, calls in zip(self.tokens, self.denoising_calls, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON can hold: every field that is there, tensors as lists, but for `prefix`; and the two
        numbers `nfe` and `tokens_per_forward`."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "prefix"}
        data = {name: _plain(value) for name, value in found.items() if value is not None}
        return data | {"nfe": self.nfe, "tokens_per_forward": self.tokens_per_forward}

    def __repr__(self) -> str:
        rows, end = len(self.tokens), sum(self.finished)
        texts = [] if self.text is None else [self.text] if isinstance(self.text, str) else self.text
        shown = [repr(text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "...") for text in texts[:2]]
        said = ", ".join(entry if len(entry) <= 2 * MOST_SHOWN else "..." for entry in shown)
        said = f"{said}, ... {len(texts) - 2} more" if len(texts) > 2 else said or "no text"
        of_rows = "" if rows == 1 else f"{rows} rows, "
        ended = "finished" if end == rows else "not finished" if not end else f"{end} finished"
        more = "".join(f", {name}" for name in ("trace", "prefix") if getattr(self, name) is not None)
        return (
            f"Output({said}: {of_rows}{count(sum(self.tokens), 'token')}, {count(self.nfe, 'forward')}, "
            f"{self.tokens_per_forward:.1f} tokens per forward, {ended}, {self.seconds:.2f} s{more})"
        )

    def _repr_html_(self) -> str:
        return str(drawing("output")(self))


@takes_arguments()
def generate(
    model: Any,
    prompt: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    preset: Preset | None = None,
    **arguments: Unpack[Arguments],
) -> Output:
    """Decode answers to one prompt or a batch of unequal ones.

    Args:
        model: from `paradec.load` or `paradec.wrap`.
        prompt: text, a chat (list of {"role", "content"}), input ids, or a list of any one of these; or what a
            tokenizer or its `apply_chat_template` returns.
        input_ids: ids under their transformers name, instead of `prompt`. Where ids hold the mask id, those positions
            are filled as well, and everything else stays as it is (see `infill`).
        attention_mask: [B, L] 0/1 for 2-D ids, padded on the left or on the right.
        preset: a `paradec.Request`, or a file that `Request.save` wrote, whose values arguments override.
        arguments: the fields of `paradec.Request`, which explains them: sampler, cache, steps, temperature, ...

    Returns:
        An `Output`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` holds what was decoded.
    """
    check_model("generate", model, MADE)
    check_source(prompt, input_ids)
    request = Request.of(arguments, preset, **own_defaults(model))
    prompts = encode(model, prompt if input_ids is None else input_ids, attention_mask, request.chat)
    return answer(model, prompts, request, arguments)


def answer(model: Any, prompts: Prompts, request: Request, said: Collection[str] = FIELDS) -> Output:
    """Decode a request for encoded prompts: what all entry points of text come to. As `generate`.

    Args:
        said: the fields of the request that the caller gave, of which a warning may speak.

    Raises: as `generate`.
    """
    method: Any = samplers.create(request.sampler) if isinstance(request.sampler, str) else request.sampler
    if method.family not in ("masked", "draft_verify", "renoising"):
        raise ValueError(
            f"sampler {method.name!r} is of family {method.family!r}; generate takes 'masked', 'draft_verify' and "
            "'renoising'"
        )
    method = sampler_on(model, method)
    warn_of_unused(request, method, said)
    if request.compile and model.device.type != "cuda":
        raise ValueError(
            f"compile=True captures CUDA graphs, and the model is on {model.device}: leave compile out (a CPU has no "
            "launches to save)"
        )
    race, callback, copies = request.race, request.callback, request.num_return_sequences
    if race is not None:
        _check_race(race, prompts, copies, request.streamer)
        copies, prompts, callback = race, replace(prompts, single=False), _until_first(callback)
    if copies > 1:
        if isinstance(request.seed, tuple) and len(request.seed) == len(prompts.rows):
            request = replace(request, seed=[entry for entry in request.seed for _ in range(copies)])
        prompts = prompts.repeated(copies)
    if request.streamer is not None:
        check_streamer(request.streamer, len(prompts.rows))
    ranks = getattr(model, "ranks", None)
    if ranks is not None:
        request = ranks.agreed("a request", request, prompts)
    state: TextState = method.start(model, prompts, request)
    if hint := state.cache_advice():
        warnings.warn(hint, stacklevel=3)
    loop: Callable[..., Any] = decode
    if request.compile:
        loop = _device_loop(method, model, state, callback, request.streamer, request.progress)
    begin = time.perf_counter()
    watched = nullcontext(callback) if request.streamer is None else stream(request.streamer, state, callback)
    try:
        together = nullcontext() if ranks is None else ranks.request()
        shown = request.progress and (ranks is None or ranks.speaks)
        with together, state.freed_store(), watched as watcher, bar(shown, state, watcher) as after_commit:
            loop(method, model, state, after_commit)
            kept = state.kept_prefix(model)
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
        stopped.output = output_of(model, state, prompts, time.perf_counter() - begin)
        if race is not None:
            stopped.output = _of_row(stopped.output, _first(state))
        raise stopped from interrupt
    if state.canvas.is_cuda:
        torch.cuda.synchronize(state.canvas.device)
    output = output_of(model, state, prompts, time.perf_counter() - begin)
    output.prefix = kept
    if ranks is not None:
        ranks.note(output.sequences)
        ranks.meet("the answer")
    if output.cost is not None and (hint := output.cost.advice()):
        warnings.warn(hint, stacklevel=3)
    if race is None:
        return output
    if race > 1 and (state.canvas == state.canvas[0]).all():
        warnings.warn(f"race={race} ran equal copies: give a temperature, or a sampler that draws", stacklevel=3)
    return _of_row(output, _first(state))


@takes_arguments()
def infill(
    model: Any,
    prompt: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    mask: str = "<mask>",
    preset: Preset | None = None,
    **arguments: Unpack[Arguments],
) -> Output:
    """Fill the masked tokens of a text; everything else stays as it is.

    >>> paradec.infill(model, "The cat <mask> on the <mask:2>.").text    # doctest: +SKIP

    A bidirectional model sees what is on both sides of a hole. By default all holes are one block; with
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
        mask: the text that represents one token to fill; "<mask:3>" and "<mask><mask><mask>" mean three. A space
            before it is left to the model.
        preset, arguments: as in `generate`, but for two defaults: `max_new_tokens` is 0 (masks appended after the
            text), and `holes_eos_inf` True (False lets the model leave a part of a hole empty).

    Returns:
        An `Output`: `text` is the completed text, `fills` the text of each hole, `filled` where holes were.

    Raises:
        ValueError: a prompt without a mask, a model or tokenizer without a mask token. Otherwise as `generate`.
    """
    check_model("infill", model, MADE)
    check_source(prompt, input_ids)
    hole = model.facts.hole_id
    if hole is None:
        raise ValueError(f"infill needs a model with a mask token; {model.facts.name} is autoregressive")
    request = Request.of(arguments, preset, max_new_tokens=0, holes_eos_inf=True, **own_defaults(model))
    prompts = encode(model, prompt if input_ids is None else input_ids, attention_mask, request.chat, placeholder=mask)
    for index, row in enumerate(prompts.rows):
        if hole not in row:
            raise ValueError(f"the prompt of row {index} has nothing to fill; put {mask!r} or the mask id in it")
    return answer(model, prompts, request, arguments)


def sampler_on(model: Any, method: Any) -> Any:
    """The sampler that decodes with a model where this one is named: on canvases a masked one says what is kept."""
    if method.family == "masked" and getattr(model, "makes", None) == "canvas":
        return samplers.create("canvas", rule=method)
    return method


def own_defaults(model: Any) -> dict[str, Any]:
    """What requests for this model begin from, where that is not the default of `paradec.Request`."""
    sampler = getattr(model, "default_sampler", None)
    return {} if sampler is None else {"sampler": sampler}


def check_source(prompt: Any, input_ids: Any) -> None:
    """Raise ValueError unless exactly one is given."""
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either prompt or input_ids" + ("" if prompt is None else ", not both"))


def _device_loop(
    method: Any, model: Any, state: Any, callback: Any, streamer: Any, progress: bool = False
) -> Callable[..., Any]:
    """The loop of a request with `compile`: on the device, or with one warning the plain one."""
    from paradec.samplers.masked.device import step as device_step
    from paradec.samplers.masked.state import MaskedState

    reason = device_step.refusal(method, model, state)
    looking = {"a callback": callback, "a streamer": streamer, "a trace": state.trace, "a bar": progress or None}
    for name, given in looking.items():
        if reason is None and given is not None:
            reason = f"{name} looks at every step"
    if reason is not None:
        warnings.warn(f"compile=True has no effect: {reason}", stacklevel=4)
        return decode

    def on_the_device(method: Any, model: Any, state: MaskedState, after_commit: Any) -> None:
        try:
            device_step.decode(method, model, state)
        except device_step.NotCapturable as error:
            warnings.warn(f"compile=True has no effect: {error}", stacklevel=5)
            decode(method, model, state, after_commit)

    return on_the_device


def _check_race(race: Any, prompts: Prompts, answers: int, streamer: Any) -> None:
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


def _first(state: TextState) -> int:
    """The row that ended, or else the one that is furthest; the lowest of several."""
    return int(np.where(state.running, state.decided, np.iinfo(np.int64).max).argmax())


def _of_row(output: Output, row: int) -> Output:
    """The output of one row of a race, with what all rows cost."""
    lists = ["row_nfe", "tokens", "finished"] + ["draft_nfe"] * (output.draft_nfe is not None)
    tensors = ("sequences", "new_tokens", "attention_mask", "filled")
    changes: dict[str, Any] = {name: [getattr(output, name)[row]] for name in lists}
    changes |= {name: getattr(output, name)[row : row + 1] for name in tensors}
    for name in ("text", "fills"):
        if getattr(output, name) is not None:
            changes[name] = getattr(output, name)[row]
    for name in ("prefix", "logprobs"):
        if getattr(output, name) is not None:
            changes[name] = getattr(output, name).row(row)
    return replace(output, **changes, race_winner=row)


def output_of(model: Any, state: TextState, prompts: Prompts, seconds: float) -> Output:
    """Read the canvas of a state: rows that start at 0 become rows that end at the same column, padded on the left."""
    facts, width = state.facts, int(state.asked.max())
    ids, given = state.canvas.cpu()[:, :width], state.given.cpu()[:, :width]
    column, length, end = torch.arange(width), _column(state.asked), _column(state.end)
    undecided = state.undecided.cpu()[:, :width]
    filled = ~given & (column < length)
    # an end token counts after everything given, and when nothing before it is undecided
    is_end = torch.isin(ids, torch.tensor(facts.eos_token_ids, dtype=torch.int64))
    is_end &= (column >= _column(state.answer_start)) & (column < end) & (undecided.int().cumsum(1) == 0)
    ended = is_end.any(1, keepdim=True)
    last = torch.where(ended, is_end.int().argmax(1, keepdim=True), width)
    counted = filled & ~undecided & (column <= last) & (column < end)
    read = ~undecided & (column < last) & (column < end)  # the end token itself is no text
    holes = facts.hole_id is not None and any(facts.hole_id in row for row in prompts.rows)
    begin = _column(np.array(prompts.starts)) if holes else _column(state.answer_start)
    text: Any = None
    fills: Any = None
    if model.tokenizer is not None:
        text = [_decoded(model, row[wanted]) for row, wanted in zip(ids, read & (column >= begin))]
        if holes:
            fills = [[_decoded(model, row[a:b]) for a, b in _runs(hole)] for row, hole in zip(ids, filled)]
    if state.trace is not None:
        state.trace.ends = np.minimum(state.end, state.asked).tolist()
        name_tokens(state.trace, model.tokenizer)
    sequences = right_aligned(ids, state.asked, facts.fill_token_id).to(state.canvas.device)
    drafting = getattr(state, "drafting", None)
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
        **{name: getattr(state, name).tolist() for name in COUNTED if hasattr(state, name)},
        logprobs=None if state.logprobs is None else _aligned(state.logprobs, state.asked, counted),
        draft_nfe=None if drafting is None else drafting.nfe.tolist(),
    )


def _plain(value: Any) -> Any:
    """A field of an output as data that JSON can hold."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _aligned(found: LogProbs, length: np.ndarray, keep: Tensor) -> LogProbs:
    """In the columns of `Output.sequences`, with nothing where `keep` [B, L] bool is not."""

    def place(tensor: Tensor, fill: Any) -> Tensor:
        return right_aligned(tensor.cpu()[:, : keep.shape[1]].masked_fill(~keep, fill), length, fill)

    return found.placed(place)


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
