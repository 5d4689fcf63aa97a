"""Causal models: several tokens are drafted, verified in one forward, and accepted up to the first rejection."""
