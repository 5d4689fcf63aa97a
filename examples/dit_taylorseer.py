"""A class-conditional DiT, plain and with TaylorSeer: times, difference of the images, and the report.

    python examples/dit_taylorseer.py --device cuda --classes "golden retriever" volcano --compare dit.png
    python examples/dit_taylorseer.py --tiny           # random weights: no download, no GPU; the images are noise

The settings are the paper's for DiT-XL/2: 50 DDIM steps of which 14 are evaluated, fourth order.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

import paradec
from paradec.api.images import contact_sheet


def tiny() -> DiTPipeline:
    """Build a pipeline with a random DiT of two layers."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
    transformer = DiTTransformer2DModel(**heads, in_channels=4, out_channels=8).eval()
    vae = AutoencoderKL(block_out_channels=(4,), layers_per_block=1, latent_channels=4, norm_num_groups=2)
    return DiTPipeline(transformer, vae.eval(), DDIMScheduler())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="facebook/DiT-XL-2-256", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--classes", nargs="+", default=["golden retriever", "volcano"], help="ImageNet class names")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--basis", default="taylor", help="taylor, newton, hermite, reuse, foca, dmd")
    parser.add_argument("--target", default="module", help="module, block, output")
    parser.add_argument(
        "--compare", metavar="FILE.png", help="save the images: a row of the plain run, a row with TaylorSeer"
    )
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    if args.tiny:
        pipe, labels = tiny(), [1, 2]
    else:
        pipe = DiTPipeline.from_pretrained(args.model, torch_dtype=torch.float16).to(args.device)
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
        labels = pipe.get_label_ids(args.classes)
    pipe.set_progress_bar_config(disable=True)

    def run() -> np.ndarray:
        generator = torch.Generator().manual_seed(0)
        return pipe(labels, num_inference_steps=args.steps, generator=generator, output_type="np").images

    start = time.perf_counter()
    plain = run()
    print(f"plain: {time.perf_counter() - start:.2f} s")
    sampler = paradec.Forecast(paradec.Every(4, first_enhance=2), args.basis, args.target, order=4)
    with paradec.accelerate(pipe, sampler) as session:
        start = time.perf_counter()
        fast = run()
        print(f"taylorseer: {time.perf_counter() - start:.2f} s")
        print(session.report())
    print(f"mean difference of the pixels: {np.abs(plain - fast).mean():.4f}")
    if args.compare:
        contact_sheet(pipe.numpy_to_pil(np.concatenate((plain, fast))), columns=len(labels)).save(args.compare)


if __name__ == "__main__":
    main()
