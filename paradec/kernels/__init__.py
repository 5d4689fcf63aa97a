"""Kernels for NVIDIA GPUs in Triton, one file each, with a float64 reference and a portable PyTorch path beside them.

Importing these modules does not import triton; choosing a Triton path does.
"""
