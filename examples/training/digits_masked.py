"""Train the packaged masked generator of digits, on one CPU core.

    python examples/training/digits_masked.py     # Ctrl-C at any time; the same command continues

The packaged VQ autoencoder encodes 28 x 28 grey pixels as 7 x 7 codes out of 256. A bidirectional transformer reads a
class token and the codes, some of them masked, and predicts the masked ones: MaskGIT (Chang et al., arXiv 2202.04200),
with its cosine schedule of mask ratios. One class token in ten is masked too, for guidance.

The network is a small U-ViT of MaskGIT-r (`paradec.models.images.uvit`). Its token embeddings are initialised with the
codebook's vectors, projected at random, its positions with sines and cosines of row and column, and its bias with the
codes' log-frequencies. It is written to `runs/digits-maskgit/export`, a folder like `paradec/assets/digits-maskgit`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from common import codes_of, digits, export, fit, half, parse_arguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from paradec.models.images.loading import packaged_path
from paradec.models.images.uvit import UViT
from paradec.models.images.vq import VQModel, load_vq

SIZES = {"size": 7, "codebook_size": 256, "classes": 11, "width": 128, "depth": 2, "heads": 4}
"""The eleventh class means "no class"."""
CELLS, MASK, CLASSES = SIZES["size"] ** 2, SIZES["codebook_size"], SIZES["classes"] - 1
LABEL_DROP = 0.1


def network() -> UViT:
    model = UViT(**SIZES)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05 if "emb" in name else parameter.shape[1] ** -0.5)
    nn.init.zeros_(model.mlm_layer.bias)
    return model


def waves(size: int, width: int) -> Tensor:
    """Compute sines and cosines of each cell's row and column: [size ** 2, width]."""
    angles = torch.arange(size).outer(3.0 ** -torch.linspace(0, 3, width // 4))
    line = torch.cat((angles.sin(), angles.cos()), -1)  # [size, width / 2]
    rows, columns = line.unsqueeze(1).expand(-1, size, -1), line.unsqueeze(0).expand(size, -1, -1)
    return torch.cat((rows, columns), -1).flatten(0, 1)


def initialise(model: UViT, vq: VQModel, codes: Tensor) -> UViT:
    """Initialise the model with the codebook's vectors, the grid's positions and the codes' frequencies."""
    book = normalize(vq.quantize.embedding.weight, dim=-1)
    counts = torch.bincount(codes.flatten(), minlength=len(book)).double() + 1
    with torch.no_grad():
        model.token_emb.word_embeddings.weight[: len(book)] = 0.05 * book @ torch.randn(book.shape[1], SIZES["width"])
        model.token_emb.position_embeddings.weight[:] = 0.07 * waves(SIZES["size"], SIZES["width"])
        model.mlm_layer.bias[..., : len(book)] = (counts / counts.sum()).log()
    return model


def logits_of(model: UViT, codes: Tensor, masked: Tensor, labels: Tensor) -> Tensor:
    """Compute logits [B, 49, 256] of codes [B, 49], masked [B, 49] bool, labels [B] (-1: none)."""
    first = torch.where(labels < 0, MASK, MASK + 1 + labels).unsqueeze(1)
    ids = torch.cat((first, codes.masked_fill(masked, MASK)), 1)
    return model(ids).logits[:, 1:, :MASK]


def draw_mask(rows: int) -> Tensor:
    """Draw masks [rows, 49] bool at random positions; their number follows the cosine schedule, at least one."""
    count = (CELLS * torch.cos(math.pi / 2 * torch.rand(rows, 1))).ceil().clamp(min=1)
    return torch.rand(rows, CELLS).argsort(1).argsort(1) < count


def train(args: argparse.Namespace, vq: VQModel, x: Tensor, y: Tensor, hx: Tensor, hy: Tensor) -> UViT:
    codes = codes_of(args.out, lambda images: vq.encode(images).flatten(1), x)
    held = vq.encode(hx * 2 - 1).flatten(1)
    torch.manual_seed(1)
    model, held_mask = initialise(network(), vq, codes), draw_mask(len(held))

    def loss_of(step: int) -> Tensor:
        index = torch.randint(len(codes), (64,))
        labels = torch.where(torch.rand(64) < LABEL_DROP, -1, y[index % len(y)])
        masked = draw_mask(64)
        return cross_entropy(logits_of(model, codes[index], masked, labels)[masked], codes[index][masked])

    @torch.no_grad()
    def judge() -> str:
        loss = cross_entropy(logits_of(model.eval(), held, held_mask, hy)[held_mask], held[held_mask])
        return f"held-out loss {loss:.4f} nats per masked token"

    fit("maskgit", model, 3e-3, args, 0, loss_of, judge)
    return model


def main() -> None:
    args = parse_arguments(__doc__, "runs/digits-maskgit", (15.0,))
    model = train(args, load_vq(Path(packaged_path("digits")) / "vq.safetensors"), *digits(args.csv))
    config = {"model_type": "uvit", "heads": SIZES["heads"], "vq": "../digits/vq.safetensors"}
    config |= {"defaults": {"steps": 8, "guidance_scale": 2.0, "temperature": 1.0}}
    export(args.out / "export", half(model), config)


if __name__ == "__main__":
    main()
