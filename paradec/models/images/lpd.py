"""LPD: a transformer that writes the codes of a picture in any order, group by group.

Zhang et al., "Locality-aware Parallel Decoding for Efficient Autoregressive Image Generation", arXiv 2507.01957.
Parameter names are those of the published checkpoints. Inputs are tokens (or the class), and masks that ask for one,
with positions; the caller decides what each sees.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from paradec.core.checks import check_choice, check_int, check_number
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import GroupQuery, RankedQuery
from paradec.core.orders import LPD as LPDOrder
from paradec.core.orders import group_sizes
from paradec.core.query import Query, StoreCall
from paradec.models.checkpoint import CheckpointError, check_fit
from paradec.models.images.base import ImageModel, ImageRequest, exact_prompts, labels_of, merge_defaults
from paradec.models.images.blocks import Block
from paradec.models.images.grid import Grid
from paradec.models.images.loading import find_files
from paradec.models.images.vq import VQModel, check_codebook, open_vq
from paradec.models.weights import read_weights


@dataclass(frozen=True)
class LPDConfig:
    """Sizes of an LPD. Raises ValueError for one out of its range.

    Args:
        dim, n_layer, n_head: width, layers, heads.
        grid: codes along one side of a picture.
        vocab_size: codes.
        num_classes: classes; the label `num_classes` is none of them (guidance).
        inner: width of the feed-forward; by default 4 dim.
        norm_eps: of all norms.
    """

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
        if self.dim % self.n_head:
            raise ValueError(f"n_head={self.n_head} must divide dim={self.dim}")

    # what stores are sized by, under transformers' names
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
"""What the authors guide with, by width, and by cells and groups of a picture."""
REPULSION = {(1536, 256, 20): 3.0}
"""Of published models, by width, cells and groups, where it differs from that of all others."""


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
            ids: [R, Q] int64: a code; `vocab_size` for a mask; from there on 1 + a label.
            positions: [R, Q] int64: 0 for the class, 1 + the cell for codes and masks; None leaves them out.
        """
        codes, classes = self.config.vocab_size, self.config.num_classes
        label = (ids - codes - 1).unsqueeze(-1)
        given = torch.where(label == classes, self.fake_latent, self.class_emb(label.squeeze(-1).clamp(0, classes - 1)))
        x = self.token_emb(ids.clamp(max=codes - 1))
        x = torch.where(label < 0, torch.where(label == -1, self.mask_token, x), given)
        return x if positions is None else self.z_proj_ln(x + self.pos_embed[0][positions])

    def backbone(self, x: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        """Hidden states [R, Q, dim] before the output matrix.

        Args:
            x: [R, Q, dim], from `embed`. mask: [R or 1, 1, Q, K] bool, True where visible; None shows everything.
            cache: `update(keys, values, layer)` returns keys and values [R, heads, K, head width] to attend over.
        """
        for block in self.blocks:
            x = block(x, mask, cache)
        return self.norm(x)

    def forward(self, codes: Tensor, labels: Tensor, order: Tensor, sizes: Sequence[int]) -> Tensor:
        """All groups at once, as in training: logits [B, S, V], float32 or wider; in place r those of cell `order[:,
        r]`.

        Args:
            codes: [B, S] int64, row by row. labels: [B] int64; `num_classes` is no class.
            order: [B, S] int64: the cells from the first to the last. sizes: of the groups, together S.
        """
        size, device = order.shape[1], order.device
        ends = torch.tensor(sizes, device=device).cumsum(0)
        group = torch.repeat_interleave(torch.arange(len(sizes), device=device), torch.tensor(sizes, device=device))
        known = int(ends[-2]) if len(sizes) > 1 else 0  # the last group's tokens are read by nobody
        classes = (self.config.vocab_size + 1 + labels).unsqueeze(1)
        blank = torch.full_like(order, self.config.vocab_size)
        ids = torch.cat((classes, codes.gather(1, order)[:, :known], blank), 1)
        positions = torch.cat((torch.zeros_like(classes), 1 + order[:, :known], 1 + order), 1)
        # the class is of group -1; tokens see those up to their own group, masks those before theirs and each other
        of = torch.cat((group.new_full((1,), -1), group[:known], group))
        is_mask = torch.arange(len(of), device=device) > known
        before = of.unsqueeze(0) < of.unsqueeze(1) + (~is_mask).unsqueeze(1)
        visible = torch.where(is_mask.unsqueeze(0), is_mask.unsqueeze(1) & (of.unsqueeze(0) == of.unsqueeze(1)), before)
        hidden = self.backbone(self.embed(ids, positions), visible[None, None])[:, known + 1 :]
        assert hidden.shape[1] == size
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> logits [..., vocab_size], float32 or wider."""
        found = self.head(hidden)
        return found.to(torch.promote_types(found.dtype, torch.float32))


# ---- the adapter ----------------------------------------------------------------------------------------------------


class LPDModel(ImageModel):
    """The adapter of LPD. Ids below `vocab_size` are codes, `vocab_size` (`blank_id`) asks for one, and from there on 1
    + a label is a class, which is all of a prompt.

    Args:
        vq: its VQ autoencoder (LlamaGen's); None gives codes alone.
        defaults: of requests: `steps`, `guidance_scale`, `temperature`, `top_k`, `top_p`.

    Raises:
        TypeError: another kind of module. ValueError: another codebook than the network's, or an unknown default.
    """

    makes = "grouped image"
    family = "groups"
    default_sampler = "groups"
    sampler_names = {"lpd": ("groups", "lpd")}
    title = "LPD (groups or lpd)"
    other_sizes = "; load it with grid=... for another size"
    conditions = "class_labels"
    module: LPD

    def __init__(
        self,
        module: LPD,
        vq: VQModel | None = None,
        defaults: Mapping[str, Any] | None = None,
        name: str = "LPD",
    ):
        if not isinstance(module, LPD):
            raise TypeError(f"module must be a paradec.models.images.lpd.LPD, not {type(module).__name__}")
        config = module.config
        check_codebook(vq, config.vocab_size, name)
        facts = ModelFacts(vocab_size=config.vocab_size, max_length=1 + config.grid**2, name=name)
        super().__init__(module.eval(), facts)
        self.vq, self.blank_id = vq, config.vocab_size
        own: dict[str, Any] = {"steps": None, "guidance_scale": None, "temperature": 1.0, "top_k": None, "top_p": None}
        self.defaults = merge_defaults(own, defaults)

    # ---- requests -------------------------------------------------------------------------------------------------

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        """As for all; the guidance is what the authors take for so many groups, 1 for sizes that are not published."""
        found = super().defaults_with(sampler)
        if found.get("guidance_scale") is None:
            cells = self.module.config.grid**2
            published = GUIDANCE.get(self.module.config.dim, {})
            groups = _count(getattr(sampler, "order", None), cells)
            usual = published.get((cells, len(group_sizes(cells))), 1.0)
            found["guidance_scale"] = published.get((cells, groups), usual)
        return found

    def begin(self, sampler: Any, laid: ImageRequest, grid: Grid, request: Any) -> Any:
        """As for all; in LPD's order with the model's own repulsion, where there is one and the sampler says none."""
        order, cells = getattr(sampler, "order", None), grid.height * grid.width
        if isinstance(order, LPDOrder) and order.repulsion is None:
            groups = len(group_sizes(cells)) if request.steps is None else request.steps
            groups = groups if order.sizes is None else _count(order, cells)
            repulsion = REPULSION.get((self.module.config.dim, cells, groups))
            if repulsion is not None:
                sampler = replace(sampler, order=replace(order, repulsion=repulsion))
        return super().begin(sampler, laid, grid, request)

    def request(self, given: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """`given`: class labels, an int or several."""
        self.no_negative_prompt(negative_prompt)
        classes = self.module.config.num_classes
        labels = [label for label in labels_of(given, classes) for _ in range(num_images)]
        rows, others = ([[self.blank_id + 1 + label] for label in each] for each in (labels, [classes] * len(labels)))
        return ImageRequest(self, exact_prompts(rows), exact_prompts(others))

    def check_prompts(self, name: str, rows: Sequence[Sequence[int]]) -> None:
        """Raise ValueError unless every row is one class, or none."""
        low, high = self.blank_id + 1, self.blank_id + 1 + self.module.config.num_classes
        for row in rows:
            if len(row) != 1:
                raise ValueError(f"{name} has {len(row)} ids; {self.facts.name} reads one: {low} + a label")
            check_int(name, row[0], low=low, high=high)

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return self.square_grid(self.module.config.grid, self.facts.vocab_size, height, width)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        if not isinstance(query, RankedQuery):
            return super().__call__(query, store)
        with self.evaluating():
            return answer_ranked(self.module, query, store)

    def in_any_order(self, branches: int) -> LPDModel:
        """The model as one of any order: rows are the class and a mask, `blank_id`, at every undecided cell."""
        facts = replace(self.facts, vocab_size=self.blank_id + 1, mask_token_id=self.blank_id)
        return self._bound(facts=facts, any_order=True, first_place=1, branches=branches)

    branches = 1

    def keep_decided(self, rows: int, length: int) -> Any:
        """A store for so many rows of each branch, whose slots are ranks."""
        return self.make_store(self.branches * rows, length)

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        return self.module.embed(ids, None if query is None else query.positions)

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        return self.module.backbone(embeddings, mask, cache)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.module.logits(hidden)

    def _visible(self, query: Query, store: Any = None) -> Tensor | None:
        raise ValueError(f"{self.facts.name} is called over a store, with queries that say what each column sees")

    def _over_store(self, query: Query, store: Any) -> Tensor:
        if not isinstance(query, GroupQuery) or query.sees is None:
            raise ValueError(f"{self.facts.name} is called with queries that say what each column sees")
        mask, slots = store.visible(query)
        seen = (slots.unsqueeze(1) < query.sees.unsqueeze(2)).unsqueeze(1)
        return seen if mask is None else seen & mask


def _count(order: Any, cells: int) -> int:
    """In how many groups an order decides so many cells, where it says so; else the usual number."""
    sizes = getattr(order, "sizes", None)
    if sizes is None:
        return len(group_sizes(cells))
    return sizes if isinstance(sizes, int) else len(sizes)


# ---- files ----------------------------------------------------------------------------------------------------------

NOT_SIZES = ("model_type", "vq", "defaults")
"""What else a folder's config.json may hold."""


def load_lpd(
    source: str | os.PathLike[str],
    preset: str | None = None,
    *,
    vq: str | os.PathLike[str] | VQModel | None = None,
    grid: int | None = None,
    n_head: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LPDModel:
    """Read an LPD.

    Args:
        source: a published `.pth` file, of which tensors alone are read; a `.safetensors` file with the same names; or
            a folder with `config.json` (`n_head` and others of `LPDConfig`'s fields; "vq", the VQ's file; "defaults" of
            requests) and `model.safetensors`.
        preset: a name of `PRESETS` that the weights must fit; None takes their own sizes.
        vq: the VQ autoencoder, or its file (LlamaGen's `vq_ds16_c2i.pt`), where the folder names none.
        grid: codes along one side, if other than the file's: its positions are resized, but the class's.
        n_head: heads, which the weights do not tell; known from the width for the published models.
        dtype: of the network's parameters; float32 by default, whatever the file's.

    Raises:
        CheckpointError: a file that is missing, corrupt, of another format or size, or does not tell the heads.
            ValueError: an argument out of its range, or a codebook of another size.
    """
    if preset is not None:
        check_choice("preset", preset, PRESETS)
    check_int("grid", grid, low=1, none=True)
    check_int("n_head", n_head, low=1, none=True)
    name, path, fields, vq = find_files(source, "vq", vq)
    weights = read_weights(path)[0]
    config = _config(path, weights, preset, fields, n_head)
    with torch.device("meta"):  # its weights are the file's
        module = LPD(config)
    needed = module.state_dict()
    check_fit(needed, weights, str(path), preset or "an LPD")
    if grid is not None and grid != config.grid:
        weights = weights | {"pos_embed": resized(weights["pos_embed"], grid)}
        with torch.device("meta"):
            module = LPD(replace(config, grid=grid))
    module.load_state_dict(weights, assign=True)
    module = module.to(device=device, dtype=dtype or torch.float32).requires_grad_(False)
    return LPDModel(module, open_vq(vq, device), fields.get("defaults"), name)


def resized(pos_embed: Tensor, grid: int) -> Tensor:
    """Position embeddings [1, S + 1, D] for `grid` x `grid` cells: bicubic over the cells; the class's stays."""
    side = math.isqrt(pos_embed.shape[1] - 1)
    cells = pos_embed[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    cells = interpolate(
        cells.to(torch.promote_types(cells.dtype, torch.float32)), (grid, grid), mode="bicubic", align_corners=False
    )
    return torch.cat((pos_embed[:, :1], cells.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)), 1)


def _config(
    path: Path, weights: Mapping[str, Tensor], preset: str | None, fields: Mapping[str, Any], n_head: int | None
) -> LPDConfig:
    """Sizes: the weights' own, but for what a preset or config.json says."""
    try:
        codes, dim = weights["token_emb.weight"].shape
        positions = weights["pos_embed"].shape[1] - 1
        numbers = [int(key.split(".")[1]) for key in weights if re.match(r"blocks\.\d+\.", key)]
        sizes: dict[str, Any] = {
            "dim": dim,
            "n_layer": 1 + max(numbers),
            "grid": math.isqrt(positions),
            "vocab_size": codes,
            "num_classes": weights["class_emb.weight"].shape[0],
            "inner": weights["blocks.0.mlp.fc1.weight"].shape[0],
        }
    except (KeyError, ValueError, IndexError) as error:
        raise CheckpointError(f"{str(path)!r} does not hold an LPD: {error} is missing or misshapen") from None
    sizes |= {} if preset is None else PRESETS[preset]
    published = next((known["n_head"] for known in PRESETS.values() if known["dim"] == sizes["dim"]), None)
    own = {key: value for key, value in fields.items() if key not in NOT_SIZES}
    heads = own.pop("n_head", None) if n_head is None else n_head
    heads = sizes.get("n_head", published) if heads is None else heads
    if heads is None:
        raise CheckpointError(f"n_head: no published LPD is {dim} wide; give n_head=...")
    try:
        return LPDConfig(**(sizes | own | {"n_head": heads}))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} does not hold an LPD: {error}") from error


def answer_ranked(module: Any, query: RankedQuery, store: Any) -> Tensor:
    """Guided logits [N, W', V + 1] of the wanted positions, each given the tokens of lower rank; -inf for the mask, 0
    where nothing is asked. W' is the most slots of the query's rows.

    A token sees the tokens of its own rank and below, a query those below and itself. Keys and values are written at
    ranks.

    Args:
        module: with `config`, `embed`, `backbone` and `logits` as in `paradec.models.images.lpd.LPD`.
    """
    assert query.wanted is not None and query.store is not None and query.store.index is not None
    blank, rows = module.config.vocab_size, query.store.index
    known = query.tokens != blank
    if query.valid is not None:
        known &= query.valid
    count, asked = int(known.sum(1).max()), query.asked
    front = (~known).int().argsort(dim=1, stable=True)[:, :count]
    wanted = query.wanted[:, : asked.shape[1]]
    columns = torch.cat((front, wanted), 1)
    positions, ranks = query.positions.gather(1, columns), query.ranks.gather(1, columns)
    tokens = torch.cat((query.tokens.gather(1, front), torch.full_like(wanted, blank)), 1)
    real = torch.cat((known.gather(1, front), asked), 1)
    is_token = torch.arange(columns.shape[1], device=columns.device) < count
    visible = is_token & (ranks.unsqueeze(1) < (ranks + is_token).unsqueeze(2))
    visible = visible | torch.eye(len(is_token), dtype=torch.bool, device=columns.device)
    slots = torch.where(real & is_token, ranks, -1)
    index = np.concatenate([rows + branch * (store.rows // query.branches) for branch in range(query.branches)])
    at = torch.as_tensor(index, device=columns.device)
    both = [each.repeat(query.branches, *[1] * (each.ndim - 1)) for each in (tokens, positions, ranks, real, visible)]
    tokens, positions, ranks, real, visible = both
    if query.branches == 2:
        others = tokens[len(rows) :]
        others.masked_fill_(others > blank, blank + 1 + module.config.num_classes)
    call = StoreCall(at, slots.repeat(query.branches, 1), index, query.store.visible_length, step=query.store.step)
    # by rank, since slots are ranks: what is evaluated here is not read from the store
    over = Query(query.rows, tokens, ranks, valid=real, visible=visible, store=call, branches=query.branches)
    cache = store.bind(over)
    mask, _ = store.visible(over)
    hidden = module.backbone(module.embed(tokens, positions), mask, cache)[:, count:]
    logits = module.logits(hidden)
    if query.branches == 2:
        given, without = logits.chunk(2)
        logits = without + query.scale.to(logits.dtype).unsqueeze(-1) * (given - without)
    logits = torch.where(asked.unsqueeze(-1), logits, 0)
    found = pad(logits, (0, 0, 0, query.wanted.shape[1] - wanted.shape[1]))
    return pad(found, (0, 1), value=-torch.inf)
