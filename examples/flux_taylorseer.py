"""FLUX, plain and with TaylorSeer: times, difference of the latents, and the report.

    python examples/flux_taylorseer.py --device cuda --compare flux.png "a tiger in the snow"
    python examples/flux_taylorseer.py --device cuda --max-memory 2GB "a tiger in the snow"
    python examples/flux_taylorseer.py --tiny          # random weights: no download, no GPU

The defaults are the public code's settings for FLUX.1-dev: 50 steps of which 10 are evaluated, first order.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

import paradec
from paradec.api.images import contact_sheet


def tiny() -> tuple[FluxPipeline, dict[str, Any]]:
    """Build a random FLUX of one double-stream and two single-stream blocks, and arguments in place of a prompt."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 2}
    embeds = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    transformer = FluxTransformer2DModel(**heads, **embeds, in_channels=4).eval()
    scale = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    vae = AutoencoderKL(block_out_channels=(4,), layers_per_block=1, latent_channels=1, norm_num_groups=1, **scale)
    parts = dict.fromkeys(["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
    pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, transformer=transformer, **parts)
    prompt = {"prompt_embeds": torch.randn(1, 8, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
    return pipe, prompt | {"height": 16, "width": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a tiger in the snow")
    parser.add_argument(
        "--model", default="black-forest-labs/FLUX.1-dev", help="hub id or folder (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--interval", type=int, default=6)
    parser.add_argument("--target", default="module", help="module, block, output")
    parser.add_argument("--max-memory", default=None, help='limit of the histories, for example "2GB"')
    parser.add_argument("--compare", metavar="FILE.png", help="save both pictures side by side, the plain run's first")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    if args.tiny:
        pipe, call = tiny()
    else:
        pipe = FluxPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16).to(args.device)
        call = {"prompt": args.prompt}
    pipe.set_progress_bar_config(disable=True)

    def run(output_type: str = "latent") -> Any:
        generator = torch.Generator().manual_seed(0)
        return pipe(**call, num_inference_steps=args.steps, generator=generator, output_type=output_type).images

    start = time.perf_counter()
    plain = run()
    print(f"plain: {time.perf_counter() - start:.2f} s")
    sampler = paradec.TaylorSeer(interval=args.interval, where=args.target, max_memory=args.max_memory)
    session = paradec.accelerate(pipe, sampler)
    start = time.perf_counter()
    fast = run()
    print(f"taylorseer: {time.perf_counter() - start:.2f} s")
    print(session.report())
    session.detach()
    print(f"relative difference of the latents: {float((plain - fast).norm() / plain.norm()):.4f}")
    if args.compare:
        pictures = run("pil")
        with paradec.accelerate(pipe, sampler):
            pictures += run("pil")
        contact_sheet(pictures, columns=2).save(args.compare)


if __name__ == "__main__":
    main()
