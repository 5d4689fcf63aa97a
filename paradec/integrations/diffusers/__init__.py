"""Forecasts inside pipelines of diffusers. (Schedulers for these pipelines are in `paradec.schedulers`.)"""
