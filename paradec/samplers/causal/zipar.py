"""ZipAR (He et al., arXiv 2412.04062): rows of an image are decoded in parallel, each some tokens behind the row
above."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import orders, rng
from paradec.core.checks import check_int
from paradec.core.family_queries import CausalQuery
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Proposal, Sampler
from paradec.core.query import StoreCall
from paradec.core.trace import Notes
from paradec.kernels.token_stats import draw
from paradec.models.images.grid import Grid
from paradec.samplers.causal.loop import CausalSampler
from paradec.samplers.causal.state import CausalState, make_proposal, read_logits
from paradec.samplers.causal.window import VerifiedWindow
from paradec.samplers.distributions import probability


@dataclass(frozen=True)
class Step:
    """One model call. Offsets count from the end of the prompt; -1 is its last token."""

    positions: list[int]
    """Offsets of the evaluated positions."""
    tokens: list[int]
    """Offsets of the tokens that are evaluated at these positions."""
    columns: list[int]
    """Indices in `positions` at which logits are read."""
    targets: list[int]
    """Offsets of the tokens that these logits predict."""


def plan_steps(grid: Grid, window: int) -> list[Step]:
    """Plan the steps of a grid. Rasters are decoded one after the other; the first step also evaluates the prompt."""
    forced = grid.layout.tolist()
    deferred: list[int] = []  # offsets at the end of complete rows, evaluated in the next step
    steps: list[Step] = []
    for begin, height, width in grid.rasters:
        stride = width + grid.stride - grid.width
        row_starts = [begin + row * stride for row in range(height)]
        for (cells,) in orders.ZipAR(window).groups(height, width):
            token_at: dict[int, int] = {offset: offset for offset in deferred}
            targets: dict[int, int] = {}
            num_decided = dict(divmod(cell, width) for cell in cells.tolist())  # per row in progress
            deferred = []
            for row, column in num_decided.items():
                offset = row_starts[row] + column  # the token to predict
                targets[offset - 1] = offset
                num_above = num_decided.get(row - 1, width)
                is_known = column > 0 or row == 0 or forced[offset - 1] >= 0 or num_above == width
                # if the end of the row above is not decided, its last decided token is evaluated instead
                token_at.setdefault(offset - 1, offset - 1 if is_known else row_starts[row - 1] + num_above - 1)
                if column == width - 1:
                    deferred += range(offset, row_starts[row] + stride)
            if not steps:  # all positions before the first image token
                token_at = {offset: offset for offset in range(-1, begin)} | token_at
            order = sorted(token_at)
            columns = [order.index(offset) for offset in targets]
            steps.append(Step(order, [token_at[offset] for offset in order], columns, list(targets.values())))
    return steps


@dataclass
class ZipARState(CausalState):
    """State of a request whose image rows are decoded in parallel."""

    schedule: list[Step] = field(init=False, default_factory=list)
    """The steps of the request."""

    def finish_step(self, rows: np.ndarray) -> None:
        # tokens before the first one that a later step predicts are final
        targets = [offset for step in self.schedule[self.commits :] for offset in step.targets]
        self.committed = self.prompt_length + min(targets, default=self.max_new_tokens)
        self._find_rows()


@dataclass(frozen=True)
class ZipAR(CausalSampler):
    """A row starts once `window` tokens of the row above are decided; then every step decides one token of the row.

    Not lossless: a token does not see the undecided tokens at the right of the rows above. If rows have no end token, a
    row's first token is predicted from the latest token of the row above. A `window` of at least the image's width is
    token-by-token decoding. There are no drafts. Needs a grid and a model with a key/value store.

    Args:
        window: number of tokens by which a row is ahead of the row below.
    """

    window: int = 16

    name = "zipar"
    paper = "ZipAR"
    arxiv = "2412.04062"
    summary = "the rows of an image side by side, each starts a window after the one above; not lossless"
    lossless = False
    state_type: ClassVar[type[CausalState]] = ZipARState
    lock_step = True

    def __post_init__(self) -> None:
        check_int("window", self.window, low=1)

    def check_request(self, model: Any, grid: Grid | None) -> None:
        """Raise ValueError without a grid, or for a model without a store."""
        if grid is None:
            raise ValueError(f"sampler {self.name!r} decodes rows of an image: it needs a grid")
        if not model.supports_store:
            raise ValueError(
                f"sampler {self.name!r} needs a model that runs over a key/value store; {model.facts.name} does not"
            )

    def num_slots(self, model: Any, num_new: int) -> int:
        return 1

    def memory(self) -> dict[str, MemorySpec]:
        return {}

    def open(self, state: CausalState, model: Any) -> None:
        assert isinstance(state, ZipARState) and state.grid is not None and state.layout is not None  # checked
        state.schedule = plan_steps(state.grid, self.window)
        layout = state.layout.expand(state.batch, -1)  # prescribed tokens are written at the start
        state.write(_columns(state, range(len(state.layout))), state.rows, layout)

    def observe(self, state: CausalState, proposal: Proposal) -> Notes:
        return Sampler.observe(self, state, proposal)  # without drafts

    def query(self, state: CausalState) -> list[CausalQuery]:
        """Evaluate the last token of every image row in progress; in the first step, evaluate the prompt."""
        assert isinstance(state, ZipARState)
        step, device = state.schedule[state.commits], state.context.device
        prompt_end = (state.prompt_length + state.shift).reshape(-1)[:, None]
        columns, token_columns = prompt_end + np.array(step.positions), prompt_end + np.array(step.tokens)
        if not state.commits:  # the whole prompts, right-aligned
            columns = token_columns = prompt_end + np.arange(-int(prompt_end.max()), step.positions[-1] + 1)
        valid = columns >= 0
        logit_columns = np.array(step.columns) + columns.shape[1] - len(step.positions)
        positions, tokens = (torch.as_tensor(np.maximum(array, 0), device=device) for array in (columns, token_columns))
        store_rows = np.arange(len(prompt_end))
        rows = torch.as_tensor(store_rows, device=device)
        slots = torch.as_tensor(np.where(valid, columns, -1), device=device)
        return [
            CausalQuery(
                rows=state.rows,
                tokens=state.context.gather(1, tokens),
                positions=positions,
                wanted=torch.as_tensor(logit_columns, device=device).expand(len(prompt_end), -1),
                valid=None if valid.all() else torch.as_tensor(valid, device=device),
                store=StoreCall(rows, slots, store_rows, int(columns.max()) + 1, step=state.commits),
                branches=state.branches,
                forwarded=-(-valid.sum(1).reshape(state.branches, -1).sum(0) // state.branches),
                index=state.rows,
                kind="window" if state.commits else "full",
            )
        ]

    def propose(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        """Draw a token for each of the W image rows in progress. Quantities: "top_logit" [R, W]."""
        assert isinstance(state, ZipARState)
        positions = _columns(state, state.schedule[state.commits].targets)
        logits = read_logits(state, outputs, queries)
        p = state.distribution(logits, state.rows, positions)
        tokens = draw(p, state.uniform(state.rows, positions, 1, rng.TOKEN_STREAM).squeeze(-1))
        available = torch.ones_like(tokens, dtype=torch.bool)
        quantities = {"top_logit": logits.amax(-1)}
        quantities |= state.recorded_quantities(p, logits, logits, state.rows, positions)
        return make_proposal(state, queries, tokens, positions, probability(p, tokens), available, quantities)

    def verify(self, state: CausalState, proposal: Proposal) -> VerifiedWindow:
        """Make all tokens final."""
        tokens = proposal.values
        return VerifiedWindow(tokens, torch.full_like(tokens[:, :1], tokens.shape[1] - 1))

    def draft_window(self, state: CausalState, proposal: Proposal, verified: VerifiedWindow, count: Tensor) -> None:
        """Draft nothing."""


def _columns(state: CausalState, offsets: Iterable[int]) -> Tensor:
    """[B, N] int64: positions of offsets [N], which count from the end of the prompt."""
    return torch.as_tensor(state.prompt_length[:, None] + np.array(list(offsets)), device=state.context.device)
