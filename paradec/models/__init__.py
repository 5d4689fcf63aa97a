"""Models: checkpoint formats, and the adapter that answers queries. Nothing here knows a sampler."""

from paradec.core.facts import ModelFacts

__all__ = ["ModelFacts"]
