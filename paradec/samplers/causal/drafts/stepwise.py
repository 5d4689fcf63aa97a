"""Drafts by several forwards of a model, one per token of a chain or per depth of a tree; and MTP's drafts, one layer
per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import Cost
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.drafts.source import (
    exclude_tokens,
    num_drafts_left,
    record_nan_rows,
    run_drafter,
    run_drafter_on_tree,
    soften_state,
    unread_span,
    write_drafts,
)
from paradec.samplers.causal.drafts.stopping import StopRule, apply_rule
from paradec.samplers.causal.state import DRAFT_STREAM, CausalState, Spans, read_logits
from paradec.samplers.causal.trees import RULES, DynamicTree, Naive, Tree, TreeLayout, TreeRule, parse_tree, query_tree

ROOT = parse_tree((1,)).layout


@dataclass(frozen=True)
class DraftChain:
    """Source: one token after the other, until a row's window is full or `stop` ends it."""

    stop: StopRule | None = None

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        drafting = state.drafting
        # clear rejected drafts from the store, which keeps the final tokens except the last
        num_read = drafting.num_read[rows] = np.minimum(drafting.num_read[rows], state.committed[rows] - 1)
        if drafting.store is not None:
            for branch in range(state.branches):
                shift = np.where(num_read > 0, state.shift[branch, rows], 0)
                drafting.store.clear_from(rows + branch * state.batch, num_read + shift)
        drafts, all_q = state.memory["drafts"].clone(), state.memory["draft_distribution"].clone()
        rule_q = all_q.clone() if self.stop is not None else all_q  # at temperature 0, q for the rule has temperature 1
        for slot in range(state.width - 1):
            rows = rows[state.num_slots(rows) - 1 > slot]
            if not len(rows):
                break
            index = torch.as_tensor(rows, device=drafts.device)
            stop = state.committed[rows] + slot
            spans = Spans(rows, drafts[index], drafting.num_read[rows], stop, stop - 1, 1)
            queries = state.make_queries(drafting.store, drafting.model.pads, spans)
            positions = torch.as_tensor(stop, device=drafts.device).unsqueeze(1)
            logits = run_drafter(state, queries)
            previous = torch.nn.functional.pad(drafts[index, :slot], (1, 0))
            logits = exclude_tokens(state, logits, rows, torch.arange(-1, slot).unsqueeze(0), previous, [slot])
            q = record_nan_rows(drafting, rows, state.distribution(logits, rows, positions))
            drafts[index, slot] = draw(q, state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)).squeeze(1)
            all_q[index, slot] = q.squeeze(1).to(all_q.dtype)
            drafting.num_read[rows] = stop
            if self.stop is not None:
                rule_q[index, slot] = (
                    soften_state(state).distribution(logits, rows, positions).squeeze(1).to(rule_q.dtype)
                )
                state.num_drafts[rows] = slot + 1
                rows = rows[~apply_rule(self.stop, rule_q[index, : slot + 1], drafts[index, : slot + 1])]
        state.memory["drafts"], state.memory["draft_distribution"] = drafts, all_q
        state.memory["draft_source"] = torch.arange(state.width, device=drafts.device).expand(state.batch, -1)


@dataclass(frozen=True)
class DraftLayers:
    """Source: each of several layers drafts one token (MTP, arXiv 2412.19437). The first layer reads final tokens and
    the model's hidden states. Each later layer reads the output of the layer before it, and the tokens shifted by one,
    with that layer's draft at the end. Columns that read drafts are evaluated again once their tokens are final."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        drafting, device = state.drafting, state.context.device
        drafter: Any = drafting.model
        assert features is not None  # MTP layers read hidden states
        num_reread = drafter.num_reread
        first_unread, _ = unread_span(state, rows, True)
        positions = state.positions(rows)[:, :-1]
        drafts, all_q = positions[:, :0], []
        begin = np.maximum(first_unread - num_reread, 1)
        query = query_tree(state, drafting.store, rows, ROOT, positions, begin, 0, np.zeros(1, int))
        states = self._align_states(state, query, torch.as_tensor(first_unread.reshape(-1, 1), device=device), features)
        uniform = state.uniform(rows, positions, 1, DRAFT_STREAM)
        for slot in range(positions.shape[1]):
            with torch.no_grad():
                logits, states = drafter(query, states, drafting.store, slot)
            logits = read_logits(state, [logits], [query])
            previous = torch.nn.functional.pad(drafts, (1, 0))
            logits = exclude_tokens(state, logits, rows, torch.arange(-1, slot).unsqueeze(0), previous, [slot])
            all_q.append(
                record_nan_rows(drafting, rows, state.distribution(logits, rows, positions[:, slot : slot + 1]))
            )
            token = draw(all_q[-1], uniform[:, slot])
            drafts = torch.cat((drafts, token), 1)
            query = query.with_fields(tokens=torch.cat((query.tokens[:, 1:], token.repeat(state.branches, 1)), 1))
        drafting.nfe += Cost([query], state.batch).nfe  # all layers count as one forward
        drafting.num_read[rows] = state.committed[rows]
        write_drafts(state, rows, drafts, torch.cat(all_q, 1))

    def _align_states(self, state: CausalState, query: Any, first_unread: Tensor, features: Tensor) -> Tensor:
        """Return the hidden states at the positions before the query's columns, [branches * R, Q, D]. Save the hidden
        states of the last columns for the next step.

        first_unread: [branches * R, 1]: first position that the drafter has not read; `features` begin before it."""
        drafting, row_index = state.drafting, query.store.rows
        assert drafting.features is not None  # `DraftingSampler.open` has made them
        num_reread = drafting.features.shape[1]
        history = torch.cat((drafting.features[row_index], features), 1)
        column = (query.positions - first_unread + num_reread).clamp(0, history.shape[1] - 1)
        states = history.take_along_dim(column.unsqueeze(-1), 1)
        tail = torch.nn.functional.pad(states, (0, 0, num_reread, 0))[:, -num_reread:]
        drafting.features = drafting.features.index_copy(0, row_index, tail)
        return states


@dataclass(frozen=True)
class StaticTree:
    """Source: a static tree; `rule` draws the children of all nodes, one depth after the other."""

    tree: Tree
    rule: TreeRule

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        tree, rule = self.tree, self.rule
        drafting, device = state.drafting, state.context.device
        index = torch.as_tensor(rows, device=device)
        depths, children = np.array(tree.depths), tree.children
        draft_state = soften_state(state) if isinstance(rule, Naive) else state
        drafts = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=device)
        all_q = state.memory["draft_distribution"][index]
        begin, end = unread_span(state, rows, features is not None)
        hidden = None if features is None else features.new_zeros(len(features), tree.size, features.shape[-1])
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        for depth in range(min(tree.depth, num_drafts_left(state, rows).max())):
            nodes = np.flatnonzero(depths == depth)
            num_drafts = int((depths <= depth).sum()) - 1  # drafts so far: nodes 1 to num_drafts
            query = query_tree(state, drafting.store, rows, tree.layout, drafts, begin, num_drafts, nodes)
            logits, output = run_drafter_on_tree(state, query, num_drafts, end - begin, features, hidden)
            logits = exclude_tokens(state, logits, rows, tree.layout.parents, drafts, nodes)
            q = draft_state.distribution(logits, rows, (committed + depth).expand(-1, len(nodes)))
            q = record_nan_rows(drafting, rows, q)
            all_q[:, nodes] = q.to(all_q.dtype)
            counts = (children[nodes] >= 0).sum(1)
            max_children = int(counts.max())
            noise = state.uniform(rows, committed + depth, len(nodes) * max_children, DRAFT_STREAM).reshape(
                -1, max_children
            )
            sampled = rule.children(q.flatten(0, 1), max_children, noise).unflatten(0, (len(rows), len(nodes)))
            for column, node in enumerate(nodes):
                child_nodes = children[node][: counts[column]].to(device)
                drafts[:, child_nodes] = sampled[:, column, : counts[column]]
                if hidden is not None and output is not None:
                    hidden[:, child_nodes] = output[:, column : column + 1]
            drafting.num_read[rows], begin = state.committed[rows], end
        state.memory.write("drafts", rows, drafts)
        state.memory.write("draft_distribution", rows, all_q)


@dataclass(frozen=True)
class RecurrentChain:
    """Source: a chain, drafted as a tree with one child per node; node i becomes slot i - 1 (EAGLE, arXiv
    2401.15077)."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        StaticTree(parse_tree((1,) * (state.width - 1)), RULES["recursive"]).fill(state, rows, features)
        drafts = state.memory["drafts"]
        state.memory["drafts"] = drafts.roll(-1, 1).clamp(min=0)  # the last slot has no draft
        state.memory["draft_source"] = torch.arange(state.width, device=drafts.device).expand(state.batch, -1)


@dataclass(frozen=True)
class GrownTree:
    """Source: a `DynamicTree` of the paths most probable under the drafter (EAGLE-2, arXiv 2406.16858)."""

    tree: DynamicTree

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        tree, drafting, device = self.tree, state.drafting, state.context.device
        top = min(tree.top_k, state.facts.vocab_size)
        soft = soften_state(state)
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        begin, end = unread_span(state, rows, features is not None)
        root = torch.full_like(committed, -1)
        # the drafter reads the root, then `top` nodes per level; candidate: indices in `candidates` from 1 (root: 0)
        parents, tokens, candidate, score = root, root, torch.zeros_like(root), torch.zeros(root.shape, device=device)
        hidden = None if features is None else features.new_zeros(len(features), 1, features.shape[-1])
        remaining = num_drafts_left(state, rows)
        # per row, so that a row's candidates do not depend on other rows
        limit = torch.as_tensor(remaining, device=device).unsqueeze(1)
        wanted_nodes = np.arange(1)
        candidates: list[tuple[Tensor, Tensor, Tensor]] = []
        for level in range(min(tree.depth, remaining.max())):
            num_drafts = tokens.shape[1] - 1
            layout = TreeLayout(parents, level, top)
            query = query_tree(state, drafting.store, rows, layout, tokens, begin, num_drafts, wanted_nodes)
            logits, output = run_drafter_on_tree(state, query, num_drafts, end - begin, features, hidden)
            logits = exclude_tokens(state, logits, rows, parents, tokens, wanted_nodes)
            q = record_nan_rows(
                drafting, rows, soft.distribution(logits, rows, (committed + level).expand(-1, len(wanted_nodes)))
            )
            likeliest = q.topk(top, -1)
            total = (score.unsqueeze(-1) + likeliest.values.log()).flatten(1).masked_fill(limit <= level, -torch.inf)
            offset = 1 + sum(level_values.shape[1] for level_values, *_ in candidates)
            candidates.append(
                (likeliest.indices.flatten(1), total, candidate[:, wanted_nodes].repeat_interleave(top, 1))
            )
            score, column = total.topk(top, -1)
            parent_nodes = torch.as_tensor(wanted_nodes, device=device)[column // top]
            parents, candidate = torch.cat((parents, parent_nodes), 1), torch.cat((candidate, offset + column), 1)
            tokens = torch.cat((tokens, candidates[-1][0].gather(1, column)), 1)
            if hidden is not None and output is not None:
                source = (column // top).repeat(state.branches, 1).unsqueeze(-1)
                hidden = torch.cat((hidden, output.take_along_dim(source, 1)), 1)
            wanted_nodes = np.arange(num_drafts + 1, num_drafts + 1 + top)
            drafting.num_read[rows], begin = state.committed[rows], end
        all_tokens, all_scores, all_parents = (torch.cat(levels, 1) for levels in zip(*candidates, strict=True))
        # a parent is at least as likely as its child and precedes it, so it is selected too
        selected = all_scores.sort(dim=1, descending=True, stable=True).indices[:, : tree.nodes - 1].sort(1).values
        drafts = all_tokens.gather(1, selected).masked_fill(all_scores.gather(1, selected).isinf(), -1)
        parent_nodes = torch.searchsorted(
            torch.cat((torch.zeros_like(root), selected + 1), 1), all_parents.gather(1, selected)
        )
        count = 1 + selected.shape[1]
        nodes = torch.full((len(rows), tree.nodes), -1, dtype=torch.int64, device=device)
        nodes[:, 1:count] = drafts
        state.memory.write("drafts", rows, nodes)
        index = torch.as_tensor(rows, device=device)
        assert drafting.parents is not None  # `DraftingSampler.open` has made them
        drafting.parents = drafting.parents.clone()
        drafting.parents[index, 1:count] = parent_nodes
