"""What all methods for causal models share: the start of a request, and how a commit writes tokens.

Three kinds of methods share it as siblings. Those that draft verify what they drafted in one forward
(`paradec.samplers.causal.chain`): a window of their own drafts (`paradec.samplers.causal.window`), or a chain or tree
of another model's (`paradec.samplers.causal.drafting`). ZipAR (`paradec.samplers.causal.zipar`) drafts nothing. Rows
are independent: each commits its own count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, shown
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import CausalQuery
from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.memory import Memory
from paradec.core.prompts import Prompts, encode
from paradec.core.protocol import NotFinite, Proposal, Sampler
from paradec.core.query import Cost
from paradec.core.trace import Notes
from paradec.models.images.grid import Grid
from paradec.request import Request, request_for
from paradec.samplers.causal.state import AnswerTexts, CausalState
from paradec.samplers.guidance import guided
from paradec.samplers.starting import keys_of, padded, stop_strings_of, suppressed_ids, trace_of

__all__ = ["CausalSampler", "CausalState", "check_causal", "negative_rows", "proposed", "read_logits"]

DRAFT_STREAM, NOISE_STREAM = 2, 3
"""Draws that make drafts, and noise that belongs to a position; streams 0 and 1 are named in `paradec.core.rng`.
Verification draws from TOKEN_STREAM."""


@dataclass(frozen=True)
class CausalSampler(Sampler):
    """Base of the methods for causal models. A subclass says what a step evaluates (`query`), what could become final
    (`propose`), and how much of it does (`commit`)."""

    family: ClassVar[str] = "draft_verify"
    models: ClassVar[tuple[str, ...]] = ("text", "image")
    unsupported: ClassVar[tuple[str, ...]] = (
        *("cache", "prefix", "keep_prefix", "share_prefix", "attention", "suffix", "blocks", "block_length", "steps"),
        *("rng", "confidence_eos_eot_inf", "stop"),
    )
    request_defaults: ClassVar[Mapping[str, Any]] = {"temperature": 1.0}
    uses_steps: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    """Whether the output has the distribution of token-by-token decoding."""
    orders: ClassVar[bool] = False
    """Whether the method decodes models of any order too (`paradec.samplers.causal.any_order`)."""
    state_type: ClassVar[type[CausalState]] = CausalState

    # ---- start ----------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model of another kind, ValueError unless it is causal and predicts the next token."""
        super().check_model(model)
        if getattr(model, "any_order", False):
            from paradec.samplers.causal import any_order

            any_order.check(self, model)
        else:
            check_causal(self.name, model)

    @torch.inference_mode(False)  # else only inference mode could go on with the state
    @torch.no_grad()
    def start(
        self,
        model: Any,
        prompt: Any,
        request: Request | None = None,
        *,
        attention_mask: Any = None,
        grid: Grid | None = None,
        negative_prompt: Any = None,
        **arguments: Any,
    ) -> CausalState:
        """Make the state of one request.

        Args:
            model: from `paradec.wrap(..., topology="causal", prediction="shifted")`, an image model, or one of any
                order, whose prompts hold masks.
            prompt, attention_mask: as in `paradec.generate`; rows may differ in length.
            request: a `paradec.Request`; or its fields by name instead, where `temperature` is 1 by default. At
                temperature 0 the result is that of greedy decoding.
            grid: what follows the prompt, for image models.
            negative_prompt: the unconditional branch's prompts under guidance: ids for every row, or for all; by
                default the last id of the prompt.

        Raises:
            TypeError: a model of another kind. ValueError: one that is not causal, or an argument out of its range; the
                message names it.
        """
        self.check_model(model)
        request = request_for(self, request, arguments)
        facts = model.facts
        encoded = encode(model, prompt, attention_mask, request.chat)
        if getattr(model, "any_order", False):
            from paradec.samplers.causal import any_order

            return any_order.start(self, model, encoded, request, grid, negative_prompt)
        if request.order is not None:
            raise ValueError(f"order={shown(request.order)} has no meaning for {facts.name}: its order is the text's")
        prompts = encoded.rows
        lengths = np.array([len(row) for row in prompts], np.int64)
        new = self._new_tokens(model, grid, request.max_new_tokens)
        contexts, shift = prompts, np.zeros((1, len(prompts)), np.int64)
        if request.guidance_scale != 1:
            negative = negative_rows(model, prompts, negative_prompt)
            shift = np.stack((shift[0], np.array([len(row) for row in negative]) - lengths))
            contexts = [*prompts, *negative]
            if not model.pads and shift.any():
                raise ValueError(f"{facts.name} takes no padding: negative_prompt must be as long as the prompt")
        elif negative_prompt is not None:
            raise ValueError("negative_prompt has no effect without guidance; give guidance_scale")
        longest = int((lengths + shift).max()) + new
        facts.check_length(longest, new)
        state = self._state(model, request, encoded, contexts, shift, lengths, lengths + new, self._width(new), grid)
        state.store = model.make_store(len(contexts), longest) if model.supports_store else None
        filled = [[(length, length + new)] for length in lengths.tolist()]
        state.trace = trace_of(self, request, state.canvas, state.length, score="probability", filled=filled)
        self._open(state, model)
        return state

    def _state(
        self,
        model: Any,
        request: Request,
        encoded: Prompts,
        contexts: list[list[int]],
        shift: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        width: int,
        grid: Grid | None = None,
        kind: type[CausalState] | None = None,
    ) -> CausalState:
        """The state before its first drafts, of checked prompts.

        Args:
            contexts: what is in each row of each branch. shift: as `CausalState.shift`.
            starts, ends: [B] int64: where answers begin and end. width: of the window.
        """
        facts, device, prompts = model.facts, model.device, encoded.rows
        keys, _ = keys_of(request, prompts, device, encoded.before)
        allowed, guess = self._allowed(facts, request, grid, device)
        texts = stop_strings_of(request, model)
        check_int("logprobs", request.logprobs, low=0, high=facts.vocab_size, none=True)
        batch, longest = len(prompts), int((ends + shift).max())
        dtype = torch.promote_types(getattr(model, "dtype", torch.float32), torch.float32)
        state = (kind or self.state_type)(
            batch=batch,
            memory=Memory(
                self.memory(), batch, {"vocab": facts.vocab_size, "position": longest, "slot": width}, device, dtype
            ),
            facts=facts,
            request=request.without_objects(),
            pads=model.pads,
            context=torch.as_tensor(padded(contexts, longest, facts.fill_token_id), device=device),
            shift=shift,
            prompt_length=starts,
            length=ends,
            keys=keys,
            width=width,
            guess=(guess / guess.sum()).to(dtype),
            guess_ids=guess.nonzero().squeeze(1),
            allowed=allowed,
            ends=torch.tensor(facts.eos_token_ids if grid is None and request.eos_early_stop else (), device=device),
            grid=grid,
            layout=None if grid is None else grid.layout.to(device),
        )
        state.texts = AnswerTexts(texts, model.tokenizer, batch) if texts else None
        if request.constraint is not None:
            from paradec.samplers.causal.constrained import TokenMasks  # for few requests

            state.masks = TokenMasks.of(self, model, state)
        if request.logprobs is not None:
            state.logprobs = LogProbs.empty(batch, longest, request.logprobs, device)
        if request.rollout:
            from paradec.samplers.causal.rollouts import RecordedTokens  # likewise

            state.rollout = RecordedTokens.of(self, model, state)
        return state

    def _new_tokens(self, model: Any, grid: Grid | None, new: int | None) -> int:
        if grid is not None:
            if new is not None and new != grid.length:
                raise ValueError(f"max_new_tokens={shown(new)}: the grid has {grid.length} tokens; leave it out")
            return grid.length
        new = model.default_max_new_tokens if new is None else new
        check_int("max_new_tokens", new, low=1)
        return new

    def _width(self, new: int) -> int:
        """Slots of a row's window, for an answer of so many tokens."""
        return 1

    def _open(self, state: CausalState, model: Any) -> None:
        """Make ready for the first step."""

    def _allowed(
        self, facts: ModelFacts, request: Request, grid: Grid | None, device: torch.device
    ) -> tuple[Tensor | None, Tensor]:
        """[V] bool of the tokens that may be drawn (None when all may), and [V] float64, 1 where a guess may fall."""
        allowed = torch.ones(facts.vocab_size, dtype=torch.bool) if grid is None else grid.allowed(facts.vocab_size)
        allowed[suppressed_ids(request, facts)] = False
        if facts.mask_token_id is not None:
            allowed[facts.mask_token_id] = False
        if not allowed.any():
            raise ValueError("suppress_tokens leaves no token that may be drawn")
        allowed = allowed.to(device)
        return None if allowed.all() else allowed, allowed.double()

    def observe(self, state: CausalState, proposal: Proposal) -> Notes:
        notes = super().observe(state, proposal)
        if state.drafting is not None:
            notes.draft_nfe = state.draft_nfe.tolist()
        return notes

    # ---- commit ---------------------------------------------------------------------------------------------------

    def _written(
        self, state: CausalState, proposal: Proposal, tokens: Tensor, count: Tensor
    ) -> tuple[Tensor, np.ndarray]:
        """Tokens that each row makes final, [R, 1] on the device and [R] on the host, of tokens [R, W] of which count
        [R, 1] are good; and the end of rows with an end token or a stop string.

        Raises:
            FloatingPointError: NaN or infinite logits. Nothing is written then.
        """
        ended = torch.zeros_like(count, dtype=torch.bool)
        if len(state.ends):
            slot = torch.arange(tokens.shape[1], device=tokens.device)
            is_end = torch.isin(tokens, state.ends) & (slot < count)
            ended = is_end.any(1, keepdim=True)
            count = torch.where(ended, is_end.int().argmax(1, keepdim=True) + 1, count)
        # a distribution without an allowed token is NaN, whatever the others' logits
        healthy = (proposal.quantities["top_logit"].isfinite(), proposal.scores.isfinite())
        broken = ~(healthy[0].all(1, keepdim=True) & healthy[1].all(1, keepdim=True))
        columns = [count, ended, broken]
        if state.drafting is not None and state.drafting.broken is not None:
            columns.append(state.drafting.broken[torch.as_tensor(proposal.rows)].unsqueeze(1))
        flags = len(columns)
        if state.texts is not None:
            columns.append(tokens)
        # the one transfer of the step
        found = torch.cat(columns, 1).T.cpu().numpy()
        written, ends, failed, *drafter = found[:flags]
        if failed.any():
            rows = proposal.rows[failed > 0]
            raise NotFinite.at_steps(rows, state.row_step[rows])
        if drafter and drafter[0].any():
            raise NotFinite("the drafter returned NaN or infinite logits", proposal.rows[drafter[0] > 0])
        if state.texts is not None:
            written, stops = state.texts.cut(proposal.rows, found[flags:].T, written)
            state.stopped[proposal.rows[stops]] = True
            ends = ends | stops
            count = torch.as_tensor(written, device=count.device).unsqueeze(1)
        finished = proposal.rows[ends > 0]
        state.end[finished] = state.committed[finished] + written[ends > 0]
        made = np.zeros(state.batch, np.int64)
        made[proposal.rows] = written
        state.last_accepted = made
        state.accepted.append(made)
        return count, written

    def _write(self, state: CausalState, positions: Tensor, rows: np.ndarray, tokens: Tensor) -> None:
        """Write tokens [R, W] at positions [R, W] of every branch; -1 writes nothing. A row's positions are distinct,
        those past its end last."""
        # a tree can be deeper than the canvas is long: columns that come around again would undo what is written
        columns = state.context.shape[1]
        positions, tokens = positions[:, :columns], tokens[:, :columns]
        begin = torch.as_tensor(state.every(rows).reshape(state.branches, -1, 1) * columns, device=tokens.device)
        shift = torch.as_tensor(state.shift[:, rows, None], device=tokens.device)
        # slots past the end wrap around, so that the positions of a row are distinct and can be written to
        place, context = (positions + shift) % columns + begin, state.context.view(-1)
        context[place] = torch.where(tokens >= 0, tokens, context.take(place))

    def _note(self, state: CausalState, proposal: Proposal, tokens: Tensor, selected: Tensor) -> StepLogProbs | None:
        """Keep the log-probabilities of tokens [R, W] that are written where `selected`, if they are asked for. The
        proposal has them of the whole vocabulary in "log_p" [R, W, V], for rollouts "logits"."""
        if state.rollout is not None:
            state.rollout.note(state, proposal, tokens, selected)
        if state.logprobs is None:
            return None
        found = StepLogProbs.of_log(proposal.quantities["log_p"], tokens.clamp(min=0), state.logprobs.count)
        state.logprobs.write(proposal.rows, proposal.positions, selected, found, state.row_step[proposal.rows])
        return found

    def _advance(self, state: CausalState, proposal: Proposal) -> None:
        """Count a step that has written its tokens."""
        state.count(proposal.cost)
        state.row_step[proposal.rows] += 1
        state.commits += 1


def check_causal(name: str, model: Any) -> None:
    """Raise ValueError unless the model is causal and predicts the next token."""
    facts = model.facts
    if (facts.topology, facts.prediction) != ("causal", "shifted"):
        raise ValueError(
            f"sampler {name!r} needs a model with topology='causal' and prediction='shifted'; {facts.name} is "
            f"{facts.topology!r}, {facts.prediction!r}"
        )


def negative_rows(model: Any, prompts: list[list[int]], given: Any) -> list[list[int]]:
    """The unconditional branch's prompt of every row."""
    if given is None:
        return [row[-1:] for row in prompts]
    rows = given.rows if isinstance(given, Prompts) else encode(model, given).rows
    if len(rows) == 1:
        rows = rows * len(prompts)
    if len(rows) != len(prompts):
        raise ValueError(f"negative_prompt has {len(rows)} rows for {len(prompts)} prompts; give one, or one per row")
    return rows


def proposed(
    state: CausalState,
    queries: list[CausalQuery],
    tokens: Tensor,
    positions: Tensor,
    scores: Tensor,
    available: Tensor,
    quantities: dict[str, Tensor],
) -> Proposal:
    """What a step proposes for the running rows; see `Proposal`."""
    return Proposal(
        rows=state.rows,
        values=tokens,
        cost=Cost(queries, state.batch),
        positions=positions,
        scores=scores,
        available=available,
        quantities=quantities,
        made_at=state.commits,
        kind=queries[0].kind,
    )


def read_logits(state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Tensor:
    """Logits [R, W, V] of the running rows, guided, in the order of `state.rows`."""
    if state.branches == 2:
        outputs = [guided(logits, state.request.guidance_scale) for logits in outputs]
    if len(outputs) == 1:
        return outputs[0]
    order = np.argsort(np.concatenate([query.index for query in queries]))
    return torch.cat(outputs)[torch.as_tensor(order, device=outputs[0].device)]
