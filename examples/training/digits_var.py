"""Train the two packaged next-scale generators of digits, on one CPU core.

    python examples/training/digits_var.py --out runs/digits-var     # Ctrl-C at any time; the same command continues

Three stages, each with a budget of CPU minutes:

1. a multi-scale VQ autoencoder: 28 x 28 pixels as code maps of 1, 2, 3, 5 and 7 codes per side;
2. a class-conditional VAR (arXiv 2404.02905) over those codes; one label in ten is dropped, for guidance;
3. a VAR of a sixth of its size over the same codes, which decodes the fine scales in CoDe (arXiv 2411.17787).

`runs/digits-var/export` then contains `digits/multi_scale_vq.safetensors`, `digits-var/` and `digits-var-small/` of
`paradec/assets`.
"""

from __future__ import annotations

import argparse
import math

import torch
from common import CodeRevival, codes_of, digits, distort, export, fit, half, parse_arguments, vq_quality
from digit_quality import load_classifier
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from paradec.models.images.multi_scale_vq import MultiScaleVQ, MultiScaleVQConfig
from paradec.models.images.var import VAR

SCALES = (1, 2, 3, 5, 7)
VQ = MultiScaleVQConfig(
    codebook_size=256, codebook_embed_dim=8, channels=16, channel_mult=(1, 2, 3), res_blocks=1, attention=False,
    z_channels=8, image_channels=1, norm_groups=8,
)  # fmt: skip
LARGE = {"depth": 4, "width": 120, "heads": 4}
SMALL = {"depth": 2, "width": 64, "heads": 2}
COMMON = {"scales": SCALES, "classes": 10, "codebook_size": 256, "code_dim": 8, "shared_adaln": True}


def train_vq(args: argparse.Namespace, x: Tensor, hx: Tensor) -> MultiScaleVQ:
    """Train the VQ autoencoder on images x; hx is held out."""
    torch.manual_seed(0)
    model = MultiScaleVQ(VQ)
    classifier = load_classifier()

    @torch.no_grad()
    def residuals(images: Tensor) -> Tensor:
        """Compute the inputs [n, 8] of the codebook at all scales."""
        rest, inputs = model.features(images), []
        for index, side in enumerate(SCALES):
            reduced = model.downsample(rest, side)
            inputs.append(reduced.flatten(0, 1))
            rest = rest - model.smooth_codes(model.codes[model.quantize.nearest(reduced)], index, SCALES)
        return torch.cat(inputs)

    revival = CodeRevival(model.quantize.embedding.weight, residuals)

    def loss_of(step: int) -> Tensor:
        images = distort(x[torch.randint(len(x), (32,))]) * 2 - 1
        if step == 0:
            revival.start(images)
        decoded, loss, ids = model(images, SCALES)
        revival.observe(step, images, torch.cat(ids, 1))
        return mse_loss(decoded, images) + 0.5 * l1_loss(decoded, images) + loss

    @torch.no_grad()
    def judge() -> str:
        model.eval()
        codes = torch.cat(model.encode(hx * 2 - 1, SCALES), 1)
        features = model.inputs(model.codes[codes], SCALES)[1]
        decoded = (model.decode(features) / 2 + 0.5).clamp(0, 1)
        return vq_quality(classifier, decoded, hx, codes)

    fit("vq", model, 2e-3, args, 0, loss_of, judge, revival.after)
    return model


def train_network(
    name: str,
    sizes: dict[str, int],
    vq: MultiScaleVQ,
    args: argparse.Namespace,
    stage: int,
    codes: Tensor,
    y: Tensor,
    held: Tensor,
    hy: Tensor,
) -> VAR:
    """Train a VAR on codes [copies * N, 88] of N digits with labels y; held and hy belong to held-out digits."""
    torch.manual_seed(0)
    model = VAR(**COMMON, **sizes)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and "scale_mul" not in key:
            nn.init.normal_(parameter, std=0.02)
        if key in ("head.weight", "head_nm.ada_lin.1.weight", "shared_ada_lin.1.weight"):
            nn.init.normal_(parameter, std=1e-3)
        if key.endswith("ada_gss"):  # gates begin at 0.5, scales and shifts near 0
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
        index = torch.randint(len(codes), (64,))
        labels = torch.where(torch.rand(64) < 0.1, COMMON["classes"], y[index % len(y)])
        return cross_entropy(model(labels, inputs_of(codes[index])).flatten(0, 1), codes[index].flatten())

    @torch.no_grad()
    def judge() -> str:
        losses = cross_entropy(model(hy, inputs_of(held)).transpose(1, 2), held, reduction="none").mean(0)
        ends = [0, *model.ends]
        scales = " ".join(f"{losses[a:b].mean():.2f}" for a, b in zip(ends[:-1], ends[1:], strict=True))
        return f"held-out loss {losses.mean():.4f} nats per token ({scales} by scale)"

    fit(name, model, 3e-3, args, stage, loss_of, judge)
    return model


def main() -> None:
    args = parse_arguments(__doc__, "runs/digits-var", (8.0, 30.0, 8.0))
    x, y, hx, hy = digits(args.csv)
    vq = train_vq(args, x, hx)

    def encode(images: Tensor) -> Tensor:
        return torch.cat(vq.encode(images, SCALES), 1)

    with torch.no_grad():
        held = encode(hx * 2 - 1)
    data = codes_of(args.out, encode, x), y, held, hy
    large = train_network("large", LARGE, vq, args, 1, *data)
    small = train_network("small", SMALL, vq, args, 2, *data)

    folder = args.out / "export"
    export(folder / "digits", half(vq), VQ.to_dict(), "multi_scale_vq.safetensors")
    for name, network in (("digits-var", large), ("digits-var-small", small)):
        weights = {key: value for key, value in half(network).items() if not key.endswith("zero_k_bias")}
        config = {"model_type": "var", "scales": SCALES, "heads": network.heads}
        config |= {"vq": "../digits/multi_scale_vq.safetensors", "defaults": {"guidance_scale": 2.0}}
        export(folder / name, weights, config)


if __name__ == "__main__":
    main()
