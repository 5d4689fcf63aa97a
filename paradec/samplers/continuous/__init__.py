"""Continuous tokens: a diffusion head draws each token given what the backbone says of it."""
