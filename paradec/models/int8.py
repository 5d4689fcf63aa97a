"""Text models with int8 weights (`paradec.kernels.int8`), which are rounded one by one while a file is read.

A quantiser of transformers replaces layers of the empty module by int8 layers, and rounds each weight when it is read.
In files of `save_pretrained`, `quantization_config` in config.json holds the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from paradec.core.checks import check_choice, check_int
from paradec.kernels.int8 import (
    ACTIVATION_BITS,
    MAX_INPUTS,
    Int8Experts,
    Int8Linear,
    Int8Module,
    is_packable,
    pack_weight,
    quantize_weight,
    weight_bits,
)
from paradec.models.checkpoint import INT8, CheckpointError

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linear layers that choose experts."""
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")


@register_quantization_config(INT8)
@dataclass
class Int8Config(QuantizationConfigMixin):
    """Settings of int8 weights.

    activations: bits of activations, 15 (as two int8 rows) or 8. min_weights: layers with fewer weights stay unchanged.
    weight_bits: 8, or 7 for processors with inexact products of 8 bits; None: the most that is exact on this processor.
    dtype: of the other weights in a saved model."""

    activations: int = 15
    min_weights: int = 2**20
    weight_bits: int | None = None
    dtype: str | None = None
    quant_method: str = INT8

    def __post_init__(self) -> None:
        check_choice("activations", self.activations, ACTIVATION_BITS)
        check_int("min_weights", self.min_weights, low=1)
        check_choice("weight_bits", self.weight_bits, (None, 7, 8))


@register_quantizer(INT8)
class Int8Quantizer(HfQuantizer):
    """Quantiser that replaces layers by int8 layers, and rounds their weights unless the file has int8 weights."""

    def __init__(self, quantization_config: Int8Config, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        try:
            bits = weight_bits()
        except RuntimeError as error:
            raise CheckpointError(str(error)) from None
        if self.pre_quantized and (quantization_config.weight_bits or 8) > bits:
            raise CheckpointError(
                f"weight_bits={quantization_config.weight_bits}: sums of products of such weights are not exact on "
                f"this processor (no VNNI); load the original checkpoint with quantization='int8' (here {bits} bits)"
            )
        quantization_config.weight_bits = quantization_config.weight_bits or bits

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Replace layers by empty int8 layers. A tied output matrix that is not int8 in the file is replaced later."""
        settings, head = self.quantization_config, model.get_output_embeddings()
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        names = [name for name, layer in model.named_modules() if is_converted(name, layer, settings.min_weights)]
        for name, layer in model.named_modules():
            sizes = [weight.numel() for weight in layer.parameters(recurse=False) if weight.ndim == 3]
            is_large = min(sizes, default=0) >= settings.min_weights and not isinstance(layer, nn.Conv1d)
            if is_large and name not in names and not self.pre_quantized:
                kind = type(layer).__name__
                raise CheckpointError(f"quantization='int8' does not work for experts of class {kind}; load without it")
        for name in names:
            layer = model.get_submodule(name)
            if layer is head and f"{name}.weight" in tied:
                if not self.pre_quantized:
                    continue
                del tied[f"{name}.weight"]
            copy = _empty_copy(layer, settings.activations)
            if not self.pre_quantized:  # transformers 5.18 casts weights to the empty layer's dtype before the rounding
                weights = {key: weight for key, weight in copy.named_parameters() if weight.dtype == torch.int8}
                for key, weight in weights.items():
                    setattr(copy, key, nn.Parameter(weight.to(model.dtype), requires_grad=False))
            model.set_submodule(name, copy)
        if not names:
            raise CheckpointError(
                f"quantization='int8': no layer has {settings.min_weights:,} weights or more; for small models give "
                "paradec.models.int8.Int8Config(min_weights=...)"
            )
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        layer = model.get_submodule(path)
        weights = EXPERT_WEIGHTS if isinstance(layer, Int8Experts) else ("weight",)
        return not self.pre_quantized and isinstance(layer, Int8Module) and name in weights

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        return None if dtype == torch.int8 else super().get_new_dtype(converter, param, dtype)  # not cast

    def get_quantize_ops(self) -> Any:
        return RoundWeights(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Round a tied output matrix (not the embeddings), pack weights, and remove all marks of quantisation."""
        layers = [layer for layer in model.modules() if isinstance(layer, Int8Module)]
        for name, weight in ((name, weight) for layer in layers for name, weight in layer.named_parameters()):
            expected = torch.float32 if name.endswith("scale") else torch.int8
            if name != "bias" and weight.dtype != expected:
                raise CheckpointError(f"a {name} of int8 layers is stored as {weight.dtype}, not {expected}")
        for layer in layers:  # transformers before 5.21 accepts a weight of any shape
            if isinstance(layer, Int8Linear) and layer.weight.shape != (layer.in_features, layer.out_features):
                raise CheckpointError(
                    f"mismatched weights: one is {list(layer.weight.shape)}, which does not fit {layer}"
                )
        stored_dtype, dtype = model.dtype, model.config.dtype
        if self.pre_quantized and stored_dtype != dtype:  # transformers before 5.21 keeps the stored dtype
            for name, weight in model.named_parameters():
                if weight.dtype == stored_dtype and not name.endswith("scale"):
                    weight.data = weight.to(dtype)
        head = model.get_output_embeddings()
        for name, layer in list(model.named_modules()):
            if layer is head and is_converted(name, layer, self.quantization_config.min_weights):
                model.set_submodule(name, Int8Linear.from_linear(layer, self.quantization_config.activations))
                model.all_tied_weights_keys.pop(f"{name}.weight", None)
        for layer in model.modules():
            if isinstance(layer, Int8Module):
                layer.pack()
        self.remove_quantization_config(model)
        for part in model.modules():
            getattr(getattr(part, "config", None), "__dict__", {}).pop("_is_quantized", None)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class RoundWeights(ConversionOps):
    """Conversion of transformers that rounds each weight to an int8 tensor and scales."""

    def __init__(self, quantizer: Int8Quantizer):
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *, model: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        result: dict[str, Tensor] = {}
        for name, tensors in input_dict.items():
            weight = tensors[0] if isinstance(tensors, list) else tensors
            expected = model.get_parameter(name).mT.shape
            if weight.shape != expected:
                raise ValueError(f"{name} is {list(weight.shape)} instead of {list(expected)}")
            scale_name = name.removesuffix("weight") + "scale" if name.endswith(".weight") else f"{name}_scale"
            bits = self.quantizer.quantization_config.weight_bits
            rounded, result[scale_name] = quantize_weight(weight, bits)
            is_packed = rounded.ndim == 2 and is_packable(rounded)
            result[name] = pack_weight(rounded) if is_packed else rounded.mT.contiguous()
        return result


def stored_config(model: Any) -> dict[str, Any] | None:
    """The `quantization_config` to save in config.json; None for a model without int8 weights."""
    layers: list[Any] = [layer for layer in model.module.modules() if isinstance(layer, Int8Module)]
    if not layers:
        return None
    for layer in layers:
        layer.unpack()  # saving reads plain weights; the next product packs them again
    weights: list[Any] = [layer.down_proj if isinstance(layer, Int8Experts) else layer.weight for layer in layers]
    return {
        "quant_method": INT8,
        "activations": layers[0].activations,
        "min_weights": min(weight.numel() for weight in weights),
        "weight_bits": 8 if any(weight.abs().amax() > 63 for weight in weights) else 7,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def is_converted(name: str, layer: Any, min_weights: int) -> bool:
    """Whether a layer gets int8 weights: a large linear layer that is not a router, or large stacked experts."""
    if type(layer) is nn.Linear:
        is_router = name.rpartition(".")[2] in ROUTERS
        return not is_router and layer.weight.numel() >= min_weights and layer.in_features <= MAX_INPUTS
    stacks: list[Any] = [getattr(layer, weight, None) for weight in EXPERT_WEIGHTS]
    if not all(isinstance(stack, nn.Parameter) and stack.ndim == 3 for stack in stacks):
        return False
    flags = [getattr(layer, field, None) for field in ("has_gate", "is_concatenated", "has_bias", "is_transposed")]
    is_plain = flags == [True, True, False, False] and type(layer)._apply_gate.__name__ == "_default_apply_gate"
    return is_plain and min(stack.numel() for stack in stacks) >= min_weights


def _empty_copy(layer: Any, activations: int) -> nn.Module:
    if not isinstance(layer, nn.Linear):
        return Int8Experts(layer, activations)
    options: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    return Int8Linear(layer.in_features, layer.out_features, layer.bias is not None, activations, **options)
