"""Canvases of noise: every token of a block may change at every step, until the block closes as a whole."""
