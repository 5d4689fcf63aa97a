"""What `AccumulatedChange(watch=...)` watches, wherever the decision is taken."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paradec.integrations.diffusers.hooks.blocks import places
from paradec.integrations.diffusers.hooks.taps import Patch


class _Found(Exception):
    """The watched tensor, on its way out of a block."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Hidden:
    """The hidden states before the first block, where modules inside the blocks decide."""

    def __init__(self, base: nn.Module, modules: dict[str, nn.Module]):
        self.seen: Tensor | None = None
        self.patch = Patch(modules[places(base, "block")[0].name], self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = latent_of(args, kwargs).detach().clone()  # the block may write into it
        return self.patch.inner(*args, **kwargs)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """What the first block of this call was given [B, ...]."""
        assert self.seen is not None
        return self.seen

    def remove(self) -> None:
        """Leave the block as it was."""
        self.patch.remove()


class Modulated:
    """The input of the first block's attention, where the blocks decide: the block is entered and left again there."""

    def __init__(self, base: nn.Module, modules: dict[str, nn.Module]):
        self.block = modules[places(base, "block")[0].name]
        self.attention = modules[places(base, "module")[0].name]

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """What the attention of a first block with these arguments will be given [B, ...]."""
        patch = Patch(self.attention, _leave)
        try:
            self.block.forward(*args, **kwargs)
        except _Found as found:
            return found.tensor
        finally:
            patch.remove()
        raise RuntimeError(f"watch='modulated': {type(self.block).__name__} did not call its attention")

    def remove(self) -> None:
        """Nothing was left on the block."""


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _Found(latent_of(args, kwargs).detach())


def latent_of(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a module works on: its argument `hidden_states`, or the first of floating numbers."""
    found: Any = kwargs.get("hidden_states")
    if not is_feature(found):
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if is_feature(leaf))
    assert isinstance(found, Tensor)
    return found


def is_feature(leaf: Any) -> bool:
    """Whether it is a tensor of floating numbers with more than one axis."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1


def unpacked(pipe: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The latent that a transformer is given, [B, C, (frames,) rows, columns], of pipelines that give cells in one row
    (FLUX, Qwen-Image) too: by the pipeline's own `_unpack_latents`, and the positions that it gives with the cells.

    Raises:
        ValueError: cells in one row [B, cells, C], and the pipeline does not tell which is where.
    """
    latent = latent_of(args, kwargs)
    if latent.ndim != 3:
        return latent
    rows, columns = _grid(kwargs)
    unpack, scale = getattr(pipe, "_unpack_latents", None), getattr(pipe, "vae_scale_factor", None)
    if unpack is not None and scale is not None and rows * columns == latent.shape[1]:
        try:
            found: Tensor = unpack(latent, rows * 2 * scale, columns * 2 * scale, scale)
        except TypeError:  # of another form
            found = latent
        config = getattr(getattr(pipe, "vae", None), "config", {})
        channels = config.get("latent_channels", config.get("z_dim", found.shape[1]))
        if found.ndim in (4, 5) and found.shape[1] == channels:
            return found
    raise ValueError(
        f"a rule that filters the latent needs its rows and columns, and {type(pipe).__name__} gives its transformer "
        f"cells in one row, of shape {tuple(latent.shape)}, without telling which is where; use another rule"
    )


def _grid(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of the cells, or (0, 0)."""
    ids, shapes = kwargs.get("img_ids"), kwargs.get("img_shapes")
    if isinstance(ids, Tensor) and ids.shape[-1] == 3 and not ids[..., 0].any():  # [(B,) cells, (picture, row, column)]
        return int(ids[..., 1].max()) + 1, int(ids[..., 2].max()) + 1
    if shapes:  # of every row of the batch: [(frames, rows, columns), ...]
        shape = shapes[0] if isinstance(shapes[0], tuple) else shapes[0][0]
        return int(shape[-2]), int(shape[-1])
    return 0, 0
