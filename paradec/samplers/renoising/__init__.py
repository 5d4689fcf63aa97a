"""Canvases of noise: every token of a block changes at every step, until the block closes as a whole."""
