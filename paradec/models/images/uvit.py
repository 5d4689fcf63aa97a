"""The masked image transformer of the MaskGIT-r checkpoints that AutoNAT and ReCAP publish: a U-ViT (transformer blocks
with long skips) over a class token and the tokens of an image. diffusers' `UVit2DModel`, Amused's, is another network;
parameter names are the files'.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from paradec.core.checks import check_int
from paradec.core.facts import ModelFacts
from paradec.models.checkpoint import CheckpointError
from paradec.models.decoder import Decoder
from paradec.models.weights import read_weights


class UViT(nn.Module):
    """Class token at position 0, image tokens at positions 1 to size ** 2.

    Ids: 0 ... codebook_size - 1 are image tokens, codebook_size is the mask, and codebook_size + 1 + c is class c. At
    position 0 the mask represents the null class, the last one: guidance, which masks the prompt, gets what it needs.

    Args:
        size: tokens per side. codebook_size: image tokens.
        classes: classes, the null class included. width, depth, heads: of the transformer; depth counts the blocks
            before and after the middle one, half of each.
    """

    def __init__(
        self, size: int = 16, codebook_size: int = 1024, classes: int = 1001, width: int = 768, depth: int = 24,
        heads: int = 8,
    ):  # fmt: skip
        super().__init__()
        for name, value in {"size": size, "codebook_size": codebook_size, "classes": classes, "width": width}.items():
            check_int(name, value, low=1)
        check_int("heads", heads, low=1)
        if width % heads:
            raise ValueError(f"heads={heads} must divide width={width}")
        check_int("depth", depth, low=0)
        if depth % 2:
            raise ValueError(f"depth={depth} must be even")
        self.size, self.codebook_size, self.classes, self.heads = size, codebook_size, classes, heads
        self.token_emb = Embeddings(codebook_size + 1, size**2, width)
        self.context_embed = Embeddings(classes, 1, width)
        self.in_blocks = nn.ModuleList(Block(width, heads) for _ in range(depth // 2))
        self.mid_block = Block(width, heads)
        self.out_blocks = nn.ModuleList(Block(width, heads, skip=True) for _ in range(depth // 2))
        self.norm = FinalNorm(width)
        self.mlm_layer = Head(width, codebook_size + 1)
        self.config = SimpleNamespace(  # what key/value stores ask for
            num_hidden_layers=depth + 1, num_attention_heads=heads, hidden_size=width, model_type="uvit"
        )

    @property
    def base_model(self) -> nn.Module:
        """What gives the hidden states before the output matrix."""
        return self.norm

    @property
    def vocab_size(self) -> int:
        """Image tokens, the mask, and the classes."""
        return self.codebook_size + 1 + self.classes

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Logits of any subset of the positions.

        Args:
            input_ids: [R, Q] int64. position_ids: [R, Q]; None is 0 to Q - 1.
            attention_mask: [R, 1, Q or 1, K] bool, True where visible; None sees everything.
            past_key_values: a store whose `update(keys, values, layer)` returns what is attended to.

        Returns:
            `.logits` [R, Q, vocab_size], the lowest number for what is no image token (guidance subtracts them).
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embed(input_ids, position_ids)
        skips = []
        for index, block in enumerate(self.in_blocks):
            x = block(x, attention_mask, past_key_values, index)
            skips.append(x)
        x = self.mid_block(x, attention_mask, past_key_values, len(skips))
        for index, block in enumerate(self.out_blocks, start=len(skips) + 1):
            x = block(x, attention_mask, past_key_values, index, skips.pop())
        return SimpleNamespace(logits=self.head(self.norm(x).last_hidden_state))

    def head(self, x: Tensor) -> Tensor:
        """Last hidden states [R, W, width] -> logits [R, W, vocab_size], as `forward` has them."""
        logits = self.mlm_layer(x, self.token_emb.word_embeddings.weight)[..., : self.codebook_size]
        others = self.vocab_size - self.codebook_size
        return nn.functional.pad(logits, (0, others), value=torch.finfo(logits.dtype).min)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[R, Q, width]: class embeddings at position 0, token embeddings elsewhere."""
        is_class = position_ids == 0
        null = input_ids == self.codebook_size
        label = torch.where(null, self.classes - 1, input_ids - self.codebook_size - 1).clamp(min=0)
        label = torch.where(is_class, label, 0)
        tokens = torch.where(is_class, 0, input_ids.clamp(max=self.codebook_size))
        image = self.token_emb(tokens, (position_ids - 1).clamp(min=0))
        return torch.where(is_class.unsqueeze(-1), self.context_embed(label, torch.zeros_like(label)), image)


class Embeddings(nn.Module):
    """A token's embedding plus its position's, normalized."""

    def __init__(self, tokens: int, positions: int, width: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(tokens, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.LayerNorm(self.word_embeddings(ids) + self.position_embeddings(positions))


class Attention(nn.Module):
    """Self-attention without a causal mask, over a store where there is one."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, store: Any, layer: int) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [R, H, Q, D] each
        if store is not None:
            key, value = store.update(key, value, layer)
        return self.proj(scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block; with `skip`, its input is first joined with that of the block across."""

    def __init__(self, width: int, heads: int, skip: bool = False):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.skip_linear = nn.Linear(2 * width, width) if skip else None

    def forward(self, x: Tensor, mask: Tensor | None, store: Any, layer: int, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            assert skip is not None
            x = self.skip_linear(torch.cat((x, skip), -1))
        x = x + self.attn(self.norm1(x), mask, store, layer)
        return x + self.mlp(self.norm2(x))


class FinalNorm(nn.LayerNorm):
    """The last norm; its output is wrapped, as adapters expect it of a model without its head."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=super().forward(x))


class Head(nn.Module):
    """Logits by the token embeddings themselves."""

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.ln = nn.LayerNorm(width, eps=1e-5)
        self.bias = nn.Parameter(torch.zeros(1, 1, tokens))

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        return linear(self.ln(gelu(self.fc(x))), embeddings) + self.bias


class UViTModel(Decoder):
    """The adapter of a `UViT`: prompts are one class token, answers all image tokens, by default as one block."""

    makes = "codes"
    has_head = True
    module: UViT

    def __init__(self, module: UViT):
        facts = ModelFacts(
            vocab_size=module.vocab_size,
            mask_token_id=module.codebook_size,
            max_length=module.size**2 + 1,
            name=type(module).__name__,
        )
        super().__init__(module.eval(), facts, default_max_new_tokens=module.size**2)

    def token_embeddings(self) -> Tensor:
        """[vocab_size, width]: of image tokens, the mask and the classes, before positions are added."""
        parts = (self.module.token_emb, self.module.context_embed)
        return torch.cat([part.word_embeddings.weight for part in parts])

    def head(self, hidden: Tensor) -> Tensor:
        """The output matrix alone: hidden states [R, W, width] -> [R, W, vocab_size]."""
        return self.module.head(hidden)

    def class_token(self, label: int) -> int:
        """The id that asks for a class.

        Raises:
            ValueError: no such class.
        """
        check_int("label", label, low=0, high=self.module.classes - 1)
        return self.module.codebook_size + 1 + label


def load_uvit(source: str | os.PathLike[str], heads: int = 8) -> UViTModel:
    """Read a checkpoint by its parameter names; all sizes but the number of heads follow from the weights.

    Args:
        source: a safetensors file, or a `.pth` of which tensors alone are read. heads: 8 in the published models.

    Raises:
        CheckpointError: no such file, or other weights. ValueError: `heads` does not divide the width.
    """
    weights, _ = read_weights(source)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    try:
        positions, width = shapes["token_emb.position_embeddings.weight"]
        tokens, classes = (shapes[f"{part}.word_embeddings.weight"][0] for part in ("token_emb", "context_embed"))
    except KeyError as error:
        raise CheckpointError(f"{str(source)!r} does not hold a U-ViT's weights: {error} is missing") from None
    depth = 2 * len({name.split(".")[1] for name in shapes if name.startswith("in_blocks.")})
    module = UViT(round(positions**0.5), tokens - 1, classes, width, depth, heads)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if expected != shapes:
        wrong = sorted(name for name in {*expected, *shapes} if expected.get(name) != shapes.get(name))
        raise CheckpointError(f"{str(source)!r} does not hold a U-ViT's weights: {', '.join(wrong[:4])}")
    module.load_state_dict(weights)
    return UViTModel(module)
