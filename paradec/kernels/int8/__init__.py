"""Linear layers with int8 weights and one scale per output. Activations have 15 bits (in two int8 rows) or 8 bits.

`reference` defines the results, `portable` computes them with `torch._int_mm`, `modules` holds the layers."""

from paradec.kernels.int8.modules import Int8Experts, Int8Linear, Int8Module
from paradec.kernels.int8.portable import MAX_INPUTS, int8_linear, is_packable, pack_weight, weight_bits
from paradec.kernels.int8.reference import ACTIVATION_BITS, quantize_weight, reference_linear

__all__ = [
    "ACTIVATION_BITS",
    "MAX_INPUTS",
    "Int8Experts",
    "Int8Linear",
    "Int8Module",
    "int8_linear",
    "is_packable",
    "pack_weight",
    "quantize_weight",
    "reference_linear",
    "weight_bits",
]
