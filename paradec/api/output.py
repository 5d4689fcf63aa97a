"""`Output`, the result of `generate` and `infill`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.attention.sparsed import AttentionCost
from paradec.caches.cost import CacheCost
from paradec.caches.kept_prefix import KeptPrefix
from paradec.core.checks import format_count, throughput_unit
from paradec.core.logprobs import LogProbs
from paradec.core.prompts import align_right
from paradec.core.rollouts import Rollout
from paradec.core.trace import Trace, get_drawing

MAX_SHOWN = 100
"""Maximum number of characters of a text in an output's `repr`."""


@dataclass(repr=False)
class Output:
    """Result of `generate` and `infill`. `B` rows, prompts of up to `P` tokens, `N` new tokens (appended masks).

    Attributes (a selection, for `help`):
        filled: [B, P + N] bool, positions of `sequences` that were masks.
        row_nfe: forward calls that evaluated each row.
        row_forwards: rows evaluated, summed over all calls (a guidance pair counts 2).
    """

    text: str | list[str] | None
    """The answer, without its end token but with its stop string. For a prompt with masks: the completed text, or a
    chat's completed last turn. With `after` in the constraint: the text after the marker. A string for one prompt, a
    list for several rows, None without a tokenizer."""
    sequences: Tensor
    """[B, P + N] int64: prompts (padded on the left to P) and answers; `sequences[:, P:]` is `new_tokens`."""
    new_tokens: Tensor
    """[B, N] int64: answers, padded after their end token. If a callback or an interrupt ended the decoding early,
    undecided positions hold the mask id, or in an open canvas the best tokens of its last step."""
    attention_mask: Tensor
    """[B, P + N] int64: 0 on the padding of prompts."""
    filled: Tensor
    """[B, P + N] bool: positions of `sequences` that were masks: holes of the prompt, and the new tokens."""
    row_nfe: list[int]
    """Forward calls that evaluated each row."""
    row_forwards: int
    """Rows evaluated, summed over all calls (a guidance pair counts 2)."""
    forwarded_tokens: int
    """Positions evaluated, summed over all rows, without padding."""
    tokens: list[int]
    """Number of tokens filled in each row, including its end token and without the padding after it."""
    finished: list[bool]
    """Whether each row ended with an end token or a stop string, or by a rule of `stop`. False for an answer that fills
    `max_new_tokens` without an end token, even if it is a complete text of a `constraint`."""
    seconds: float
    """Wall time of the decoding loop."""
    fills: list[str] | list[list[str]] | None = None
    """For prompts with masks: the text of each run of filled positions, in reading order, per row."""
    reasoning: str | list[str] | None = None
    """With `after` in the constraint: the free text before the marker."""
    reasoning_tokens: list[int] | None = None
    """Number of tokens of `reasoning` and the marker in each row; `tokens` counts them too."""
    recorded_trace: Trace | None = None
    """With `trace=True`: the recorded steps; else None, where `trace` raises an error."""
    cost: CacheCost | None = None
    """Full and partial forwards and evaluated positions of each row, and the bytes of cached keys and values."""
    attention: AttentionCost | None = None
    """Cost of sparse attention; None with dense attention."""
    prefix: KeptPrefix | None = None
    """With `keep_prefix`: keys and values of prompts and answers, for the `prefix` of the next request."""
    encoder_calls: list[int] | None = None
    """On models with canvases: number of each row's forward calls that encoded final tokens."""
    denoising_calls: list[int] | None = None
    """On models with canvases: number of each row's forward calls that its open canvas needed. (With
    `rng="reference"`, all rows run in lock step, and a call may include rows that do not need it.)"""
    draft_nfe: list[int] | None = None
    """Forward calls of the drafter for each row; None without a drafter."""
    log_weight: list[float] | None = None
    """For masked models with a `constraint` and a temperature: logarithm of each row's weight. The weight is the
    product over all steps of Z before the step / Z after it, where Z is the probability of the texts that match the
    constraint. Answers that are resampled by weight approach the model's own distribution of these texts, decoded in
    the same steps. The mean weight estimates the model's probability of a matching text."""
    logprobs: LogProbs | None = None
    """With `logprobs`: log-probabilities of every filled position of `sequences`, from the step that wrote it."""
    rollout: Rollout | None = None
    """With `rollout`: every decision, its step and log-probability, over the whole canvas."""
    index: int | None = None
    """From `generate_many`: number of the prompt, from 0."""
    id: Any = None
    """From `generate_many`: the caller's name of the prompt."""
    error: Exception | None = None
    """From `generate_many`: why the answer is not complete; the other fields hold the tokens decoded so far."""

    @property
    def trace(self) -> Trace:
        """The recorded steps. Raises NoTraceError without `trace=True`."""
        return check_recorded(self.recorded_trace)

    @property
    def nfe(self) -> int:
        """Number of function evaluations: the maximum of `row_nfe`."""
        return max(self.row_nfe)

    @property
    def reused(self) -> list[int]:
        """Number of each row's positions that were not evaluated, because an earlier request or another row had
        computed their keys and values."""
        return [0] * len(self.tokens) if self.cost is None else self.cost.reused_tokens

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens divided by `sum(row_nfe)`. Padding after the end does not count."""
        return sum(self.tokens) / max(1, sum(self.row_nfe))

    @property
    def tokens_per_denoising_call(self) -> list[float] | None:
        """On models with canvases: answer tokens of each row divided by `denoising_calls`. (transformers'
        `tokens_per_forward` counts all tokens of whole canvases except the padding id.)"""
        if self.denoising_calls is None:
            return None
        return [tokens / max(1, calls) for tokens, calls in zip(self.tokens, self.denoising_calls, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data: every field that is not None, except `prefix`, with tensors as lists; also the numbers
        `nfe` and `tokens_per_forward`."""
        names = {"recorded_trace": "trace"}
        values = {
            names.get(entry.name, entry.name): getattr(self, entry.name)
            for entry in fields(self)
            if entry.name != "prefix"
        }
        data = {name: _to_json(value) for name, value in values.items() if value is not None}
        return data | {"nfe": self.nfe, "tokens_per_forward": self.tokens_per_forward}

    def __repr__(self) -> str:
        rows, end = len(self.tokens), sum(self.finished)
        texts = [] if self.text is None else [self.text] if isinstance(self.text, str) else self.text
        quoted = [repr(text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "...") for text in texts[:2]]
        answers = ", ".join(entry if len(entry) <= 2 * MAX_SHOWN else "..." for entry in quoted) or "no text"
        answers += f", ... {len(texts) - 2} more" if len(texts) > 2 else ""
        row_text = "" if rows == 1 else f"{rows} rows, "
        ended = "finished" if end == rows else "not finished" if not end else f"{end} finished"
        extras = ", trace" * (self.recorded_trace is not None) + ", prefix" * (self.prefix is not None)
        return (
            f"Output({answers}: {row_text}{format_count(sum(self.tokens), 'token')}, "
            f"{format_count(self.nfe, 'forward')}, {self.tokens_per_forward:.1f} {throughput_unit(rows)}, {ended}, "
            f"{self.seconds:.2f} s{extras})"
        )

    def _repr_html_(self) -> str:
        return str(get_drawing("output")(self))


class NoTraceError(ValueError, AttributeError):
    """No trace was recorded. An AttributeError, so that `hasattr(output, "trace")` is False."""


def check_recorded(trace: Trace | None) -> Trace:
    """Return the trace of an output. Raises NoTraceError for None."""
    if trace is None:
        raise NoTraceError("no trace was recorded; request it with trace=True")
    return trace


def _to_json(value: Any) -> Any:
    """Convert a field of an output to JSON data."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def align_logprobs(logprobs: LogProbs, length: np.ndarray, keep: Tensor) -> LogProbs:
    """Move log-probabilities to the columns of `Output.sequences`; remove them where `keep` [B, L] bool is False."""

    def align(tensor: Tensor, fill: Any) -> Tensor:
        return align_right(tensor.cpu()[:, : keep.shape[1]].masked_fill(~keep, fill), length, fill)

    return logprobs.map_columns(align)


def find_runs(flags: Tensor) -> list[tuple[int, int]]:
    """List start and end (exclusive) of every run of True in flags [L]."""
    edges = torch.cat((flags.new_zeros(1), flags, flags.new_zeros(1))).int().diff()
    return list(zip((edges > 0).nonzero().squeeze(1).tolist(), (edges < 0).nonzero().squeeze(1).tolist(), strict=True))
