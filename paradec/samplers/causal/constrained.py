"""Causal requests with a `constraint`: tokens after which no text of it can be completed get no probability.

The distribution of a slot is the model's over the tokens that keep a text possible, given what is final and the drafts
before the slot, in as many tokens as are left. Drafts are verified against these distributions, and drawn from them
where a smaller model drafts; so whatever is exact without a constraint has exactly the distribution of token-by-token
decoding with it. A slot after a draft that fits no text keeps the model's own distribution: it never becomes final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paradec.constraints.grammar import GrammarTexts
from paradec.constraints.values import Constraint, Grammar
from paradec.core.rows import ROWS
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.verification import ONE_HOT
from paradec.samplers.spans import Span, no_texts, refused, reserved_tokens, span_of


class Texts(Protocol):
    """The texts that an answer may be, token by token. States are values."""

    @property
    def begin(self) -> Any:
        """The state before the first token."""

    def after(self, state: Any, token: int) -> Any | None:
        """The state after a token; None where no text goes on with it."""

    def excluded(self, state: Any, read: int, device: torch.device) -> Tensor | None:
        """[V] bool: the tokens with which no text can be completed, after `read` tokens; None where none can in any
        case."""

    def certain(self, state: Any, read: int) -> int | None:
        """The only token with which one can."""


@dataclass(frozen=True)
class SpanTexts:
    """The texts of an automaton that fit the tokens that are left."""

    span: Span
    begin: int = 0

    def after(self, state: int, token: int) -> int | None:
        found = self.span.automaton.step(state, token)
        return None if found < 0 else found

    def _fitting(self, state: int, read: int) -> np.ndarray:
        """[k] int64: the classes that do."""
        classes, following = self.span.automaton.after(state)
        found: np.ndarray = classes[self.span.after(read + 1)[following]]
        return found

    def excluded(self, state: int, read: int, device: torch.device) -> Tensor | None:
        span = self.span
        if span.stop - span.first <= read or not span.after(read)[state]:
            return None
        class_of, out = torch.as_tensor(span.automaton.class_of).to(device), np.ones(span.automaton.classes + 1, bool)
        out[self._fitting(state, read)] = False
        return torch.as_tensor(out, device=device)[class_of.long()]

    def certain(self, state: int, read: int) -> int | None:
        fits = self._fitting(state, read)
        alone = len(fits) == 1 and self.span.automaton.sizes[fits[0]] == 1
        return int(self.span.automaton.members[fits[0]][0]) if alone else None


@dataclass
class TokenMasks:
    """The text of each row, and how far it has been read. `B` rows."""

    texts: list[Texts] = field(metadata=ROWS)
    """[B]."""
    first: np.ndarray = field(metadata=ROWS)
    """[B] int64: where each answer begins."""
    read: np.ndarray = field(metadata=ROWS)
    """[B] int64: final tokens of each answer that `state` is after."""
    state: list[Any] = field(metadata=ROWS)
    """[B]."""

    @classmethod
    def of(cls, sampler: Any, model: Any, state: CausalState) -> TokenMasks:
        """For a request with a constraint.

        Raises:
            ValueError: a sampler or another argument that it does not work with; no tokenizer, or one that a grammar
                does not work with; or no text fits.
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
        known, texts = dict[Any, Span](), list[Texts]()
        if isinstance(value, Grammar):
            facts = model.facts
            texts = [GrammarTexts(value.grammar, model.tokenizer, facts.vocab_size, facts.eos_token_ids)] * state.batch
        for first, stop in zip(state.prompt_length.tolist(), state.length.tolist(), strict=True) if not texts else ():
            given: list[int | None] = [None] * (stop - first)
            reserved = reserved_tokens(model.facts, True)
            texts.append(
                SpanTexts(span_of(model, value, suppressed, reserved, given, first, True, stop - first, known))
            )
        begin = [each.begin for each in texts]
        return cls(texts, state.prompt_length.copy(), np.zeros(state.batch, np.int64), begin)

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
            texts, read = self.texts[row], [int(state.committed[row] - self.first[row])]
            at = [self._reached(state, row)]
            for parent, token in zip(above[index if len(above) > 1 else 0][1:], held[index][1:]):
                read.append(read[parent] + 1)
                at.append(None if at[parent] is None else texts.after(at[parent], token))
            for column, node in enumerate(kept):
                out = None if at[node] is None else texts.excluded(at[node], read[node], logits.device)
                if out is not None:
                    masked[index, column].masked_fill_(out, -torch.inf)
        return masked

    def _reached(self, state: CausalState, row: int) -> Any:
        """The state after what is final of a row."""
        begin = int(self.first[row] + self.read[row])
        for token in state.canvas[row, begin : int(state.committed[row])].tolist():
            self.state[row] = self.texts[row].after(self.state[row], token)
        self.read[row] = state.committed[row] - self.first[row]
        return self.state[row]

    def put_certain(self, state: CausalState, rows: np.ndarray) -> None:
        """Draft what one token alone fits, in the windows of rows, after what is drafted too: it is accepted whatever
        the model says."""
        drafts, source = (state.memory.read(rows)[name] for name in ("drafts", "draft_source"))
        held, sources = drafts.tolist(), source.tolist()
        for index, row in enumerate(rows.tolist()):
            texts, now = self.texts[row], self._reached(state, row)
            read, reach = int(self.read[row]), int(state.drafted[row])
            for slot in range(min(len(held[index]), int(state.length[row] - state.committed[row]))):
                if (certain := texts.certain(now, read + slot)) is not None:
                    held[index][slot], sources[index][slot] = certain, ONE_HOT
                    reach = max(reach, slot + 1)
                elif slot >= reach:
                    break
                if (now := texts.after(now, held[index][slot])) is None:
                    break
            state.drafted[row] = reach
        state.memory.write("drafts", rows, drafts.new_tensor(held))
        state.memory.write("draft_source", rows, source.new_tensor(sources))
