"""Versions of the package and of its random draws."""

__version__ = "0.1.0"
DRAWS = 2
"""Version of the random draws, saved with seeds. It increases when a seed no longer draws the same tokens."""
