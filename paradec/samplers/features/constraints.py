"""Constraints (`constraint`): every answer, or every hole (run of masks in a prompt), is a text of a formal language.

Masked models and canvases of noise: a step conditions the product of its marginals on the language
(`paradec.constraints.passes`). The candidates form one text, the likeliest or a joint draw, so that any selection of
them fits the language. Scores are those of the conditioned marginals.

Causal models: a slot's distribution is the model's, restricted to tokens after which a text is still possible, given
the final tokens, the drafts before the slot and the number of remaining tokens. Drafts are drawn from these
distributions and verified against them, so that answers of lossless samplers have the distribution of token-by-token
decoding with the constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.constraints import passes
from paradec.constraints.grammar import GrammarTexts
from paradec.constraints.marginals import Marginals
from paradec.constraints.values import Constraint, Grammar
from paradec.core import rng
from paradec.core.checks import short_repr
from paradec.core.facts import HOLE
from paradec.core.protocol import NotFinite
from paradec.core.rows import ROWS, row_layout
from paradec.kernels.token_stats import token_statistics
from paradec.request import NO_FILTERS
from paradec.samplers.causal.window import ONE_HOT
from paradec.samplers.distributions import apply_temperature, filter_logits
from paradec.samplers.features.feature import Ends, Feature, overrides
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks
from paradec.samplers.features.spans import SpanPart, TextSpan, find_parts, find_spans
from paradec.samplers.features.stop_strings import StopStrings
from paradec.samplers.masked.blocks import EndOfText, open_blocks


def raise_unsupported(model: Any, state: Any, reasons: dict[str, bool]) -> None:
    """Raise ValueError for the first reason that holds, if any: one of all families, or else one of `reasons`."""
    name, request = model.facts.name, state.request
    common = {
        f"it needs a tokenizer, and {name} has none": getattr(model, "tokenizer", None) is None,
        "rng='reference' draws tokens independently": request.rng == "reference",
        "stop_strings may end a row before its text is complete": request.stop_strings is not None,
        f"stop={short_repr(request.stop)} may end a row before its text is complete": (
            any(not isinstance(rule, (EndOfText, StopStrings)) for rule in getattr(state, "stop_rules", ()))
        ),
    }
    if (why := next((reason for reason, holds in (common | reasons).items() if holds), None)) is not None:
        raise ValueError(f"constraint={short_repr(request.constraint)} does not work here: {why}")


@dataclass
class SpanConstraint(Feature):
    """Constraint whose texts are spans of each row. The undecided tokens of a span are drawn jointly."""

    spans: list[tuple[TextSpan, ...]] = field(metadata=row_layout(fill=()))

    why_host_only = "constraints run on the host"
    stream: ClassVar[int]
    """Random stream of the draws."""

    def uniform(self, state: Any, part: SpanPart) -> np.ndarray:
        """Draw uniform numbers [m] in (0, 1) for a part's undecided positions, by row, step and position."""
        step, positions = torch.as_tensor(state.row_step[part.row : part.row + 1]), torch.tensor([part.open_positions])
        key = state.keys[part.row : part.row + 1]
        draws = rng.uniform(key, step.to(key.device), positions.to(key.device), 1, self.stream)
        return draws[0, :, 0].cpu().numpy()

    def _marginals(self, state: Any, part: SpanPart, logits: Tensor) -> Marginals | None:
        """Compute the marginals of a part; None for NaN or +inf logits, for which `commit` raises an error."""
        marginals = Marginals(part.span.automaton, logits, part.tokens, part.state, part.last)
        if marginals.has_invalid_logits:
            return None
        if marginals.total == -np.inf:
            step = int(state.row_step[part.row])
            raise NotFinite(
                f"the model excludes (-inf) every text of the constraint for row {part.row} at its step {step}",
                np.array([part.row]),
            )
        return marginals

    def _filter(self, state: Any, part: SpanPart, marginals: Marginals) -> Marginals:
        """Apply the request's filters (top-p, ...) to marginals, but never exclude the likeliest text."""
        if state.request.filters == NO_FILTERS:
            return marginals
        allowed = filter_logits(marginals.conditioned_logits(), *state.request.filters) > -torch.inf
        allowed.scatter_(1, marginals.best().unsqueeze(1), True)
        filtered = self._marginals(state, part, marginals.logits.masked_fill(~allowed, -torch.inf))
        assert filtered is not None
        return filtered


# ---- masked models --------------------------------------------------------------------------------------------------


@dataclass
class MaskedConstraint(SpanConstraint):
    """Constraint of masked models: spans, and the importance weight of each row's draws.

    A position is certain if only one token fits. Every commit also writes the open block's certain positions. At
    temperature 0 they are also written when the block opens, without a forward; above 0, not before its first step.
    """

    log_weight: np.ndarray | None = field(metadata=ROWS)
    """[B] float64: see `paradec.Output.log_weight`; None at temperature 0."""

    stream = 7

    @classmethod
    def from_request(cls, sampler: Any, model: Any, state: Any) -> MaskedConstraint:
        """Make the constraint of a request. Raises ValueError if it is unsupported, or if no text fits a row."""
        raise_unsupported(model, state, _masked_reasons(sampler, state))
        canvas = state.canvas.cpu().numpy()
        # with early stop rules, a step reads logits up to the row's end
        length = None if state.request.stop is not None else getattr(state.blocks, "length", None)
        spans = find_spans(model, state, canvas, state.mask_id, canvas.shape[1] if length is None else length)
        return cls(spans, None if state.request.temperature == 0 else np.zeros(state.batch))

    def __post_init__(self) -> None:
        self._draws: dict[tuple[int, int], tuple[int, SpanPart, Marginals]] = {}

    def after_row_change(self) -> None:
        self._draws = {}

    def read_candidates(
        self, sampler: Any, state: Any, logits: Tensor, query: Any, generator: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute candidate tokens [N, K] and quantities [N, K] of a query, as `MaskedSampler.read_candidates`."""
        positions = state.window.query_positions(query)
        current = state.canvas[torch.as_tensor(query.rows, device=logits.device)].gather(1, positions)
        undecided = current == state.mask_id
        if state.window.valid is not None:
            valid = state.window.valid[torch.as_tensor(query.window.index, device=logits.device)]
            undecided &= valid if query.window.columns is None else valid.gather(1, query.window.columns)
        canvas, host_positions = state.canvas.cpu().numpy(), positions.cpu().numpy()
        texts, entries = list[tuple[Tensor, dict[str, Tensor]]](), list[int]()
        for index, row in enumerate(query.rows.tolist()):
            columns = {position: column for column, position in enumerate(host_positions[index].tolist())}
            for part_index, part in enumerate(self._open_parts(state, row, canvas[row])):
                open_columns = [columns[position] for position in part.open_positions]
                first, last = open_columns[0], open_columns[-1]
                contiguous = last - first < len(open_columns)
                part_logits = logits[index, first : last + 1] if contiguous else logits[index, open_columns]
                texts.append(self._draw_text(sampler, state, part_logits, part, part_index))
                entries += [index * host_positions.shape[1] + column for column in open_columns]
        is_constrained = torch.zeros_like(undecided).flatten()
        is_constrained[entries] = True
        tokens, quantities = current, dict[str, Tensor]()
        if sampler.needs.decided_logits or bool((undecided & ~is_constrained.view_as(undecided)).any()):
            tokens, quantities = sampler.read_candidates(state, logits, query, generator)
        if not texts:
            return tokens, quantities
        flat = torch.tensor(entries, device=logits.device)
        for name in texts[0][1]:
            value = torch.cat([values[name] for _, values in texts])
            merged = quantities.get(name, value.new_zeros(current.shape))
            quantities[name] = merged.flatten().index_copy(0, flat, value.to(merged)).view_as(current)
        sampled = torch.cat([text_tokens for text_tokens, _ in texts])
        return tokens.flatten().index_copy(0, flat, sampled).view_as(current), quantities

    def _open_parts(self, state: Any, row: int, canvas: np.ndarray, stop: int | None = None) -> list[SpanPart]:
        """List the undecided parts of spans in the row's window, before position `stop` (None: the window's end)."""
        if stop is None:
            stop = int((state.length if "early_stops" in state.features else state.block_end)[row])
        return find_parts(self.spans[row], row, canvas, canvas == state.mask_id, int(state.block_start[row]), stop)

    def _draw_text(
        self, sampler: Any, state: Any, raw: Tensor, part: SpanPart, part_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose candidates [m] for a part's undecided positions from raw logits [m, V]; also return quantities [m]."""
        needs, temperature = sampler.needs, state.request.temperature
        raw_marginals = self._marginals(state, part, raw)
        if raw_marginals is None:
            invalid = raw.new_full((len(raw),), torch.nan, dtype=torch.float64)
            return torch.zeros_like(invalid, dtype=torch.int64), dict.fromkeys(needs.reads, invalid)
        scaled = raw if temperature in (0, 1) else apply_temperature(raw, temperature)
        marginals = raw_marginals if scaled is raw else self._marginals(state, part, scaled)
        assert marginals is not None
        if temperature > 0 or needs.score_from == "sampled":
            marginals = self._filter(state, part, marginals)
        if temperature == 0:
            tokens = marginals.best()
        else:
            tokens = marginals.sample(self.uniform(state, part))
            self._draws[part.row, part_index] = int(state.row_step[part.row]), part, marginals
        scored = raw_marginals if needs.score_from == "raw" else marginals
        if needs.reads == ("confidence",):
            return tokens, {"confidence": scored.probabilities(tokens)}
        return token_statistics(scored.conditioned_logits(), needs.reads, tokens)

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        """At temperature 0, write the certain positions of newly opened blocks."""
        if self.log_weight is None:
            self.write_certain(state, rows)

    def write_certain(self, state: Any, rows: np.ndarray) -> None:
        """Write the certain positions in the open blocks of `rows` [R]. Rows with a full block then open the next."""
        canvas, full_rows = state.canvas.cpu().numpy(), []
        for row in rows.tolist():
            certain = self._find_certain(state, row, canvas[row])
            if not certain:
                continue
            positions, tokens = torch.tensor([*certain.items()], device=state.canvas.device).unbind(1)
            state.canvas[row, positions] = tokens
            if "rollout" in state.features:
                state.features["rollout"].record_forced(state, row, positions, tokens)
            if state.trace is not None:  # tokens that no step writes belong to the trace's initial canvas
                for position, token in certain.items():
                    state.trace.canvas[row][position] = token
            state.masks_at_open[row] -= len(certain)
            state.remaining[row] -= len(certain)
            state.decided[row] += len(certain)
            if not state.remaining[row]:
                full_rows.append(row)
        if full_rows:
            open_blocks(state, np.array(full_rows))

    def _find_certain(self, state: Any, row: int, canvas: np.ndarray) -> dict[int, int]:
        """Map the certain positions of the open block (undecided, and only one token fits) to their tokens."""
        certain = {}
        for part in self._open_parts(state, row, canvas, int(state.block_end[row])):
            automaton = part.span.automaton
            fits = passes.possible_classes(automaton, part.tokens, part.state, part.last)
            for slot, token in enumerate(part.tokens):
                classes = np.flatnonzero(fits[slot])
                if token is None and automaton.sizes[classes].sum() == 1:
                    certain[part.first + slot] = int(automaton.members[classes[0]][0])
        return certain

    def on_commit(self, state: Any, proposal: Any, decision: Any) -> None:
        """Add the positions that are certain after the method's selection."""
        canvas, window = state.canvas.cpu().numpy().copy(), state.window
        tokens = torch.where(decision.selected, decision.values, proposal.current).cpu().numpy()
        selected, values = decision.selected.clone(), decision.values.clone()
        for index, row in enumerate(window.rows.tolist()):
            positions = window.host_positions[index]
            is_valid = slice(None) if window.host_valid is None else window.host_valid[index]
            canvas[row, positions[is_valid]] = tokens[index][is_valid]
            for position, token in self._find_certain(state, row, canvas[row]).items():
                column = position - int(positions[0])
                selected[index, column], values[index, column] = True, token
        decision.filled = torch.where(selected & ~decision.selected, 1, decision.filled).to(decision.filled.dtype)
        decision.selected, decision.values = selected, values

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """Add ln(Z / Z') to `log_weight`: Z is the total mass of the span's texts, Z' their mass given new tokens."""
        if not self._draws:
            return False
        canvas = state.canvas.cpu().numpy()
        assert self.log_weight is not None  # above temperature 0
        for (row, _), (step, part, marginals) in self._draws.items():
            if step != state.row_step[row] - 1 or row not in proposal.rows:
                continue
            current = canvas[row, part.first : part.first + len(part.tokens)].tolist()
            decided = [k for k, token in enumerate(part.tokens) if token is None and current[k] != state.mask_id]
            masses = marginals.sums.copy()
            for slot in decided:
                masses[slot] = passes.certain(part.span.automaton, current[slot])
            log_mass = passes.backward_sums(part.span.automaton, masses, part.last)[0, part.state]
            self.log_weight[row] += marginals.total - float(log_mass) - float(marginals.norms(decided).sum())
        self._draws.clear()
        return False


def _masked_reasons(sampler: Any, state: Any) -> dict[str, bool]:
    name, needs, blocks, methods = sampler.name, sampler.needs, state.blocks, getattr(sampler, "rules", (sampler,))
    redraws = overrides(sampler, "read_candidates") and state.request.temperature > 0
    trims = state.request.eos_early_stop and any(overrides(method, "trim") for method in methods)
    is_partial = state.cache.facts.evaluates not in ("block", "undecided")
    return {
        f"sampler {name!r} drafts steps ahead": needs.multi_step,
        f"sampler {name!r} replaces decided tokens": needs.revises or needs.mask_probes,
        f"sampler {name!r} chooses the positions of several steps ahead": hasattr(sampler, "targets"),
        f"sampler {name!r} draws every token a second time, independently": redraws,
        f"sampler {name!r} cuts rows off before their end; give eos_early_stop=False": trims,
        f"cache={state.cache.name!r} does not evaluate all undecided positions of the block": is_partial,
        f"blocks={short_repr(blocks)} open several blocks of a row at once": isinstance(blocks, PipelinedBlocks),
        f"blocks={short_repr(blocks)} end at single candidates": getattr(blocks, "reads_logits", False),
    }


# ---- canvases of noise ----------------------------------------------------------------------------------------------


@dataclass
class CanvasConstraint(SpanConstraint):
    """Constraint of canvases of noise: spans, and their parts in this step.

    A canvas closes with the likeliest text, not with the best token of each position. Its text continues that of the
    previous canvas, and can be continued to the end of the span. Entropies are those of the conditioned marginals.
    """

    stream = rng.TOKEN_STREAM

    @classmethod
    def from_request(cls, model: Any, state: Any, canvas: np.ndarray) -> CanvasConstraint:
        """Make a request's constraint. Raises as `MaskedConstraint`. canvas: [B, L], `HOLE` at positions to fill."""
        raise_unsupported(model, state, {})
        return cls(find_spans(model, state, canvas, HOLE, state.width))

    def __post_init__(self) -> None:
        self._parts: list[tuple[int, SpanPart, list[int], Marginals]] = []

    def condition(self, state: Any, rows: np.ndarray, positions: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Condition logits [R, C, V] at their temperature on the texts; also return the likeliest texts [R, C]."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        temperature, canvas = state.temperature(rows).tolist(), state.canvas.cpu().numpy()
        undecided = state.undecided.cpu().numpy()
        best_tokens, host_positions = logits.argmax(-1), positions.cpu().numpy()
        self._parts = []
        for index, row in enumerate(rows.tolist()):
            begin, stop = int(host_positions[index, 0]), int(state.requested_end[row])
            if len(state.ends) and stop < begin + state.width:  # end tokens after the requested positions
                beyond = logits[index, stop - begin :]
                beyond.fill_(-torch.inf)
                beyond[:, state.ends[0]] = 0
            for part in find_parts(self.spans[row], row, canvas[row], undecided[row], begin, begin + state.width):
                columns = [position - begin for position in part.open_positions]
                marginals = self._marginals(state, part, logits[index, columns] / temperature[index])
                if marginals is None:
                    continue  # `commit` raises the error
                marginals = self._filter(state, part, marginals)
                best_tokens[index, columns] = marginals.best()
                logits[index, columns] = marginals.conditioned_logits() * temperature[index]
                self._parts.append((index, part, columns, marginals))
        return logits, best_tokens

    def draw(self, state: Any, positions: Tensor, tokens: Tensor) -> Tensor:
        """Draw tokens [R, C] from the last conditioned step: texts in spans, and `tokens` elsewhere."""
        samples = tokens.clone()
        for index, part, columns, marginals in self._parts:
            samples[index, columns] = marginals.sample(self.uniform(state, part))
        return samples


# ---- causal models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanTexts:
    """Texts of an automaton that fit the span's positions, read token by token from the state `begin`."""

    span: TextSpan
    begin: int = 0

    def after(self, state: int, token: int) -> int | None:
        """Return the state after a token; None if no text continues with this token."""
        next_state = self.span.automaton.step(state, token)
        return None if next_state < 0 else next_state

    def _fitting(self, state: int, num_read: int) -> np.ndarray:
        """List the classes of tokens with which a text can continue: [k] int64."""
        classes, next_states = self.span.automaton.transitions(state)
        return np.asarray(classes[self.span.after(num_read + 1)[next_states]])

    def excluded(self, state: int, num_read: int, device: torch.device) -> Tensor | None:
        """Find tokens that continue no text after `num_read` tokens: [V] bool; None: no text fits, or a full span."""
        span = self.span
        if span.stop - span.first <= num_read or not span.after(num_read)[state]:
            return None
        class_of = torch.as_tensor(span.automaton.class_of).to(device)
        is_excluded = np.ones(span.automaton.classes + 1, bool)
        is_excluded[self._fitting(state, num_read)] = False
        return torch.as_tensor(is_excluded, device=device)[class_of.long()]

    def certain(self, state: int, num_read: int) -> int | None:
        """Return the token with which a text must continue; None if several or no tokens are possible."""
        fits = self._fitting(state, num_read)
        is_certain = len(fits) == 1 and self.span.automaton.sizes[fits[0]] == 1
        return int(self.span.automaton.members[fits[0]][0]) if is_certain else None


@dataclass
class CausalConstraint:
    """Constraint of causal models, `B` rows. Slots after a draft that fits no text keep the model's distribution."""

    texts: list[Any] = field(metadata=ROWS)
    """[B] `SpanTexts` or `GrammarTexts`."""
    answer_start: np.ndarray = field(metadata=ROWS)
    """[B] int64: start of each answer."""
    num_read: np.ndarray = field(metadata=ROWS)
    """[B] int64: number of final tokens of each answer that `text_states` includes."""
    text_states: list[Any] = field(metadata=ROWS)

    @classmethod
    def from_request(cls, sampler: Any, model: Any, state: Any) -> CausalConstraint:
        """Make the constraint of a request. Raises as `MaskedConstraint`."""
        value, facts = state.request.constraint, model.facts
        reasons = {
            f"{facts.name} decides in any order; write load_protein_mpnn(..., rules=paradec.DesignRules(omit="
            '"C", omit_at={0: "P"})) to exclude letters': bool(getattr(model, "any_order", False)),
            "it is a list for holes, which causal models do not fill": not isinstance(value, Constraint),
            f"sampler {sampler.name!r} accepts tokens that its distribution excludes": not sampler.lossless,
            "early_exit='published' commits tokens that were not verified": (
                getattr(sampler, "group", None) is not None and getattr(sampler, "early_exit", "") == "published"
            ),
        }
        raise_unsupported(model, state, reasons)
        if isinstance(value, Grammar):
            grammar = GrammarTexts(value.grammar, model.tokenizer, facts.vocab_size, facts.eos_token_ids)
            texts: list[Any] = [grammar] * state.batch
        else:
            canvas = state.canvas.cpu().numpy()
            canvas = np.where(np.arange(canvas.shape[1]) < state.prompt_length[:, None], canvas, HOLE)
            texts = [SpanTexts(span) for (span,) in find_spans(model, state, canvas, HOLE, 1)]
        begin = [text.begin for text in texts]
        return cls(texts, state.prompt_length.copy(), np.zeros(state.batch, np.int64), begin)

    def mask_slots(self, state: Any, logits: Tensor, rows: np.ndarray, drafts: Tensor) -> Tensor:
        """Exclude tokens that fit no text from logits [R, W, V] of slots, each after the drafts [R, W] before it."""
        parents = torch.arange(-1, logits.shape[1] - 1).unsqueeze(0)
        tokens = torch.nn.functional.pad(drafts, (1, 0))[:, : len(parents[0])]
        return self.mask_nodes(state, logits, rows, parents, tokens)

    def mask_nodes(
        self,
        state: Any,
        logits: Tensor,
        rows: np.ndarray,
        parents: Tensor,
        tokens: Tensor,
        nodes: Sequence[int] | np.ndarray | None = None,
    ) -> Tensor:
        """Exclude tokens that fit no text from logits [R, K, V] after nodes of the rows' trees of drafts.

        parents: [R or 1, N] int64, parents before children; -1 for the root, node 0, which is the last final token.
        tokens: [R, N] int64, -1 for nodes without a token. nodes: [K], the nodes of the logits; None for all N."""
        parent_lists, token_lists = parents.tolist(), tokens.tolist()
        node_list = range(logits.shape[1]) if nodes is None else [int(node) for node in nodes]
        masked = logits.clone()
        for index, row in enumerate(rows.tolist()):
            texts, num_read = self.texts[row], [int(state.committed[row] - self.answer_start[row])]
            states = [self._advance(state, row)]
            for parent, token in zip(parent_lists[index if len(parent_lists) > 1 else 0][1:], token_lists[index][1:]):
                num_read.append(num_read[parent] + 1)
                states.append(None if states[parent] is None else texts.after(states[parent], token))
            for column, node in enumerate(node_list):
                excluded = None if states[node] is None else texts.excluded(states[node], num_read[node], logits.device)
                if excluded is not None:
                    masked[index, column].masked_fill_(excluded, -torch.inf)
        return masked

    def _advance(self, state: Any, row: int) -> Any:
        begin = int(self.answer_start[row] + self.num_read[row])
        for token in state.canvas[row, begin : int(state.committed[row])].tolist():
            self.text_states[row] = self.texts[row].after(self.text_states[row], token)
        self.num_read[row] = state.committed[row] - self.answer_start[row]
        return self.text_states[row]

    def draft_certain(self, state: Any, rows: np.ndarray) -> None:
        """Draft the tokens of certain positions, which only one token fits. Such drafts are always accepted."""
        drafts, source = (state.memory.read(rows)[name] for name in ("drafts", "draft_source"))
        draft_lists, sources = drafts.tolist(), source.tolist()
        for index, row in enumerate(rows.tolist()):
            texts, text_state = self.texts[row], self._advance(state, row)
            num_read, num_drafted = int(self.num_read[row]), int(state.num_drafts[row])
            for slot in range(min(len(draft_lists[index]), int(state.length[row] - state.committed[row]))):
                if (certain := texts.certain(text_state, num_read + slot)) is not None:
                    draft_lists[index][slot], sources[index][slot] = certain, ONE_HOT
                    num_drafted = max(num_drafted, slot + 1)
                elif slot >= num_drafted:
                    break
                if (text_state := texts.after(text_state, draft_lists[index][slot])) is None:
                    break
            state.num_drafts[row] = num_drafted
        state.memory.write("drafts", rows, drafts.new_tensor(draft_lists))
        state.memory.write("draft_source", rows, source.new_tensor(sources))
