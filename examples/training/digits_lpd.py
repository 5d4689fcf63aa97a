"""Train the packaged LPD of handwritten digits, a transformer that writes an image's codes in any order.

    python examples/training/digits_lpd.py    # one thread; Ctrl-C at any time; the same command continues

The packaged VQ autoencoder encodes an image as 7 x 7 codes out of 256. Each image of a batch gets a random order.
Half of the batches decode one code after the other: the network learns the distribution of a code given any other
codes, which exact decoding in any order needs (`create("groups", lossless=True)`). The other half decodes groups of
codes, as LPD does (Zhang et al., arXiv 2507.01957). One class in ten is dropped, for guidance. The model is written to
`runs/digits-lpd/export`, a folder like `paradec/assets/digits-lpd`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import codes_of, digits, export, fit, half, parse_arguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paradec.core.orders import group_sizes
from paradec.models.images.loading import packaged_path
from paradec.models.images.lpd import LPD, LPDConfig
from paradec.models.images.vq import VQModel, load_vq

SIZES = LPDConfig(dim=128, n_layer=4, n_head=4, grid=7, vocab_size=256, num_classes=10)
CELLS = SIZES.grid**2
LABEL_DROP = 0.1
STEPS = (8, 12, 16)
"""Numbers of groups in training."""


def network() -> LPD:
    model = LPD(SIZES)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02 if "blocks" in name or "head" in name else 0.2)
    return model


def loss_in(model: LPD, codes: Tensor, labels: Tensor, order: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Compute the loss in nats per code of codes [B, 49], labels [B] (10: none), order [B, 49] and sizes of groups."""
    logits = model(codes, labels, order, sizes)
    return cross_entropy(logits.flatten(0, 1), codes.gather(1, order).flatten())


def orders(rows: int) -> Tensor:
    """Draw a random permutation for each row: [rows, 49]."""
    return torch.rand(rows, CELLS).argsort(1)


def train(args: argparse.Namespace, vq: VQModel, x: Tensor, y: Tensor, hx: Tensor, hy: Tensor) -> LPD:
    with torch.no_grad():
        codes = codes_of(args.out, lambda images: vq.encode(images).flatten(1), x)
        held = vq.encode(hx * 2 - 1).flatten(1)
    torch.manual_seed(1)
    model, single = network(), (1,) * CELLS
    held_order = orders(len(held))

    def loss_of(step: int) -> Tensor:
        index = torch.randint(len(codes), (48,))
        labels = torch.where(torch.rand(len(index)) < LABEL_DROP, SIZES.num_classes, y[index % len(y)])
        sizes = single if step % 2 else group_sizes(CELLS, STEPS[step // 2 % len(STEPS)])
        return loss_in(model, codes[index], labels, orders(len(index)), tuple(sizes))

    @torch.no_grad()
    def judge() -> str:
        loss = loss_in(model.eval(), held, hy, held_order, single)
        return f"held-out loss {loss:.4f} nats per code, one after the other in a random order"

    fit("lpd", model, 2e-3, args, 0, loss_of, judge)
    return model


def main() -> None:
    args = parse_arguments(__doc__, "runs/digits-lpd", (30.0,))
    model = train(args, load_vq(Path(packaged_path("digits")) / "vq.safetensors"), *digits(args.csv))
    config = {"model_type": "lpd", "n_head": SIZES.n_head, "vq": "../digits/vq.safetensors"}
    export(args.out / "export", half(model), config | {"defaults": {"guidance_scale": 4.0}})


if __name__ == "__main__":
    main()
