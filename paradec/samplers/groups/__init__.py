"""Samplers of image models that are fed groups of positions in any order, over keys and values stored by rank."""
