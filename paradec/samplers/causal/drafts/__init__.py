"""Sources of drafts for a causal model. `source.py` has the interface."""
