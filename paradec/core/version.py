"""The one place that holds the versions: of the package, and of its random draws."""

__version__ = "0.1.0"
DRAWS = 2
"""Goes up where equal seeds draw other tokens than before: what was drawn is kept with it."""
