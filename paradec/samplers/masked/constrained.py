"""Requests with a `constraint`: candidates are parts of one text of the language, and what is certain is written.

Every step conditions the product of its marginals on the language (`paradec.constraints.passes`). Candidates are one
text: the likeliest at temperature 0, above it a joint draw; so whatever a method selects of them stays possible. Scores
are the conditioned marginals. Positions of the open block that one token fits are written with every commit; at
temperature 0 also when the block opens, without a forward. Above it, the block's first step weighs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.constraints import passes
from paradec.constraints.marginals import Marginals
from paradec.core import rng
from paradec.core.checks import shown
from paradec.core.protocol import NotFinite
from paradec.core.query import WindowQuery
from paradec.core.rows import ROWS, row_layout
from paradec.kernels.token_stats import token_statistics
from paradec.samplers.distributions import tempered
from paradec.samplers.features.feature import Ends, Feature
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks
from paradec.samplers.features.stop_strings import StopStrings
from paradec.samplers.filters import filter_logits
from paradec.samplers.masked.blocks import EndOfText, open_blocks
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import Decision, MaskedProposal
from paradec.samplers.spans import Part, Span, no_texts, parts_of, refused, spans_of

STREAM = 7
"""Of the random numbers that texts are drawn with."""


@dataclass
class Constrained(Feature):
    """The texts of each row, and what its draws have cost."""

    spans: list[tuple[Span, ...]] = field(metadata=row_layout(fill=()))
    """[B]."""
    log_weight: np.ndarray | None = field(metadata=ROWS)
    """[B] float64: see `paradec.Output.log_weight`; None at temperature 0."""

    host_only = "a constraint is asked on the host"

    def __post_init__(self) -> None:
        self._drawn: dict[tuple[int, int], tuple[int, Part, Marginals]] = {}

    def after_row_change(self) -> None:
        self._drawn = {}

    # ---- candidates -----------------------------------------------------------------------------------------------

    def candidates(
        self, sampler: Any, state: MaskedState, logits: Tensor, query: WindowQuery, generator: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """In the place of the method's `read`."""
        positions = state.window.query_positions(query)
        current = state.canvas[torch.as_tensor(query.rows, device=logits.device)].gather(1, positions)
        undecided = current == state.mask_id
        if state.window.valid is not None:
            valid = state.window.valid[torch.as_tensor(query.window.index, device=logits.device)]
            undecided &= valid if query.window.columns is None else valid.gather(1, query.window.columns)
        canvas, where = state.canvas.cpu().numpy(), positions.cpu().numpy()
        found, places = list[tuple[Tensor, dict[str, Tensor]]](), list[int]()
        for index, row in enumerate(query.rows.tolist()):
            columns = {position: column for column, position in enumerate(where[index].tolist())}
            for number, part in enumerate(self._parts(state, row, canvas[row])):
                at = [columns[position] for position in part.open]
                together = at[-1] - at[0] < len(at)
                own = logits[index, at[0] : at[-1] + 1] if together else logits[index, at]
                found.append(self._text(sampler, state, own, part, number))
                places += [index * where.shape[1] + column for column in at]
        inside = torch.zeros_like(undecided).flatten()
        inside[places] = True
        tokens, quantities = current, dict[str, Tensor]()
        if sampler.needs.decided_logits or bool((undecided & ~inside.view_as(undecided)).any()):
            tokens, quantities = sampler.read(state, logits, query, generator)
        if not found:
            return tokens, quantities
        entries = torch.tensor(places, device=logits.device)
        for name in found[0][1]:
            value = torch.cat([read[name] for _, read in found])
            whole = quantities.get(name, value.new_zeros(current.shape))
            quantities[name] = whole.flatten().index_copy(0, entries, value.to(whole)).view_as(current)
        chosen = torch.cat([tokens for tokens, _ in found])
        return tokens.flatten().index_copy(0, entries, chosen).view_as(current), quantities

    def _parts(self, state: MaskedState, row: int, canvas: np.ndarray, stop: int | None = None) -> list[Part]:
        """The parts of the row's window, or of what is left of `stop` there, that hold something undecided."""
        begin, mask = int(state.block_start[row]), state.mask_id
        if stop is None:
            stop = int((state.length if "early_stops" in state.features else state.block_end)[row])
        return parts_of(self.spans[row], row, canvas, canvas == mask, begin, stop)

    def _text(
        self, sampler: Any, state: MaskedState, raw: Tensor, part: Part, number: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Candidates [m] of a part's undecided positions, whose logits are raw [m, V], and the quantities [m] that the
        sampler reads."""
        request, needs = state.request, sampler.needs
        filters = (request.top_p, request.top_k)
        filtered = any(each is not None for each in filters)
        warm = request.temperature if request.temperature > 0 else 1.0
        model = self._marginals(state, part, raw)
        if model is None:
            nothing = raw.new_full((len(raw),), torch.nan, dtype=torch.float64)
            return torch.zeros_like(nothing, dtype=torch.int64), dict.fromkeys(needs.reads, nothing)
        source = model if warm == 1 else self._marginals(state, part, tempered(raw, warm))
        assert source is not None
        if filtered and (request.temperature > 0 or needs.score_from == "sampled"):
            # the likeliest text stays possible
            kept = filter_logits(source.conditioned(), *filters) > -torch.inf
            kept |= torch.zeros_like(kept).scatter_(1, source.best().unsqueeze(1), True)
            source = self._marginals(state, part, source.logits.masked_fill(~kept, -torch.inf))
            assert source is not None
        if request.temperature == 0:
            tokens = source.best()
        else:
            tokens = source.drawn(self.uniform(state, part))
            self._drawn[part.row, number] = int(state.row_step[part.row]), part, source
        scored = model if needs.score_from == "raw" else source
        if needs.reads == ("confidence",):
            return tokens, {"confidence": scored.probabilities(tokens)}
        return token_statistics(scored.conditioned(), needs.reads, tokens)

    def uniform(self, state: MaskedState, part: Part) -> np.ndarray:
        """The numbers [m] in (0, 1) that a text is drawn with: they depend on row, step and position alone."""
        step, places = torch.as_tensor(state.row_step[part.row : part.row + 1]), torch.tensor([part.open])
        key = state.keys[part.row : part.row + 1]
        return rng.uniform(key, step.to(key.device), places.to(key.device), 1, STREAM)[0, :, 0].cpu().numpy()

    def _marginals(self, state: MaskedState, part: Part, logits: Tensor) -> Marginals | None:
        """The marginals of a part; None where logits are NaN or infinite, of which `commit` speaks."""
        found = Marginals(part.span.automaton, logits, part.held, part.state, part.last)
        if found.broken:
            return None
        if found.total == -np.inf:
            step = int(state.row_step[part.row])
            raise NotFinite(
                f"the model excludes (-inf) every text of the constraint for row {part.row} at its step {step}",
                np.array([part.row]),
            )
        return found

    # ---- what is certain ------------------------------------------------------------------------------------------

    def on_start(self, state: MaskedState, rows: np.ndarray) -> None:
        """Write what is certain in blocks that have opened, unless the next step has to weigh it first."""
        if self.log_weight is None:
            self.write_certain(state, rows)

    def write_certain(self, state: MaskedState, rows: np.ndarray) -> None:
        """Write without a forward what one token alone fits in the open blocks of `rows` [R]; full blocks close."""
        canvas, full = state.canvas.cpu().numpy(), []
        for row in rows.tolist():
            certain = self._certain(state, row, canvas[row])
            if not certain:
                continue
            places, tokens = torch.tensor([*certain.items()], device=state.canvas.device).unbind(1)
            state.canvas[row, places] = tokens
            if state.rollout is not None:
                state.rollout.record_forced(state, row, places, tokens)
            if state.trace is not None:  # which has what was there before the first step
                for position, token in certain.items():
                    state.trace.canvas[row][position] = token
            state.masks_at_open[row] -= len(certain)
            state.remaining[row] -= len(certain)
            state.decided[row] += len(certain)
            if not state.remaining[row]:
                full.append(row)
        if full:
            open_blocks(state, np.array(full))

    def _certain(self, state: MaskedState, row: int, canvas: np.ndarray) -> dict[int, int]:
        """Undecided positions of the open block that one token fits, and that token; `canvas` [L] is what there is."""
        found = {}
        for part in self._parts(state, row, canvas, int(state.block_end[row])):
            automaton = part.span.automaton
            fits = passes.possible(automaton, part.held, part.state, part.last)
            for at, token in enumerate(part.held):
                classes = np.flatnonzero(fits[at])
                if token is None and automaton.sizes[classes].sum() == 1:
                    found[part.first + at] = int(automaton.members[classes[0]][0])
        return found

    def on_commit(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        """Take what is certain once the method's selection is there."""
        canvas, window = state.canvas.cpu().numpy().copy(), state.window
        written = torch.where(decision.selected, decision.values, proposal.current).cpu().numpy()
        chosen, values = decision.selected.clone(), decision.values.clone()
        for index, row in enumerate(window.rows.tolist()):
            places = window.host_positions[index]
            inside = slice(None) if window.host_valid is None else window.host_valid[index]
            canvas[row, places[inside]] = written[index][inside]
            for position, token in self._certain(state, row, canvas[row]).items():
                column = position - int(places[0])
                chosen[index, column], values[index, column] = True, token
        decision.filled = torch.where(chosen & ~decision.selected, 1, decision.filled).to(decision.filled.dtype)
        decision.selected, decision.values = chosen, values

    def on_close(
        self, state: MaskedState, proposal: MaskedProposal, decision: Decision, tokens: np.ndarray, ends: Ends
    ) -> bool:
        """Weigh what was drawn: Z before the step over Z with what it wrote, by the same probabilities."""
        if self.log_weight is None:
            return False
        canvas = state.canvas.cpu().numpy()
        for (row, _), (step, part, drawn) in self._drawn.items():
            if step != state.row_step[row] - 1 or row not in proposal.rows:
                continue
            now = canvas[row, part.first : part.first + len(part.held)].tolist()
            decided = [at for at, token in enumerate(part.held) if token is None and now[at] != state.mask_id]
            masses = drawn.sums.copy()
            for at in decided:
                masses[at] = passes.certain(part.span.automaton, now[at])
            with_it = passes.ahead(part.span.automaton, masses, part.last)[0, part.state]
            self.log_weight[row] += drawn.total - float(with_it) - float(drawn.norms(decided).sum())
        self._drawn.clear()
        return False


def constrained(sampler: Any, model: Any, state: MaskedState) -> Constrained:
    """The tracker of a request with a constraint.

    Raises:
        ValueError: a sampler, cache, block policy or stop rule that it does not work with; no tokenizer; or no text of
            the constraint fits a row.
    """
    refused(state.request.constraint, no_texts(model) | _reasons(sampler, state))
    suppressed = () if state.suppressed is None else tuple(state.suppressed.tolist())
    canvas = state.canvas.cpu().numpy()
    # with early rules a step looks at the row's end
    length = None if state.request.stop is not None else getattr(state.blocks, "length", None)
    width = canvas.shape[1] if length is None else length
    spans = spans_of(model, state, suppressed, canvas, state.mask_id, width)
    return Constrained(spans, None if state.request.temperature == 0 else np.zeros(state.batch))


def _reasons(sampler: Any, state: MaskedState) -> dict[str, bool]:
    """Why a sampler and the other arguments of a request could not serve a constraint, and whether it is so."""
    needs, request, methods = sampler.needs, state.request, getattr(sampler, "rules", (sampler,))
    return {
        f"sampler {sampler.name!r} drafts steps ahead of the text": needs.multi_step,
        f"sampler {sampler.name!r} replaces what it has decided": needs.revises or needs.mask_probes,
        f"sampler {sampler.name!r} counts the positions of several steps ahead": hasattr(sampler, "targets"),
        f"sampler {sampler.name!r} draws every token once more, by itself": (
            _overrides(sampler, "read") and request.temperature > 0
        ),
        f"sampler {sampler.name!r} cuts rows off before their end; give eos_early_stop=False": (
            request.eos_early_stop and any(_overrides(each, "trim") for each in methods)
        ),
        f"cache={state.cache.name!r} leaves undecided positions of the block unevaluated": (
            state.cache.facts.evaluates not in ("block", "undecided")
        ),
        f"blocks={shown(state.blocks)} have several blocks of a row open at once": (
            isinstance(state.blocks, PipelinedBlocks)
        ),
        f"blocks={shown(state.blocks)} end where single candidates say so": (
            getattr(state.blocks, "reads_logits", False)
        ),
        "rng='reference' draws every token by itself": request.rng == "reference",
        "stop_strings may end a row before its text is whole": request.stop_strings is not None,
        f"stop={shown(request.stop)} may end a row before its text is whole": (
            any(not isinstance(rule, (EndOfText, StopStrings)) for rule in state.stop_rules)
        ),
    }


def _overrides(sampler: Any, method: str) -> bool:
    """Whether a sampler has a method of `MaskedSampler` of its own; that class begins requests through this module."""
    base = next(each for each in type(sampler).__mro__ if each.__name__ == "MaskedSampler")
    return getattr(type(sampler), method) is not getattr(base, method)
