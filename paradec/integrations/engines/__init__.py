"""paradec inside other people's engines: the engine owns model, memory and requests, the sampler decides what is final.

`hosted.py` is what the engines share; each engine has a file of its own, which imports without the engine.
"""
