"""Sizes of a small MAR model and its decoder."""

from __future__ import annotations

SIZES = {"side": 4, "channels": 4, "width": 16, "depth": 2, "heads": 2, "classes": 10, "buffer": 4}
DECODER = {"channels": 32, "channel_mult": (1, 2), "res_blocks": 1, "attention": False, "z_channels": 4}
