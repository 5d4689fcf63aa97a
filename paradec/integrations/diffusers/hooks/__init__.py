"""Sessions that accelerate diffusers' pipelines. `session.py` has the entry point, `paradec.accelerate`.

Special sessions: `recap.py` (AmusedPipeline), `block_cache.py` (LLaDA2Pipeline), `prior.py` (GlmImagePipeline).
"""
