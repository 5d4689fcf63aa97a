"""Train the packaged diffusion transformer of digits, on one CPU core.

    python examples/training/digits_dit.py --out runs/digits-dit     # Ctrl-C at any time; the same command continues

A DiT (Peebles and Xie, arXiv 2212.09748; diffusers' `DiTTransformer2DModel`) denoises 28 x 28 pixels in patches of
4 x 4. It predicts the velocity v of Salimans and Ho (arXiv 2202.00512) under the cosine schedule; one label in ten is
dropped, for guidance. It is written to `runs/digits-dit/export`, a diffusers folder like `paradec/assets/digits-dit`.
"""

from __future__ import annotations

import argparse

import torch
from common import digits, distort, fit, parse_arguments
from diffusers import DDIMScheduler, DiTTransformer2DModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paradec.models.images.pixel_dit import PixelDiTPipeline

CLASSES = 10
LABEL_DROP = 0.1


def network() -> DiTTransformer2DModel:
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=24, in_channels=1, out_channels=1, num_layers=6, sample_size=28,
        patch_size=4, num_embeds_ada_norm=CLASSES,
    )  # fmt: skip
    for block in model.transformer_blocks:  # every block is initialised as the identity, as in the paper
        nn.init.zeros_(block.norm1.linear.weight)
        nn.init.zeros_(block.norm1.linear.bias)
    nn.init.zeros_(model.proj_out_2.weight)
    nn.init.zeros_(model.proj_out_2.bias)
    return model


def schedule() -> DDIMScheduler:
    # no clipping: DDIM would clip the image but not its noise, which distorts guided images, more with more steps
    return DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
    )


def train(args: argparse.Namespace, x: Tensor, y: Tensor, hx: Tensor, hy: Tensor) -> DiTTransformer2DModel:
    torch.manual_seed(0)
    model, noising = network(), schedule()
    steps = noising.config.num_train_timesteps

    def loss_at(images: Tensor, labels: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        model.eval()  # in training mode each block would drop labels on its own
        noisy, target = noising.add_noise(images, noise, t), noising.get_velocity(images, noise, t)
        return mse_loss(model(noisy, timestep=t, class_labels=labels).sample, target)

    def loss_of(step: int) -> Tensor:
        index = torch.randint(len(x), (64,))
        images = distort(x[index]) * 2 - 1
        labels = torch.where(torch.rand(64) < LABEL_DROP, CLASSES, y[index])
        return loss_at(images, labels, torch.randn_like(images), torch.randint(steps, (64,)))

    held = hx[:500] * 2 - 1
    noise = torch.randn(held.shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def judge() -> str:
        loss = loss_at(held, hy[:500], noise, torch.arange(500) * steps // 500)
        return f"held-out loss {loss:.4f}"

    fit("dit", model, 2e-3, args, 0, loss_of, judge)
    return model


def main() -> None:
    args = parse_arguments(__doc__, "runs/digits-dit", (20.0,))
    model = train(args, *digits(args.csv))
    PixelDiTPipeline(model.half(), schedule()).save_pretrained(args.out / "export")
    for file in (args.out / "export").rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors creates files that only their owner can read


if __name__ == "__main__":
    main()
