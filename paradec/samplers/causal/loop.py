"""The loop of the methods for causal models: `start`, `query`, `propose`, `commit`. Read `sjd.py` first.

With the key/value store, a step evaluates the last final token and the window of drafts after it, and reads the target
distribution of every slot. `commit` verifies the drafts up to the first rejection (`verify`). It writes the accepted
drafts and one more token, drafts the next window (`draft_window`), and clears rejected drafts from the store. Rows are
independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, short_repr
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import CausalQuery
from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.memory import Memory, MemorySpec
from paradec.core.prompts import Prompts, encode
from paradec.core.protocol import Commit, NotFinite, Proposal, Sampler
from paradec.core.trace import Notes
from paradec.models.images.grid import Grid
from paradec.request import Request, request_for
from paradec.samplers.causal.state import CausalState, Spans, read_logits
from paradec.samplers.causal.trees import drop_nodes_past_end, make_step_query
from paradec.samplers.causal.window import UNIFORM, Branches, DraftWindow, VerifiedWindow, propose_path, propose_window
from paradec.samplers.distributions import probability
from paradec.samplers.features.rollouts import RecordedRollout
from paradec.samplers.features.stop_strings import StopStrings
from paradec.samplers.features.token_controls import TokenControls
from paradec.samplers.masked.blocks import NEVER
from paradec.samplers.start import make_row_keys, make_trace, pad_rows, suppressed_ids

WINDOW = 16
"""Default number of slots, as in SJD's scripts."""


@dataclass(frozen=True)
class CausalSampler(Sampler):
    """Base of the methods for causal models. A subclass implements `verify` (usually with `accept`) and
    `draft_window`.

    For every draft the state has the distribution q that the draft was drawn from. p is the target distribution, with
    temperature, filters, guidance and constraints. If `accept` is min(1, p / q), the output has the distribution of
    token-by-token decoding.

    Args:
        window: slots evaluated at once: the next token and `window - 1` drafts. 1 is token-by-token decoding. None
            means 16, and for models of any order all slots.
    """

    window: int | None = None

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
    """Whether the method also decodes models of any order (`paradec.samplers.causal.any_order`)."""
    guesses: ClassVar[bool] = False
    """Whether slots that are new to the window are filled with guesses."""
    embedding_source: ClassVar[str] = ""
    """Vectors by which `accept` compares tokens: "token_embeddings", "codebook" or "" (none)."""
    state_type: ClassVar[type[CausalState]] = CausalState

    def __post_init__(self) -> None:
        check_int("window", self.window, low=1, none=True)

    # ---- the method -----------------------------------------------------------------------------------------------

    def accept(self, window: DraftWindow) -> Tensor:
        """Return the probability [R, W] that each draft is accepted if all drafts before it are accepted."""
        raise NotImplementedError

    def verify(self, state: CausalState, proposal: Proposal) -> VerifiedWindow:
        """Return the window's tokens and the number of accepted drafts."""
        raise NotImplementedError

    def open(self, state: CausalState, model: Any) -> None:
        """Fill the first window."""
        raise NotImplementedError

    def draft_window(self, state: CausalState, proposal: Proposal, verified: VerifiedWindow, count: Tensor) -> None:
        """Draft the next window of the proposal's rows, which begins `count` [R, 1] tokens later."""
        raise NotImplementedError

    @property
    def branches(self) -> Branches | None:
        """Drafts in addition to the window, evaluated in the same forward; None: there are no such drafts."""
        return None

    def num_slots(self, model: Any, num_new: int) -> int:
        """Return the number of slots of a row's window, for an answer of `num_new` tokens."""
        return min(self.window or WINDOW, num_new)

    def memory(self) -> dict[str, MemorySpec]:
        return {
            "drafts": MemorySpec(("slot",), torch.int64, reset="sequence"),
            "draft_source": MemorySpec(("slot",), torch.int64, UNIFORM, reset="sequence"),
            "draft_distribution": MemorySpec(("slot", "vocab"), None, reset="sequence"),
        }

    # ---- start ----------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model of another kind, ValueError unless it is causal (and predicts the next token) or
        of any order."""
        super().check_model(model)
        if getattr(model, "any_order", False):
            from paradec.samplers.causal import any_order

            any_order.check(self, model)
        else:
            check_causal(self.name, model)

    def check_request(self, model: Any, grid: Grid | None) -> None:
        """Raise ValueError if the settings do not fit the model or its grid."""

    @torch.inference_mode(False)  # else the state could be used in inference mode only
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
        """As `Sampler.start`.

        model: a causal model, an image model, or a model of any order, which fills the masks of its prompts.
        prompt, attention_mask: as in `paradec.generate`; rows may differ in length.
        request: temperature is 1 by default; 0 is greedy decoding.
        grid: layout of the image tokens after the prompt, for image models.
        negative_prompt: prompts of the unconditional branch under guidance: ids for each row, or one list for all rows;
            the default is the last id of each prompt."""
        self.check_model(model)
        self.check_request(model, grid)
        request = request_for(self, request, arguments)
        facts = model.facts
        encoded = encode(model, prompt, attention_mask, request.chat)
        if getattr(model, "any_order", False):
            from paradec.samplers.causal import any_order

            return any_order.start(self, model, encoded, request, grid, negative_prompt)
        if request.order is not None:
            raise ValueError(f"order={short_repr(request.order)} must be None: {facts.name} decodes from left to right")
        prompts = encoded.rows
        lengths = np.array([len(row) for row in prompts], np.int64)
        num_new = num_new_tokens(model, grid, request.max_new_tokens)
        contexts, shift = prompts, np.zeros((1, len(prompts)), np.int64)
        if request.guidance_scale != 1:
            negative = encode_negative_prompt(model, prompts, negative_prompt)
            shift = np.stack((shift[0], np.array([len(row) for row in negative]) - lengths))
            contexts = [*prompts, *negative]
            if not model.pads and shift.any():
                raise ValueError(f"negative_prompt must be as long as the prompt: {facts.name} supports no padding")
        elif negative_prompt is not None:
            raise ValueError("negative_prompt has no effect without guidance; give guidance_scale")
        longest = int((lengths + shift).max()) + num_new
        facts.check_length(longest, num_new)
        width = self.num_slots(model, num_new)
        state = self.make_state(model, request, encoded, contexts, shift, lengths, lengths + num_new, width, grid)
        state.store = model.make_store(len(contexts), longest) if model.supports_store else None
        filled = [[(length, length + num_new)] for length in lengths.tolist()]
        state.trace = make_trace(self, request, state.canvas, state.length, score="probability", filled=filled)
        state.embeddings = read_embeddings(self, model)
        self.open(state, model)
        return state

    def make_state(
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
        state_type: type[CausalState] | None = None,
    ) -> CausalState:
        """Make a state without drafts from checked prompts.

        contexts: ids of each row of each branch. shift: as `CausalState.shift`.
        starts, ends: [B] int64: begin and end of the answers. width: window slots. state_type: class of the state."""
        facts, device, prompts = model.facts, model.device, encoded.rows
        keys, _ = make_row_keys(request, prompts, device, encoded.copy_indices)
        allowed = allowed_tokens(facts, request, grid)
        guess = allowed.to(device).double()
        features: dict[str, Any] = {}
        if request.stop_strings:
            features["stop_strings"] = StopStrings.from_request(request, model, starts)
        check_int("logprobs", request.logprobs, low=0, high=facts.vocab_size, none=True)
        batch, longest = len(prompts), int((ends + shift).max())
        dtype = torch.promote_types(getattr(model, "dtype", torch.float32), torch.float32)
        state = (state_type or self.state_type)(
            batch=batch,
            memory=Memory.allocate(
                self.memory(), batch, {"vocab": facts.vocab_size, "position": longest, "slot": width}, device, dtype
            ),
            facts=facts,
            request=request.without_objects(),
            pads=model.pads,
            context=torch.as_tensor(pad_rows(contexts, longest, facts.fill_token_id), device=device),
            shift=shift,
            prompt_length=starts,
            length=ends,
            keys=keys,
            width=width,
            guess=(guess / guess.sum()).to(dtype),
            guess_ids=guess.nonzero().squeeze(1),
            allowed=None if allowed.all() else allowed.to(device),
            ends=torch.tensor(facts.eos_token_ids if grid is None and request.eos_early_stop else (), device=device),
            grid=grid,
            layout=None if grid is None else grid.layout.to(device),
        )
        state.features = features
        if (controls := TokenControls.from_request(self, model, request, state.in_order)) is not None:
            features["controls"] = controls
        if request.constraint is not None:
            from paradec.samplers.features.constraints import CausalConstraint  # few requests need it

            features["constraint"] = CausalConstraint.from_request(self, model, state)
        if request.logprobs is not None:
            state.logprobs = LogProbs.empty(batch, longest, request.logprobs, device)
        if request.rollout:
            features["rollout"] = RecordedRollout.from_request(self, model, state)
        return state

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: CausalState) -> list[CausalQuery]:
        """Evaluate the last final token and the drafts; in a row's first step, or without a store, the whole row."""
        if self.branches is not None and (tree := self.branches.layout(state)) is not None:
            return [make_step_query(state, tree, drop_nodes_past_end(state, tree, self.branches.nodes(state, tree)))]
        rows, committed = state.rows, state.committed[state.rows]
        drafts = state.memory.read(rows)["drafts"]
        is_first = state.row_step[rows] == 0
        begin = np.where(is_first, state.reused[rows], committed - 1)
        stop = committed - 1 + state.num_evaluated()
        spans = Spans(rows, drafts, begin, stop, committed - 1, state.width, is_first)
        return state.make_queries(state.store, state.pads, spans)

    def propose(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        """Compute the target distribution of every slot and draw a token from it. outputs: logits [branches * R, W, V],
        one tensor per query.

        Quantities: "p" [R, W, V]; "uniform" [R, W, 2], to verify a draft and to resample a rejected draft; "guesses"
        [R, 2 W], uniform numbers for the next guesses; "top_logit" [R, W]. With branches: "drafts" [R, W] of the
        selected path. With `logprobs`: "log_p" [R, W, V]. With `rollout`: "logits" [R, W, V] without constraint."""
        logits = read_logits(state, outputs, queries)
        if self.branches is not None and (tree := self.branches.layout(state)) is not None:
            return propose_path(state, self.branches, tree, logits, queries)
        return propose_window(state, logits, queries, self.guesses)

    def commit(self, state: CausalState, proposal: Proposal) -> Commit:
        """Verify the drafts, write the accepted ones and one more token, and draft the next window. Raises
        FloatingPointError if the model returned NaN or infinite logits (then nothing is written), and ValueError for a
        proposal made from an earlier state."""
        state.check_current(proposal)
        rows, verified = proposal.rows, self.verify(state, proposal)
        count, num_final = finish_rows(state, proposal, verified.tokens, verified.accepted + 1)
        selected = torch.arange(verified.tokens.shape[1], device=count.device) < count
        state.write(proposal.positions, rows, torch.where(selected, verified.tokens, -1))
        state.committed[rows] += num_final
        if state.rollout is not None:
            state.rollout.record_causal(state, proposal, verified.tokens, selected)
        logprobs = None
        if state.logprobs is not None:
            log_p = proposal.quantities["log_p"]
            logprobs = StepLogProbs.from_log_probabilities(log_p, verified.tokens.clamp(min=0), state.logprobs.count)
            state.logprobs.write(rows, proposal.positions, selected, logprobs, state.row_step[rows])
        state.count(proposal.cost)
        state.row_step[rows] += 1
        state.commits += 1
        self.draft_window(state, proposal, verified, count)
        state.finish_step(rows)
        p = proposal.quantities.get("p")
        scores = proposal.scores if p is None else probability(p, verified.tokens)
        return Commit(rows, verified.tokens, proposal.positions, selected, scores, proposal.kind, logprobs)

    def observe(self, state: CausalState, proposal: Proposal) -> Notes:
        """As in the base class; also record the evaluated drafts of windows and trees."""
        notes, rows = super().observe(state, proposal), proposal.rows
        if state.drafting is not None:
            notes.draft_nfe = state.draft_nfe.tolist()
        notes.drafts, notes.blocks = set(), [None] * state.batch
        window_ends = np.minimum(proposal.positions.amax(1).cpu().numpy() + 1, state.length[rows])
        for row, first, last in zip(rows.tolist(), state.final_ends(rows).tolist(), window_ends.tolist(), strict=True):
            notes.blocks[row] = (first, last)
        for query in proposal.cost.queries:
            count = len(query.rows)
            is_draft = state.is_draft(query)
            if query.valid is not None:
                is_draft &= query.valid[:count].cpu().numpy()
            index, column = is_draft.nonzero()
            positions, tokens = (
                tensor[:count].cpu().numpy()[index, column] for tensor in (query.positions, query.tokens)
            )
            draft_rows = query.rows[index]
            notes.drafts.update(zip(draft_rows.tolist(), positions.tolist(), tokens.tolist(), strict=True))
        return notes


# ---- parts of the start -------------------------------------------------------------------------------------------


def check_causal(name: str, model: Any) -> None:
    """Raise ValueError unless the model of sampler `name` is causal and predicts the next token."""
    facts = model.facts
    if (facts.topology, facts.prediction) != ("causal", "shifted"):
        raise ValueError(
            f"sampler {name!r} needs a model with topology='causal' and prediction='shifted'; {facts.name} is "
            f"{facts.topology!r}, {facts.prediction!r}"
        )


def num_new_tokens(model: Any, grid: Grid | None, max_new_tokens: int | None) -> int:
    """Return the number of new tokens: the grid's tokens, or `max_new_tokens`."""
    if grid is not None:
        if max_new_tokens is not None and max_new_tokens != grid.length:
            raise ValueError(
                f"max_new_tokens={short_repr(max_new_tokens)} must be left out: the grid has {grid.length} tokens"
            )
        return grid.length
    num_new = model.default_max_new_tokens if max_new_tokens is None else max_new_tokens
    check_int("max_new_tokens", num_new, low=1)
    return int(num_new)


def encode_negative_prompt(model: Any, prompts: list[list[int]], negative_prompt: Any) -> list[list[int]]:
    """Return the prompts of the unconditional branch, one per row."""
    if negative_prompt is None:
        return [row[-1:] for row in prompts]
    encoded = negative_prompt if isinstance(negative_prompt, Prompts) else encode(model, negative_prompt)
    rows = encoded.rows * len(prompts) if len(encoded.rows) == 1 else encoded.rows
    if len(rows) != len(prompts):
        raise ValueError(f"negative_prompt has {len(rows)} rows for {len(prompts)} prompts; give one, or one per row")
    return rows


def allowed_tokens(facts: ModelFacts, request: Request, grid: Grid | None) -> Tensor:
    """[V] bool: the tokens that may be drawn. Raises ValueError if there are none."""
    allowed = torch.ones(facts.vocab_size, dtype=torch.bool) if grid is None else grid.allowed(facts.vocab_size)
    allowed[suppressed_ids(request, facts)] = False
    if facts.mask_token_id is not None:
        allowed[facts.mask_token_id] = False
    if not allowed.any():
        raise ValueError("suppress_tokens leaves no token that may be drawn")
    return allowed


def read_embeddings(sampler: CausalSampler, model: Any) -> Tensor | None:
    """Return the tokens' vectors [V, d] named by `CausalSampler.embedding_source`; None if it is ""."""
    if not (source := sampler.embedding_source):
        return None
    embeddings: Tensor | None = getattr(model, source, lambda: None)()
    if embeddings is None:
        raise ValueError(f"sampler {sampler.name!r} needs a model with {source}; {model.facts.name} has none")
    if embeddings.ndim != 2 or len(embeddings) != model.facts.vocab_size:
        raise ValueError(
            f"{source} of {model.facts.name} has shape {tuple(embeddings.shape)}; expected one row for each of "
            f"{model.facts.vocab_size} tokens"
        )
    return embeddings.detach().to(model.device)


# ---- parts of the commit ------------------------------------------------------------------------------------------


def finish_rows(state: CausalState, proposal: Proposal, tokens: Tensor, count: Tensor) -> tuple[Tensor, np.ndarray]:
    """Return the number of new final tokens of each row, [R, 1] on the device and [R] on the host. Set the ends of rows
    that end among the first `count` [R, 1] of tokens [R, W]: at the first end token or stop string.

    Raises FloatingPointError for NaN or infinite logits, before any change."""
    ended = torch.zeros_like(count, dtype=torch.bool)
    if len(state.ends):
        slot = torch.arange(tokens.shape[1], device=tokens.device)
        is_end = torch.isin(tokens, state.ends) & (slot < count)
        ended = is_end.any(1, keepdim=True)
        count = torch.where(ended, is_end.int().argmax(1, keepdim=True) + 1, count)
    # if no token is allowed, the distribution is NaN although the logits are finite
    is_logit_finite = proposal.quantities["top_logit"].isfinite().all(1, keepdim=True)
    is_score_finite = proposal.scores.isfinite().all(1, keepdim=True)
    columns = [count, ended, ~(is_logit_finite & is_score_finite)]
    if state.drafting is not None and state.drafting.broken is not None:
        columns.append(state.drafting.broken[torch.as_tensor(proposal.rows)].unsqueeze(1))
    num_counts = len(columns)
    stop_strings = state.stop_strings if state.in_order else None
    if stop_strings is not None:
        columns.append(tokens)
    # the only transfer to the host in a step
    host = torch.cat(columns, 1).T.cpu().numpy()
    num_final, is_ended, failed, *drafter_failed = host[:num_counts]
    if failed.any():
        rows = proposal.rows[failed > 0]
        raise NotFinite.at_steps(rows, state.row_step[rows])
    if drafter_failed and drafter_failed[0].any():
        raise NotFinite("the drafter returned NaN or infinite logits", proposal.rows[drafter_failed[0] > 0])
    if stop_strings is not None:
        begin = state.committed[proposal.rows]
        stops = stop_strings.find_ends(proposal.rows, begin, host[num_counts:].T, begin + num_final)
        state.stopped[proposal.rows[stops < NEVER]] = True
        is_ended, num_final = is_ended | (stops < NEVER), np.minimum(num_final, stops - begin)
        count = torch.as_tensor(num_final, device=count.device).unsqueeze(1)
    finished = proposal.rows[is_ended > 0]
    state.end[finished] = state.committed[finished] + num_final[is_ended > 0]
    state.last_accepted = np.zeros(state.batch, np.int64)
    state.last_accepted[proposal.rows] = num_final
    state.accepted.append(state.last_accepted)
    return count, num_final
