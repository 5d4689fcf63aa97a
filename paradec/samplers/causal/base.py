"""Speculative Jacobi decoding of causal models: one forward judges a window of drafts and renews them.

The loop of all these methods. A step evaluates the last final token and the drafts after it over the key/value store;
the drafts are judged (`accept`), the first that falls is redrawn, what lies behind it is renewed (`refresh`), and
slots that are new to the window get a guess (`init`). A method is one decision, `accept`. Rows are independent: each
commits its own count, and its slots of the store behind what is final are given back.

Every draft carries the law q that it was really drawn from. After a step the q of each slot that was not committed is
this step's p, whether its token stayed or changed; so the output has the law of token-by-token decoding whenever
`accept` is min(1, p / q), at any temperature, top-k, top-p, guidance and structure, which make p and are never applied
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec import rng
from paradec.checks import check_choice, check_int, shown
from paradec.models.facts import ModelFacts
from paradec.models.images.grid import Grid
from paradec.prompts import Prompts, encode
from paradec.protocol import Commit, Cost, Memory, MemorySpec, Proposal, Query, Sampler
from paradec.request import Request, randomness, request_for
from paradec.samplers.causal.state import JacobiState
from paradec.samplers.causal.verification import CERTAIN, UNIFORM, DraftLaws, draw, judge, laws_at, probability
from paradec.samplers.masked.state import put_rows, rows_of
from paradec.samplers.statistics import argmax, guided, log_of
from paradec.trace import Trace

DRAFT_STREAM, NOISE_STREAM = 2, 3
"""Draws that make guesses, and noise that belongs to a position; streams 0 and 1 are named in `paradec.rng`.
Verification draws from TOKEN_STREAM."""
INITS = ("random", "repeat_horizontal", "sample_horizontal", "repeat_vertical", "sample_vertical")
REFRESHES = ("resample", "maximal", "gumbel", "keep")
RANDOM_LAWS = ("uniform", "one_hot")


@dataclass(frozen=True)
class JacobiSampler(Sampler):
    """Base of the methods that judge a window of drafts. A subclass implements `accept`.

    Args:
        window: slots evaluated at once, the next token and `window - 1` drafts; 1 is token-by-token decoding.
        init: guesses for slots that are new to the window: "random" (uniform over what may stand there), or a copy of
            the left neighbour ("repeat_horizontal") or of the one above ("repeat_vertical", needs a grid), or what the
            model thought likeliest there ("sample_horizontal", "sample_vertical"). A neighbour that is new itself is
            replaced by the nearest known one in that direction; where there is none the guess is random. Tokens that
            the grid prescribes are put in as they are.
        refresh: what becomes of the drafts behind the first that fell: `paradec.samplers.causal.verification.judge`.
        random_law: q of random guesses: "uniform", what they were drawn from, or "one_hot" (the public code: certain
            of the drawn word). Both are exact; uniform ones stand more often.
    """

    window: int = 16
    init: str = "random"
    refresh: str = "resample"
    random_law: str = "uniform"

    family: ClassVar[str] = "draft_verify"
    models: ClassVar[tuple[str, ...]] = ("text", "image")
    redraws: ClassVar[bool] = True
    """Whether a fallen draft is redrawn from norm(max(0, p - q)); else the fresh token takes its place."""
    reads: ClassVar[str] = ""
    """What `accept` reads of the model's words: "token_embeddings", "codebook" or nothing."""
    unserved: ClassVar[tuple[str, ...]] = (
        *("blocks", "block_length", "steps", "stop", "stop_strings", "confidence_eos_eot_inf", "rng"),
        *("cache", "attention", "prefix", "keep_prefix", "share_prefix"),
    )
    request_defaults: ClassVar[Mapping[str, Any]] = {"temperature": 1.0}
    uses_steps: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    """Whether the output has the law of token-by-token decoding."""

    def __post_init__(self) -> None:
        check_int("window", self.window, low=1)
        check_choice("init", self.init, INITS)
        check_choice("refresh", self.refresh, REFRESHES)
        check_choice("random_law", self.random_law, RANDOM_LAWS)

    # ---- the method's own decision --------------------------------------------------------------------------------

    def accept(self, law: Tensor, drafts: DraftLaws, fresh: Tensor, latents: Tensor | None) -> Tensor:
        """Probability that each draft stands, given those before it; min(1, p / q) unless a method says otherwise.

        Args:
            law: [R, W, V], p: the model's law at each slot, given the drafts before it.
            drafts: the drafts and their laws q.
            fresh: [R, W] int64: tokens drawn from p.
            latents: [V, d], what `reads` names.

        Returns:
            [R, W].
        """
        return (probability(law, drafts.tokens) / drafts.of_drafts()).clamp(max=1)

    # ---- start ----------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model of another kind, ValueError unless it is causal and predicts the next token."""
        super().check_model(model)
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
    ) -> JacobiState:
        """Make the state of one request.

        Args:
            model: from `paradec.wrap(..., topology="causal", prediction="shifted")`, or an image model.
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
        facts, device = model.facts, model.device
        encoded = encode(model, prompt, attention_mask, request.chat)
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
        if facts.max_length is not None and longest > facts.max_length:
            raise ValueError(
                f"prompt of {longest - new} tokens + max_new_tokens={new} = {longest} is longer than {facts.name} "
                f"takes ({facts.max_length})"
            )
        _, seeds = randomness(request, prompts)
        allowed, support = self._words(facts, request, grid, device)
        latents = self._latents(model, device)

        batch, width = len(prompts), self._width(new)
        context = np.full((len(contexts), longest), facts.fill_token_id, np.int64)
        context[np.arange(longest) < np.array([len(row) for row in contexts])[:, None]] = np.concatenate(contexts)
        dtype = torch.promote_types(getattr(model, "dtype", torch.float32), torch.float32)
        specs = {
            "drafts": MemorySpec((width,), torch.int64, reset="sequence"),
            "draft_source": MemorySpec((width,), torch.int64, UNIFORM, reset="sequence"),
            "draft_law": MemorySpec((width, "vocab"), dtype, reset="sequence"),
        }
        if self.refresh == "gumbel":
            specs["noise"] = MemorySpec((width, "vocab"), dtype, reset="sequence")
        if self.init.startswith("sample"):
            specs["best"] = MemorySpec(("position",), torch.int64, -1, reset="sequence")
        state = JacobiState(
            batch=batch,
            memory=Memory(specs, batch, {"vocab": facts.vocab_size, "position": longest}, device),
            facts=facts,
            request=request.without_objects(),
            pads=model.pads,
            context=torch.as_tensor(context, device=device),
            shift=shift,
            prompt_length=lengths,
            length=lengths + new,
            keys=torch.as_tensor(rng.row_keys(seeds, prompts, encoded.before), device=device),
            width=width,
            support=(support / support.sum()).to(dtype),
            support_ids=support.nonzero().squeeze(1),
            allowed=allowed,
            ends=torch.tensor(facts.eos_token_ids if grid is None and request.eos_early_stop else (), device=device),
            grid=grid,
            layout=None if grid is None else grid.layout.to(device),
            latents=latents,
            store=model.make_store(len(contexts), longest) if model.supports_store else None,
        )
        if request.trace:
            rows = [context[r, : lengths[r] + new].tolist() for r in range(batch)]
            state.trace = Trace(canvas=rows, settings=self.to_dict() | request.sampling())
        nothing = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self._put_noise(state, state.rows, np.full(batch, width))
        self._draft(state, state.rows, nothing, state.memory["drafts"], nothing.expand(-1, width), None)
        return state

    def _new_tokens(self, model: Any, grid: Grid | None, new: int | None) -> int:
        if grid is not None:
            if new is not None and new != grid.length:
                raise ValueError(f"max_new_tokens={shown(new)}: the grid has {grid.length} tokens; leave it out")
            return grid.length
        if self.init.endswith("vertical"):
            raise ValueError(f"init={self.init!r} needs a grid; text has no rows: use 'random' or a horizontal init")
        new = model.default_max_new_tokens if new is None else new
        check_int("max_new_tokens", new, low=1)
        return new

    def _width(self, new: int) -> int:
        return min(self.window, new)

    def _words(
        self, facts: ModelFacts, request: Request, grid: Grid | None, device: torch.device
    ) -> tuple[Tensor | None, Tensor]:
        """[V] bool of the words that may be drawn (None when all may), and [V] float64, 1 where a guess may fall."""
        allowed = torch.ones(facts.vocab_size, dtype=torch.bool) if grid is None else grid.allowed(facts.vocab_size)
        out = [*request.suppress_tokens, *(facts.eos_token_ids if request.logits_eos_inf else ())]
        for entry in out:
            check_int("suppress_tokens", entry, low=0, high=facts.vocab_size - 1)
        allowed[out] = False
        if not allowed.any():
            raise ValueError("suppress_tokens leaves no word that may be drawn")
        allowed = allowed.to(device)
        return None if allowed.all() else allowed, allowed.double()

    def _latents(self, model: Any, device: torch.device) -> Tensor | None:
        if not self.reads:
            return None
        found = getattr(model, self.reads, lambda: None)()
        if found is None:
            raise ValueError(f"sampler {self.name!r} needs a model with {self.reads}; {model.facts.name} has none")
        if found.ndim != 2 or len(found) != model.facts.vocab_size:
            raise ValueError(
                f"{self.reads} of {model.facts.name} has shape {tuple(found.shape)}; expected one row for each of "
                f"{model.facts.vocab_size} words"
            )
        return found.detach().to(device)

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: JacobiState) -> list[Query]:
        """The last final token and the drafts after it, over the store; whole rows at first and without a store."""
        rows, committed = state.rows, state.committed[state.rows]
        drafts = rows_of(state.memory, rows)["drafts"]
        begin = np.zeros_like(committed) if state.commits == 0 else committed - 1
        stop = committed - 1 + state.slots(rows)
        return state.calls(state.store, state.pads, rows, drafts, begin, stop, committed - 1, state.width)

    def propose(self, state: JacobiState, outputs: list[Tensor], queries: list[Query]) -> Proposal:
        """The law of every slot and a token drawn from it. outputs: logits [branches * R, W, V], one per query.

        Quantities: "law" [R, W, V]; "uniform" [R, W, 2], the draws that judge and that redraw a fallen draft;
        "top_logit" [R, W].
        """
        rows, logits = state.rows, read_logits(state, outputs, queries)
        positions = state.positions(rows)
        law = state.laws(logits, rows, positions)
        uniform = state.uniform(rows, positions, 3, rng.TOKEN_STREAM)
        if self.refresh == "gumbel":
            noise = laws_at(rows_of(state.memory, rows)["noise"], positions % state.width)
            fresh = argmax(log_of(law) + noise)
        else:
            fresh = draw(law, uniform[..., 0])
        return Proposal(
            rows=rows,
            values=fresh,
            cost=Cost(queries, state.batch),
            positions=positions,
            scores=probability(law, fresh),
            available=torch.as_tensor(np.arange(state.width) < state.slots(rows)[:, None], device=law.device),
            quantities={"law": law, "uniform": uniform[..., 1:], "top_logit": logits.amax(-1)},
            made_at=state.commits,
            kind=queries[0].kind,
        )

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: JacobiState, proposal: Proposal) -> Commit:
        """Judge the drafts, write what stands and one token more, and move the window.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
            ValueError: a proposal made from an earlier state.
        """
        state.check_current(proposal)
        rows, law = proposal.rows, proposal.quantities["law"]
        drafts = self._drafts(state, rows)
        # the last slot before a row's end is the token after all drafts: nothing was drafted there
        drafted = torch.nn.functional.pad(proposal.available[:, 1:], (0, 1))
        chance = self.accept(law, drafts, proposal.values, state.latents)
        uniform = proposal.quantities["uniform"]
        judged = judge(law, drafts, drafted, chance, proposal.values, uniform, self.refresh, self.redraws)
        tokens, count = judged.tokens, judged.standing + 1
        count, written = self._written(state, proposal, tokens, count)
        slot = torch.arange(state.width, device=law.device)
        selected = slot < count
        self._write(state, proposal.positions, rows, torch.where(selected, tokens, -1))

        # what was not committed is drafted next, with this step's p as its q; slots new to the window are guessed
        state.count(proposal.cost)
        state.committed[rows] += written
        state.row_step[rows] += 1
        state.commits += 1
        self._put_noise(state, rows, written)
        dense, source = law, slot.expand(len(rows), -1)
        if judged.kept is not None:
            old, held = drafts.source, judged.kept
            dense = torch.where((held & (old >= 0)).unsqueeze(-1), drafts.at(source), law)
            source = torch.where(held & (old < 0), old, source)
        put_rows(state.memory, "draft_law", rows, dense)
        if "best" in state.memory:
            self._write_best(state, proposal.positions, rows, law, selected)
        self._draft(state, rows, count, tokens, source, law)
        self._roll_back(state, rows)
        return Commit(rows, tokens, proposal.positions, selected, probability(law, tokens), proposal.kind)

    def _drafts(self, state: JacobiState, rows: np.ndarray) -> DraftLaws:
        memory = rows_of(state.memory, rows)
        return DraftLaws(memory["drafts"], memory["draft_law"], memory["draft_source"], state.support)

    def _written(
        self, state: JacobiState, proposal: Proposal, tokens: Tensor, count: Tensor
    ) -> tuple[Tensor, np.ndarray]:
        """Tokens that each row makes final, [R, 1] on the device and [R] on the host; and the end of rows with an
        end."""
        ended = torch.zeros_like(count)
        if len(state.ends):
            slot = torch.arange(tokens.shape[1], device=tokens.device)
            is_end = torch.isin(tokens, state.ends) & (slot < count)
            ended = is_end.any(1, keepdim=True)
            count = torch.where(ended, is_end.int().argmax(1, keepdim=True) + 1, count)
        # a law without an allowed word is NaN, whatever the others' logits
        healthy = (proposal.quantities["top_logit"].isfinite(), proposal.scores.isfinite())
        broken = ~(healthy[0].all(1, keepdim=True) & healthy[1].all(1, keepdim=True))
        columns = [count, ended.long(), broken.long()]
        if state.draft_broken is not None:
            columns.append(state.draft_broken.long().expand_as(count))
        # the one transfer of the step
        written, ends, failed, *drafter = torch.cat(columns, 1).T.cpu().numpy()
        if failed.any():
            row = int(proposal.rows[failed.argmax()])
            raise FloatingPointError(
                f"the model returned NaN or infinite logits for row {row} at its step {int(state.row_step[row])}"
            )
        if drafter and drafter[0].any():
            raise FloatingPointError("the drafter returned NaN or infinite logits")
        finished = proposal.rows[ends > 0]
        state.end[finished] = state.committed[finished] + written[ends > 0]
        made = np.zeros(state.batch, np.int64)
        made[proposal.rows] = written
        state.accepted.append(made)
        return count, written

    def _write(self, state: JacobiState, positions: Tensor, rows: np.ndarray, tokens: Tensor) -> None:
        """Write tokens [R, W] at positions [R, W] of every branch; -1 writes nothing. A row's positions are distinct,
        those past its end last."""
        # a tree can be deeper than the canvas is long: columns that come around again would undo what is written
        columns = state.context.shape[1]
        positions, tokens = positions[:, :columns], tokens[:, :columns]
        for branch in range(state.branches):
            at = torch.as_tensor(rows + branch * state.batch, device=tokens.device).unsqueeze(1)
            shift = torch.as_tensor(state.shift[branch, rows, None], device=tokens.device)
            # slots past the end wrap around, so that the positions of a row are distinct and can be written to
            place = (positions + shift) % columns
            state.context[at, place] = torch.where(tokens >= 0, tokens, state.context[at, place])

    def _roll_back(self, state: JacobiState, rows: np.ndarray) -> None:
        """Give back the store's slots behind what is final, and finish the rows that have reached their end."""
        if state.store is not None:
            for branch in range(state.branches):
                # the last final token has not been evaluated
                state.store.forget(rows + branch * state.batch, state.committed[rows] + state.shift[branch, rows] - 1)
        state.rows = np.flatnonzero(state.committed < state.end)

    # ---- drafts ---------------------------------------------------------------------------------------------------

    def _draft(
        self, state: JacobiState, rows: np.ndarray, count: Tensor, tokens: Tensor, source: Tensor, law: Tensor | None
    ) -> None:
        """Fill the next window: tokens [R, W] and laws `source` [R, W] move down by count [R, 1]; the rest is guessed.

        `law` [R, W, V]: of this step, None before the first.
        """
        slot = torch.arange(state.width, device=tokens.device)
        # before the first step nothing is known
        known = slot + count < state.width if law is not None else torch.zeros_like(tokens, dtype=torch.bool)
        at = (slot + count).clamp(max=state.width - 1)
        guess, guessed_from = self._guess(state, rows, known.sum(1, keepdim=True), tokens.gather(1, at))
        put_rows(state.memory, "drafts", rows, torch.where(known, tokens.gather(1, at), guess))
        put_rows(state.memory, "draft_source", rows, torch.where(known, source.gather(1, at), guessed_from))

    def _guess(self, state: JacobiState, rows: np.ndarray, known: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses for every slot of the next window, of which the first known [R, 1] hold drafts [R, W]; and their
        laws."""
        positions = state.positions(rows)
        noise = state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)
        size = len(state.support_ids)
        guess = state.support_ids[(noise * size).long().clamp(max=size - 1)]
        source = torch.full_like(guess, UNIFORM if self.random_law == "uniform" else CERTAIN)
        if self.init != "random":
            copied = self._copied(state, rows, positions, known, drafts)
            guess, source = torch.where(copied >= 0, copied, guess), torch.where(copied >= 0, CERTAIN, source)
        if state.layout is not None:
            forced = state.forced(rows, positions)
            guess, source = torch.where(forced >= 0, forced, guess), torch.where(forced >= 0, CERTAIN, source)
        return guess, source

    def _copied(self, state: JacobiState, rows: np.ndarray, positions: Tensor, known: Tensor, drafts: Tensor) -> Tensor:
        """[R, W] int64: the neighbour's word, -1 where there is none. Arguments as in `_guess`; positions [R, W]."""
        index = torch.as_tensor(rows, device=drafts.device)
        slot = torch.arange(state.width, device=drafts.device)
        if self.init.startswith("sample"):
            words = state.memory["best"][index]
        else:
            words = state.canvas[index]
            place = positions % words.shape[1]
            words = words.scatter(1, place, torch.where(slot < known, drafts, words.gather(1, place)))
        start = torch.as_tensor(state.prompt_length[rows, None], device=drafts.device)
        last = positions[:, :1] + known - 1
        if self.init.endswith("horizontal"):
            at = last.expand_as(positions)
        else:
            stride = state.grid.stride
            at = positions - stride * torch.div(positions - last + stride - 1, stride, rounding_mode="floor")
        found = words.gather(1, at.clamp(min=0, max=words.shape[1] - 1))
        if state.grid is None:
            return found
        # image tokens alone are copied, and none into the first column from its left
        usable = (at >= start) & (state.forced(rows, at.clamp(min=0).maximum(start)) < 0)
        if self.init.endswith("horizontal"):
            usable &= (positions - start - len(state.grid.head)) % state.grid.stride > 0
        return torch.where(usable, found, -1)

    def _write_best(
        self, state: JacobiState, positions: Tensor, rows: np.ndarray, law: Tensor, selected: Tensor
    ) -> None:
        """Note the likeliest word of every slot, final or not: inits that look at it ask for the neighbours'."""
        best = state.memory["best"]
        best[torch.as_tensor(rows, device=best.device).unsqueeze(1), positions % best.shape[1]] = argmax(law)

    def _put_noise(self, state: JacobiState, rows: np.ndarray, new: np.ndarray) -> None:
        """Gumbel noise of the last new [R] positions of the rows' windows: one vector per position, for good."""
        if "noise" not in state.memory:
            return
        noise, device = state.memory["noise"], state.context.device
        index, slot = np.nonzero(np.arange(state.width) >= state.width - new[:, None])
        at = torch.as_tensor(rows[index], device=device)
        position = torch.as_tensor(state.committed[rows[index]] + slot, device=device)
        drawn = rng.uniform(state.keys[at], torch.zeros_like(at), position.unsqueeze(1), noise.shape[-1], NOISE_STREAM)
        noise[at, position % state.width] = rng.gumbel(drawn).squeeze(1).to(noise.dtype)


@dataclass(frozen=True)
class Jacobi(JacobiSampler):
    """Jacobi decoding: a draft stands when it is the very token that this step draws at its slot.

    Lossless at every temperature: what is committed is always this step's own draw from p. With fresh draws at every
    iteration (`refresh="resample"`) it saves next to nothing at a temperature above 0; the noise of a position is
    therefore kept (`refresh="gumbel"`), so that the iteration has a fixed point.
    """

    refresh: str = "gumbel"

    name = "jacobi"
    paper = "Jacobi decoding"
    arxiv = "2305.10427"
    summary = "a draft stands when it equals the token that this step draws at its slot; lossless"
    redraws = False

    def accept(self, law: Tensor, drafts: DraftLaws, fresh: Tensor, latents: Tensor | None) -> Tensor:
        return (drafts.tokens == fresh).to(law.dtype)


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


def read_logits(state: JacobiState, outputs: list[Tensor], queries: list[Query]) -> Tensor:
    """Logits [R, W, V] of the running rows, guided, in the order of `state.rows`."""
    if state.branches == 2:
        outputs = [guided(logits, state.request.guidance_scale) for logits in outputs]
    if len(outputs) == 1:
        return outputs[0]
    order = np.argsort(np.concatenate([query.index for query in queries]))
    return torch.cat(outputs)[torch.as_tensor(order, device=outputs[0].device)]
