"""A LLaDA-format model as a checkpoint ships it: its own attention, nothing of transformers but the base class."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_llada import LLaDAConfig


class RMSLayerNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x, theta):
    """Rotary embedding of [R, heads, L, width], angles in float32."""
    length, width = x.shape[-2:]
    frequency = theta ** -(torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=x.device), frequency).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angle.cos().to(x.dtype) + torch.cat((-second, first), -1) * angle.sin().to(x.dtype)


class LLaDALlamaBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config.d_model, config.mlp_hidden_size
        self.heads, self.theta = config.n_heads, config.rope_theta
        for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
            setattr(self, name, nn.Linear(size, size, bias=False))
        self.ff_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.ff_out = nn.Linear(inner, size, bias=False)
        self.attn_norm = RMSLayerNorm(size, config.rms_norm_eps)
        self.ff_norm = RMSLayerNorm(size, config.rms_norm_eps)

    def forward(self, x, bias):
        rows, length, size = x.shape
        h = self.attn_norm(x)
        q, k, v = (
            projection(h).view(rows, length, self.heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        # no causal mask: this is what makes the model a LLaDA
        mixed = F.scaled_dot_product_attention(
            rotate(q, self.theta), rotate(k, self.theta), v, attn_mask=bias, is_causal=False
        )
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(rows, length, size))
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))


class LLaDAModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.embedding_size, config.d_model),
                "blocks": nn.ModuleList(LLaDALlamaBlock(config) for _ in range(config.n_layers)),
                "ln_f": RMSLayerNorm(config.d_model, config.rms_norm_eps),
                "ff_out": nn.Linear(config.d_model, config.embedding_size, bias=False),
            }
        )


class LLaDAModelLM(PreTrainedModel):
    config_class = LLaDAConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = LLaDAModel(config)
        self.calls = []
        self.post_init()

    def forward(
        self,
        input_ids=None,
        inputs_embeds=None,
        attention_mask=None,
        past_key_values=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache or past_key_values is not None:
            raise ValueError("this model is bidirectional and keeps no keys and values")
        self.calls.append(tuple(input_ids.shape))
        parts = self.model.transformer
        x = parts["wte"](input_ids)
        bias = None
        if attention_mask is not None and not attention_mask.all():
            bias = torch.zeros(attention_mask.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(attention_mask == 0, torch.finfo(x.dtype).min)[:, None, None]
        for block in parts["blocks"]:
            x = block(x, bias)
        return CausalLMOutputWithPast(logits=parts["ff_out"](parts["ln_f"](x)))
