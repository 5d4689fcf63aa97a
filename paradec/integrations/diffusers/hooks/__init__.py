"""Sessions on diffusers' pipelines. `session` is the entry point (`paradec.accelerate`).

Forecasts: `transformer` (one per component), `blocks` (its modules), `hook`, `taps` and `stack`, `report`,
`clock` (runs and steps), `bac` and `magcache` (calibration). Other pipelines: `recap` (AmusedPipeline), `block_cache`
(LLaDA2Pipeline), `prior` (GlmImagePipeline).
"""
