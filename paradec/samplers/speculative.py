"""Speculative decoding: a smaller model drafts, the model judges its drafts in one forward.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192; Chen et al., arXiv
2302.01318. With trees of drafts: SpecInfer, arXiv 2305.09781, and the rules of `paradec.samplers.multi_draft`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec import rng
from paradec.checks import check_choice, shown
from paradec.protocol import Commit, Cost, Proposal, Query
from paradec.samplers.draft_verify import draw, probability
from paradec.samplers.jacobi import DRAFT_STREAM, JacobiSampler, JacobiState, check_model, read_logits
from paradec.samplers.masked_state import put_rows, rows_of
from paradec.samplers.multi_draft import RULES, Tree, walk


@dataclass(frozen=True)
class Speculative(JacobiSampler):
    """`drafter` drafts `window - 1` tokens one after the other, or a `tree` of them; exact rules judge them.

    Lossless for any drafter, at any temperature, top-k, top-p, guidance and structure; these shape the drafter's law
    too. The drafter keeps a key/value store of its own, and runs within `commit` and `start`. `nfe` counts the model's
    forwards; the drafter's are in `state.draft_nfe`.

    Args:
        drafter: a causal model with the same vocabulary, from `paradec.wrap` or of the same image family. `to_dict`
            names it only.
        window: slots evaluated at once without a tree: the next token and `window - 1` drafts.
        tree: children of every node per depth, (3, 2, 1) say, or the paths of a static tree; None is a chain.
        rule: of the tree's nodes: one of `paradec.samplers.multi_draft.RULES`.
        init, refresh, random_law: take no part, and must be left alone.
    """

    window: int = 5
    drafter: Any = None
    tree: Any = None
    rule: str = "without_replacement"

    name = "speculative"
    paper = "Speculative decoding"
    arxiv = "2211.17192"
    summary = "a smaller model drafts a chain or a tree that the model judges in one forward; lossless"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("init", "random"), ("refresh", "resample"), ("random_law", "uniform")):
            if getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning where a model drafts; leave it out")
        check_choice("rule", self.rule, RULES)
        if self.tree is not None:
            tree = Tree.of(self.tree)
            counts = {(depth, int((row >= 0).sum())) for depth, row in zip(tree.depths, tree.children, strict=True)}
            if self.rule == "greedy" and len({depth for depth, _ in counts}) < len(counts):
                raise ValueError(
                    f"rule='greedy' needs as many children at every node of a depth; tree={self.tree} has not"
                )
            object.__setattr__(self, "tree", tuple(self.tree))
        if self.drafter is not None:
            if not callable(self.drafter) or not hasattr(self.drafter, "facts"):
                raise ValueError(f"drafter={shown(self.drafter)} must be a causal model, from paradec.wrap say")
            check_model(self.name, self.drafter)

    def to_dict(self) -> dict[str, Any]:
        """The sampler as plain data; the drafter is named only, and must be given again."""
        found = {"sampler": self.name} | {key: getattr(self, key) for key in self.settings()}
        return found | {"drafter": None if self.drafter is None else self.drafter.facts.name}

    # ---- start ----------------------------------------------------------------------------------------------------

    def start(self, model: Any, prompt: Any, **request: Any) -> JacobiState:
        """Make the state of one request: see `paradec.samplers.jacobi.JacobiSampler.start`.

        Raises:
            ValueError: no drafter, one with another vocabulary, or a tree over a model without a store.
        """
        if self.drafter is None:
            raise ValueError(
                "drafter is needed: paradec.samplers.create('speculative', drafter=a smaller causal model)"
            )
        check_model(self.name, model)
        own, small = model.facts, self.drafter.facts
        if small.vocab_size != own.vocab_size:
            raise ValueError(
                f"drafter {small.name} has a vocabulary of {small.vocab_size}, {own.name} one of {own.vocab_size}; "
                "a drafter must have the same"
            )
        for each in (model, self.drafter) if self.tree is not None else ():
            if not (each.supports_store and each.supports_visibility):
                raise ValueError(f"tree={self.tree} needs models that run over a store; {each.facts.name} does not")
        return super().start(model, prompt, **request)

    def _width(self, new: int) -> int:
        return super()._width(new) if self.tree is None else Tree.of(self.tree).size

    def _draft(
        self, state: JacobiState, rows: np.ndarray, count: Tensor, tokens: Tensor, source: Tensor, law: Tensor | None
    ) -> None:
        if law is None:
            limit = self.drafter.facts.max_length
            if limit is not None and limit < state.context.shape[1]:
                raise ValueError(
                    f"drafter {self.drafter.facts.name} takes {limit} positions of {state.context.shape[1]}"
                )
            if self.drafter.supports_store:
                state.draft_store = self.drafter.make_store(*state.context.shape)
        rows = rows[state.committed[rows] < state.end[rows]]
        # what it holds beyond the final tokens before the last belongs to drafts that fell
        fed = state.draft_fed[rows] = np.minimum(state.draft_fed[rows], state.committed[rows] - 1)
        if state.draft_store is not None and len(rows):
            for branch in range(state.branches):
                shift = np.where(fed > 0, state.shift[branch, rows], 0)
                state.draft_store.forget(rows + branch * state.batch, fed + shift)
        if len(rows):
            self._draft_chain(state, rows) if self.tree is None else self._draft_tree(state, rows)

    def _draft_chain(self, state: JacobiState, rows: np.ndarray) -> None:
        """One token after the other, each row as many as it has slots for."""
        drafts, laws = state.memory["drafts"].clone(), state.memory["draft_law"].clone()
        for slot in range(state.width - 1):
            rows = rows[state.slots(rows) - 1 > slot]
            if not len(rows):
                break
            index = torch.as_tensor(rows, device=drafts.device)
            stop = state.committed[rows] + slot
            calls = state.calls(
                state.draft_store, self.drafter.pads, rows, drafts[index], state.draft_fed[rows], stop, stop - 1, 1
            )
            positions = torch.as_tensor(stop, device=drafts.device).unsqueeze(1)
            law = state.laws(self._read(state, calls), rows, positions)
            drafts[index, slot] = draw(law, state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)).squeeze(1)
            laws[index, slot] = law.squeeze(1).to(laws.dtype)
            state.draft_fed[rows] = stop
        state.memory["drafts"], state.memory["draft_law"] = drafts, laws
        state.memory["draft_source"] = torch.arange(state.width, device=drafts.device).expand(state.batch, -1)

    def _read(self, state: JacobiState, calls: list[Query]) -> Tensor:
        """The drafter's guided logits for the calls."""
        with torch.no_grad():
            outputs = [
                self.drafter(call) if state.draft_store is None else self.drafter(call, state.draft_store)
                for call in calls
            ]
        state.draft_nfe += Cost(calls, state.batch).nfe
        return read_logits(state, outputs, calls)

    # ---- trees ----------------------------------------------------------------------------------------------------

    def _draft_tree(self, state: JacobiState, rows: np.ndarray) -> None:
        """All children of one depth after the other."""
        tree, device = Tree.of(self.tree), state.context.device
        index = torch.as_tensor(rows, device=device)
        depths, children, rule = np.array(tree.depths), tree.children, RULES[self.rule]
        drafts = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=device)
        laws = state.memory["draft_law"][index]
        fresh = state.committed[rows] - state.draft_fed[rows]
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        for depth in range(tree.depth):
            nodes = np.flatnonzero(depths == depth)
            known = int((depths <= depth).sum()) - 1  # drafts that there are, all in front
            query = tree_query(state, state.draft_store, rows, tree, drafts, fresh, known, nodes)
            law = state.laws(self._read(state, [query]), rows, (committed + depth).expand(-1, len(nodes)))
            laws[:, nodes] = law.to(laws.dtype)
            counts = (children[nodes] >= 0).sum(1)
            most = int(counts.max())
            noise = state.uniform(rows, committed + depth, len(nodes) * most, DRAFT_STREAM).reshape(-1, most)
            made = rule.children(law.flatten(0, 1), most, noise).unflatten(0, (len(rows), len(nodes)))
            for at, node in enumerate(nodes):
                below = children[node][: counts[at]].to(device)
                drafts[:, below] = made[:, at, : counts[at]]
            state.draft_fed[rows], fresh = state.committed[rows], np.zeros_like(fresh)
        put_rows(state.memory, "drafts", rows, drafts)
        put_rows(state.memory, "draft_law", rows, laws)

    def query(self, state: JacobiState) -> list[Query]:
        """The drafts, and before them the final tokens that the store does not hold."""
        if self.tree is None:
            return super().query(state)
        tree, rows = Tree.of(self.tree), state.rows
        fresh = state.committed[rows] - state.held[rows]
        drafts = rows_of(state.memory, rows)["drafts"]
        return [tree_query(state, state.store, rows, tree, drafts, fresh, tree.size - 1, np.arange(tree.size))]

    def propose(self, state: JacobiState, outputs: list[Tensor], queries: list[Query]) -> Proposal:
        """As `JacobiSampler.propose`; of a tree, `values` are the walk's tokens and "accepted" [R, 1] is how many of
        its nodes stand."""
        if self.tree is None:
            return super().propose(state, outputs, queries)
        tree, rows, logits = Tree.of(self.tree), state.rows, read_logits(state, outputs, queries)
        device = logits.device
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        depths = torch.tensor(tree.depths, device=device)
        law = state.laws(logits, rows, committed + depths)
        memory = rows_of(state.memory, rows)
        left = torch.as_tensor(state.end[rows, None] - state.committed[rows, None], device=device)
        drafts = memory["drafts"].masked_fill(depths >= left, -1)
        positions = committed + torch.arange(tree.depth + 1, device=device)
        uniform = state.uniform(rows, positions, tree.children.shape[1] + 1, rng.TOKEN_STREAM)
        found = walk(tree, drafts, law, memory["draft_law"], RULES[self.rule], uniform)
        node = found.nodes.clamp(min=0)
        scores = probability(law.take_along_dim(node.unsqueeze(-1), 1), found.tokens.clamp(min=0))
        return Proposal(
            rows=rows,
            values=found.tokens,
            cost=Cost(queries, state.batch),
            positions=positions,
            scores=scores,
            available=torch.arange(tree.depth + 1, device=device) < left,
            quantities={"accepted": found.accepted.unsqueeze(1), "top_logit": logits.amax(-1)},
            made_at=state.commits,
            kind=queries[0].kind,
        )

    def commit(self, state: JacobiState, proposal: Proposal) -> Commit:
        """As `JacobiSampler.commit`."""
        if self.tree is None:
            return super().commit(state, proposal)
        if proposal.made_at != state.commits:
            raise ValueError("this proposal was made from an earlier state; call step again before commit")
        rows, tokens = proposal.rows, proposal.values
        count, written = self._written(state, proposal, tokens, proposal.quantities["accepted"] + 1)
        selected = torch.arange(tokens.shape[1], device=tokens.device) < count
        self._write(state, proposal.positions, rows, torch.where(selected, tokens, -1))
        state.count(proposal.cost)
        state.held[rows] = state.committed[rows]
        state.committed[rows] += written
        state.row_step[rows] += 1
        state.commits += 1
        self._draft(state, rows, count, tokens, tokens, proposal.scores)
        state.rows = np.flatnonzero(state.committed < state.end)
        return Commit(rows, tokens, proposal.positions, selected, proposal.scores, proposal.kind)


def tree_query(
    state: JacobiState,
    store: Any,
    rows: np.ndarray,
    tree: Tree,
    drafts: Tensor,
    fresh: np.ndarray,
    known: int,
    wanted: np.ndarray,
) -> Query:
    """Evaluate final tokens, which the store takes in, and after them drafts of a tree, which it does not.

    Args:
        rows: [R]. drafts: [R, N] int64, -1 where a node has none.
        fresh: [R] int64: how many of the last final tokens the store does not hold; the very last is the tree's root.
        known: drafts to evaluate, counted from node 1.
        wanted: [W] int64: nodes whose logits are wanted; the root only while `fresh` has it.
    """
    device, branches = state.context.device, state.branches
    shift = state.shift[:, rows]
    first = bool((fresh == state.committed[rows]).all())  # then each branch has its own prompt to evaluate
    committed = (state.committed[rows] + shift).reshape(-1)
    fresh = committed if first else np.tile(fresh, branches)
    width, count = int(fresh.max()), len(committed)
    # the final tokens end at column `width`, however many a row has
    final = committed[:, None] - width + np.arange(width)
    depths = np.array(tree.depths)[1 : known + 1]
    column = np.concatenate((final, committed[:, None] - 1 + depths), 1)
    at_rows = np.concatenate([rows + branch * state.batch for branch in range(branches)])
    at = torch.as_tensor(at_rows, device=device)
    positions = torch.as_tensor(np.clip(column, 0, state.context.shape[1] - 1), device=device)
    nodes = drafts[:, 1 : known + 1].repeat(branches, 1)
    real_final = final >= (committed - fresh)[:, None]
    inside = column[:, width:] < (state.length[rows] + shift).reshape(-1)[:, None]
    real = torch.cat(
        (torch.as_tensor(real_final, device=device), torch.as_tensor(inside, device=device) & (nodes >= 0)), 1
    )
    tokens = torch.cat((state.context[at.unsqueeze(1), positions[:, :width]], nodes.clamp(min=0)), 1)
    sees = torch.ones((width + known, width + known), dtype=torch.bool, device=device).tril()
    sees[width:, width:] = tree.ancestors[1 : known + 1, 1 : known + 1].to(device)
    slots = np.concatenate((np.where(real_final, final, -1), np.full((count, known), -1)), 1)
    return Query(
        rows=rows,
        tokens=tokens,
        positions=positions,
        wanted=torch.as_tensor(wanted + width - 1, device=device).expand(count, -1),
        valid=real,
        visible=sees.expand(count, -1, -1),
        store_rows=at,
        slots=torch.as_tensor(slots, device=device),
        store_index=at_rows,
        reach=int(committed.max()),
        step=state.commits,
        branches=branches,
        forwarded=fresh[: len(rows)] + known,
        index=np.arange(len(rows)),
        kind="full" if first else "window",
    )
