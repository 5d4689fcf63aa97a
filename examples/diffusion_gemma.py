"""DiffusionGemma writes canvases of random tokens that settle: watch one, fill holes, try another rule.

    python examples/diffusion_gemma.py --device cuda "Why is the sky blue?"
    python examples/diffusion_gemma.py --tiny          # a small random checkpoint: shows the steps, says noise

Drafts are the best tokens of every step; any of them may change until its canvas closes. `--check` has transformers'
own generate answer with the same random numbers.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch

import paradec


def write_tiny(folder: str) -> None:
    """A checkpoint in the published format: a random model over the packaged model's tokens, canvases of 8."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
    from transformers.utils import logging

    packaged = paradec.load()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text = {
        "vocab_size": packaged.facts.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "max_position_embeddings": 512,
    }
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, **heads}
    image = {"image_token_id": 1, "boi_token_id": 2, "eoi_token_id": 3}
    config = DiffusionGemmaConfig(text_config=text | heads, vision_config=vision, canvas_length=8, **image)
    module = DiffusionGemmaForBlockDiffusion(config)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim > 1:  # with smaller weights no canvas would settle
                weight.normal_(0, 1.0 if "embed_tokens" in name else 0.1)
    module.generation_config.pad_token_id = packaged.facts.pad_token_id
    module.generation_config.confidence_threshold = 0.2
    module.generation_config.max_denoising_steps = 24
    module.save_pretrained(folder)
    packaged.tokenizer.save_pretrained(folder)


class Drafts:
    """A streamer that prints drafts of the open canvas, of every so many steps, and closed canvases after a bar."""

    def __init__(self, tokenizer: Any, every: int):
        self.tokenizer, self.every = tokenizer, every
        self.closed = 0
        self.step = 0

    def put(self, ids: torch.Tensor) -> None:
        self.closed += 1
        self.step = 0
        what = "prompt" if self.closed == 1 else f"canvas {self.closed - 1}"
        print(f"{what:>9} | {self.tokenizer.decode(ids[0])}")

    def put_draft(self, ids: torch.Tensor) -> None:
        self.step += 1
        if self.step % self.every == 0:
            print(f"step {self.step:4} . {self.tokenizer.decode(ids[0])}")

    def end(self) -> None:
        print()


def counts(out: paradec.Output) -> str:
    """Denoising and encoder calls apart."""
    return (
        f"{out.tokens[0]} tokens: {out.denoising_calls[0]} denoising calls, {out.encoder_calls[0]} encoder calls, "
        f"{out.tokens_per_denoising_call[0]:.2f} tokens per denoising call"
    )


def check(model: Any, ids: list[int], new: int, seed: int) -> None:
    """transformers' generate after torch.manual_seed(seed), beside paradec.generate with rng="reference"."""
    torch.manual_seed(seed)
    prompt = torch.tensor([ids], device=model.device)
    found = model.module.generate(prompt, max_new_tokens=new, eos_token_id=list(model.facts.eos_token_ids))
    theirs = found.sequences[:, len(ids) : len(ids) + new].cpu()
    out = paradec.generate(model, input_ids=[ids], max_new_tokens=new, rng="reference", seed=seed)
    # where a row ends before the last canvas, transformers leaves the others out
    ours = out.new_tokens[:, : theirs.shape[1]].cpu()
    print(f"the same tokens as transformers' generate: {torch.equal(ours, theirs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--model", default="google/diffusiongemma-26B-A4B-it", help="hub id or folder")
    parser.add_argument("--tiny", action="store_true", help="make a small random checkpoint instead")
    parser.add_argument(
        "--rule", default="threshold", help="a masked sampler that says what is kept (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=None, help="by default 256 (20 with --tiny)")
    parser.add_argument("--every", type=int, default=4, help="steps from one shown draft to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with transformers (done with --tiny)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        print("A random model: its answers are noise.")
        with tempfile.TemporaryDirectory() as folder:
            write_tiny(folder)
            model = paradec.load(folder)
        question, text, length = "Sort: pear fig apple", "kiwi <mask:2> pear", 20
    else:
        model = paradec.load(args.model, dtype=args.dtype, device=args.device)
        question, text, length = "Why is the sky blue?", "The cat <mask> on the <mask:2>, which was still warm.", 256
    question, length = args.prompt or question, args.max_new_tokens or length
    request: dict[str, Any] = {"max_new_tokens": length, "seed": args.seed}

    out = paradec.generate(model, question, streamer=Drafts(model.tokenizer, args.every), **request)
    print(counts(out))

    other = paradec.samplers.create("canvas", rule=args.rule)
    out = paradec.generate(model, question, sampler=other, **request)
    print(f"\n{args.rule}: {out.text}\n{counts(out)}")

    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    out = paradec.infill(model, turns, seed=args.seed)
    print(f"\n{text}\n{out.text}\n{counts(out)}")

    if args.tiny or args.check:
        check(model, model.tokenizer(question)["input_ids"], length, args.seed)


if __name__ == "__main__":
    main()
