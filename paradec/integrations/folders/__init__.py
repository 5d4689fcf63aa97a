"""Folders with code that transformers or diffusers loads and that calls paradec: `paradec export-folder`.

`generate.py` (transformers) and `pipeline.py` (diffusers) are copied into such folders, so they are checked and tested
like the rest of the package. Each imports paradec within `try`: both libraries scan a file's imports and recommend to
install a missing module by its name, but PyPI's `paradec` is another project.
"""
