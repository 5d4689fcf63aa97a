"""Modules with int8 weights: a linear layer, and the experts of a mixture."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from paradec.kernels.int8.portable import int8_linear, is_packable, pack_weight, weight_bits
from paradec.kernels.int8.reference import quantize_weight

_packing = threading.Lock()


class Int8Module(nn.Module):
    """A module with int8 weights [..., K inputs, N outputs], which it packs for products on this processor
    (`pack_weight`). `to`, `state_dict`, copies and pickles unpack the weights; the next product packs them again."""

    names: tuple[str, ...]
    """Names of the weights."""

    def pack(self) -> None:
        """Replace plain weights by packed ones if possible: a matrix by a parameter, a stack by a `ParameterList`."""
        with _packing:
            for name in self.names:
                weight = getattr(self, name)
                if isinstance(weight, nn.ParameterList) or not is_packable(weight):
                    continue
                if weight.ndim == 2:
                    setattr(self, name, _freeze(pack_weight(weight.t())))
                else:
                    delattr(self, name)
                    setattr(self, name, nn.ParameterList(_freeze(pack_weight(matrix.t())) for matrix in weight))

    def unpack(self) -> None:
        """Replace packed weights by plain ones."""
        with _packing:
            for name in self.names:
                weight = getattr(self, name)
                if isinstance(weight, nn.ParameterList):
                    delattr(self, name)
                    setattr(self, name, _freeze(torch.stack([matrix.to_dense() for matrix in weight])))
                elif weight.is_mkldnn:
                    setattr(self, name, _freeze(weight.to_dense()))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.unpack()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unpack()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unpack()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self.unpack()
        return self.__dict__.copy()


class Int8Linear(Int8Module):
    """A linear layer with int8 weights (`int8_linear`). The constructor leaves the parameters uninitialised. `weight`
    is [K inputs, N outputs], the layout that products of few rows read fastest.

    in_features, out_features: K and N. bias: whether the layer has a bias, of `dtype`. activations: bits, 15 or 8."""

    names = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        activations: int = 15,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.activations = in_features, out_features, activations
        self.weight = _empty(torch.int8, device, in_features, out_features)
        self.scale = _empty(torch.float32, device, out_features)
        self.bias = _empty(dtype, device, out_features) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, activations: int = 15) -> Int8Linear:
        """Round the weights of a layer, on its device. Raises RuntimeError if integer products are inexact there."""
        weight, bias = linear.weight, linear.bias
        options: dict[str, Any] = {"activations": activations, "device": weight.device, "dtype": weight.dtype}
        layer = cls(linear.in_features, linear.out_features, bias is not None, **options)
        with torch.no_grad():
            rounded, layer.scale.data = quantize_weight(weight, weight_bits(weight.device.type))
            layer.weight.data = rounded.t().contiguous()
            if layer.bias is not None:
                layer.bias.data = bias.detach().clone()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        self.pack()
        weight: Tensor = self.weight  # read once: another thread may copy the module, which unpacks it
        weight = weight if weight.is_mkldnn else weight.t()
        return int8_linear(x, weight, self.scale, self.bias, self.activations)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, activations={self.activations}"


class Int8Experts(Int8Module):
    """Experts of a mixture with int8 weights. The constructor leaves the parameters uninitialised.

    gate_up_proj [E, D, 2 I] and down_proj [E, I, D] for `E` experts of hidden size `D` and inner size `I`, each with
    scales [E, outputs], have the names of transformers' experts. An expert computes down(act(gate(x)) * up(x)).

    experts: the module to replace. activations: bits, 15 or 8."""

    names = ("gate_up_proj", "down_proj")

    def __init__(self, experts: Any, activations: int = 15):
        super().__init__()
        self.num_experts, self.activations, self.act_fn = len(experts.down_proj), activations, experts.act_fn
        for name in self.names:
            weight = getattr(experts, name)
            setattr(self, name, _empty(torch.int8, weight.device, *weight.mT.shape))
            setattr(self, f"{name}_scale", _empty(torch.float32, weight.device, *weight.shape[:-1]))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T tokens, D]: the sum over each token's experts `top_k_index` [T, k], weighted by `top_k_weights` [T, k]."""
        self.pack()
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert < self.num_experts:  # other numbers mean no expert
                tokens, slots = torch.where(top_k_index == expert)
                gate, up = self._linear("gate_up_proj", expert, hidden_states[tokens]).chunk(2, -1)
                result = self._linear("down_proj", expert, self.act_fn(gate) * up)
                result = result * top_k_weights[tokens, slots].unsqueeze(-1)
                output.index_add_(0, tokens, result.to(output.dtype))
        return output

    def _linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        weight, scale = getattr(self, name)[expert], getattr(self, f"{name}_scale")
        weight = weight if weight.is_mkldnn else weight.t()
        return int8_linear(x, weight, scale[expert], activations=self.activations)


def _freeze(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _empty(dtype: torch.dtype | None, device: Any, *shape: int) -> nn.Parameter:
    return _freeze(torch.empty(shape, dtype=dtype, device=device))
