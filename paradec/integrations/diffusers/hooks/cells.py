"""The latent of a pipeline that gives its transformer cells in one row (FLUX, Qwen-Image): with its rows and columns.

How cells make a picture is the pipeline's own knowledge (`_unpack_latents`); how many there are is said by the
positions that it gives with them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paradec.integrations.diffusers.hooks.watched import latent_of


def unpacked(pipe: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The latent that a transformer is given, [B, C, (frames,) rows, columns].

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
