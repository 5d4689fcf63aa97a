"""Kernels for NVIDIA GPUs in Triton, one file each, with a portable PyTorch path beside them.

They import where triton is not installed, and serve by the portable path then. Where it is, `token_stats` imports it
when a Triton path is first taken, and `sparsed` when it is imported itself, which `import paradec` does not do.
"""
