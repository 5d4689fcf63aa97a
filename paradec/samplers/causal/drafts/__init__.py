"""Where drafts of a causal model come from, a source a file. `source.py` has the interface."""
