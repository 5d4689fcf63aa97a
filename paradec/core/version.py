"""Versions of the package and of its random draws."""

__version__ = "0.1.0"
DRAWS = 2
"""Increases when equal seeds draw other tokens; saved with seeds."""
