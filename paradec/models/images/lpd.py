"""LPD (Zhang et al., "Locality-aware Parallel Decoding", arXiv 2507.01957): codes of a picture in groups, in any order.

Parameter names are those of the published checkpoints. Inputs are the class, tokens, and mask tokens at positions to
predict. An attention mask of the caller decides which inputs see each other."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from paradec.core.checks import check_divides, check_int, check_number, check_type
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import GroupQuery, RankedQuery
from paradec.core.orders import LPD as LPDOrder
from paradec.core.orders import group_sizes
from paradec.core.query import Query, StoreCall
from paradec.models.checkpoint import CheckpointError, check_fit, checkpoint_errors
from paradec.models.images.base import ImageModel, ImageRequest, exact_prompts, list_labels, merge_defaults, widen
from paradec.models.images.blocks import Block
from paradec.models.images.grid import Grid
from paradec.models.images.loading import NOT_SIZES, count_blocks, find_files
from paradec.models.images.vq import VQModel, check_codebook, open_vq
from paradec.models.weights import read_weights


@dataclass(frozen=True)
class LPDConfig:
    """Sizes of an LPD. Raises ValueError for a size out of its range.

    dim, n_layer, n_head: width, layers, heads. inner: width of the feed-forward; by default 4 dim.
    grid: codes along one side of a picture. vocab_size: number of codes.
    num_classes: number of classes; label `num_classes` is unconditional (for guidance)."""

    dim: int
    n_layer: int
    n_head: int
    grid: int = 16
    vocab_size: int = 16384
    num_classes: int = 1000
    inner: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("dim", "n_layer", "n_head", "grid", "vocab_size", "num_classes", "inner"):
            check_int(name, getattr(self, name), low=1, none=name == "inner")
        check_number("norm_eps", self.norm_eps, low=0, open_low=True)
        check_divides("n_head", self.n_head, "dim", self.dim)

    # sizes for stores, by transformers' names
    num_hidden_layers = property(lambda self: self.n_layer)
    num_attention_heads = property(lambda self: self.n_head)
    hidden_size = property(lambda self: self.dim)


PRESETS: dict[str, dict[str, int]] = {
    "lpd_l": {"dim": 1024, "n_layer": 24, "n_head": 16},
    "lpd_xl": {"dim": 1280, "n_layer": 36, "n_head": 20},
    "lpd_xxl": {"dim": 1536, "n_layer": 48, "n_head": 24},
}
"""Sizes of the published models, which make 256 (16 x 16 codes) or 512 pixels (32 x 32)."""
GUIDANCE: dict[int, dict[tuple[int, int], float]] = {
    1024: {(256, 20): 4.8, (256, 32): 5.4, (1024, 48): 7.3},
    1280: {(256, 20): 4.9, (256, 32): 5.0, (1024, 48): 6.0},
    1536: {(256, 20): 5.9},
}
"""Width of the model -> {(cells, groups) of a picture: the authors' guidance scale}."""
REPULSION = {(1536, 256, 20): 3.0}
"""(width, cells, groups) -> repulsion, for published models that do not use the order's default."""


class LPD(nn.Module):
    """The network, without the codebook."""

    def __init__(self, config: LPDConfig):
        super().__init__()
        self.config = config
        self.class_emb = nn.Embedding(config.num_classes, config.dim)
        self.fake_latent = nn.Parameter(torch.zeros(1, config.dim))
        self.token_emb = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, config.grid**2 + 1, config.dim))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.z_proj_ln = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.blocks = nn.ModuleList(
            Block(config.dim, config.n_head, layer, config.norm_eps, config.inner) for layer in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def embed(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Inputs [R, Q, dim] of the blocks.

        Args:
            ids: [R, Q] int64: a code, `vocab_size` for a mask, or `vocab_size` + 1 + a label.
            positions: [R, Q] int64: 0 for the class, 1 + the cell for codes and masks; None adds no positions."""
        codes, classes = self.config.vocab_size, self.config.num_classes
        label = (ids - codes - 1).unsqueeze(-1)
        class_embeddings = self.class_emb(label.squeeze(-1).clamp(0, classes - 1))
        class_embeddings = torch.where(label == classes, self.fake_latent, class_embeddings)
        x = self.token_emb(ids.clamp(max=codes - 1))
        x = torch.where(label < 0, torch.where(label == -1, self.mask_token, x), class_embeddings)
        return x if positions is None else self.z_proj_ln(x + self.pos_embed[0][positions])

    def backbone(self, x: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        """Hidden states [R, Q, dim] before the output matrix.

        Args:
            x: [R, Q, dim], from `embed`. mask: [R or 1, 1, Q, K] bool, True where visible; None shows everything.
            cache: `update(keys, values, layer)` returns keys and values [R, heads, K, head width] to attend to."""
        for block in self.blocks:
            x = block(x, mask, cache)
        return self.norm(x)

    def forward(self, codes: Tensor, labels: Tensor, order: Tensor, sizes: Sequence[int]) -> Tensor:
        """Logits of all groups at once, as in training: [B, S, V] for S cells and V codes; `[:, r]` is for cell
        `order[:, r]`.

        Args:
            codes: [B, S] int64, in raster order. labels: [B] int64; label `num_classes` is unconditional.
            order: [B, S] int64: the cells in the order of prediction. sizes: of the groups; their sum is S."""
        size, device = order.shape[1], order.device
        ends = torch.tensor(sizes, device=device).cumsum(0)
        group = torch.repeat_interleave(torch.arange(len(sizes), device=device), torch.tensor(sizes, device=device))
        num_known = int(ends[-2]) if len(sizes) > 1 else 0  # the last group's tokens are not read
        classes = (self.config.vocab_size + 1 + labels).unsqueeze(1)
        masks = torch.full_like(order, self.config.vocab_size)
        ids = torch.cat((classes, codes.gather(1, order)[:, :num_known], masks), 1)
        positions = torch.cat((torch.zeros_like(classes), 1 + order[:, :num_known], 1 + order), 1)
        # the class is group -1; tokens see tokens up to their group; masks see earlier tokens and masks of their group
        groups = torch.cat((group.new_full((1,), -1), group[:num_known], group))
        is_mask = torch.arange(len(groups), device=device) > num_known
        is_earlier = groups.unsqueeze(0) < groups.unsqueeze(1) + (~is_mask).unsqueeze(1)
        same_group = is_mask.unsqueeze(1) & (groups.unsqueeze(0) == groups.unsqueeze(1))
        visible = torch.where(is_mask.unsqueeze(0), same_group, is_earlier)
        hidden = self.backbone(self.embed(ids, positions), visible[None, None])[:, num_known + 1 :]
        assert hidden.shape[1] == size
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> logits [..., vocab_size], float32 or wider."""
        return widen(self.head(hidden))


# ---- the adapter ----------------------------------------------------------------------------------------------------


class LPDModel(ImageModel):
    """The adapter of LPD. Ids below `vocab_size` are codes, `vocab_size` (`blank_id`) is a cell to predict, and
    `vocab_size` + 1 + a label is a class. A prompt is one class.

    vq: its VQ autoencoder (LlamaGen's); None makes only codes.
    defaults: `steps`, `guidance_scale`, `temperature`, `top_k`, `top_p` of requests.
    Raises TypeError for another kind of module, ValueError for a codebook of the wrong size or an unknown default."""

    makes = "grouped image"
    family = "groups"
    default_sampler = "groups"
    sampler_names = {"lpd": ("groups", "lpd")}
    title = "LPD (groups or lpd)"
    other_sizes = "; load it with grid=... for another size"
    conditions = "class_labels"
    module: LPD

    def __init__(
        self, module: LPD, vq: VQModel | None = None, defaults: Mapping[str, Any] | None = None, name: str = "LPD"
    ):
        check_type("module", module, LPD)
        config = module.config
        check_codebook(vq, config.vocab_size, name)
        facts = ModelFacts(vocab_size=config.vocab_size, max_length=1 + config.grid**2, name=name)
        super().__init__(module.eval(), facts)
        self.vq, self.blank_id = vq, config.vocab_size
        base: dict[str, Any] = {"steps": None, "guidance_scale": None, "temperature": 1.0, "top_k": None, "top_p": None}
        self.defaults = merge_defaults(base, defaults)

    # ---- requests -------------------------------------------------------------------------------------------------

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        """As in the base class, with the authors' guidance for the sampler's number of groups, or else for the default
        number of groups; 1 for unpublished sizes."""
        fields = super().defaults_with(sampler)
        if fields.get("guidance_scale") is None:
            cells = self.module.config.grid**2
            published = GUIDANCE.get(self.module.config.dim, {})
            groups = _count_groups(getattr(sampler, "order", None), cells)
            default_scale = published.get((cells, len(group_sizes(cells))), 1.0)
            fields["guidance_scale"] = published.get((cells, groups), default_scale)
        return fields

    def begin(self, sampler: Any, image_request: ImageRequest, grid: Grid, request: Any) -> Any:
        """As in the base class, but an LPD order without a repulsion gets the model's entry in `REPULSION`, if any."""
        order, cells = getattr(sampler, "order", None), grid.height * grid.width
        if isinstance(order, LPDOrder) and order.repulsion is None:
            groups = len(group_sizes(cells)) if request.steps is None else request.steps
            groups = groups if order.sizes is None else _count_groups(order, cells)
            repulsion = REPULSION.get((self.module.config.dim, cells, groups))
            if repulsion is not None:
                sampler = replace(sampler, order=replace(order, repulsion=repulsion))
        return super().begin(sampler, image_request, grid, request)

    def request(self, conditions: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        self.refuse_negative_prompt(negative_prompt)
        classes = self.module.config.num_classes
        rows = [[self.blank_id + 1 + label] for label in list_labels(conditions, classes, num_images)]
        uncond = [[self.blank_id + 1 + classes] for _ in rows]
        return ImageRequest(self, exact_prompts(rows), exact_prompts(uncond))

    def check_prompts(self, name: str, rows: Sequence[Sequence[int]]) -> None:
        """Raise ValueError unless every row is one id: a class, or the unconditional label."""
        min_id, max_id = self.blank_id + 1, self.blank_id + 1 + self.module.config.num_classes
        for row in rows:
            if len(row) != 1:
                raise ValueError(f"{name} has {len(row)} ids; {self.facts.name} reads one id, {min_id} + a label")
            check_int(name, row[0], low=min_id, high=max_id)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        if not isinstance(query, RankedQuery):
            return super().__call__(query, store)
        with self.evaluation_context():
            return ranked_logits(self.module, query, store)

    def in_any_order(self, branches: int) -> LPDModel:
        """Return a copy for any-order samplers: a row is the class and all cells; `blank_id` marks undecided cells."""
        facts = replace(self.facts, vocab_size=self.blank_id + 1, mask_token_id=self.blank_id)
        return self._copy_with(facts=facts, any_order=True, first_position=1, branches=branches)

    branches = 1

    def keep_decided(self, rows: int, length: int) -> Any:
        """Make a store for `rows` rows of each branch. A cell's keys are in the slot of its rank in the order."""
        return self.make_store(self.branches * rows, length)

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        return self.module.embed(ids, None if query is None else query.positions)

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        return self.module.backbone(embeddings, mask, cache)

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.logits(hidden)

    def _visible(self, query: Query, store: Any = None) -> Tensor | None:
        raise ValueError(f"{self.facts.name} needs a store and queries with `visible_end`")

    def _store_mask(self, query: Query, store: Any) -> Tensor:
        if not isinstance(query, GroupQuery) or query.visible_end is None:
            raise ValueError(f"{self.facts.name} needs queries with `visible_end`")
        mask, slots = store.visible(query)
        visible = (slots.unsqueeze(1) < query.visible_end.unsqueeze(2)).unsqueeze(1)
        return visible if mask is None else visible & mask


def _count_groups(order: Any, cells: int) -> int:
    sizes = getattr(order, "sizes", None)
    if sizes is None:
        return len(group_sizes(cells))
    return sizes if isinstance(sizes, int) else len(sizes)


# ---- files ----------------------------------------------------------------------------------------------------------


def load_lpd(
    source: str | os.PathLike[str],
    *,
    vq: str | os.PathLike[str] | VQModel | None = None,
    grid: int | None = None,
    n_head: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LPDModel:
    """Read an LPD. Raises CheckpointError for a wrong file or an unknown number of heads, ValueError for a wrong
    argument or codebook.

    source: a published `.pth` file (only its tensors are read), a `.safetensors` file with the same names, or a folder
        with `config.json` (`n_head` and other fields of `LPDConfig`; "vq", the VQ's file; "defaults" of requests) and
        `model.safetensors`.
    vq: the VQ autoencoder, or its file (LlamaGen's `vq_ds16_c2i.pt`), if the folder states none.
    grid: codes along one side; the file's position embeddings are resized to it.
    n_head: number of heads; None: that of config.json, or else of the published model of the same width.
    dtype: of the network's parameters; float32 by default."""
    check_int("grid", grid, low=1, none=True)
    check_int("n_head", n_head, low=1, none=True)
    name, path, fields, vq = find_files(source, "vq", vq)
    weights = read_weights(path)[0]
    config = _config(path, weights, fields, n_head)
    with torch.device("meta"):  # the file's weights replace these
        module = LPD(config)
    check_fit(module.state_dict(), weights, str(path), "an LPD")
    if grid is not None and grid != config.grid:
        weights = weights | {"pos_embed": resize_positions(weights["pos_embed"], grid)}
        with torch.device("meta"):
            module = LPD(replace(config, grid=grid))
    module.load_state_dict(weights, assign=True)
    module = module.to(device=device, dtype=dtype or torch.float32).requires_grad_(False)
    return LPDModel(module, open_vq(vq, device), fields.get("defaults"), name)


def resize_positions(pos_embed: Tensor, grid: int) -> Tensor:
    """Resize position embeddings [1, 1 + cells, dim] to `grid` x `grid` cells, bicubically, except the class's."""
    side = math.isqrt(pos_embed.shape[1] - 1)
    cells = pos_embed[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    cells = interpolate(widen(cells), (grid, grid), mode="bicubic", align_corners=False)
    return torch.cat((pos_embed[:, :1], cells.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)), 1)


def _config(path: Path, weights: Mapping[str, Tensor], fields: Mapping[str, Any], n_head: int | None) -> LPDConfig:
    with checkpoint_errors(f"{str(path)!r} does not hold an LPD", LookupError, ValueError):
        codes, dim = weights["token_emb.weight"].shape
        positions = weights["pos_embed"].shape[1] - 1
        sizes: dict[str, Any] = {
            "dim": dim,
            "n_layer": count_blocks(weights, "blocks"),
            "grid": math.isqrt(positions),
            "vocab_size": codes,
            "num_classes": weights["class_emb.weight"].shape[0],
            "inner": weights["blocks.0.mlp.fc1.weight"].shape[0],
        }
    published_heads = next((entry["n_head"] for entry in PRESETS.values() if entry["dim"] == sizes["dim"]), None)
    overrides = {key: value for key, value in fields.items() if key not in NOT_SIZES}
    heads = overrides.pop("n_head", None) if n_head is None else n_head
    heads = published_heads if heads is None else heads
    if heads is None:
        raise CheckpointError(f"no published LPD has the width {dim}; give its number of heads, n_head=...")
    with checkpoint_errors(f"{str(path)!r} does not hold an LPD", TypeError, ValueError):
        config = LPDConfig(**(sizes | overrides | {"n_head": heads}))
    return config


def ranked_logits(module: Any, query: RankedQuery, store: Any) -> Tensor:
    """Guided logits [N, W, V + 1] of the query's N rows, at the W columns `query.wanted`; -inf for the mask id, 0 in
    padding. A token sees tokens up to its rank; a wanted column sees tokens of lower rank and itself. Keys and values
    are stored by rank.

    module: has `config`, `embed`, `backbone` and `logits` as in `LPD`."""
    assert query.wanted is not None and query.store is not None and query.store.index is not None
    blank, rows = module.config.vocab_size, query.store.index
    is_decided = query.tokens != blank
    if query.valid is not None:
        is_decided &= query.valid
    num_tokens, is_queried = int(is_decided.sum(1).max()), query.is_wanted
    token_columns = (~is_decided).int().argsort(dim=1, stable=True)[:, :num_tokens]
    query_columns = query.wanted[:, : is_queried.shape[1]]
    columns = torch.cat((token_columns, query_columns), 1)
    positions, ranks = query.positions.gather(1, columns), query.ranks.gather(1, columns)
    tokens = torch.cat((query.tokens.gather(1, token_columns), torch.full_like(query_columns, blank)), 1)
    valid = torch.cat((is_decided.gather(1, token_columns), is_queried), 1)
    is_token = torch.arange(columns.shape[1], device=columns.device) < num_tokens
    visible = is_token & (ranks.unsqueeze(1) < (ranks + is_token).unsqueeze(2))
    visible = visible | torch.eye(len(is_token), dtype=torch.bool, device=columns.device)
    slots = torch.where(valid & is_token, ranks, -1)
    index = np.concatenate([rows + branch * (store.rows // query.branches) for branch in range(query.branches)])
    row_index = torch.as_tensor(index, device=columns.device)
    tensors = (tokens, positions, ranks, valid, visible)
    tokens, positions, ranks, valid, visible = (x.repeat(query.branches, *[1] * (x.ndim - 1)) for x in tensors)
    if query.branches == 2:
        uncond_tokens = tokens[len(rows) :]
        uncond_tokens.masked_fill_(uncond_tokens > blank, blank + 1 + module.config.num_classes)
    slots = slots.repeat(query.branches, 1)
    call = StoreCall(row_index, slots, index, query.store.visible_length, step=query.store.step)
    # positions of `call_query` are ranks, like slots: so the store hides stored tokens that this call evaluates again
    call_query = Query(query.rows, tokens, ranks, valid=valid, visible=visible, store=call, branches=query.branches)
    cache = store.bind(call_query)
    mask, _ = store.visible(call_query)
    hidden = module.backbone(module.embed(tokens, positions), mask, cache)[:, num_tokens:]
    logits = module.logits(hidden)
    if query.branches == 2:
        cond, uncond = logits.chunk(2)
        logits = uncond + query.scale.to(logits.dtype).unsqueeze(-1) * (cond - uncond)
    logits = torch.where(is_queried.unsqueeze(-1), logits, 0)
    output = pad(logits, (0, 0, 0, query.wanted.shape[1] - query_columns.shape[1]))
    return pad(output, (0, 1), value=-torch.inf)
