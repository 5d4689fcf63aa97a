"""What `AccumulatedChange(watch=...)` and `SeaCache` read of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paradec.integrations.diffusers.hooks.blocks import latent_of, main_stream, places
from paradec.integrations.diffusers.hooks.hook import Hook

NAME = "paradec_watch"
"""Of these hooks: the same modules may be forecast."""


class Hidden:
    """The hidden states before the first block, where modules inside the blocks decide."""

    def __init__(self, base: nn.Module, modules: dict[str, nn.Module]):
        self.seen: Tensor | None = None
        self.block = modules[places(base, "block", True)[0].name]
        self.hook = Hook(self.block, self._call, NAME)

    def _call(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        self.seen = main_stream(self.block, args, kwargs).detach().clone()  # the block may write into it
        return inner(*args, **kwargs)

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """What the first block of this call was given [B, ...]."""
        assert self.seen is not None
        return self.seen

    def remove(self) -> None:
        """Leave the block as it was."""
        self.hook.remove()


class Modulated:
    """The input of the first block's attention, where the blocks decide: the block is entered and left again there."""

    def __init__(self, base: nn.Module, modules: dict[str, nn.Module]):
        self.attention = modules[places(base, "module", True)[0].name]

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """What the attention of a first block with these arguments will be given [B, ...]. inner: its forward."""

        def leave(inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            raise _Found(main_stream(self.attention, args, kwargs).detach())

        hook = Hook(self.attention, leave, NAME)
        try:
            inner(*args, **kwargs)
        except _Found as found:
            return found.tensor
        finally:
            hook.remove()
        raise RuntimeError("watch='modulated': the first block did not call its attention; use watch='hidden'")

    def remove(self) -> None:
        """Nothing was left on the block."""


class _Found(Exception):
    """The watched tensor, on its way out of a block."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


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
        except RuntimeError:  # cells that are no squares of 2 x 2 (Qwen-Image 2.1)
            return latent.transpose(1, 2).unflatten(2, (rows, columns))
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
