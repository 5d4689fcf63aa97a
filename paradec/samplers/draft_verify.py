"""The draft-and-verify family over causal models: one forward judges a window of drafted tokens.

A method of this family is one decision, `accept`: with what probability each draft stands; and, beside it, `draft`: how
tokens that nothing is known of yet are guessed. Everything around it is here: the query, the law of every slot, the
judgement, the redraw where a draft falls, and the window's move. Rows are independent: each commits its own count.

Two invariants make the output exact whenever `accept` is min(1, p / q) (SJD and its relatives depend on nothing else):
every draft carries the law q that it was really drawn from, with draws of its own; and after a step each slot that was
not committed has been drawn anew from this step's p, which becomes its q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from paradec import rng
from paradec.checks import check_int
from paradec.models.facts import ModelFacts
from paradec.prompts import encode
from paradec.protocol import Commit, Cost, Memory, MemorySpec, Proposal, Query, Sampler, State
from paradec.samplers.masked_state import put_rows, rows_of
from paradec.samplers.request import Request, randomness
from paradec.samplers.statistics import filter_logits
from paradec.trace import Trace

DRAFT_STREAM = 2
"""Draws that make first drafts; streams 0 and 1 are named in `paradec.rng`. Verification draws from TOKEN_STREAM."""


@dataclass
class DraftState(State):
    """What changes while a window of drafts is verified. `B` rows, canvas of `L` positions, `W` window slots.

    Slot i of a row's window stands for position `committed + i`. The drafts and the laws that they were drawn from are
    the memory "drafts" [B, W] and "draft_law" [B, W, V]; what stands in the last slot is never judged.
    """

    facts: ModelFacts
    request: Request
    pads: bool
    canvas: Tensor
    """[B, L] int64 ids; positions from `committed` on hold the fill id."""
    prompt_length: np.ndarray
    length: np.ndarray
    """[B] int64 on the host: where each row ends."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    width: int
    """W: the sampler's window, or the whole answer where that is shorter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.committed = self.prompt_length.copy()
        self.row_step = np.zeros(self.batch, np.int64)
        self.rows = np.arange(self.batch)
        """[R] int64 on the host: the rows that are not finished."""

    @property
    def done(self) -> bool:
        return len(self.rows) == 0

    @property
    def progress(self) -> tuple[int, int]:
        return int((self.committed - self.prompt_length).sum()), int((self.length - self.prompt_length).sum())

    def slots(self, rows: np.ndarray) -> np.ndarray:
        """[R] int64: slots of each row's window that lie before its end."""
        return np.minimum(self.width, self.length[rows] - self.committed[rows])

    def positions(self, rows: np.ndarray) -> Tensor:
        """[R, W] int64: positions of the slots; those past a row's end are counted on."""
        return torch.as_tensor(self.committed[rows, None] + np.arange(self.width), device=self.canvas.device)

    def uniform(self, rows: np.ndarray, positions: Tensor, words: int, stream: int, ahead: int = 0) -> Tensor:
        """[R, W, words] float64 draws for `positions` at the rows' steps, or `ahead` steps later."""
        steps = torch.as_tensor(self.row_step[rows] + ahead, device=positions.device)
        return rng.uniform(self.keys[torch.as_tensor(rows, device=positions.device)], steps, positions, words, stream)


@dataclass(frozen=True)
class DraftVerifySampler(Sampler):
    """Base of the family. A subclass implements `accept` and `draft`.

    Args:
        window: slots evaluated at once: the next token and `window - 1` drafts; 1 decodes token by token.
    """

    window: int = 16

    family: ClassVar[str] = "draft_verify"

    def __post_init__(self) -> None:
        check_int("window", self.window, low=1)

    # ---- the method's own decisions -------------------------------------------------------------------------------

    def accept(self, law: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
        """Probability that each draft stands, given those before it.

        Args:
            law: [R, W, V] float64, p: the model's law at each slot, given the drafts before it.
            draft_law: [R, W, V] float64, q: what the drafts were drawn from.
            drafts: [R, W] int64.

        Returns:
            [R, W] float64.
        """
        raise NotImplementedError

    def draft(self, noise: Tensor, last: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """First drafts for slots that nothing is known of.

        Args:
            noise: [R, W] float64 in (0, 1), one number per slot.
            last: [R, 1] int64: the last token before them, final or drafted.
            vocab: V.

        Returns:
            Tokens [R, W] int64, and the law that each was drawn from, [R, W, V] float64.
        """
        raise NotImplementedError

    # ---- start ----------------------------------------------------------------------------------------------------

    def start(
        self,
        model: Any,
        prompt: Any,
        *,
        attention_mask: Any = None,
        chat: bool | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | Sequence[int] | None = None,
        trace: bool = False,
    ) -> DraftState:
        """Make the state of one request: `max_new_tokens` are drawn for every row, end tokens included.

        Args:
            model: from `paradec.wrap(..., topology="causal", prediction="shifted")`.
            prompt, attention_mask, chat: as in `paradec.generate`; rows may differ in length.
            temperature: 0 takes the best token: then the result is that of greedy decoding.
            top_p, top_k: restrict the law to the nucleus of this mass, then to this many words.
            seed: one for all rows or one per row. Equal prompts draw different numbers.

        Raises:
            ValueError: a model of another kind, or an argument out of its range; the message names it.
        """
        facts = getattr(model, "facts", None)
        if facts is None or (facts.topology, facts.prediction) != ("causal", "shifted"):
            kind = type(model).__name__ if facts is None else f"{facts.topology!r}, {facts.prediction!r}"
            raise ValueError(
                f"sampler {self.name!r} needs a model with topology='causal' and prediction='shifted', not {kind}"
            )
        request = Request(temperature=temperature, top_p=top_p, top_k=top_k)
        new = model.default_max_new_tokens if max_new_tokens is None else max_new_tokens
        check_int("max_new_tokens", new, low=1)
        prompts = encode(model, prompt, attention_mask, chat).rows
        lengths = np.array([len(row) for row in prompts], np.int64)
        longest = int(lengths.max()) + new
        if facts.max_length is not None and longest > facts.max_length:
            raise ValueError(
                f"prompt of {longest - new} tokens + max_new_tokens={new} = {longest} is longer than {facts.name} "
                f"takes ({facts.max_length})"
            )
        _, seeds = randomness(request, seed, None, prompts)

        batch, width, device = len(prompts), min(self.window, new), model.device
        canvas = np.full((batch, longest), facts.fill_token_id, np.int64)
        canvas[np.arange(longest) < lengths[:, None]] = np.concatenate(prompts)
        specs = {
            "drafts": MemorySpec((width,), torch.int64, reset="sequence"),
            "draft_law": MemorySpec((width, "vocab"), torch.float64, reset="sequence"),
        }
        state = DraftState(
            batch=batch,
            memory=Memory(specs, batch, {"vocab": facts.vocab_size}, device),
            facts=facts,
            request=request,
            pads=model.pads,
            canvas=torch.as_tensor(canvas, device=device),
            prompt_length=lengths,
            length=lengths + new,
            keys=torch.as_tensor(rng.row_keys(seeds, prompts), device=device),
            width=width,
        )
        noise = state.uniform(state.rows, state.positions(state.rows), 1, DRAFT_STREAM).squeeze(-1)
        last = torch.tensor([[row[-1]] for row in prompts], device=device)
        state.memory["drafts"], state.memory["draft_law"] = self.draft(noise, last, facts.vocab_size)
        if trace:
            rows = [canvas[r, : lengths[r] + new].tolist() for r in range(batch)]
            state.trace = Trace(canvas=rows, settings=self.to_dict() | asdict(request))
        return state

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: DraftState) -> list[Query]:
        """The final tokens and the drafts after them: one call, or one per length for models that take no padding."""
        stop = state.committed[state.rows] + state.slots(state.rows) - 1
        groups = [np.arange(len(stop))] if state.pads else [np.flatnonzero(stop == n) for n in np.unique(stop)]
        return [self._query(state, index, stop[index]) for index in groups]

    def _query(self, state: DraftState, index: np.ndarray, stop: np.ndarray) -> Query:
        rows, device = state.rows[index], state.canvas.device
        row_index = torch.as_tensor(rows, device=device)
        column = np.arange(stop.max())
        slot = torch.as_tensor(column - state.committed[rows, None], device=device)
        drafts = state.memory["drafts"][row_index].gather(1, slot.clamp(0, state.width - 1))
        valid = column < stop[:, None]
        # the logits of a position stand one column to its left; slots past a row's end ask for any
        wanted = np.minimum(state.committed[rows, None] - 1 + np.arange(state.width), stop[:, None] - 1)
        return Query(
            rows=rows,
            tokens=torch.where(slot < 0, state.canvas[row_index, : len(column)], drafts),
            positions=torch.as_tensor(np.minimum(column, stop[:, None] - 1), device=device),
            wanted=torch.as_tensor(wanted, device=device),
            valid=None if valid.all() else torch.as_tensor(valid, device=device),
            forwarded=stop,
            index=index,
        )

    def propose(self, state: DraftState, outputs: list[Tensor], queries: list[Query]) -> Proposal:
        """The law of every slot and a token drawn from it. outputs: logits [R, W, V], one per query.

        Quantities: "law" [R, W, V] float64; "uniform" [R, W, 2], the draws that judge and that redraw a fallen draft;
        "top_logit" [R, W].
        """
        rows, logits = state.rows, outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if len(outputs) > 1:
            order = np.argsort(np.concatenate([query.index for query in queries]))
            logits = logits[torch.as_tensor(order, device=logits.device)]
        law = token_law(logits, state.request)
        positions = state.positions(rows)
        uniform = state.uniform(rows, positions, 3, rng.TOKEN_STREAM)
        fresh = inverse_cdf(law, uniform[..., 0])
        return Proposal(
            rows=rows,
            values=fresh,
            cost=Cost(queries, state.batch),
            positions=positions,
            scores=law.gather(-1, fresh.unsqueeze(-1)).squeeze(-1),
            available=torch.as_tensor(np.arange(state.width) < state.slots(rows)[:, None], device=law.device),
            quantities={"law": law, "uniform": uniform[..., 1:], "top_logit": logits.max(-1).values.double()},
            made_at=state.commits,
        )

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: DraftState, proposal: Proposal) -> Commit:
        """Judge the drafts, write what stands and one token more, and move the window.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
            ValueError: a proposal made from an earlier state.
        """
        rows, law, available = proposal.rows, proposal.quantities["law"], proposal.available
        if proposal.made_at != state.commits:
            raise ValueError("this proposal was made from an earlier state; call step again before commit")
        memory = rows_of(state.memory, rows)
        drafts, draft_law = memory["drafts"], memory["draft_law"]
        # the last slot before a row's end is the token after all drafts: nothing was drafted there
        drafted = pad(available[:, 1:], (0, 1))
        chance = self.accept(law, draft_law, drafts)
        tokens, standing = judge(
            law, draft_law, drafts, drafted, chance, proposal.values, proposal.quantities["uniform"]
        )
        slot = torch.arange(state.width, device=law.device)
        count = standing + 1
        selected = slot < count

        broken = ~proposal.quantities["top_logit"].isfinite().all(1)
        # the one transfer of the step
        written, failed = torch.stack((count.squeeze(1), broken.long())).cpu().numpy()
        if failed.any():
            row = int(rows[failed.argmax()])
            raise FloatingPointError(
                f"the model returned NaN or infinite logits for row {row} at its step {int(state.row_step[row])}"
            )

        # slots past the end wrap around, so that the positions of a row are distinct and can be written to
        place = proposal.positions % state.canvas.shape[1]
        row_index = torch.as_tensor(rows, device=law.device).unsqueeze(1)
        state.canvas[row_index, place] = torch.where(selected, tokens, state.canvas[row_index, place])

        # what was not committed is drafted next, with this step's p as its q; slots new to the window are guessed
        noise = state.uniform(rows, proposal.positions + count, 1, DRAFT_STREAM, ahead=1).squeeze(-1)
        guesses, guess_law = self.draft(noise, tokens[:, -1:], law.shape[-1])
        known, source = slot + count < state.width, (slot + count).clamp(max=state.width - 1)
        drafts = torch.where(known, tokens.gather(1, source), guesses)
        draft_law = torch.where(known.unsqueeze(-1), law.take_along_dim(source.unsqueeze(-1), 1), guess_law)
        put_rows(state.memory, "drafts", rows, drafts)
        put_rows(state.memory, "draft_law", rows, draft_law)

        state.count(proposal.cost)
        state.committed[rows] += written
        state.row_step[rows] += 1
        state.commits += 1
        state.rows = np.flatnonzero(state.committed < state.length)
        scores = law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return Commit(rows, tokens, proposal.positions, selected, scores, proposal.kind)


def judge(
    law: Tensor, draft_law: Tensor, drafts: Tensor, drafted: Tensor, chance: Tensor, fresh: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative verification of a window; a pure function.

    Drafts stand up to the first that falls. That one is redrawn from norm(max(0, p - q)), which no filter may touch
    again; all slots after it, and the slot after the last draft, take their fresh token.

    Args:
        law, draft_law: [R, W, V], p and q.
        drafts: [R, W] int64; drafted: [R, W] bool, False where a slot holds no draft (its last one never does).
        chance: [R, W]: probability that a draft stands.
        fresh: [R, W] int64, drawn from `law`.
        uniform: [R, W, 2] in (0, 1): judges the draft, redraws it.

    Returns:
        Tokens [R, W] int64, and how many drafts stand [R, 1] int64; one token more than those is final.
    """
    stands = drafted & (uniform[..., 0] < chance)
    standing = stands.long().cumprod(1).sum(1, keepdim=True)
    p, q = (tensor.take_along_dim(standing.unsqueeze(-1), 1) for tensor in (law, draft_law))  # [R, 1, V]
    residual = (p - q).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)  # nothing is left only by rounding
    redrawn = inverse_cdf(residual, uniform[..., 1].gather(1, standing))
    slot = torch.arange(drafts.shape[1], device=drafts.device)
    fell = (slot == standing) & drafted
    return torch.where(slot < standing, drafts, torch.where(fell, redrawn, fresh)), standing


def token_law(logits: Tensor, request: Request) -> Tensor:
    """Law that a token is drawn from: logits [R, W, V] -> [R, W, V] float64. Temperature 0 is certain of the best."""
    if request.temperature == 0:
        return one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = logits.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / request.temperature  # no overflow, however low the temperature
    return filter_logits(logits, request.top_p, request.top_k).softmax(-1)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw from weights [..., V] (not normalised) with one number [...] in (0, 1) each: [...] int64.

    The smallest k with w_0 + ... + w_k > u sum(w): a word without weight is never drawn.
    """
    total = weights.cumsum(-1)
    # 53 random bits may round to 1, which lies past the last word
    target = uniform.clamp(max=1 - 2.0**-53).unsqueeze(-1) * total[..., -1:]
    # the clamp is for NaN weights, which commit refuses
    return torch.searchsorted(total, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
