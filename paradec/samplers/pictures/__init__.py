"""Samplers of pictures that neither masked nor causal models make: a file for each family of models, or method."""
