"""Samplers inside inference engines. The engine owns model, memory and requests; the sampler decides which tokens are
final. The adapters share `hosted.py`. Each has its own file or package, which can be imported without the engine.
"""
