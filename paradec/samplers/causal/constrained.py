"""Causal requests with a `constraint`: tokens after which no text of it can be completed get no probability.

The distribution of a slot is the model's over the tokens that keep a text possible, given what is final and the drafts
before the slot, in as many tokens as are left. Drafts are verified against these distributions, and drawn from them
where a smaller model drafts; so whatever is exact without a constraint has exactly the distribution of token-by-token
decoding with it. A slot after a draft that fits no text keeps the model's own distribution: it never becomes final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.constraints.values import Constraint
from paradec.core import rows as of_rows
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.verification import ONE_HOT
from paradec.samplers.spans import Span, no_texts, refused, span_of


@dataclass
class TokenMasks:
    """The text of each row, and how far it has been read. `B` rows."""

    spans: list[Span]
    """[B]."""
    read: np.ndarray
    """[B] int64: final tokens of each answer that `state` is after."""
    state: np.ndarray
    """[B] int64: of the automaton."""

    @classmethod
    def of(cls, sampler: Any, model: Any, state: CausalState) -> TokenMasks:
        """For a request with a constraint.

        Raises:
            ValueError: a sampler or another argument that it does not work with; no tokenizer; or no text fits.
        """
        value: Any = state.request.constraint
        refused(
            value,
            no_texts(model)
            | {
                f"{model.facts.name} is a model of any order": bool(getattr(model, "any_order", False)),
                "it is a list for holes, and causal models fill none": not isinstance(value, Constraint),
                f"sampler {sampler.name!r} accepts tokens that its distribution excludes": not sampler.lossless,
                "early_exit='published' commits tokens that were not verified": (
                    getattr(sampler, "group", None) is not None and getattr(sampler, "early_exit", "") == "published"
                ),
                "stop_strings may end a row before its text is whole": state.request.stop_strings is not None,
            },
        )
        suppressed = () if state.allowed is None else np.flatnonzero(~state.allowed.cpu().numpy()).tolist()
        known, spans = dict[Any, Span](), list[Span]()
        for first, stop in zip(state.prompt_length.tolist(), state.length.tolist(), strict=True):
            spans.append(span_of(model, value, suppressed, [None] * (stop - first), first, True, stop - first, known))
        return cls(spans, *np.zeros((2, state.batch), np.int64))

    def taken(self, rows: np.ndarray) -> TokenMasks:
        """A copy that has the `rows` [N] alone."""
        return TokenMasks([self.spans[row] for row in rows], self.read[rows], self.state[rows])

    def put(self, slots: np.ndarray, other: TokenMasks) -> None:
        """Replace the rows `slots` [N]."""
        for slot, span in zip(slots.tolist(), other.spans, strict=True):
            self.spans[slot] = span
        of_rows.exchange(self.read, slots, other.read)
        of_rows.exchange(self.state, slots, other.state)

    # ---- masks ----------------------------------------------------------------------------------------------------

    def of_chain(self, state: CausalState, logits: Tensor, rows: np.ndarray, drafts: Tensor) -> Tensor:
        """Logits [R, W, V] of slots, each after the drafts [R, W] before it."""
        parents = torch.arange(-1, logits.shape[1] - 1).unsqueeze(0)
        return self.of_nodes(
            state, logits, rows, parents, torch.nn.functional.pad(drafts, (1, 0))[:, : len(parents[0])]
        )

    def of_nodes(
        self,
        state: CausalState,
        logits: Tensor,
        rows: np.ndarray,
        parents: Tensor,
        tokens: Tensor,
        nodes: Sequence[int] | np.ndarray | None = None,
    ) -> Tensor:
        """Logits [R, K, V] after the nodes of the rows' trees, without the tokens that fit no text.

        Args:
            parents: [R or 1, N] int64, -1 for the root, which is node 0 and the last final token; parents come first.
            tokens: [R, N] int64, -1 where a node has none. nodes: [K], of all N by default.
        """
        above, held = parents.tolist(), tokens.tolist()
        kept = range(logits.shape[1]) if nodes is None else [int(node) for node in nodes]
        masked = logits.clone()
        for index, row in enumerate(rows.tolist()):
            span = self.spans[row]
            depth, at = [int(state.committed[row]) - span.first], [self._reached(state, row)]
            for parent, token in zip(above[index if len(above) > 1 else 0][1:], held[index][1:]):
                depth.append(depth[parent] + 1)
                at.append(span.automaton.step(at[parent], token))
            table, class_of = span.automaton.table, torch.as_tensor(span.automaton.class_of).to(logits.device)
            for column, node in enumerate(kept):
                left = span.stop - span.first - depth[node]
                if at[node] < 0 or left <= 0 or not span.after[depth[node], at[node]]:
                    continue
                fits = np.append((table[at[node]] >= 0) & span.after[depth[node] + 1, table[at[node]]], False)
                out = torch.as_tensor(~fits, device=logits.device)[class_of.long()]
                masked[index, column].masked_fill_(out, -torch.inf)
        return masked

    def of_drafts(
        self,
        state: CausalState,
        logits: Tensor,
        rows: np.ndarray,
        parents: Tensor,
        tokens: Tensor,
        nodes: Sequence[int] | np.ndarray,
    ) -> Tensor:
        """As `of_nodes`, of a model that drafts; all tokens that fit are alike where it has none of them."""
        masked = self.of_nodes(state, logits, rows, parents, tokens, nodes)
        nothing = (masked == -torch.inf).all(-1, keepdim=True)
        if nothing.any():  # drafters may have a smaller vocabulary, or candidates
            alike = self.of_nodes(state, torch.zeros_like(logits), rows, parents, tokens, nodes)
            masked = torch.where(nothing, alike, masked)
        return masked

    def of_slot(self, state: CausalState, logits: Tensor, rows: np.ndarray, before: Tensor) -> Tensor:
        """The same of the slot [R, 1, V] after the drafts [R, n] of a chain."""
        parents = torch.arange(-1, before.shape[1]).unsqueeze(0)
        return self.of_drafts(state, logits, rows, parents, torch.nn.functional.pad(before, (1, 0)), [before.shape[1]])

    def _reached(self, state: CausalState, row: int) -> int:
        """The automaton's state after what is final of a row."""
        span, read = self.spans[row], int(self.read[row])
        committed = int(state.committed[row]) - span.first
        if committed > read:
            now = int(self.state[row])
            for token in state.canvas[row, span.first + read : span.first + committed].tolist():
                now = span.automaton.step(now, token)
            self.read[row], self.state[row] = committed, now
        return int(self.state[row])

    def put_certain(self, state: CausalState, rows: np.ndarray) -> None:
        """Draft what one token alone fits, in the windows of rows, after what is drafted too: it is accepted whatever
        the model says."""
        drafts, source = (state.memory.read(rows)[name] for name in ("drafts", "draft_source"))
        held, sources = drafts.tolist(), source.tolist()
        for index, row in enumerate(rows.tolist()):
            span, now = self.spans[row], self._reached(state, row)
            depth, reach = int(state.committed[row]) - span.first, int(state.drafted[row])
            for slot in range(min(len(held[index]), int(state.length[row] - state.committed[row]))):
                after = span.automaton.table[now]
                fits = np.flatnonzero((after >= 0) & span.after[depth + slot + 1, after])
                if len(fits) == 1 and span.automaton.sizes[fits[0]] == 1:
                    held[index][slot] = int(span.automaton.members[fits[0]][0])
                    sources[index][slot] = ONE_HOT
                    reach = max(reach, slot + 1)
                elif slot >= reach:
                    break
                now = span.automaton.step(now, held[index][slot])
                if now < 0:
                    break
            state.drafted[row] = reach
        state.memory.write("drafts", rows, drafts.new_tensor(held))
        state.memory.write("draft_source", rows, source.new_tensor(sources))
