"""Integrations into diffusers, transformers, inference engines and Ray; a server; exported folders with code."""
