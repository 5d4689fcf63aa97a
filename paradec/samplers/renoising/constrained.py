"""Canvases with a `constraint`: every step's distributions are conditioned on it, and what closes is one of its texts.

What an earlier step kept counts for nothing, so that one thing decides whether an answer fits: a canvas closes with the
likeliest text, not with the best token of each position, from the state after the canvas before it to states from which
the rest can be filled. Entropies are those of the conditioned marginals; what a step keeps is drawn jointly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.constraints.marginals import Marginals
from paradec.core import rng
from paradec.core.facts import HOLE
from paradec.core.protocol import NotFinite
from paradec.samplers.filters import filter_logits
from paradec.samplers.masked.blocks import EndOfText
from paradec.samplers.renoising.state import DenoisingState
from paradec.samplers.spans import Span, no_texts, parts_of, refused, spans_of


@dataclass
class CanvasTexts:
    """The texts of each row, and their distributions at this step."""

    spans: list[tuple[Span, ...]]
    """[B]."""

    @classmethod
    def of(cls, model: Any, state: DenoisingState, canvas: np.ndarray) -> CanvasTexts:
        """For a request with a constraint. canvas: [B, L] int64 with `HOLE` at what is to be filled.

        Raises:
            ValueError: an argument that it does not work with; no tokenizer; or no text fits a row.
        """
        request = state.request
        refused(
            request.constraint,
            no_texts(model)
            | {
                "rng='reference' draws every token by itself": request.rng == "reference",
                "stop_strings may end a row before its text is whole": request.stop_strings is not None,
                "a stop rule of one's own may end a row before its text is whole": (
                    any(not isinstance(rule, EndOfText) for rule in state.stop_rules)
                ),
            },
        )
        suppressed = () if state.suppressed is None else tuple(state.suppressed.tolist())
        return cls(spans_of(model, state, suppressed, canvas, HOLE, state.width))

    def __post_init__(self) -> None:
        self._found: list[tuple[int, int, list[int], Marginals]] = []

    def conditioned(
        self, state: DenoisingState, rows: np.ndarray, positions: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, C, V] whose tempered distributions are conditioned on the texts, from those of the model; and the
        likeliest texts [R, C]."""
        request, logits = state.request, logits.to(torch.promote_types(logits.dtype, torch.float32))
        temperature, canvas = state.temperature(rows).tolist(), state.canvas.cpu().numpy()
        undecided = torch.as_tensor(~state._final).numpy()
        best, where = logits.argmax(-1), positions.cpu().numpy()
        filters = (request.top_p, request.top_k)
        self._found = []
        for index, row in enumerate(rows.tolist()):
            begin, asked = int(where[index, 0]), int(state.asked[row])
            if len(state.ends) and asked < begin + state.width:  # what is cut off in the end
                beyond = logits[index, asked - begin :]
                beyond.fill_(-torch.inf)
                beyond[:, state.ends[0]] = 0
            for part in parts_of(self.spans[row], row, canvas[row], undecided[row], begin, begin + state.width):
                at = [position - begin for position in part.open]
                warm = logits[index, at] / temperature[index]
                model = self._marginals(state, row, part, warm)
                if model is None:
                    continue  # the commit says what is wrong
                if any(each is not None for each in filters):
                    kept = filter_logits(model.conditioned(), *filters) > -torch.inf
                    kept.scatter_(1, model.best().unsqueeze(1), True)  # the likeliest text stays possible
                    model = self._marginals(state, row, part, warm.masked_fill(~kept, -torch.inf))
                    assert model is not None
                best[index, at] = model.best()
                logits[index, at] = model.conditioned() * temperature[index]
                self._found.append((index, row, at, model))
        return logits, best

    def _marginals(self, state: DenoisingState, row: int, part: Any, logits: Tensor) -> Marginals | None:
        found = Marginals(part.span.automaton, logits, part.held, part.state, part.last)
        if found.broken:
            return None
        if found.total == -np.inf:
            step = int(state.row_step[row])
            raise NotFinite(
                f"the model excludes (-inf) every text of the constraint for row {row} at its step {step}",
                np.array([row]),
            )
        return found

    def drawn(self, state: DenoisingState, positions: Tensor, tokens: Tensor) -> Tensor:
        """Draws [R, C] of the last step's distributions: texts where they are constrained, `tokens` elsewhere."""
        drawn = tokens.clone()
        for index, row, at, model in self._found:
            uniform = self.uniform(state, row, positions[index, at])
            drawn[index, at] = model.drawn(uniform)
        return drawn

    def uniform(self, state: DenoisingState, row: int, positions: Tensor) -> np.ndarray:
        """The numbers [m] in (0, 1) that a text is drawn with: they depend on row, step and position alone."""
        step = torch.as_tensor(state.row_step[row : row + 1]).to(positions.device)
        found = rng.uniform(state.keys[row : row + 1], step, positions.unsqueeze(0), 1, rng.TOKEN_STREAM)
        return found[0, :, 0].cpu().numpy()
