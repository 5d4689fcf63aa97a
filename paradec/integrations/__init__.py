"""Where something else owns the loop or the model: diffusers, transformers, engines, a server, Ray."""
