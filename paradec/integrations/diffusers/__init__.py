"""Acceleration of diffusers' pipelines by forecasts, and tuning for it. Schedulers are in `paradec.schedulers`."""
