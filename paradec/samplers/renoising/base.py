"""The renoising family: a block (canvas) starts as random tokens, and every step decides all its positions anew.

A step evaluates each open canvas. A rule (a masked sampler's `select`) chooses the positions that keep their tokens;
all others become noise. A canvas closes with its best tokens when these no longer change, or at its last step. Then it
is encoded, and the next canvas opens. Rows are independent. A step computes what transformers'
`DiffusionGemmaGenerationMixin.generate` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_at_most, check_bool, check_int, check_number
from paradec.core.family_queries import CanvasQuery
from paradec.core.logprobs import StepLogProbs
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, NotFinite, Proposal, Sampler
from paradec.core.query import Cost, StoreCall
from paradec.core.trace import Notes
from paradec.kernels.token_stats import draw, token_statistics
from paradec.request import Request, request_for
from paradec.samplers.distributions import filter_logits
from paradec.samplers.features.holes import exclude_ends
from paradec.samplers.masked.view import View, run_select
from paradec.samplers.renoising import rules
from paradec.samplers.renoising.start import start_state
from paradec.samplers.renoising.state import NOISE_STREAM, DenoisingState
from paradec.samplers.statistics import top_by_rank

PIECE = 2**22
"""Number of logits per piece when statistics are computed."""


@dataclass(kw_only=True)
class CanvasProposal(Proposal):
    """A proposal of this family. `values` are the best tokens, or the prompt's tokens at prompt positions (which are
    not `available`). Shapes: `R` rows with a denoised canvas, `C` positions, `V` tokens."""

    logits: Tensor
    """[R, C, V]: the model's logits, before the temperature, from which the commit draws and computes embeddings."""
    soften: Callable[[Tensor], Tensor]
    """The model's function from logits [..., V] to embeddings [..., D] for the next step."""
    encoded: np.ndarray
    """[E] int64, on the host: rows whose final tokens were encoded in this step."""


@dataclass(frozen=True)
class CanvasSampler(Sampler):
    """Base of the family. A subclass chooses the rule that keeps tokens (`rule_for`).

    Args:
        max_denoising_steps: N, maximum number of steps of a canvas. A request's `steps`, which is divided among the
            canvases of a row, replaces it.
        t_min, t_max: the temperature falls from t_max, in N equal parts, towards t_min, which it does not reach.
        stability_threshold: number of earlier steps that must have the same best tokens as this one before a canvas may
            close early (before its N-th step).
        confidence_threshold: the mean entropy of the canvas, in nats, must be below this to close early.
        early_stop: False closes no canvas before its N-th step.
        encode_wait: number of steps that a row with a closed canvas may wait to be encoded together with other rows. It
            changes no row's result. 0 evaluates the fewest positions; higher values make fewer calls.

    None is the value of the model's generation_config.json, or transformers' default: 48, 0.4, 0.8, 1, 0.005.
    """

    max_denoising_steps: int | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    early_stop: bool = True
    encode_wait: int = 2

    family: ClassVar[str] = "renoising"
    models: ClassVar[tuple[str, ...]] = ("canvas",)
    uses_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int("max_denoising_steps", self.max_denoising_steps, low=1, none=True)
        check_number("t_min", self.t_min, low=0, high=1e6, none=True)
        check_number("t_max", self.t_max, low=1e-6, high=1e6, none=True)
        if self.t_min is not None and self.t_max is not None:
            check_at_most("t_min", self.t_min, "t_max", self.t_max)
        check_int("stability_threshold", self.stability_threshold, low=0, none=True)
        check_number("confidence_threshold", self.confidence_threshold, low=0, none=True, open_low=True)
        check_bool("early_stop", self.early_stop)
        check_int("encode_wait", self.encode_wait, low=0)

    def rule_for(self, defaults: Mapping[str, Any]) -> Any:
        """Return the masked sampler whose `select` keeps positions. defaults: the model's settings."""
        raise NotImplementedError

    def memory(self) -> Mapping[str, MemorySpec]:
        """Declare the tensors of the open canvas between steps: "window" is C, "hidden" D."""
        return {
            "noisy": MemorySpec(("window",), torch.int64),
            "soft": MemorySpec(("window", "hidden"), None),
            "unchanged": MemorySpec((), torch.int64),
        }

    # ---- start ----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # else the state could be used in inference mode only
    @torch.no_grad()
    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> DenoisingState:
        """Make the state of one request: a `paradec.Request`, or its fields by name. Raises ValueError or TypeError."""
        return start_state(self, model, prompt, request_for(self, request, arguments), attention_mask)

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: DenoisingState) -> list[CanvasQuery]:
        """Build the calls: final tokens to encode, if any, then all open canvases that do not wait for encoding."""
        encoded_rows, rows = state.choose_rows()
        queries = [_build_encode_query(state, encoded_rows)] if len(encoded_rows) else []
        # canvases also attend to the tokens that this step encodes
        visible = np.where(np.isin(np.arange(state.batch), encoded_rows), state.block_start, state.encoded)
        positions = state.positions(rows)
        is_first = not state.canvas_step[rows].any()
        memory = state.memory.read(rows)
        begin = int(state.block_start[rows].min())
        canvas = CanvasQuery(
            rows=rows,
            tokens=memory["noisy"],
            positions=positions,
            store=StoreCall(state.index(rows), None, rows, int(visible[rows].max()), begin, state.commits),
            forwarded=np.full(len(rows), state.width),
            kind="canvas",
            soft_embeddings=None if is_first else memory["soft"],
        )
        return [*queries, canvas]

    def propose(self, state: DenoisingState, outputs: list[Tensor], queries: list[CanvasQuery]) -> CanvasProposal:
        """Propose the best token of every position of open canvases, with statistics. outputs[-1]: logits [R, C, V]."""
        logits, rows, soften = outputs[-1], queries[-1].rows, queries[-1].soften
        if soften is None:
            raise ValueError("the model must set `soften` in the query of the canvases, as models with canvases do")
        positions = state.positions(rows)
        if state.suppressed is not None:
            logits.index_fill_(-1, state.suppressed, -torch.inf)  # in place: only this step reads them
        if state.request.holes_eos_inf and len(state.ends):
            exclude_ends(state, logits, positions < state.index(state.answer_start[rows]).unsqueeze(1))
        if (controls := state.features.get("controls")) is not None:
            logits = controls.adjust_rows(state, logits, rows, positions)
        names = tuple(dict.fromkeys((*state.rule.needs.reads, "confidence", "minus_entropy")))
        statistics, step_logprobs = [], []
        shape, count, texts = logits.shape[:2], max(1, PIECE // logits.shape[-1]), None
        if state.constraint is not None:
            logits, texts = state.constraint.condition(state, rows, positions, logits)
        for piece_index, piece in enumerate(self._tempered_pieces(state, rows, logits, count)):
            piece_tokens = None if texts is None else texts.flatten()[piece_index * count : (piece_index + 1) * count]
            statistics.append(token_statistics(piece, names, piece_tokens))
            if state.logprobs is not None:
                piece_logits, best_tokens = piece.unsqueeze(1), statistics[-1][0].unsqueeze(1)
                step_logprobs.append(StepLogProbs.from_logits(piece_logits, best_tokens, state.logprobs.count))
        tokens = torch.cat([entry[0] for entry in statistics]).view(shape)
        quantities = {name: torch.cat([entry[1][name] for entry in statistics]).view(shape) for name in names}
        is_prompt = state.read(state.is_prompt, rows, positions)
        logprobs = None
        if step_logprobs:
            logprobs = StepLogProbs.combine(
                step_logprobs, lambda parts: torch.cat(parts).view(*shape, *parts[0].shape[2:])
            )
        return CanvasProposal(
            rows=rows,
            values=torch.where(is_prompt, state.read(state.canvas, rows, positions), tokens),
            cost=Cost(queries, state.batch),
            positions=positions,
            scores=quantities[state.rule.needs.score],
            available=~is_prompt,
            quantities=quantities,
            made_at=state.commits,
            kind="+".join(query.kind for query in queries),
            logprobs=logprobs,
            logits=logits,
            soften=soften,
            encoded=queries[0].rows if len(queries) > 1 else rows[:0],
        )

    def _tempered_logits(self, state: DenoisingState, logits: Tensor, temperature: Tensor) -> Tensor:
        request = state.request
        return filter_logits(logits / temperature.unsqueeze(-1), *request.filters)

    def _tempered_pieces(self, state: DenoisingState, rows: np.ndarray, logits: Tensor, count: int) -> Iterator[Tensor]:
        """Yield tempered and filtered logits of the rows' canvases [R, C, V], in pieces [n, V] of `count` positions."""
        temperature = state.temperature(rows).unsqueeze(1).expand(logits.shape[:2]).flatten()
        for piece, piece_temperature in zip(logits.flatten(0, 1).split(count), temperature.split(count), strict=True):
            yield self._tempered_logits(state, piece, piece_temperature)

    def observe(self, state: DenoisingState, proposal: CanvasProposal) -> Notes:
        notes = super().observe(state, proposal)
        notes.blocks = [None] * state.batch
        for row in proposal.rows.tolist():
            notes.blocks[row] = (int(state.block_start[row]), int(state.block_end[row]))
        index, column = (tensor.cpu() for tensor in proposal.available.nonzero(as_tuple=True))
        positions, tokens = (tensor.cpu()[index, column].tolist() for tensor in (proposal.positions, proposal.values))
        notes.drafts = set(zip(proposal.rows[index.numpy()].tolist(), positions, tokens, strict=True))
        return notes

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: DenoisingState, proposal: CanvasProposal) -> Commit:
        """Keep tokens or replace them by noise, and close canvases that are stable or at their last step. Raises
        FloatingPointError for NaN or infinite logits; then nothing is written."""
        state.check_current(proposal)
        rows, undecided = proposal.rows, proposal.available
        previous = state.read(state.canvas, rows, proposal.positions)
        entropy = -proposal.quantities["minus_entropy"].masked_fill(~undecided, 0).sum(1) / undecided.sum(1)
        is_unchanged = (proposal.values == previous).all(1)
        tokens = proposal.values.cpu().numpy()
        entropy, is_unchanged = torch.stack((entropy, is_unchanged.double())).cpu().numpy()
        if not math.isfinite(np.add.reduce(entropy)):  # logits with NaN or +inf make entropy NaN
            broken = rows[~np.isfinite(entropy)]
            raise NotFinite.at_steps(broken, state.row_step[broken])

        # a copy, since the step may still fail
        generator = None if state.generator is None else state.generator.clone_state()
        selected = self._select(state, proposal)
        sampled = self._draw_tokens(state, proposal, selected, generator)
        noise = state.draw_noise(rows, proposal.positions, generator, NOISE_STREAM)
        noisy = torch.where(selected, sampled, torch.where(undecided, noise, proposal.values))

        is_first = state.canvas_step[rows] == 0
        unchanged = np.where((is_unchanged > 0) & ~is_first, state.memory["unchanged"].cpu().numpy()[rows] + 1, 0)
        is_stable = np.zeros(len(rows), bool)
        if state.stability_rule is not None:
            is_stable = state.stability_rule.is_stable(unchanged, entropy)
        is_waiting = state.converged[rows]  # in lock step: canvases that converged earlier
        is_last_step = state.canvas_step[rows] + 1 >= state.steps
        is_closing = is_stable | is_waiting
        is_closing = is_last_step | (is_closing.all() if state.lock_step else is_closing)
        stays_open = ~is_closing & ~is_waiting
        soft = self._soften_rows(state, proposal, stays_open)  # the state is unchanged so far

        if generator is not None and state.generator is not None:
            state.generator.set_state(generator.get_state())
        is_active = torch.as_tensor(~is_waiting, device=undecided.device).unsqueeze(1)
        values = torch.where(is_active, proposal.values, previous)
        tokens = np.where(is_waiting[:, None], previous.cpu().numpy(), tokens) if is_waiting.any() else tokens
        state.canvas[state.index(rows).unsqueeze(1), proposal.positions] = values
        state.memory.write("noisy", rows, torch.where(is_active, noisy, state.noisy(rows)))
        state.memory.write("unchanged", rows, torch.as_tensor(unchanged, device=undecided.device))
        if soft is not None:
            state.memory.write("soft", rows[stays_open], soft)
        final = torch.as_tensor(is_closing, device=undecided.device).unsqueeze(1) & undecided
        if state.logprobs is not None and proposal.logprobs is not None:
            state.logprobs.write(rows, proposal.positions, final, proposal.logprobs, state.row_step[rows])
        self._count(state, proposal)
        state.converged[rows] = is_stable | is_waiting
        state.close(rows[is_closing], tokens[is_closing])
        scores = proposal.quantities["confidence"]
        return Commit(rows, values, proposal.positions, final, scores, proposal.kind, proposal.logprobs)

    def _select(self, state: DenoisingState, proposal: CanvasProposal) -> Tensor:
        rows, undecided, positions = proposal.rows, proposal.available, proposal.positions
        keys, steps = state.keys[state.index(rows)], state.index(state.row_step[rows])

        def draw_uniform() -> Tensor:
            return rng.uniform(keys, steps, positions, 1, rng.POSITION_STREAM).squeeze(-1)

        view = View(
            scores=proposal.scores.masked_fill(~undecided, -torch.inf),
            candidates=undecided,
            tokens=proposal.values,
            positions=positions,
            quantities=proposal.quantities,
            quota=rules.quota(state.rule, undecided.sum(1), state.canvas_step[rows] + 1, state.steps),
            memory={},
            updates={},
            current=state.noisy(rows),
            editable=torch.zeros_like(undecided),
            top=top_by_rank,
            draw=draw_uniform,
            choose=lambda scores, count: top_by_rank(scores + rng.gumbel(draw_uniform()), count),
            ends=state.ends,
        )
        return run_select(state.rule, view) & undecided

    def _draw_tokens(
        self, state: DenoisingState, proposal: CanvasProposal, selected: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Draw tokens [R, C] int64 where `selected` (undefined elsewhere); with a generator, as transformers does."""
        rows, sampled = proposal.rows, proposal.values.clone()
        if generator is not None:
            (logits,) = self._tempered_pieces(state, rows, proposal.logits, selected.numel())
            p = logits.softmax(-1, dtype=torch.float32).to(generator.device)
            return torch.multinomial(p, 1, generator=generator).view(sampled.shape).to(sampled.device)
        keys, steps = state.keys[state.index(rows)], state.index(state.row_step[rows])
        uniform = rng.uniform(keys, steps, proposal.positions, 1, rng.TOKEN_STREAM).squeeze(-1)
        temperature = state.temperature(rows).unsqueeze(1).expand(selected.shape)
        row, column = selected.nonzero(as_tuple=True)
        count = max(1, PIECE // proposal.logits.shape[-1])
        for index in zip(row.split(count), column.split(count), strict=True):
            logits = self._tempered_logits(state, proposal.logits[index], temperature[index])
            p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))  # as in transformers
            sampled[index] = draw(p, uniform[index])
        return sampled if state.constraint is None else state.constraint.draw(state, proposal.positions, sampled)

    def _soften_rows(self, state: DenoisingState, proposal: CanvasProposal, stays_open: np.ndarray) -> Tensor | None:
        """Compute embeddings [N, C, D] for the next step of rows whose canvas `stays_open` [R] bool."""
        if not stays_open.any():
            return None
        rows, index = proposal.rows[stays_open], torch.as_tensor(stays_open, device=proposal.logits.device)
        logits = proposal.logits if stays_open.all() else proposal.logits[index]
        # one product per row: each product reads all embeddings
        embeddings = [proposal.soften(piece) for piece in self._tempered_pieces(state, rows, logits, logits.shape[1])]
        soft = torch.stack(embeddings).to(state.canvas.device)
        if state.has_prompt_in_canvas:  # no predictions may enter prompt positions
            soft = soft.masked_fill(~proposal.available[index.to(soft.device)].unsqueeze(-1), 0)
        return soft

    def _count(self, state: DenoisingState, proposal: CanvasProposal) -> None:
        rows, encoded_rows = proposal.rows, proposal.encoded
        state.count(proposal.cost)
        state.commits += 1
        state.encoded[encoded_rows] = state.block_start[encoded_rows]
        state.encoder_calls[encoded_rows] += 1
        state.num_waits[np.setdiff1d(state.rows, rows)] += 1
        state.num_waits[rows] = 0
        state.denoising_calls[rows] += state.running[rows] & ~state.converged[rows]
        state.canvas_step[rows] += 1
        state.row_step[rows] += 1


def _build_encode_query(state: DenoisingState, rows: np.ndarray) -> CanvasQuery:
    begin, end = state.encoded[rows], state.block_start[rows]
    column = begin[:, None] + np.arange((end - begin).max())
    valid = column < end[:, None]
    device = state.canvas.device
    positions = torch.as_tensor(np.minimum(column, end[:, None] - 1), device=device)
    slots = torch.as_tensor(np.where(valid, column, -1), device=device)
    images = [state.images[row] for row in rows if state.encoded[row] == 0 and state.images]
    embeddings = [image for image in images if image is not None]
    return CanvasQuery(
        rows=rows,
        tokens=state.read(state.canvas, rows, positions),
        positions=positions,
        wanted=torch.empty((len(rows), 0), dtype=torch.int64, device=device),
        valid=None if valid.all() else torch.as_tensor(valid, device=device),
        store=StoreCall(state.index(rows), slots, rows, int(end.max()), int(begin.min()), state.commits),
        forwarded=end - begin,
        kind="encode",
        images=torch.cat(embeddings) if embeddings else None,
    )
