"""Integrations into libraries that own the loop or the model: diffusers, transformers, engines, a server, Ray."""
