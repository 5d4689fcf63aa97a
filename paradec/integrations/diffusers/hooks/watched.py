"""What `AccumulatedChange(watch="modulated")` and `SeaCache` read of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paradec.integrations.diffusers.hooks.blocks import latent_of, main_stream
from paradec.integrations.diffusers.hooks.hook import Hook

WATCH = "paradec_watch"
"""The name of hooks that watch: the same modules may be forecast."""


class _Found(Exception):
    """The watched tensor, which leaves a block early."""


def modulated_input(attention: nn.Module, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The input [B, ...] of a block's attention in a call of the block (forward `inner`) with these arguments."""

    def leave(inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        raise _Found(main_stream(attention, args, kwargs).detach())

    hook = Hook(attention, leave, WATCH)
    try:
        inner(*args, **kwargs)
    except _Found as found:
        tensor: Tensor = found.args[0]
        return tensor
    finally:
        hook.remove()
    raise RuntimeError("watch='modulated': the first block did not call its attention; use watch='hidden'")


def unpacked(pipe: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The latent that a transformer is given, [B, C, (frames,) rows, columns].

    Cells in one row [B, cells, C] (FLUX, Qwen-Image) are unpacked by the pipeline's `_unpack_latents` and the positions
    among the arguments.

    Raises:
        ValueError: the positions of cells in one row are unknown.
    """
    latent = latent_of(args, kwargs)
    if latent.ndim != 3:
        return latent
    rows, columns = _grid(kwargs)
    unpack, scale = getattr(pipe, "_unpack_latents", None), getattr(pipe, "vae_scale_factor", None)
    if unpack is not None and scale is not None and rows * columns == latent.shape[1]:
        try:
            picture: Tensor = unpack(latent, rows * 2 * scale, columns * 2 * scale, scale)
        except TypeError:  # of another form
            picture = latent
        except RuntimeError:  # cells that are no squares of 2 x 2 (Qwen-Image 2.1)
            return latent.transpose(1, 2).unflatten(2, (rows, columns))
        config = getattr(getattr(pipe, "vae", None), "config", {})
        channels = config.get("latent_channels", config.get("z_dim", picture.shape[1]))
        if picture.ndim in (4, 5) and picture.shape[1] == channels:
            return picture
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
