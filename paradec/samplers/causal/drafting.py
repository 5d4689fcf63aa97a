"""Base of the methods that accept a drafter (`speculative.py`, `lantern.py`). The model evaluates all drafts in one
forward. A chain is verified like SJD's window, by the method's `accept`. A tree is verified by `node_rule` and
`trees.walk`. `paradec.samplers.causal.drafts` has a file for each source of drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from paradec.core import rng
from paradec.core.checks import check_model, short_repr
from paradec.core.family_queries import CausalQuery
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Proposal
from paradec.models.images.grid import Grid
from paradec.samplers.causal.drafts.block import DraftBlock, DraftWalk
from paradec.samplers.causal.drafts.source import DraftSource, num_drafts_left
from paradec.samplers.causal.drafts.stepwise import DraftChain, DraftLayers, GrownTree, RecurrentChain, StaticTree
from paradec.samplers.causal.drafts.stopping import Unconfident, shorten_windows
from paradec.samplers.causal.drafts.text import NamedDrafter, PromptLookup, TokenRecycling
from paradec.samplers.causal.loop import CausalSampler, check_causal
from paradec.samplers.causal.sjd import verify
from paradec.samplers.causal.state import ALL_SLOTS, CausalState, Drafting, make_proposal, read_logits
from paradec.samplers.causal.trees import (
    DynamicTree,
    Tree,
    TreeLayout,
    TreeRule,
    drop_nodes_past_end,
    make_step_query,
    parse_tree,
    to_tuples,
    walk,
)
from paradec.samplers.causal.window import VerifiedWindow, read_window

DRAFT_SOURCES: dict[str, DraftSource] = {"block": DraftBlock(), "walk": DraftWalk(), "layers": DraftLayers()}
"""Sources for drafters that fill a whole window at once, by `FeatureDrafter.fills`."""
NUM_PROBES = 256
"""`check_vocabulary` compares about this many evenly spaced ids."""


@dataclass(frozen=True)
class DraftingSampler(CausalSampler):
    """Base of the methods that accept drafts of another model: a chain of `window - 1` tokens, verified by `accept`, or
    a `tree`, verified by `node_rule`.

    The drafter runs in `start` and `commit`, with a separate key/value store. A drafter that reads hidden states
    (`reads_features`: EAGLE, DFlash, MTP) drafts from `CausalQuery.hidden` of the model's last forward. So with such a
    drafter a row's first step verifies no drafts, and makes one token.

    Args:
        drafter: see `Speculative`. Methods with `window_drafters` also accept a drafter that fills a whole window or
            has its own tree (`paradec.samplers.causal.drafts.text`).
        tree: see `Speculative`; None means a chain.
        window: slots evaluated at once without a tree: the next token and `window - 1` drafts.
    """

    drafter: Any = None
    tree: Any = None

    needs_drafter: ClassVar[bool] = False
    """Whether a drafter is required; if not, the sampler can draft by itself."""
    window_drafters: ClassVar[bool] = False
    """Whether drafters that fill a whole window (`slots`) or have their own tree are accepted."""
    accepts_matching_draw: ClassVar[bool] = True
    """Whether the walk continues at a child that equals the token drawn if no child is accepted (`trees.walk`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("drafter", NamedDrafter.from_setting(self.drafter))
        if isinstance(self.drafter, TokenRecycling):
            self._use_drafter_tree(self.drafter)
        if self.tree is not None and self.drafter is None and not self.needs_drafter:
            raise ValueError(f"tree={short_repr(self.tree)} needs a drafter")
        if isinstance(self.tree, Mapping):  # a dynamic tree, written by `to_dict`
            self._set("tree", DynamicTree(**self.tree))
        if self.tree is not None and not isinstance(self.tree, DynamicTree):
            Tree.from_setting(self.tree)
            self._set("tree", to_tuples(self.tree))
        if isinstance(self.drafter, nn.Module) and not hasattr(self.drafter, "facts"):
            from paradec.models.wrapping import wrap

            try:
                self._set("drafter", wrap(self.drafter))
            except ValueError as error:
                raise ValueError(f"drafter={type(self.drafter).__name__} cannot be wrapped: {error}") from None
        if self.drafter_slots is not None:
            self._check_window_drafter()
        if self.drafter is not None and not self.has_text_drafter:
            if not callable(self.drafter) or not hasattr(self.drafter, "facts"):
                raise ValueError(
                    f"drafter={short_repr(self.drafter)} must be a causal model (e.g. from paradec.load or "
                    "paradec.wrap), a drafter from paradec.load_drafter, 'prompt_lookup' or 'token_recycling'"
                )
            check_model(f"drafter of {self.name!r}", self.drafter, (*self.models, "drafts"))
            check_causal(self.name, self.drafter)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _use_drafter_tree(self, drafter: TokenRecycling) -> None:
        """Set `tree` to the drafter's tree. Raises ValueError for another tree, or without `window_drafters`."""
        if not self.window_drafters:
            raise ValueError(f"drafter={drafter.name!r} must be a causal model for {self.name!r}")
        tree = self.tree
        is_dynamic = isinstance(tree, (DynamicTree, Mapping))
        if tree is not None and (is_dynamic or Tree.from_setting(tree) != parse_tree(drafter.tree)):
            raise ValueError(f"tree={short_repr(tree)}: drafter={drafter.name!r} has its own tree, leave tree out")
        self._set("tree", drafter.tree)

    def _check_window_drafter(self) -> None:
        """Raise ValueError if the sampler or a setting does not allow a drafter of whole windows."""
        name = self.drafter.name if self.has_text_drafter else self.drafter.facts.name
        if not self.window_drafters:
            raise ValueError(f"drafter={name!r} must be a causal model or an EAGLE drafter for {self.name!r}")
        if self.tree is not None:
            raise ValueError(f"tree={short_repr(self.tree)} has no meaning with drafter={name!r}, which drafts a chain")
        if self.window != self.settings()["window"]:
            raise ValueError(
                f"window={self.window} has no meaning with drafter={name!r}, which evaluates {self.drafter_slots} "
                "slots: leave window out"
            )

    @property
    def drafter_slots(self) -> int | None:
        """Slots of the window that the drafter fills at once; None for drafters of trees or of single tokens."""
        return getattr(self.drafter, "slots", None)

    @property
    def has_text_drafter(self) -> bool:
        """Whether the drafter has no network (a `NamedDrafter`); then q is one-hot."""
        return isinstance(self.drafter, NamedDrafter)

    @property
    def reads_features(self) -> bool:
        """Whether the drafter reads the model's hidden states."""
        return getattr(self.drafter, "reads_features", False)

    def node_rule(self, state: CausalState) -> TreeRule:
        """Return the rule that draws and verifies the nodes of a tree."""
        raise NotImplementedError

    # ---- start ----------------------------------------------------------------------------------------------------

    def check_request(self, model: Any, grid: Grid | None) -> None:
        """As in the base class. Also raise ValueError for a missing drafter, a drafter with another vocabulary, a
        drafter that reads another model's hidden states, or a tree with a model that has no store."""
        super().check_request(model, grid)
        if self.drafter is None:
            if self.needs_drafter:
                raise ValueError(f"drafter=None must be a smaller causal model: create({self.name!r}, drafter=model)")
            return
        if not self.has_text_drafter:
            check_vocabulary(model, self.drafter)
            self.bind_drafter(model)
        for network in () if self.tree is None else (model,) if self.has_text_drafter else (model, self.drafter):
            if not (network.supports_store and network.supports_visibility):
                raise ValueError(f"tree={self.tree} needs models that run over a store; {network.facts.name} does not")

    def bind_drafter(self, model: Any) -> Any:
        """Return the drafter, bound to the request's model if it reads the model's hidden states."""
        return self.drafter.bind(model) if self.reads_features else self.drafter

    def num_slots(self, model: Any, num_new: int) -> int:
        if self.tree is None:
            return super().num_slots(model, num_new) if self.drafter_slots is None else min(self.drafter_slots, num_new)
        return self.tree.nodes if isinstance(self.tree, DynamicTree) else parse_tree(self.tree).size

    def memory(self) -> dict[str, MemorySpec]:
        specs = super().memory()
        if self.has_text_drafter:
            specs["draft_distribution"] = dataclasses.replace(specs["draft_distribution"], dims=(1, "vocab"))
        if isinstance(getattr(self, "stop", None), Unconfident):
            specs["confidence"] = MemorySpec(("slot",), None, reset="sequence")
        if self.tree is None:
            return specs
        drafter_specs = self.drafter.memory() if isinstance(self.drafter, TokenRecycling) else {}
        return {name: specs[name] for name in ("drafts", "draft_distribution")} | drafter_specs

    def tree_layout(self, state: CausalState) -> TreeLayout:
        """Layout of the running rows' trees."""
        if isinstance(self.tree, DynamicTree):
            widest = min(self.tree.top_k, state.facts.vocab_size)
            return TreeLayout(state.drafting.parents[torch.as_tensor(state.rows)], self.tree.depth, widest)
        return parse_tree(self.tree).layout

    # ---- drafts ---------------------------------------------------------------------------------------------------

    def open(self, state: CausalState, model: Any) -> None:
        if self.drafter is None:
            super().open(state, model)
            return
        if isinstance(self.drafter, PromptLookup):
            self.draft_next(state, state.rows, None)
            return
        limit = None if self.has_text_drafter else self.drafter.facts.max_length
        if limit is not None and limit < state.context.shape[1]:
            need = state.context.shape[1]
            raise ValueError(f"drafter {self.drafter.facts.name} has {limit} positions; the request needs {need}")
        drafting = state.drafting = Drafting(self.bind_drafter(model), *np.zeros((2, state.batch), np.int64))
        if not self.has_text_drafter and self.drafter.supports_store:
            drafting.store = self.drafter.make_store(*state.context.shape)
        if self.tree is not None:
            state.memory["drafts"] = torch.full_like(state.memory["drafts"], -1)
        if isinstance(self.tree, DynamicTree):
            drafting.parents = torch.arange(-1, state.width - 1, device=state.context.device).repeat(state.batch, 1)
        if self.reads_features:
            state.num_drafts[:] = 0
            if num_reread := getattr(self.drafter, "num_reread", 0):
                shape = (len(state.context), num_reread, model.hidden_size)
                drafting.features = torch.zeros(shape, dtype=model.dtype, device=state.context.device)
        else:
            self.draft_next(state, state.rows, None)

    def draft_window(self, state: CausalState, proposal: Proposal, verified: VerifiedWindow, count: Tensor) -> None:
        if self.drafter is None:
            super().draft_window(state, proposal, verified, count)
            return
        if "node_logits" in proposal.quantities:
            self.drafter.observe(state, proposal)
        self.draft_next(state, proposal.rows, proposal.quantities.get("features"))

    def draft_next(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """Fill the next windows or trees of `rows`, where drafts fit. features: as for `DraftSource.fill`, unfused."""
        active = np.flatnonzero(num_drafts_left(state, rows) > 0)
        if not len(active) or state.width == 1:
            return
        if features is not None:
            state.num_drafts[rows] = ALL_SLOTS
            branch_offset = torch.arange(state.branches, device=features.device).unsqueeze(1) * len(rows)
            features = self.drafter.fuse(
                features[(branch_offset + torch.as_tensor(active, device=features.device)).flatten()]
            )
        rows = rows[active]
        source, stop_rule = self.source(state), getattr(self, "stop", None)
        source.fill(state, rows, features)
        if stop_rule is not None and not isinstance(source, DraftChain):
            shorten_windows(state, rows, stop_rule)

    def source(self, state: CausalState) -> DraftSource:
        """Return the source of the next drafts."""
        if self.has_text_drafter:
            return self.drafter
        if self.drafter_slots is not None:
            return DRAFT_SOURCES[self.drafter.fills]
        if isinstance(self.tree, DynamicTree):
            return GrownTree(self.tree)
        if self.tree is not None:
            return StaticTree(parse_tree(self.tree), self.node_rule(state))
        return RecurrentChain() if self.reads_features else DraftChain(getattr(self, "stop", None))

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: CausalState) -> list[CausalQuery]:
        """Evaluate the drafts and the final tokens that are not in the store."""
        if self.tree is None:
            queries = super().query(state)
        else:
            queries = [make_step_query(state, self.tree_layout(state), state.memory.read(state.rows)["drafts"])]
        if not self.reads_features:
            return queries
        return [query.with_fields(keep_hidden=True, keep_layers=self.drafter.keep_layers) for query in queries]

    def propose(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        """As in the base class. For a tree, `values` are the tokens of the walk, and the quantity "accepted" [R, 1] is
        the number of accepted nodes. If the drafter reads hidden states, "features" [branches * R, F, D] has the hidden
        state before each of F tokens: the final tokens that the drafter has not read, then the new final tokens."""
        if self.reads_features and any(query.hidden is None for query in queries):
            raise ValueError(f"{state.facts.name} set no query.hidden, which the drafter reads")
        if self.tree is not None:
            return self._propose_tree(state, outputs, queries)
        proposal = super().propose(state, outputs, queries)
        if self.reads_features:  # column 0 is the hidden state before the first token that the drafter has not read
            proposal.quantities["features"] = _join_hidden(state, queries)
        return proposal

    def _propose_tree(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        tree, rows, logits = self.tree_layout(state), state.rows, read_logits(state, outputs, queries)
        device = logits.device
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        depths = tree.depths.to(device)
        memory, guided = state.memory.read(rows), logits
        if state.controls is not None:
            logits = state.controls.adjust_nodes(state, logits, rows, tree.parents, memory["drafts"])
        if state.constraint is not None:
            logits = state.constraint.mask_nodes(state, logits, rows, tree.parents, memory["drafts"])
        row_index, node_positions = torch.arange(len(rows), device=device), (committed + depths).expand(len(rows), -1)

        def target(node: Tensor) -> Tensor:
            position = node_positions[row_index, node].unsqueeze(1)
            return state.distribution(logits[row_index, node].unsqueeze(1), rows, position).squeeze(1)

        remaining = torch.as_tensor(state.end[rows, None] - state.committed[rows, None], device=device)
        drafts = drop_nodes_past_end(state, tree, memory["drafts"])
        positions = committed + torch.arange(tree.depth + 1, device=device)
        uniform = state.uniform(rows, positions, tree.widest + 1, rng.TOKEN_STREAM)
        q = memory["draft_distribution"].expand(len(rows), *logits.shape[1:])
        result = walk(tree, drafts, target, q, self.node_rule(state), uniform, self.accepts_matching_draw)
        node = result.nodes.clamp(min=0)
        quantities = {"accepted": result.accepted.unsqueeze(1), "top_logit": logits.amax(-1)}
        if self.has_text_drafter:
            quantities |= {"node_logits": logits, "nodes": drafts}
        quantities |= state.recorded_quantities(None, logits, guided, rows, node_positions.gather(1, node), node)
        if self.reads_features and queries[0].hidden is not None:
            quantities["features"] = self._select_features(state, queries[0].hidden, node)
        available = torch.arange(tree.depth + 1, device=device) < remaining
        return make_proposal(state, queries, result.tokens, positions, result.scores, available, quantities)

    def _select_features(self, state: CausalState, hidden: Tensor, node: Tensor) -> Tensor:
        """Select F of the hidden states [branches * R, Q, D] of a tree's call. In a row's first step, select those of
        the prompt; later, those of `node` [R, depth + 1], which is the root and the accepted nodes."""
        is_first = state.num_drafts[state.rows] == 0
        root = hidden.shape[1] - (1 if is_first.all() else state.width)
        width = max(root + 1, node.shape[1]) if is_first.any() else node.shape[1]
        lengths = (state.committed[state.rows] + state.shift[:, state.rows]).reshape(-1, 1)
        prompt_index = torch.as_tensor(np.minimum(np.arange(width) + root + 1 - lengths, root), device=hidden.device)
        node_index = torch.nn.functional.pad(node + root, (0, max(width - node.shape[1], 0))).repeat(state.branches, 1)
        is_prompt = torch.as_tensor(np.tile(is_first, state.branches), device=hidden.device).unsqueeze(1)
        return hidden.take_along_dim(torch.where(is_prompt, prompt_index, node_index[:, :width]).unsqueeze(-1), 1)

    def verify(self, state: CausalState, proposal: Proposal) -> VerifiedWindow:
        """As in the base class; a tree was already verified in `propose`."""
        if self.tree is not None:
            return VerifiedWindow(proposal.values, proposal.quantities["accepted"])
        if self.drafter is None:
            return super().verify(state, proposal)
        window, has_draft = read_window(state, proposal)
        return verify(window, has_draft, self.accept(window), proposal.quantities["uniform"])


def _join_hidden(state: CausalState, queries: list[CausalQuery]) -> Tensor:
    """Join the hidden states of all queries in the order of the running rows: [branches * R, F, D]."""
    hidden_states = [query.hidden for query in queries if query.hidden is not None]
    if len(hidden_states) == 1:
        return hidden_states[0]
    width, rows = max(hidden.shape[1] for hidden in hidden_states), len(state.rows)
    features = hidden_states[0].new_zeros(state.branches * rows, width, hidden_states[0].shape[-1])
    for query, hidden in zip(queries, hidden_states, strict=True):
        assert query.index is not None  # set for queries with a store
        branch_rows = (query.index + rows * np.arange(state.branches)[:, None]).reshape(-1)
        features[torch.as_tensor(branch_rows, device=features.device), : hidden.shape[1]] = hidden
    return features


def check_vocabulary(model: Any, drafter: Any) -> None:
    """Raise ValueError for vocabularies of different sizes, or tokenizers that differ in one of the compared ids."""
    size, drafter_size = model.facts.vocab_size, drafter.facts.vocab_size
    if drafter_size != size:
        raise ValueError(
            f"drafter {drafter.facts.name} has {drafter_size} tokens, {model.facts.name} {size}; their vocabularies "
            "must be equal"
        )
    tokenizer, drafter_tokenizer = getattr(model, "tokenizer", None), getattr(drafter, "tokenizer", None)
    if tokenizer is None or drafter_tokenizer is None or tokenizer is drafter_tokenizer:
        return
    for probe in range(0, size, max(1, size // NUM_PROBES)):
        tokens = tokenizer.convert_ids_to_tokens(probe), drafter_tokenizer.convert_ids_to_tokens(probe)
        if tokens[0] != tokens[1]:
            raise ValueError(
                f"drafter {drafter.facts.name} has another vocabulary than {model.facts.name}: token {probe} is "
                f"{tokens[1]!r}, not {tokens[0]!r}; the vocabularies must be equal"
            )
