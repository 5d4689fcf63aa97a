"""Drafts of another model: how a chain or a tree of them is made, verified and committed.

The base of the methods that can take a drafter (`speculative.py`, `lantern.py`). The model evaluates all drafts in one
forward; a chain is verified by the loop of `chain.py` and the method's `accept`, a tree by its `node_rule` and the walk
of `trees.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from paradec.core import rng
from paradec.core.checks import check_model, shown
from paradec.core.family_queries import CausalQuery
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, Proposal
from paradec.core.query import Cost
from paradec.kernels.token_stats import draw
from paradec.request import Request
from paradec.samplers.causal.base import DRAFT_STREAM, check_causal, proposed, read_logits
from paradec.samplers.causal.block_drafts import draft_block
from paradec.samplers.causal.chain import ChainSampler
from paradec.samplers.causal.lookup import PromptLookup
from paradec.samplers.causal.state import CausalState, Drafting, Spans
from paradec.samplers.causal.tree_query import tree_query
from paradec.samplers.causal.trees import RULES, DynamicTree, Naive, Rule, Tree, TreeLayout, tree_of, walk
from paradec.samplers.causal.verification import DraftWindow, Verified, probability

PROBED = 256
"""Ids, evenly spread, by which the vocabularies of a model and its drafter are compared."""


@dataclass(frozen=True)
class DraftingSampler(ChainSampler):
    """Base of the methods whose drafts another model can make: a chain of `window - 1`, or a `tree`. A subclass says
    how the nodes of a tree are verified (`node_rule`); a chain is verified by `accept`.

    The drafter keeps a key/value store of its own, and runs within `commit` and `start`. One that reads hidden states
    (`reads_features`, EAGLE's) drafts from what the model's last forward left in `CausalQuery.hidden`: the final
    tokens and the accepted drafts. Before the first forward there is nothing to draft from, so the first step makes one
    token.

    Args:
        drafter: a causal model with the same vocabulary, from `paradec.load` or `paradec.wrap`, a causal language model
            of transformers as it is, or one of the same image family; or an EAGLE drafter of this very model, from
            `paradec.load_drafter`. `to_dict` names it only. For methods that say so (`window_drafters`) also one that
            fills a window by itself: "prompt_lookup" or a `paradec.samplers.causal.lookup.PromptLookup`.
        tree: children of every node per depth, (3, 2, 1) say, the paths of a static tree, the name of one
            (`paradec.samplers.causal.trees.TREES`), or a `DynamicTree`; None is a chain.
        window: slots evaluated at once without a tree: the next token and `window - 1` drafts.
    """

    drafter: Any = None
    tree: Any = None

    needs_drafter: ClassVar[bool] = False
    """Whether nothing is drafted without one; else the sampler drafts for itself."""
    window_drafters: ClassVar[bool] = False
    """Whether drafters are taken that fill a window of their own size (`slots`) at once."""
    hits: ClassVar[bool] = True
    """Whether a drawn token that equals a node leads on to it: see `paradec.samplers.causal.trees.walk`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "drafter", PromptLookup.of(self.drafter))
        if self.tree is not None and self.drafter is None and not self.needs_drafter:
            raise ValueError(f"tree={shown(self.tree)} needs a drafter")
        if isinstance(self.tree, Mapping):  # as `to_dict` writes a dynamic one
            object.__setattr__(self, "tree", DynamicTree(**self.tree))
        if self.tree is not None and not isinstance(self.tree, DynamicTree):
            Tree.of(self.tree)
            if not isinstance(self.tree, str):
                entries = tuple(entry if isinstance(entry, int) else tuple(entry) for entry in self.tree)
                object.__setattr__(self, "tree", entries)
        if isinstance(self.drafter, nn.Module) and not hasattr(self.drafter, "facts"):
            object.__setattr__(self, "drafter", _wrapped(self.drafter))
        if self._own_slots is not None:
            self._check_window_drafter()
        if self.drafter is not None and not self._looks_up:
            if not callable(self.drafter) or not hasattr(self.drafter, "facts"):
                raise ValueError(
                    f"drafter={shown(self.drafter)} must be a causal model, from paradec.load or paradec.wrap say, "
                    "'prompt_lookup', or a drafter from paradec.load_drafter"
                )
            check_model(f"drafter of {self.name!r}", self.drafter, (*self.models, "drafts"))
            check_causal(self.name, self.drafter)

    def _check_window_drafter(self) -> None:
        """Raise ValueError for a drafter that fills a window by itself, where that is not taken or another setting says
        how much is drafted."""
        name = self.drafter.name if self._looks_up else self.drafter.facts.name
        if not self.window_drafters:
            raise ValueError(f"drafter={name!r} is not for {self.name!r}; give a causal model or an EAGLE drafter")
        if self.tree is not None:
            raise ValueError(f"tree={shown(self.tree)} has no meaning with drafter={name!r}, which drafts a chain")
        default = next(field.default for field in dataclasses.fields(self) if field.name == "window")
        if self.window != default:
            raise ValueError(
                f"window={self.window} has no meaning with drafter={name!r}, which evaluates {self._own_slots} slots: "
                "leave it out"
            )

    @property
    def _own_slots(self) -> int | None:
        """Slots of the window that the drafter fills at once; None for those that draft token by token."""
        return getattr(self.drafter, "slots", None)

    @property
    def _looks_up(self) -> bool:
        return isinstance(self.drafter, PromptLookup)

    def node_rule(self, state: CausalState) -> Rule:
        """How the nodes of a tree are drawn and verified."""
        raise NotImplementedError

    @property
    def _reads_features(self) -> bool:
        return getattr(self.drafter, "reads_features", False)

    # ---- start ----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # else only inference mode could go on with the state
    @torch.no_grad()
    def start(self, model: Any, prompt: Any, request: Request | None = None, **arguments: Any) -> CausalState:
        """Make the state of one request: see `paradec.samplers.causal.base.CausalSampler.start`.

        Raises:
            TypeError: a model of another kind. ValueError: no drafter, one with another vocabulary, an EAGLE drafter of
                another model, or a tree over a model without a store.
        """
        if self.drafter is None and self.needs_drafter:
            raise ValueError(
                f"drafter is needed: paradec.samplers.create({self.name!r}, drafter=a smaller causal model)"
            )
        if self.drafter is not None and not self._looks_up:
            self.check_model(model)
            own, small = model.facts, self.drafter.facts
            if small.vocab_size != own.vocab_size:
                raise ValueError(
                    f"drafter {small.name} has a vocabulary of {small.vocab_size}, {own.name} one of {own.vocab_size}; "
                    "a drafter must have the same"
                )
            _check_vocabulary(model, self.drafter)
            self._bound(model)
            for each in (model, self.drafter) if self.tree is not None else ():
                if not (each.supports_store and each.supports_visibility):
                    raise ValueError(f"tree={self.tree} needs models that run over a store; {each.facts.name} does not")
        return super().start(model, prompt, request, **arguments)

    def _bound(self, model: Any) -> Any:
        """The drafter, over this request's model where it reads that one's features."""
        return self.drafter.bound(model) if self._reads_features else self.drafter

    def _width(self, new: int) -> int:
        if self.tree is None:
            return super()._width(new) if self._own_slots is None else min(self._own_slots, new)
        return self.tree.size if isinstance(self.tree, DynamicTree) else tree_of(self.tree).size

    def memory(self) -> dict[str, MemorySpec]:
        specs = super().memory()
        if self._looks_up:  # whose q are one-hot
            specs["draft_distribution"] = dataclasses.replace(specs["draft_distribution"], dims=(1, "vocab"))
        return specs if self.tree is None else {name: specs[name] for name in ("drafts", "draft_distribution")}

    def _layout(self, state: CausalState) -> TreeLayout:
        """Of the running rows' trees."""
        if isinstance(self.tree, DynamicTree):
            widest = min(self.tree.top_k, state.facts.vocab_size)
            parents = _drafting(state).parents
            assert parents is not None
            return TreeLayout(parents[torch.as_tensor(state.rows)], self.tree.depth, widest)
        return tree_of(self.tree).layout

    # ---- drafts ---------------------------------------------------------------------------------------------------

    def _first_drafts(self, state: CausalState, model: Any) -> None:
        if self.drafter is None:
            super()._first_drafts(state, model)
            return
        if self._looks_up:
            self._draft_next(state, state.rows, None)
            return
        limit = self.drafter.facts.max_length
        if limit is not None and limit < state.context.shape[1]:
            raise ValueError(f"drafter {self.drafter.facts.name} takes {limit} positions of {state.context.shape[1]}")
        own = state.drafting = Drafting(self._bound(model), *np.zeros((3, state.batch), np.int64))
        if self.drafter.supports_store:
            own.store = self.drafter.make_store(*state.context.shape)
        if self.tree is not None:
            state.memory["drafts"] = torch.full_like(state.memory["drafts"], -1)
        if isinstance(self.tree, DynamicTree):
            own.parents = torch.arange(-1, state.width - 1, device=state.context.device).repeat(state.batch, 1)
        if not self._reads_features:
            self._draft_next(state, state.rows, None)

    def _draft(
        self, state: CausalState, proposal: Proposal, window: DraftWindow, found: Verified, count: Tensor
    ) -> None:
        if self.drafter is None:
            super()._draft(state, proposal, window, found, count)
        else:
            self._draft_next(state, proposal.rows, proposal.quantities.get("features"))

    def _draft_next(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """Draft for rows. features: [branches * R, F, D], hidden states for a drafter that reads them: of the tokens
        before those that became final, from the first that it has not read."""
        going = np.flatnonzero(_drafts_left(state, rows) > 0)
        if not len(going) or state.width == 1:
            return
        if features is not None:
            every = torch.arange(state.branches, device=features.device).unsqueeze(1) * len(rows)
            features = features[(every + torch.as_tensor(going, device=features.device)).flatten()]
        rows = rows[going]
        if self._looks_up:
            self.drafter.draft(state, rows)
        elif self._own_slots is not None and features is not None:
            _checked(_drafting(state), rows, draft_block(state, _drafting(state), rows, features))
        elif isinstance(self.tree, DynamicTree):
            self._grow_tree(state, rows, self.tree, features)
        elif self.tree is not None:
            self._draft_tree(state, rows, tree_of(self.tree), self.node_rule(state), features)
        elif features is not None:
            self._draft_chain_from(state, rows, features)
        else:
            self._draft_chain(state, rows)

    def _draft_chain(self, state: CausalState, rows: np.ndarray) -> None:
        """One token after the other, each row as many as it has slots for."""
        own = _drafting(state)
        # what the store holds beyond the final tokens before the last belongs to rejected drafts
        fed = own.fed[rows] = np.minimum(own.fed[rows], state.committed[rows] - 1)
        if own.store is not None:
            for branch in range(state.branches):
                shift = np.where(fed > 0, state.shift[branch, rows], 0)
                own.store.forget(rows + branch * state.batch, fed + shift)
        drafts, every_q = state.memory["drafts"].clone(), state.memory["draft_distribution"].clone()
        for slot in range(state.width - 1):
            rows = rows[state.slots(rows) - 1 > slot]
            if not len(rows):
                break
            index = torch.as_tensor(rows, device=drafts.device)
            stop = state.committed[rows] + slot
            spans = Spans(rows, drafts[index], own.fed[rows], stop, stop - 1, 1)
            calls = state.calls(own.store, own.model.pads, spans)
            positions = torch.as_tensor(stop, device=drafts.device).unsqueeze(1)
            q = _checked(own, rows, state.distribution(self._read(state, calls), rows, positions))
            drafts[index, slot] = draw(q, state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)).squeeze(1)
            every_q[index, slot] = q.squeeze(1).to(every_q.dtype)
            own.fed[rows] = stop
        state.memory["drafts"], state.memory["draft_distribution"] = drafts, every_q
        state.memory["draft_source"] = torch.arange(state.width, device=drafts.device).expand(state.batch, -1)

    def _read(self, state: CausalState, calls: list[CausalQuery]) -> Tensor:
        """The drafter's guided logits for the calls."""
        own = _drafting(state)
        with torch.no_grad():
            outputs = [own.model(call) if own.store is None else own.model(call, own.store) for call in calls]
        own.nfe += Cost(calls, state.batch).nfe
        return read_logits(state, outputs, calls)

    def _draft_chain_from(self, state: CausalState, rows: np.ndarray, features: Tensor) -> None:
        """A chain from hidden states: a tree with one child everywhere, whose node i is slot i - 1."""
        chain = tree_of((1,) * (state.width - 1))
        self._draft_tree(state, rows, chain, RULES["recursive"], features)
        state.memory["drafts"] = state.memory["drafts"].roll(-1, 1).clamp(min=0)  # nothing is drafted for the last
        state.memory["draft_source"] = torch.arange(state.width, device=features.device).expand(state.batch, -1)

    def _draft_tree(
        self, state: CausalState, rows: np.ndarray, tree: Tree, rule: Rule, features: Tensor | None
    ) -> None:
        """All children of one depth after the other.

        Args:
            features: [branches * R, F, D]: the model's hidden states from the first final token on that the drafter has
                not read, less one position; None for drafters that read none.
        """
        own, device = _drafting(state), state.context.device
        index = torch.as_tensor(rows, device=device)
        depths, children = np.array(tree.depths), tree.children
        drawn_from = _softened(state) if isinstance(rule, Naive) else state
        drafts = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=device)
        every_q = state.memory["draft_distribution"][index]
        begin, last = self._unread(state, rows)
        made = None if features is None else features.new_zeros(len(features), tree.size, features.shape[-1])
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        for depth in range(min(tree.depth, _drafts_left(state, rows).max())):
            nodes = np.flatnonzero(depths == depth)
            known = int((depths <= depth).sum()) - 1  # drafts that there are, all in front
            query = tree_query(state, own.store, rows, tree.layout, drafts, begin, known, nodes)
            logits, out = self._read_tree(state, query, known, last - begin, features, made)
            q = drawn_from.distribution(logits, rows, (committed + depth).expand(-1, len(nodes)))
            q = _checked(own, rows, q)
            every_q[:, nodes] = q.to(every_q.dtype)
            counts = (children[nodes] >= 0).sum(1)
            most = int(counts.max())
            noise = state.uniform(rows, committed + depth, len(nodes) * most, DRAFT_STREAM).reshape(-1, most)
            drawn = rule.children(q.flatten(0, 1), most, noise).unflatten(0, (len(rows), len(nodes)))
            for at, node in enumerate(nodes):
                below = children[node][: counts[at]].to(device)
                drafts[:, below] = drawn[:, at, : counts[at]]
                if made is not None and out is not None:
                    made[:, below] = out[:, at : at + 1]
            own.fed[rows], begin = state.committed[rows], last
        state.memory.write("drafts", rows, drafts)
        state.memory.write("draft_distribution", rows, every_q)

    def _grow_tree(self, state: CausalState, rows: np.ndarray, tree: DynamicTree, features: Tensor | None) -> None:
        """See `DynamicTree`; `features` as in `_draft_tree`."""
        own, device, top = _drafting(state), state.context.device, min(tree.top_k, state.facts.vocab_size)
        soft = _softened(state)
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        begin, last = self._unread(state, rows)
        root = torch.full_like(committed, -1)
        # what the drafter reads: the root, then `top` nodes of each level; their places are among all that it named
        parents, tokens, place, score = root, root, torch.zeros_like(root), torch.zeros(root.shape, device=device)
        made = None if features is None else features.new_zeros(len(features), 1, features.shape[-1])
        left = _drafts_left(state, rows)
        limit = torch.as_tensor(left, device=device).unsqueeze(1)  # what a row names does not depend on its neighbours
        wanted = np.arange(1)
        named: list[tuple[Tensor, Tensor, Tensor]] = []
        for level in range(min(tree.depth, left.max())):
            known = tokens.shape[1] - 1
            layout = TreeLayout(parents, level, top)
            query = tree_query(state, own.store, rows, layout, tokens, begin, known, wanted)
            logits, out = self._read_tree(state, query, known, last - begin, features, made)
            q = _checked(own, rows, soft.distribution(logits, rows, (committed + level).expand(-1, len(wanted))))
            best = q.topk(top, -1)
            total = (score.unsqueeze(-1) + best.values.log()).flatten(1).masked_fill(limit <= level, -torch.inf)
            first = 1 + sum(part.shape[1] for part, *_ in named)
            named.append((best.indices.flatten(1), total, place[:, wanted].repeat_interleave(top, 1)))
            score, at = total.topk(top, -1)
            above = torch.as_tensor(wanted, device=device)[at // top]
            parents, place = torch.cat((parents, above), 1), torch.cat((place, first + at), 1)
            tokens = torch.cat((tokens, named[-1][0].gather(1, at)), 1)
            if made is not None and out is not None:
                source = (at // top).repeat(state.branches, 1).unsqueeze(-1)
                made = torch.cat((made, out.take_along_dim(source, 1)), 1)
            wanted = np.arange(known + 1, known + 1 + top)
            own.fed[rows], begin = state.committed[rows], last
        tokens, score, place = (torch.cat(part, 1) for part in zip(*named, strict=True))
        # a parent is as likely as its child or likelier, and named before it: it is kept too
        kept = score.sort(dim=1, descending=True, stable=True).indices[:, : tree.size - 1].sort(1).values
        drafts = tokens.gather(1, kept).masked_fill(score.gather(1, kept).isinf(), -1)
        above = torch.searchsorted(torch.cat((torch.zeros_like(root), kept + 1), 1), place.gather(1, kept))
        count = 1 + kept.shape[1]
        every = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=device)
        every[:, 1:count] = drafts
        state.memory.write("drafts", rows, every)
        index = torch.as_tensor(rows, device=device)
        assert own.parents is not None  # `_first_drafts` has made them
        own.parents = own.parents.clone()
        own.parents[index, 1:count] = above

    def _unread(self, state: CausalState, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[branches, R] int64: the first final token that the drafter has not read, and the one after the last."""
        fed, shift = _drafting(state).fed[rows], state.shift[:, rows]
        return np.where(fed > 0, fed + shift, int(self._reads_features)), state.committed[rows] + shift

    def _read_tree(
        self,
        state: CausalState,
        query: CausalQuery,
        known: int,
        fresh: np.ndarray,
        features: Tensor | None,
        made: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The drafter's guided logits, and what it made of the wanted nodes [branches * R, W, D] if it reads features.

        Args:
            known: drafts in the query. fresh: [branches, R]: final tokens in it.
            features: see `_draft_tree`. made: [branches * R, N, D]: what was made of each node's parent.
        """
        if features is None or made is None:
            return self._read(state, [query]), None
        own = _drafting(state)
        beside = _right_aligned(features, fresh.reshape(-1), query.tokens.shape[1] - known)
        logits, out = own.model(query, torch.cat((beside, made[:, 1 : known + 1]), 1), own.store)
        own.nfe += Cost([query], state.batch).nfe
        return read_logits(state, [logits], [query]), out

    # ---- step -----------------------------------------------------------------------------------------------------

    def _undrafted(self, state: CausalState) -> bool:
        """Whether there is nothing yet that drafts could come from."""
        return self._reads_features and state.commits == 0

    def query(self, state: CausalState) -> list[CausalQuery]:
        """The drafts, and before them the final tokens that the store does not hold."""
        if self.tree is not None:
            queries = [self._tree_query(state)]
        elif self._undrafted(state):
            rows, committed = state.rows, state.committed[state.rows]
            drafts, begin = state.memory.read(rows)["drafts"], np.zeros_like(committed)
            spans = Spans(rows, drafts, begin, committed, committed - 1, state.width)
            queries = state.calls(state.store, state.pads, spans)
        else:
            queries = super().query(state)
        if not self._reads_features:
            return queries
        return [query.but(keep_hidden=True, keep_layers=self.drafter.keep_layers) for query in queries]

    def _tree_query(self, state: CausalState) -> CausalQuery:
        rows, held = state.rows, _drafting(state).held[state.rows]
        begin = np.where(held > 0, held + state.shift[:, rows], 0)
        wanted = np.arange(state.width) * (not self._undrafted(state))
        drafts = state.memory.read(rows)["drafts"]
        return tree_query(state, state.store, rows, self._layout(state), drafts, begin, int(wanted.max()), wanted)

    def propose(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        """As `ChainSampler.propose`; of a tree, `values` are the walk's tokens and "accepted" [R, 1] is how many of its
        nodes are. For drafters that read them, "features" [branches * R, F, D] are the hidden states of the tokens
        before those that become final, from the first that the drafter has not read."""
        if self._reads_features and any(query.hidden is None for query in queries):
            raise ValueError(f"{state.facts.name} left no hidden states in its query, which the drafter reads")
        if self.tree is not None:
            return self._propose_tree(state, outputs, queries)
        proposal = super().propose(state, outputs, queries)
        if self._undrafted(state):
            proposal.available[:, 1:] = False
        if self._reads_features and queries[0].hidden is not None:  # the columns begin where it goes on
            proposal.quantities["features"] = queries[0].hidden
        return proposal

    def _propose_tree(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        tree, rows, logits = self._layout(state), state.rows, read_logits(state, outputs, queries)
        device = logits.device
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        depths = tree.depths.to(device)
        p = state.distribution(logits, rows, committed + depths)
        memory = state.memory.read(rows)
        left = torch.as_tensor(state.end[rows, None] - state.committed[rows, None], device=device)
        drafts = memory["drafts"].masked_fill(depths >= left, -1)
        positions = committed + torch.arange(tree.depth + 1, device=device)
        uniform = state.uniform(rows, positions, tree.widest + 1, rng.TOKEN_STREAM)
        found = walk(tree, drafts, p, memory["draft_distribution"], self.node_rule(state), uniform, self.hits)
        node = found.nodes.clamp(min=0)
        scores = probability(p.take_along_dim(node.unsqueeze(-1), 1), found.tokens.clamp(min=0))
        quantities = {"accepted": found.accepted.unsqueeze(1), "top_logit": logits.amax(-1)}
        if state.logprobs is not None:
            log_p = state.log_distribution(p, logits, rows, committed + depths)
            quantities["log_p"] = log_p.take_along_dim(node.unsqueeze(-1), 1)
        if self._reads_features and queries[0].hidden is not None:
            quantities["features"] = self._features_of(state, queries[0].hidden, node)
        available = torch.arange(tree.depth + 1, device=device) < left
        return proposed(state, queries, found.tokens, positions, scores, available, quantities)

    def _features_of(self, state: CausalState, hidden: Tensor, node: Tensor) -> Tensor:
        """[branches * R, F, D]: of a tree's call, the prompts' hidden states at first, then those of the root and the
        accepted nodes [R, D + 1]."""
        if state.commits == 0:
            lengths = (state.committed[state.rows] + state.shift[:, state.rows]).reshape(-1, 1)
            width = hidden.shape[1]
            column = np.minimum(np.arange(width) + width - lengths, width - 1)
            at = torch.as_tensor(column, device=hidden.device)
        else:
            root = hidden.shape[1] - state.width
            at = (node + root).repeat(state.branches, 1)
        return hidden.take_along_dim(at.unsqueeze(-1), 1)

    def commit(self, state: CausalState, proposal: Proposal) -> Commit:
        """As `ChainSampler.commit`."""
        if self.tree is None:
            return super().commit(state, proposal)
        state.check_current(proposal)
        rows, tokens = proposal.rows, proposal.values
        count, written = self._written(state, proposal, tokens, proposal.quantities["accepted"] + 1)
        selected = torch.arange(tokens.shape[1], device=tokens.device) < count
        self._write(state, proposal.positions, rows, torch.where(selected, tokens, -1))
        _drafting(state).held[rows] = state.committed[rows]
        state.committed[rows] += written
        said = self._note(state, proposal, tokens, selected)
        self._advance(state, proposal)
        self._draft_next(state, rows, proposal.quantities.get("features"))
        state.rows = np.flatnonzero(state.committed < state.end)
        return Commit(rows, tokens, proposal.positions, selected, proposal.scores, proposal.kind, said)


def _wrapped(module: nn.Module) -> Any:
    """A causal language model of transformers, wrapped as a drafter."""
    from paradec.models.wrapping import wrap

    try:
        return wrap(module)
    except ValueError as error:
        raise ValueError(f"drafter={type(module).__name__} cannot be taken as it is: {error}") from None


def _check_vocabulary(model: Any, drafter: Any) -> None:
    """Raise ValueError where the tokenizers of the two have other tokens for some of `PROBED` ids."""
    own, small = getattr(model, "tokenizer", None), getattr(drafter, "tokenizer", None)
    if own is None or small is None or own is small:
        return
    size = model.facts.vocab_size
    for probe in range(0, size, max(1, size // PROBED)):
        tokens = own.convert_ids_to_tokens(probe), small.convert_ids_to_tokens(probe)
        if tokens[0] != tokens[1]:
            raise ValueError(
                f"drafter {drafter.facts.name} has another vocabulary than {model.facts.name}: token {probe} is "
                f"{tokens[1]!r}, not {tokens[0]!r}; a drafter must have the same"
            )


def _drafting(state: CausalState) -> Drafting:
    assert state.drafting is not None  # a request of a sampler with a drafter has one
    return state.drafting


def _checked(own: Drafting, rows: np.ndarray, q: Tensor) -> Tensor:
    """Distributions of the drafter for rows, [R, ..., V]; whether one was NaN is found out with the next commit's
    transfer."""
    broken = q[..., 0].isnan().flatten(1).any(1)
    if own.broken is None:
        own.broken = torch.zeros(len(own.nfe), dtype=torch.bool, device=q.device)
    index = torch.as_tensor(rows, device=q.device)
    own.broken = own.broken.index_copy(0, index, own.broken[index] | broken)
    return q


def _drafts_left(state: CausalState, rows: np.ndarray) -> np.ndarray:
    """[R] int64: how many drafts one after the other can become final; a step makes one token more than
    it accepts."""
    return state.end[rows] - state.committed[rows] - 1


def _softened(state: CausalState) -> CausalState:
    """The state with temperature 1 in the place of 0, for drafts that are taken: a one-hot distribution
    names no second token."""
    if state.request.temperature:
        return state
    soft = copy.copy(state)
    soft.request = dataclasses.replace(state.request, temperature=1.0)
    return soft


def _right_aligned(features: Tensor, counts: np.ndarray, width: int) -> Tensor:
    """[R, width, D]: the first `counts` [R] of features [R, F, D], so that the last of them is at the end."""
    column = np.maximum(np.arange(width) - (width - counts)[:, None], 0)
    return features.take_along_dim(torch.as_tensor(column, device=features.device).unsqueeze(-1), 1)
