"""Samplers inside inference engines: the engine owns model, memory and requests, the sampler decides what is final.

The engines share `hosted.py`. Each engine has its own file or package, which can be imported without the engine.
"""
