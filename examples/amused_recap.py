"""Amused with four schedulers: diffusers' own, MaskGIT, Halton, and ReCAP, which also changes the transformer's layers.

    python examples/amused_recap.py --device cuda "a red fox in the snow"     # writes amused-recap.png
    python examples/amused_recap.py --tiny             # random weights: no download, no GPU, no file

The picture has a row for each scheduler, diffusers' first. In ReCAP's local steps the transformer's layers evaluate
only the cells that these steps fill, with the keys and values of the full step before them. The number of cells
evaluated in each step is printed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel

import paradec
from paradec.api.images import contact_sheet
from paradec.schedulers import HaltonScheduler, MaskGITScheduler


def tiny() -> tuple[AmusedPipeline, dict[str, Any]]:
    """Build a random Amused for images of 8 x 8 pixels, a code each; also return arguments in place of a prompt."""
    torch.manual_seed(0)
    embeds = {"cond_embed_dim": 8, "encoder_hidden_size": 8, "micro_cond_encode_dim": 2, "micro_cond_embed_dim": 10}
    sizes = {"hidden_size": 8, "in_channels": 8, "block_out_channels": 8, "intermediate_size": 8, "num_res_blocks": 1}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 1, "block_num_heads": 1}
    transformer = UVit2DModel(**embeds, **sizes, **heads, vocab_size=32, codebook_size=32).eval()
    convolutions = {"block_out_channels": [8], "layers_per_block": 1, "norm_num_groups": 8}
    vqvae = VQModel(**convolutions, latent_channels=8, num_vq_embeddings=32, lookup_from_codebook=True).eval()
    pipe = AmusedPipeline(vqvae, None, None, transformer, AmusedScheduler(mask_token_id=31))
    prompt = {"prompt_embeds": torch.ones(1, 8), "encoder_hidden_states": torch.ones(1, 8, 8)}
    negative = {"negative_prompt_embeds": -torch.ones(1, 8), "negative_encoder_hidden_states": torch.zeros(1, 8, 8)}
    return pipe, prompt | negative | {"height": 8, "width": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a red fox in the snow")
    parser.add_argument("--model", default="amused/amused-256", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--local-steps", type=int, default=1, help="ReCAP's l: local steps after a full one")
    parser.add_argument("--full-groups", type=int, default=4, help="number of first groups that have no local steps")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--out", default="amused-recap.png", help="a row for each sampler (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    if args.tiny:
        pipe, call = tiny()
    else:
        pipe = AmusedPipeline.from_pretrained(args.model).to(args.device)
        call = {"prompt": args.prompt}
    pipe.set_progress_bar_config(disable=True)
    cells: list[int] = []  # number of an image's cells that the layers evaluate in each call
    pipe.transformer.transformer_layers[0].attn1.to_q.register_forward_hook(
        lambda module, args, output: cells.append(output.shape[1])
    )
    pictures = []

    def run(name: str) -> None:
        cells.clear()
        start = time.perf_counter()
        draw = torch.Generator().manual_seed(0)
        pictures.extend(
            pipe(**call, num_inference_steps=args.steps, num_images_per_prompt=args.images, generator=draw).images
        )
        print(f"{name}: {time.perf_counter() - start:.2f} s, {sum(cells)} cells evaluated; step by step: {cells}")

    original = pipe.scheduler
    run("AmusedScheduler")
    for cls in (MaskGITScheduler, HaltonScheduler):
        pipe.scheduler = cls.from_config(original.config)
        run(cls.__name__)
    pipe.scheduler = original
    recap = paradec.samplers.create("recap", local_steps=args.local_steps, full_groups=args.full_groups)
    with paradec.accelerate(pipe, recap) as session:  # replaces the scheduler and hooks the layers
        run("ReCAP")
        print(session.report())
    assert pipe.scheduler is original
    if not args.tiny:
        contact_sheet(pictures, columns=args.images).save(args.out)


if __name__ == "__main__":
    main()
