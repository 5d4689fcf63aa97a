"""Folders that transformers and diffusers load code from, with paradec in them: `paradec export-folder`.

`generate.py` (transformers) and `pipeline.py` (diffusers) are written into such folders unchanged, so that they are
checked and tested as the rest of the package. Each imports paradec within `try`: both libraries read the imports of a
file and recommend to install a package of a missing one's name, and PyPI's `paradec` is another project.
"""
