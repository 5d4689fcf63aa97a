"""Wan, plain, with TaylorSeer, and with BAC's schedules. The two calls of guidance in a step share one decision.

    python examples/wan_taylorseer.py --device cuda --compare wan.png "a fox runs through tall grass"
    python examples/wan_taylorseer.py --tiny           # random weights: no download, no GPU

The settings are the public code's for Wan2.1: 50 steps of which 10 are evaluated, first order. BAC's calibration
records one plain run and chooses the steps at which each attention and feed-forward module is evaluated.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

import paradec
from paradec.api.images import contact_sheet
from paradec.integrations.diffusers.calibration import calibrate_bac


def tiny() -> tuple[WanPipeline, dict[str, Any]]:
    """Build a random Wan of two layers, and arguments in place of a prompt."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32}
    embeds = {"text_dim": 16, "freq_dim": 32, "rope_max_seq_len": 32}
    transformer = WanTransformer3DModel(**heads, **embeds, in_channels=4, out_channels=4).eval()
    scale = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **scale)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=transformer)
    prompt = {"prompt_embeds": torch.randn(1, 7, 16), "negative_prompt_embeds": torch.randn(1, 7, 16)}
    return pipe, prompt | {"height": 16, "width": 16, "num_frames": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a fox runs through tall grass")
    parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="hub id or folder")
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--steps", type=int, default=None, help="default: 50, or 12 with --tiny")
    parser.add_argument("--compare", metavar="FILE.png", help="save every run's middle frame, the plain run's first")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    steps = args.steps or (12 if args.tiny else 50)

    if args.tiny:
        pipe, call = tiny()
    else:
        pipe = WanPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16).to(args.device)
        call = {"prompt": args.prompt, "height": 480, "width": 832, "num_frames": 81}
    pipe.set_progress_bar_config(disable=True)

    def run(output_type: str = "latent") -> Any:
        generator = torch.Generator().manual_seed(0)
        return pipe(**call, num_inference_steps=steps, generator=generator, output_type=output_type).frames

    def middle() -> Any:
        frames = run("pil")[0]
        return frames[len(frames) // 2]

    start = time.perf_counter()
    plain = run()
    print(f"plain: {time.perf_counter() - start:.2f} s")

    updates = steps // 5
    schedule = calibrate_bac(pipe, run, updates)
    if not args.tiny:
        schedule.save("wan-bac.json")
    frames = [middle()] if args.compare else []
    samplers = {
        "taylorseer": paradec.samplers.create("taylorseer", preset="wan"),
        "taylorseer, output only": paradec.samplers.create("taylorseer", preset="wan", where="output"),
        "bac": paradec.Forecast(when=schedule),
    }
    for name, sampler in samplers.items():
        with paradec.accelerate(pipe, sampler) as session:
            start = time.perf_counter()
            fast = run()
            seconds = time.perf_counter() - start
            report = session.report()
            frames += [middle()] if args.compare else []
        difference = float((plain - fast).norm() / plain.norm())
        hooked = sum(call.evaluated + call.forecast for call in report.calls)
        evaluated = sum(call.evaluated for call in report.calls) / hooked
        print(
            f"{name}: {seconds:.2f} s, {evaluated:.0%} of the modules evaluated, "
            f"histories {report.bytes / 1e6:.3g} MB, relative difference of the latents {difference:.4f}"
        )
    if args.compare:
        contact_sheet(frames, columns=len(frames)).save(args.compare)


if __name__ == "__main__":
    main()
