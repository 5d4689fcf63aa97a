"""Train the packaged autoregressive generator of digits, its VQ, classifier and drafter, on one CPU core.

    python examples/training/digits_ar.py --out runs/digits          # Ctrl-C at any time; the same command continues

Five stages, each with a budget of CPU minutes:

1. a classifier, which later judges generated images (class accuracy, and Frechet distance on its features);
2. a VQ autoencoder: 28 x 28 pixels as 7 x 7 codes out of 256;
3. a class-conditional LlamaGen (arXiv 2406.06525) over those codes; one label in ten is dropped, for guidance;
4. a LlamaGen of a sixth of that size, trained in the same way: the drafter for the large one (`speculative`);
5. distillation of the large one into the drafter, with distributions as targets instead of codes (Hinton et al., arXiv
   1503.02531; for drafters: DistillSpec, arXiv 2310.08461), because a draft is accepted with probability sum min(p, q).
   p and q are the guided distributions of model and drafter, at a new random guidance scale in every step.

`runs/digits/export` then contains the folders of `paradec/assets`: `digits/` (VQ, classifier), `digits-ar/` and
`digits-ar-drafter/`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from common import CodeRevival, codes_of, digits, distort, export, fit, half, parse_arguments, vq_quality
from digit_quality import DigitClassifier, moments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, l1_loss, mse_loss, normalize

from paradec.models.images.llamagen import LlamaGen, LlamaGenConfig
from paradec.models.images.vq import VQConfig, VQModel

VQ = VQConfig(
    codebook_size=256, codebook_embed_dim=8, channels=16, channel_mult=(1, 2, 3), res_blocks=1, attention=False,
    z_channels=32, image_channels=1, norm_groups=8, encoder=True,
)  # fmt: skip
AR = LlamaGenConfig(dim=128, n_layer=4, n_head=4, multiple_of=32, vocab_size=256, grid=7, num_classes=10)
DRAFTER = replace(AR, dim=64, n_layer=2)
SCALES = (1.0, 3.0)
"""Range of guidance scales in the distillation."""


def train_classifier(args: argparse.Namespace, x: Tensor, y: Tensor, hx: Tensor, hy: Tensor) -> DigitClassifier:
    """Train the classifier on images x with labels y; hx and hy are held out."""
    model = DigitClassifier()

    def loss_of(step: int) -> Tensor:
        index = torch.randint(len(x), (128,))
        return cross_entropy(model(distort(x[index])), y[index])

    @torch.no_grad()
    def judge() -> str:
        return f"held-out accuracy {(model.eval()(hx).argmax(-1) == hy).float().mean():.4f}"

    fit("classifier", model, 3e-3, args, 0, loss_of, judge)
    with torch.no_grad():
        for name, images in (("train", x), ("held_out", hx)):
            mean, covariance = moments(model.features(images))
            getattr(model, f"{name}_mean").copy_(mean)
            getattr(model, f"{name}_covariance").copy_(covariance)
    return model


def train_vq(args: argparse.Namespace, x: Tensor, hx: Tensor, classifier: DigitClassifier) -> VQModel:
    model = VQModel(VQ)
    revival = CodeRevival(
        model.quantize.embedding.weight, lambda images: normalize(model.latents(images).flatten(0, -2), dim=-1)
    )

    def loss_of(step: int) -> Tensor:
        images = distort(x[torch.randint(len(x), (32,))]) * 2 - 1
        if step == 0:
            revival.start(images)
        decoded, loss, ids = model(images)
        revival.observe(step, images, ids)
        return mse_loss(decoded, images) + 0.5 * l1_loss(decoded, images) + loss

    @torch.no_grad()
    def judge() -> str:
        ids = model.eval().encode(hx * 2 - 1)
        decoded = (model.decode(ids) / 2 + 0.5).clamp(0, 1)
        return vq_quality(classifier, decoded, hx, ids)

    fit("vq", model, 2e-3, args, 1, loss_of, judge, revival.after)
    return model


def logits_of(model: LlamaGen, codes: Tensor, labels: Tensor) -> Tensor:
    """Compute logits [B, 49, 256] of codes [B, 49] with labels [B]."""
    first = model.cls_embedding.embedding_table(labels).unsqueeze(1)
    embeddings = torch.cat((first, model.tok_embeddings(codes[:, :-1])), 1)
    cells = torch.arange(-1, AR.grid**2 - 1)
    return model.head(model.backbone(embeddings, cells.expand(len(codes), -1)))


Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Codes [copies * N, 49] of N digits, labels [N], then codes and labels of held-out digits."""


def train_network(name: str, config: LlamaGenConfig, args: argparse.Namespace, stage: int, data: Data) -> LlamaGen:
    codes, y, held, hy = data
    torch.manual_seed(0)
    model = LlamaGen(config)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        if key == "output.weight":
            nn.init.zeros_(parameter)

    def loss_of(step: int) -> Tensor:
        index = torch.randint(len(codes), (64,))
        labels = torch.where(torch.rand(64) < 0.1, AR.num_classes, y[index % len(y)])
        return cross_entropy(logits_of(model, codes[index], labels).flatten(0, 1), codes[index].flatten())

    @torch.no_grad()
    def judge() -> str:
        loss = cross_entropy(logits_of(model, held, hy).flatten(0, 1), held.flatten())
        return f"held-out loss {loss:.4f} nats per token"

    fit(name, model, 3e-3, args, stage, loss_of, judge)
    return model


def distil(model: LlamaGen, teacher: LlamaGen, args: argparse.Namespace, data: Data) -> None:
    """Train the model towards the teacher's guided distributions."""
    codes, y, held, hy = data

    def guided(network: LlamaGen, codes: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Compute guided log-probabilities [B, 49, 256]."""
        both = torch.cat((labels, torch.full_like(labels, AR.num_classes)))
        with_class, without = logits_of(network, codes.repeat(2, 1), both).chunk(2)
        return (without + scale * (with_class - without)).log_softmax(-1)

    def loss_of(step: int) -> Tensor:
        index = torch.randint(len(codes), (32,))
        batch = codes[index], y[index % len(y)], float(torch.empty(()).uniform_(*SCALES))
        with torch.no_grad():
            target = guided(teacher, *batch)
        return kl_div(guided(model, *batch), target, reduction="sum", log_target=True) / batch[0].numel()

    @torch.no_grad()
    def judge() -> str:
        p, q = (guided(network, held[:200], hy[:200], 2.0).exp() for network in (teacher, model))
        accepted = torch.minimum(p, q).sum(-1).mean()
        return f"probability that a draft is accepted {accepted:.4f} (guidance 2, held-out digits)"

    fit("distilled", model, 2e-3, args, 4, loss_of, judge)


def main() -> None:
    args = parse_arguments(__doc__, "runs/digits", (1.0, 8.0, 30.0, 5.0, 5.0))
    x, y, hx, hy = digits(args.csv)
    classifier = train_classifier(args, x, y, hx, hy)
    vq = train_vq(args, x, hx, classifier)
    with torch.no_grad():
        held = vq.encode(hx * 2 - 1).flatten(1)
    data = codes_of(args.out, lambda images: vq.encode(images).flatten(1), x), y, held, hy
    ar = train_network("ar", AR, args, 2, data)
    drafter = train_network("drafter", DRAFTER, args, 3, data)
    distil(drafter, ar, args, data)

    folder = args.out / "export"
    # moments stay in float32
    weights = half(classifier) | {name: value for name, value in classifier.named_buffers()}
    export(folder / "digits", weights, {}, "classifier.safetensors")
    export(folder / "digits", half(vq), VQ.to_dict(), "vq.safetensors")
    for name, network in (("digits-ar", ar), ("digits-ar-drafter", drafter)):
        fields = ("dim", "n_layer", "n_head", "multiple_of", "vocab_size", "grid", "num_classes", "condition")
        config = {"model_type": "llamagen"} | {field: getattr(network.config, field) for field in fields}
        config |= {"vq": "../digits/vq.safetensors", "defaults": {"guidance_scale": 2.0, "top_k": None}}
        export(folder / name, half(network), config)


if __name__ == "__main__":
    main()
