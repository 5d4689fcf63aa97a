"""Sessions on diffusers' pipelines. `session` is the entry point (`paradec.accelerate`).

Other pipelines: `recap` (AmusedPipeline), `block_cache` (LLaDA2Pipeline), `prior` (GlmImagePipeline).
"""
