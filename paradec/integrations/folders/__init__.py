"""Folders with code that transformers or diffusers loads, and that calls paradec: `paradec export-folder`.

`export.py` copies `generate.py` (for transformers) or `pipeline.py` (for diffusers) into such a folder. The two files
import paradec within `try`: both libraries scan a file's other imports, and recommend to install a missing module by
its name, but PyPI's `paradec` is another project.
"""
