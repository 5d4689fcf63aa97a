"""SparseD: dense attention in the first steps, then each head attends only to the key blocks with its largest weights.
Wang et al., "SparseD: Sparse Attention for Diffusion Language Models", arXiv 2509.24014. A head attends to the same
blocks in successive steps, so by default the blocks of each layer and head are listed once, in the last dense step.
Kernels: `paradec.kernels.block_sparse`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number

DENSE, ESTIMATE, SPARSE = range(3)
"""Mode of a row in a model call: dense attention; dense attention that also makes block lists; sparse attention."""
BACKENDS = ("auto", "torch", "triton", "flex")
SELECTIONS = ("isolated", "reference")


@dataclass(frozen=True)
class SparseD:
    """Settings of SparseD. The defaults are the paper's for long prompts, the preset "short" for short prompts.

    As in the paper's code, int(T * skip) + 2 of T scheduled steps are dense, and the last of them makes the lists. T is
    the request's `steps`, or the number of masks if `steps` is None. If the sampler has no schedule, a row is dense
    until int(masks * skip) + 1 tokens are decided: the same steps, if each decides one token. With a cache, lists are
    made in the next step that evaluates the whole row. A row makes new lists when its sampler shortens it.

    Args:
        select: share of key blocks selected per query block, in (0, 1], separately for prompt and answer: of n blocks,
            max(1, int(n * select) + 1), at most n.
        skip: share of the steps that are dense.
        block_size: positions per block, from 1 to 4096.
        dense_steps: number of dense steps; replaces `skip`.
        refresh_pattern_every: number of steps after which a dense step makes new lists; None: never.
        selection: "isolated" ranks key blocks of prompt and answer separately (the paper). "reference" ranks the
            prompt's blocks among all blocks, which may select fewer (the public code).
        backend: "triton", "torch", or "auto": Triton on NVIDIA GPUs, torch elsewhere. "flex": PyTorch's flex_attention;
            on a GPU compiled per shape, with block sizes that are multiples of 128; on a CPU for comparison only.

    Raises ValueError for a setting out of its range."""

    select: float = 0.3
    skip: float = 0.2
    block_size: int = 128
    dense_steps: int | None = None
    refresh_pattern_every: int | None = None
    selection: str = "isolated"
    backend: str = "auto"

    name: ClassVar[str] = "sparsed"
    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "SparseD"
    arxiv: ClassVar[str] = "2509.24014"
    summary: ClassVar[str] = "dense at first, then only the blocks of keys that each head attended to most"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"short": {"select": 0.5, "block_size": 32}}

    def __post_init__(self) -> None:
        check_number("select", self.select, low=0, high=1, open_low=True)
        check_number("skip", self.skip, low=0, high=1)
        check_int("block_size", self.block_size, low=1, high=4096)
        check_int("dense_steps", self.dense_steps, low=1, none=True)
        check_int("refresh_pattern_every", self.refresh_pattern_every, low=1, none=True)
        check_choice("selection", self.selection, SELECTIONS)
        check_choice("backend", self.backend, BACKENDS)

    def to_dict(self) -> dict[str, Any]:
        return {"attention": self.name} | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def why_unsupported(self, sampler: Any, model: Any) -> str | None:
        """Why SparseD does not work with a sampler and a model, or None."""
        facts = model.facts
        if getattr(model, "kind", None) != "decoder":
            return f"it needs a transformers decoder; {facts.name} is not one"
        if facts.topology != "bidirectional":
            return f"it needs bidirectional attention; the attention of {facts.name} is {facts.topology}"
        if sampler.needs.mask_probes:
            return "the sampler evaluates masks that other positions do not see; block lists cannot express this"
        if sampler.needs.multi_step:
            return "the sampler makes several steps in one call, which would change the result of sparse attention"
        return None

    def begin(self, state: Any, scheduled: bool) -> SparseDState:
        """Make a request's state. scheduled: whether its sampler has a schedule of steps."""
        return SparseDState(self, state, scheduled)


class SparseDState:
    """Block lists of every row, guidance branch and layer of a request, and its counts of calls. `B` rows."""

    def __init__(self, settings: SparseD, state: Any, scheduled: bool):
        self.settings = settings
        self.listed_at = np.full(state.batch, -1)
        """[B] int64: the row's step in which its lists were made, or -1."""
        self.length = state.length.copy()
        """[B] int64: number of positions at step `listed_at`."""
        self.prompt_length = state.prompt_length.copy()
        self.calls = np.zeros((3, state.batch), np.int64)
        """[3, B] int64: calls of each row, by mode."""
        self.layers: dict[int, Any] = {}
        """One `BlockIndex` per layer, with branches * B rows."""
        self.peak_bytes = 0
        self._density: np.ndarray | None = None
        steps = state.total  # masks of each row
        if scheduled and state.request.steps is not None:
            steps = np.full(state.batch, state.request.steps)
        self._dense_until = (steps * settings.skip).astype(np.int64) + 1
        if settings.dense_steps is not None:
            scheduled, self._dense_until = True, np.full(state.batch, settings.dense_steps - 1)
        self._scheduled = scheduled

    # ---- one step --------------------------------------------------------------------------------------------------

    def modes(self, state: Any, rows: np.ndarray, is_full: bool) -> np.ndarray:
        """[N] int64: DENSE, ESTIMATE or SPARSE for each of `rows` [N] in a model call. is_full: whether the call
        evaluates whole rows."""
        step, interval = state.row_step[rows], self.settings.refresh_pattern_every
        has_lists = (self.listed_at[rows] >= 0) & (self.length[rows] == state.length[rows])
        is_due = ~has_lists & ((step if self._scheduled else state.decided[rows]) >= self._dense_until[rows])
        if interval is not None:
            is_due |= has_lists & (step - self.listed_at[rows] >= interval)
        if not is_full:
            return np.where(has_lists, SPARSE, DENSE)
        return np.where(is_due, ESTIMATE, np.where(has_lists, SPARSE, DENSE))

    def plan(self, state: Any, part: Any) -> SparsePlan | None:
        """Plan the attention of one part of a query. Returns None if attention is dense for all rows."""
        rows = state.window.rows[part.index]
        modes = self.modes(state, rows, part.kind == "full")
        if not modes.any():
            return None
        return SparsePlan(self, state, part, rows, modes)

    def on_commit(self, state: Any, queries: list[Any]) -> None:
        """Count the calls of a step, and record where new lists were made. `row_step` already includes this step.
        queries: the step's queries."""
        for query in queries:
            plan, rows = query.attention, query.rows
            modes = np.full(len(rows), DENSE) if plan is None or not plan.attended else plan.modes[: len(rows)]
            self.calls[modes, rows] += 1
            estimated = rows[modes == ESTIMATE]
            self.listed_at[estimated], self.length[estimated] = state.row_step[estimated] - 1, state.length[estimated]

    # ---- lists -----------------------------------------------------------------------------------------------------

    def store_lists(self, layer: int, rows: np.ndarray, block_index: Any, branches: int) -> None:
        """Store the lists `block_index` of `rows` [R], which are indices into the branches * B rows."""
        if layer not in self.layers:
            self.layers[layer] = self._empty_lists(block_index, branches)
            self.peak_bytes = sum(index.nbytes for index in self.layers.values())
        stored, row_index = self.layers[layer], torch.as_tensor(rows, device=block_index.count.device)
        count, blocks = stored.count[row_index].zero_(), stored.blocks[row_index].zero_()
        count[:, :, : block_index.count.shape[2]] = block_index.count
        blocks[:, :, : block_index.blocks.shape[2], : block_index.blocks.shape[3]] = block_index.blocks
        stored.count[row_index], stored.blocks[row_index] = count, blocks

    def _empty_lists(self, index: Any, branches: int) -> Any:
        """Empty lists for all rows, wide enough for the longest list."""
        from paradec.kernels.block_sparse.lists import BlockIndex, budget, generation_block

        size, select = self.settings.block_size, self.settings.select
        blocks = -(-self.length // size)
        first = generation_block(self.length, self.length - self.prompt_length, size)
        prompt = budget(first if self.settings.selection == "isolated" else blocks, select)
        max_blocks = int((np.minimum(prompt, first) + budget(blocks - first, select)).max())
        shape = (branches * len(self.length), index.count.shape[1], int(blocks.max()))
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            return BlockIndex(index.count.new_zeros(shape), index.blocks.new_zeros((*shape, max_blocks)), size)

    def release(self) -> None:
        """Free the lists; `report` still has their density and size."""
        if self.layers:
            self._density = self._list_density()
        self.layers = {}

    def _list_density(self) -> np.ndarray:
        """[B] float64: share of block pairs in the lists, mean over layers, heads and branches."""
        num_listed = torch.stack([index.count.double().sum(2).mean(1).cpu() for index in self.layers.values()]).mean(0)
        blocks = -(-self.length // self.settings.block_size)
        return num_listed.view(-1, len(self.length)).mean(0).numpy() / blocks**2

    def report(self) -> AttentionCost:
        density = self._list_density() if self.layers else self._density
        has_lists = self.listed_at >= 0
        return AttentionCost(
            attention=self.settings.name,
            dense_calls=self.calls[DENSE].tolist(),
            pattern_calls=self.calls[ESTIMATE].tolist(),
            sparse_calls=self.calls[SPARSE].tolist(),
            density=[
                float(density[row]) if has_lists[row] and density is not None else None for row in range(len(has_lists))
            ],
            pattern_bytes=self.peak_bytes,
        )


@dataclass(frozen=True)
class AttentionCost:
    """Number of a request's model calls, and density and size of its block lists. Each `list` has one entry per row."""

    attention: str
    dense_calls: list[int]
    """Number of calls with dense attention."""
    pattern_calls: list[int]
    """Number of dense calls that also made lists."""
    sparse_calls: list[int]
    """Number of calls with sparse attention."""
    density: list[float | None]
    """Share of (query block, key block) pairs in the lists: mean over layers, heads, branches; None without lists."""
    pattern_bytes: int
    """Bytes of all block lists."""


class SparsePlan:
    """Attention of one model call (`WindowQuery.attention`), for every layer. The call has `R` rows, including guidance
    branches, `Q` queries, `K` keys, `H` heads, `G` key/value heads and head dimension `D`."""

    def __init__(self, owner: SparseDState, state: Any, part: Any, rows: np.ndarray, modes: np.ndarray):
        self.owner, self.branches = owner, state.branches
        self.modes = np.tile(modes, state.branches)
        """[R] int64: DENSE, ESTIMATE or SPARSE."""
        self.rows = np.concatenate([rows + branch * state.batch for branch in range(state.branches)])
        """[R] int64: rows in `SparseDState.layers`."""
        self.lengths = np.tile(state.length[rows], state.branches)
        self.prompts = np.tile(state.prompt_length[rows], state.branches)
        # the call's rows of each mode, int64
        self.dense, self.estimate, self.sparse = (np.flatnonzero(self.modes == mode) for mode in range(3))
        self.tiles: Any = None
        if len(self.sparse):
            from paradec.kernels.block_sparse.lists import QueryTiles

            positions, valid = np.tile(part.positions, (state.branches, 1))[self.sparse], None
            if part.valid is not None:
                valid = np.tile(part.valid, (state.branches, 1))[self.sparse]
            self.tiles = QueryTiles.from_positions(positions, valid, owner.settings.block_size, state.canvas.device)
        self.attended = False
        """Whether a model call used the plan."""

    def attend(
        self,
        dense: Callable[..., Tensor],
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Compute the attention of one layer: [R, Q, H, D].

        dense: full attention, (query, key, value, mask) -> [R, Q, H, D].
        query: [R, H, Q, D]. key, value: [R, G, K, D], from position 0.
        mask: [R, 1, 1, K] bool, True at real keys; None: no padding. scale: None means D ** -0.5."""
        self.attended = True
        query, key = query.to(value.dtype), key.to(value.dtype)
        outputs = []
        if len(self.dense):
            outputs.append(dense(*_rows(self.dense, query, key, value, mask)))
        if len(self.estimate):
            outputs.append(self._make_lists(dense, layer, _rows(self.estimate, query, key, value, mask), scale))
        if len(self.sparse):
            outputs.append(self._attend_sparse(layer, *_rows(self.sparse, query, key, value), scale=scale))
        if len(outputs) == 1:
            return outputs[0]
        order = np.argsort(np.concatenate((self.dense, self.estimate, self.sparse)))
        return torch.cat(outputs).index_select(0, torch.as_tensor(order, device=query.device))

    def _attend_sparse(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        from paradec.kernels.block_sparse.api import sparse_attention

        return sparse_attention(
            query,
            key,
            value,
            self.owner.layers[layer],
            tiles=self.tiles.to(query.device),
            lengths=self.lengths[self.sparse],
            rows=self.rows[self.sparse],
            scale=scale,
            backend=self.owner.settings.backend,
        ).transpose(1, 2)

    def _make_lists(self, dense: Callable[..., Tensor], layer: int, inputs: list[Any], scale: float | None) -> Tensor:
        """Compute dense attention of the rows in mode ESTIMATE and store their lists. inputs: query, key, value and
        mask of these rows."""
        from paradec.kernels import block_sparse as kernels

        query, key, value, _ = inputs
        settings, lengths = self.owner.settings, self.lengths[self.estimate]
        first = kernels.generation_block(lengths, lengths - self.prompts[self.estimate], settings.block_size)
        longest, lse = int(lengths.max()), None
        backend = "auto" if settings.backend == "flex" else settings.backend
        options: dict[str, Any] = {"lengths": lengths, "scale": scale, "backend": backend}
        if kernels.choose_backend(backend, query, settings.block_size) == "triton":
            # this attention also returns the log-sum-exps, so `block_means` need not compute them
            output, lse = kernels.sparse_attention(query, key, value, None, return_logsumexp=True, **options)
            output, lse = output.transpose(1, 2), lse[:, :, :longest]
        else:
            output = dense(*inputs)
        query, key = query[:, :, :longest], key[:, :, :longest]
        means = kernels.block_means(query, key, settings.block_size, first=first, logsumexp=lse, **options)
        joint = None
        if settings.selection == "reference":
            joint = kernels.block_means(query, key, settings.block_size, logsumexp=lse, **options)
        index = kernels.select_blocks(
            means, settings.select, settings.block_size, lengths=lengths, first=first, joint=joint
        )
        self.owner.store_lists(layer, self.rows[self.estimate], index, self.branches)
        return output


def _rows(indices: np.ndarray, *tensors: Tensor | None) -> list[Any]:
    """Select rows of each tensor [R, ...]. A tensor is not copied if it has one row or all its rows are selected."""
    selected: list[Any] = []
    for tensor in tensors:
        if tensor is None or len(tensor) == len(indices) or len(tensor) == 1:
            selected.append(tensor)
        else:
            selected.append(tensor.index_select(0, torch.as_tensor(indices, device=tensor.device)))
    return selected
