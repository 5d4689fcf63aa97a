"""The window of drafts: its proposal in a step, its move, and guesses for its new slots.

Tokens of this step that were not committed become drafts of the next window; their q is this step's p. Slots new to the
window get guesses. The q of a guess is uniform, or one-hot (copied neighbours, or guess_distribution="one_hot").

With branches (`Branches`) the drafts are a tree: node 0 is the last final token, nodes 1 to W - 1 are the window's
drafts, and the other nodes are the branches. One path is selected and verified as a window.

`R` rows, `W` slots, `N` nodes, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.family_queries import CausalQuery
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Proposal
from paradec.kernels.token_stats import argmax, draw
from paradec.samplers.causal.state import DRAFT_STREAM, NOISE_STREAM, CausalState, make_proposal
from paradec.samplers.causal.trees import TreeLayout, drop_nodes_past_end
from paradec.samplers.distributions import probability, safe_log, select_slots

UNIFORM, ONE_HOT = -1, -2
"""Values of `DraftDistributions.source`: q is uniform over the possible guesses, or q is one-hot at the draft."""
INITS = ("random", "repeat_horizontal", "sample_horizontal", "repeat_vertical", "sample_vertical")
REFRESHES = ("resample", "maximal", "gumbel", "keep")
GUESS_DISTRIBUTIONS = ("uniform", "one_hot")


# ---- drafts, and the distributions that they were drawn from ---------------------------------------------------------


@dataclass
class DraftDistributions:
    """The drafts of a window and the distributions q that they were drawn from."""

    tokens: Tensor
    """[R, W] int64: the drafts."""
    dense: Tensor
    """[R, D, V] float: distributions of drawn drafts; D is W, or 1 if all drafts are one-hot."""
    source: Tensor
    """[R, W] int64: index in `dense` of each slot's distribution, or UNIFORM, or ONE_HOT."""
    guess: Tensor
    """[V] float: the distribution of slots with source UNIFORM."""

    def probability_of(self, tokens: Tensor) -> Tensor:
        """Return q of G tokens per slot: tokens [R, W, G] -> [R, W, G]."""
        rows, count, size = self.dense.shape
        source = self.source.unsqueeze(-1)
        row = torch.arange(rows, device=tokens.device).view(-1, 1, 1)
        dense = self.dense.reshape(-1).take((row * count + source.clamp(min=0)) * size + tokens)
        one_hot = (tokens == self.tokens.unsqueeze(-1)).to(dense.dtype)
        return torch.where(source >= 0, dense, torch.where(source == UNIFORM, self.guess[tokens], one_hot))

    def draft_probability(self) -> Tensor:
        """q(x) of the drafts x, [R, W]."""
        return self.probability_of(self.tokens.unsqueeze(-1)).squeeze(-1)

    def distributions(self, slot: Tensor | None = None) -> Tensor:
        """Return q [R, N, V] of slots [R, N]; None: all slots."""
        source, tokens = self.source, self.tokens
        if slot is not None:
            source, tokens = source.gather(1, slot), tokens.gather(1, slot)
        q = select_slots(self.dense, source.clamp(min=0))
        q = torch.where((source == UNIFORM).unsqueeze(-1), self.guess, q)
        one_hot = (source == ONE_HOT).unsqueeze(-1)
        q.mul_(~one_hot)
        return q.scatter_add_(-1, tokens.unsqueeze(-1), one_hot.to(q.dtype))


@dataclass
class DraftWindow:
    """Input of a method's `accept`: a window of drafts with p and q."""

    p: Tensor
    """[R, W, V]: the target distribution of each slot, given the drafts before it."""
    drafts: DraftDistributions
    """The drafts x, and q."""
    sampled: Tensor
    """[R, W] int64: tokens drawn from p."""
    embeddings: Tensor | None = None
    """[V, d]: vectors of the tokens (`CausalSampler.embedding_source`)."""

    def ratio(self) -> Tensor:
        """p(x) / q(x) of the drafts x, [R, W]."""
        return probability(self.p, self.drafts.tokens) / self.drafts.draft_probability()


class VerifiedWindow(NamedTuple):
    """Result of verification."""

    tokens: Tensor
    """[R, W] int64: the window after the step. Tokens up to and including slot `accepted` are final."""
    accepted: Tensor
    """[R, 1] int64: number of drafts before the first rejection; one more token becomes final. -1: no final token."""
    keeps_draft: Tensor | None = None
    """[R, W] bool: slots that keep their old draft and q; None: no slot."""


# ---- the proposal of a step -----------------------------------------------------------------------------------------


def propose_window(state: CausalState, logits: Tensor, queries: list[CausalQuery], guesses: bool) -> Proposal:
    """Compute the target distribution of every slot and draw a token from it: see `CausalSampler.propose`.

    logits: [R, W, V], guided. guesses: whether slots that are new to the next window get guesses."""
    rows, guided = state.rows, logits
    positions = state.positions(rows)
    if state.controls is not None:
        logits = state.controls.adjust_slots(state, logits, rows, state.memory.read(rows)["drafts"])
    if state.constraint is not None:
        logits = state.constraint.mask_slots(state, logits, rows, state.memory.read(rows)["drafts"])
    p = state.distribution(logits, rows, positions)
    uniform, quantities = draw_uniform(state, positions, guesses)
    sampled = draw_tokens(state, p, positions, uniform[..., 0])
    num_predicted = state.num_predicted(state.num_evaluated())
    available = torch.as_tensor(np.arange(state.width) < num_predicted[:, None], device=p.device)
    # without exclusions or changes, the token that greedy decoding draws has the top logit
    needs_max = (
        state.allowed is not None
        or state.constraint is not None
        or state.controls is not None
        or state.has_prescribed_tokens
        or state.request.temperature
    )
    top_logit = logits.amax(-1) if needs_max else probability(logits, sampled)
    quantities |= {"p": p, "uniform": uniform[..., 1:], "top_logit": top_logit}
    quantities |= state.recorded_quantities(p, logits, guided, rows, positions)
    return make_proposal(state, queries, sampled, positions, probability(p, sampled), available, quantities)


def draw_uniform(state: CausalState, positions: Tensor, guesses: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw uniform numbers [R, W, 3] for positions [R, W]: to sample a token, to verify a draft, and to resample it. If
    new slots get guesses, also return "guesses" [R, 2 W]: the guesses' numbers for 2 W slots from slot 0 on."""
    if not (guesses and state.guesses):
        return state.uniform(state.rows, positions, 3, rng.TOKEN_STREAM), {}
    rows, width = state.rows, state.width
    ranks = state.committed[rows, None] + np.arange(2 * width)
    next_positions = torch.as_tensor(state.positions_of_ranks(rows[:, None], ranks), device=positions.device)
    is_next_step = np.arange(3 * width) >= width
    stream = torch.as_tensor(np.where(is_next_step, DRAFT_STREAM, rng.TOKEN_STREAM), device=positions.device)
    uniform = state.uniform(rows, torch.cat((positions, next_positions), 1), 3, stream, is_next_step)
    return uniform[:, :width], {"guesses": uniform[:, width:, 0]}


def draw_tokens(state: CausalState, p: Tensor, positions: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens [R, W] from p [R, W, V] with the positions' stored noise; if there is none, with `uniform` [R, W]."""
    if state.request.temperature == 0:
        return argmax(p)
    if "noise" not in state.memory:
        return draw(p, uniform)
    noise = select_slots(state.memory.read(state.rows)["noise"], positions % state.width)
    return argmax(safe_log(p) + noise)


def read_drafts(state: CausalState, rows: np.ndarray) -> DraftDistributions:
    """Read the drafts in the windows of rows, and the q of each draft."""
    memory = state.memory.read(rows)
    return DraftDistributions(memory["drafts"], memory["draft_distribution"], memory["draft_source"], state.guess)


def read_window(state: CausalState, proposal: Proposal) -> tuple[DraftWindow, Tensor]:
    """Return the window that a step verifies, and the slots with drafts, [R, W] bool."""
    drafts, has_draft = read_drafts(state, proposal.rows), state.verified_slots(proposal.available)
    if "drafts" in proposal.quantities:  # drafts of the path that branches selected
        drafts.tokens = proposal.quantities["drafts"].clamp(min=0)
        has_draft = has_draft & (proposal.quantities["drafts"] >= 0)
    return DraftWindow(proposal.quantities["p"], drafts, proposal.values, state.embeddings), has_draft


# ---- the next window ----------------------------------------------------------------------------------------------


def move_window(
    state: CausalState, proposal: Proposal, verified: VerifiedWindow, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Move the window by `count` [R, 1] tokens. For tokens that were not committed, this step's p becomes q. Return
    which slots have drafts, [R, W] bool (a prefix); the drafts; and their `DraftDistributions.source`, [R, W] int64."""
    rows, p = proposal.rows, proposal.quantities["p"]
    slot = torch.arange(state.width, device=p.device)
    dense, source = p, slot.expand(len(rows), -1)
    if verified.keeps_draft is not None:
        drafts = read_drafts(state, rows)
        keeps_dense = verified.keeps_draft & (drafts.source >= 0)
        dense = torch.where(keeps_dense.unsqueeze(-1), drafts.distributions(source), p)
        source = torch.where(verified.keeps_draft & (drafts.source < 0), drafts.source, source)
    state.memory.write("draft_distribution", rows, dense)
    if "best" in state.memory:
        best_tokens, index = state.memory["best"], torch.as_tensor(rows, device=p.device).unsqueeze(1)
        best_tokens[index, proposal.positions % best_tokens.shape[1]] = argmax(p)
    evaluated = proposal.available.sum(1, keepdim=True)
    is_drafted, source_slot = slot + count < evaluated, (slot + count).clamp(max=state.width - 1)
    return is_drafted, verified.tokens.gather(1, source_slot), source.gather(1, source_slot)


def guess_drafts(
    state: CausalState,
    rows: np.ndarray,
    num_known: Tensor,
    drafts: Tensor,
    uniform: Tensor | None,
    init: str | None,
    distribution: str,
    from_text: bool,
) -> tuple[Tensor, Tensor]:
    """Guess [R, W] tokens for every slot of the next window; also return their `DraftDistributions.source` [R, W].

    num_known: [R, 1]: number of leading slots that already have drafts. drafts: [R, W].
    uniform: [R, W]: numbers for random guesses; None draws them.
    init, distribution: `init` and `guess_distribution` of `SJD`. from_text: as for `draw_from_text`."""
    if not state.guesses:
        return drafts, torch.full_like(drafts, ONE_HOT)
    if uniform is None:
        uniform = state.uniform(rows, state.positions(rows), 1, DRAFT_STREAM).squeeze(-1)
    size = len(state.guess_ids)
    guess = state.guess_ids[(uniform * size).long().clamp(max=size - 1)]
    if from_text:
        guess = torch.where((text := draw_from_text(state, rows, uniform)) >= 0, text, guess)
    source = torch.full_like(guess, UNIFORM if distribution == "uniform" else ONE_HOT)
    copies_neighbours = init not in (None, "random", "model")
    if not copies_neighbours and not state.has_prescribed_tokens:
        return guess, source
    positions = state.positions(rows)
    if copies_neighbours:
        copied = copy_neighbours(state, rows, str(init), positions, num_known, drafts)
        guess, source = torch.where(copied >= 0, copied, guess), torch.where(copied >= 0, ONE_HOT, source)
    if state.has_prescribed_tokens:
        forced = state.prescribed_tokens(rows, positions)
        guess, source = torch.where(forced >= 0, forced, guess), torch.where(forced >= 0, ONE_HOT, source)
    return guess, source


def draw_from_text(state: CausalState, rows: np.ndarray, uniform: Tensor) -> Tensor:
    """Draw tokens [R, W] int64 from each row's prompt and answer with uniform [R, W]; -1: the token is not allowed."""
    device, size = uniform.device, len(state.guess)
    length = torch.as_tensor(state.committed[rows, None], device=device)
    column = (uniform * length).long().minimum(length - 1)
    text = state.canvas[torch.as_tensor(rows, device=device)].gather(1, column)
    # prompts may contain ids beyond the logits
    is_allowed = (text < size) & (state.guess[text.clamp(max=size - 1)] > 0)
    return torch.where(is_allowed, text, -1)


def copy_neighbours(
    state: CausalState, rows: np.ndarray, init: str, positions: Tensor, num_known: Tensor, drafts: Tensor
) -> Tensor:
    """Return the tokens [R, W] int64 of the neighbours of positions [R, W]; -1: none to copy. init: see `SJD`."""
    index = torch.as_tensor(rows, device=drafts.device)
    slot = torch.arange(state.width, device=drafts.device)
    if init.startswith("sample"):
        tokens = state.memory["best"][index]
    else:
        tokens = state.canvas[index]
        column = positions % tokens.shape[1]
        tokens = tokens.scatter(1, column, torch.where(slot < num_known, drafts, tokens.gather(1, column)))
    prompt_length = torch.as_tensor(state.prompt_length[rows, None], device=drafts.device)
    last_known = positions[:, :1] + num_known - 1
    if init.endswith("horizontal"):
        source = last_known.expand_as(positions)
    else:
        assert state.grid is not None  # `SJD.check_request` checked it
        stride, _ = state.grid.line(positions - prompt_length)
        source = positions - stride * torch.div(positions - last_known + stride - 1, stride, rounding_mode="floor")
    copied = tokens.gather(1, source.clamp(min=0, max=tokens.shape[1] - 1))
    if state.grid is None:
        return copied
    # copy only image tokens of the same raster, and nothing from the left of the first column
    stride, first_column = state.grid.line(positions - prompt_length)
    is_usable = (source >= prompt_length + first_column) & (
        state.prescribed_tokens(rows, source.clamp(min=0).maximum(prompt_length)) < 0
    )
    if init.endswith("horizontal"):
        is_usable &= (positions - prompt_length - first_column) % stride > 0
    return torch.where(is_usable, copied, -1)


def draw_noise(state: CausalState, rows: np.ndarray, num_new: np.ndarray) -> None:
    """Draw and store Gumbel noise for the last `num_new` [R] positions of the windows; none at temperature 0."""
    if "noise" not in state.memory or state.request.temperature == 0:
        return
    noise, device = state.memory["noise"], state.context.device
    index, slot = np.nonzero(np.arange(state.width) >= state.width - num_new[:, None])
    row = torch.as_tensor(rows[index], device=device)
    positions = state.positions_of_ranks(rows[index], state.committed[rows[index]] + slot)
    position = torch.as_tensor(positions, device=device)
    uniform = rng.uniform(state.keys[row], torch.zeros_like(row), position.unsqueeze(1), noise.shape[-1], NOISE_STREAM)
    noise[row, position % state.width] = rng.gumbel(uniform).squeeze(1).to(noise.dtype)


# ---- branches -----------------------------------------------------------------------------------------------------


@dataclass
class Path:
    """Path of drafts selected from a window and its branches."""

    node: Tensor
    """[R, W] int64: the node whose distribution each slot uses."""
    p: Tensor
    """[R, W, V]: distribution of each slot."""
    sampled: Tensor
    """[R, W] int64: a token drawn from each distribution."""
    drafts: Tensor
    """[R, W] int64: the draft of each slot; -1 if it has none and uses the sampled token."""
    uniform: Tensor
    """[R, W, 2] float64: numbers to verify each draft (0: accept) and to resample a rejected draft."""
    quantities: dict[str, Tensor] = field(default_factory=dict)
    """Further quantities of the proposal."""


class Branches(Protocol):
    """Further drafts, evaluated in the same forward as the window."""

    def memory(self) -> dict[str, MemorySpec]:
        """Memory that the branches need between steps."""

    def check_model(self, model: Any) -> None:
        """Raise ValueError for a model that cannot evaluate branches."""

    def layout(self, state: CausalState) -> TreeLayout | None:
        """Layout of the window's chain and the branches; None without branches."""

    def nodes(self, state: CausalState, tree: TreeLayout) -> Tensor:
        """[R, N] int64: the running rows' drafts; -1 at the root and at nodes without a draft."""

    def select_path(self, state: CausalState, tree: TreeLayout, nodes: Tensor, p: Tensor, positions: Tensor) -> Path:
        """Select the path through nodes [R, N] with p [R, N, V] at positions [R, N]."""

    def draft(self, state: CausalState, rows: np.ndarray, quantities: dict[str, Tensor]) -> None:
        """Draft the branches of rows, after their windows. quantities: those of the proposal; empty at start."""


def check_branches(name: str, value: int, model: Any) -> None:
    """Raise ValueError if the model cannot evaluate branches, which the setting `name` needs."""
    if not (model.supports_store and model.supports_visibility):
        raise ValueError(f"{name}={value} needs a model that runs over a store; {model.facts.name} does not")


def propose_path(
    state: CausalState, branches: Branches, tree: TreeLayout, logits: Tensor, queries: list[CausalQuery]
) -> Proposal:
    """As `propose_window`, for the selected path. logits: [R, N, V], guided."""
    rows, guided = state.rows, logits
    nodes = drop_nodes_past_end(state, tree, branches.nodes(state, tree))
    positions = torch.as_tensor(state.committed[rows, None], device=nodes.device) + tree.depths.to(nodes.device)
    if state.controls is not None:
        logits = state.controls.adjust_nodes(state, logits, rows, tree.parents, nodes)
    if state.constraint is not None:
        logits = state.constraint.mask_nodes(state, logits, rows, tree.parents, nodes)
    p = state.distribution(logits, rows, positions)
    path, positions = branches.select_path(state, tree, nodes, p, positions), positions[:, : state.width]
    quantities = {"p": path.p, "uniform": path.uniform, "top_logit": logits.amax(-1), "drafts": path.drafts}
    quantities |= state.recorded_quantities(path.p, logits, guided, rows, positions, path.node) | path.quantities
    evaluated = torch.as_tensor(state.num_evaluated()[:, None], device=p.device)
    available = torch.arange(state.width, device=p.device) < evaluated
    scores = probability(path.p, path.sampled)
    return make_proposal(state, queries, path.sampled, positions, scores, available, quantities)
