"""What attaches to other people's pipelines and comes off again.

`session` is the entry point (`paradec.accelerate`). Forecasts: `transformer` (one per component), `blocks` (where its
modules are), `taps` (what is put around them), `memory` (what fits), `report`, and `bac` (calibration). Runs and
steps: `clock`, `guard`, and `paradec.integrations.diffusers.runs`. Other pipelines: `recap` (AmusedPipeline),
`block_cache` (LLaDA2Pipeline). `stand_in` gives back every attribute that was replaced.
"""
