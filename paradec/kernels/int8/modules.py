"""Modules with int8 weights: a linear layer, and the experts of a mixture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paradec.kernels.int8.portable import int8_linear, weight_bits
from paradec.kernels.int8.reference import quantize_weight


class Int8Linear(nn.Module):
    """A linear layer with int8 weights (`int8_linear`); its parameters are made empty. `weight` is [K, N], the layout
    that products of few rows read fastest.

    in_features, out_features: K and N. bias: whether there is one, of `dtype`. activations: bits, 15 or 8.
    """

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
        self.weight = _frozen(torch.int8, device, in_features, out_features)
        self.scale = _frozen(torch.float32, device, out_features)
        self.bias = _frozen(dtype, device, out_features) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, activations: int = 15) -> Int8Linear:
        """Round the weights of a layer, on its device. Raises RuntimeError as `weight_bits`."""
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
        return int8_linear(x, self.weight.t(), self.scale, self.bias, self.activations)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, activations={self.activations}"


class Int8Experts(nn.Module):
    """Experts of a mixture with int8 weights; its parameters are made empty.

    gate_up_proj [E, D, 2 I] and down_proj [E, I, D], each with scales [E, outputs]: down(act(gate(x)) * up(x)), under
    the names of transformers' experts.

    experts: the module in whose place it stands. activations: bits, 15 or 8."""

    def __init__(self, experts: Any, activations: int = 15):
        super().__init__()
        self.num_experts, self.activations, self.act_fn = len(experts.down_proj), activations, experts.act_fn
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)
            setattr(self, name, _frozen(torch.int8, weight.device, *weight.mT.shape))
            setattr(self, f"{name}_scale", _frozen(torch.float32, weight.device, *weight.shape[:-1]))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D]: the sum over each token's experts [T, k], weighted by `top_k_weights` [T, k]."""
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert < self.num_experts:  # larger numbers stand for none
                tokens, slots = torch.where(top_k_index == expert)
                gate, up = self._linear("gate_up_proj", expert, hidden_states[tokens]).chunk(2, -1)
                result = self._linear("down_proj", expert, self.act_fn(gate) * up)
                result = result * top_k_weights[tokens, slots].unsqueeze(-1)
                output.index_add_(0, tokens, result.to(output.dtype))
        return output

    def _linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        weight, scale = getattr(self, name), getattr(self, f"{name}_scale")
        return int8_linear(x, weight[expert].t(), scale[expert], activations=self.activations)


def _frozen(dtype: torch.dtype | None, device: Any, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
