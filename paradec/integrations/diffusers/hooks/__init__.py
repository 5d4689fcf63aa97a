"""What attaches to other people's pipelines and comes off again.

`session` is the entry point (`paradec.accelerate`). Forecasts: `transformer` (one per component), `blocks` (where its
modules are), `hook` (a function around a module, in diffusers' registry), `taps` and `stack` (what stands there),
`memory` (what fits), `report`, `clock` (runs and steps), and `bac` and `magcache` (calibration). Other pipelines:
`recap` (AmusedPipeline), `block_cache` (LLaDA2Pipeline), `prior` (GlmImagePipeline).
"""
