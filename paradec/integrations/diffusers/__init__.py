"""Forecasts inside the pipelines of diffusers. (Schedulers for its pipelines are in `paradec.schedulers`.)"""
