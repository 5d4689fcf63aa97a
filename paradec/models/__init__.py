"""Models: checkpoint formats, and adapters that evaluate queries, independent of samplers."""

from paradec.core.facts import ModelFacts

__all__ = ["ModelFacts"]
