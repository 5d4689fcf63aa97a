"""Causal models: several tokens are drafted, verified in one forward, and accepted as far as they are good."""
