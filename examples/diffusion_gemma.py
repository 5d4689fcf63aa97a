"""DiffusionGemma denoises canvases of random tokens: answer, try another rule, fill holes.

    python examples/diffusion_gemma.py --device cuda "Why is the sky blue?"
    python examples/diffusion_gemma.py --tiny          # a small random checkpoint: its answers are noise

With --tiny, the answer of transformers' own `generate` with the same random numbers is compared.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch

import paradec


def write_tiny(folder: str) -> None:
    """Write a random checkpoint in the published format, with the packaged model's tokenizer and canvases of 8."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    packaged = paradec.load()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text = {
        "vocab_size": packaged.facts.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "global_head_dim": 16,
        "num_global_key_value_heads": 1, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    }  # fmt: skip
    ids = {"image_token_id": 1, "boi_token_id": 2, "eoi_token_id": 3}
    config = DiffusionGemmaConfig(text_config=text | heads, canvas_length=8, **ids)
    module = DiffusionGemmaForBlockDiffusion(config)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim > 1:  # with smaller weights no canvas would become stable
                weight.normal_(0, 1.0 if "embed_tokens" in name else 0.1)
    module.generation_config.pad_token_id = packaged.facts.pad_token_id
    module.generation_config.confidence_threshold = 0.2
    module.generation_config.max_denoising_steps = 24
    module.save_pretrained(folder)
    packaged.tokenizer.save_pretrained(folder)


def describe_cost(out: paradec.Output) -> str:
    return f"{out.tokens[0]} tokens: {out.denoising_calls[0]} denoising calls, {out.encoder_calls[0]} encoder calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--model", default="google/diffusiongemma-26B-A4B-it", help="hub id or folder")
    parser.add_argument("--tiny", action="store_true", help="make a small random checkpoint instead")
    parser.add_argument("--rule", default="threshold", help="a masked sampler that chooses tokens")
    parser.add_argument("--max-new-tokens", type=int, default=None, help="by default 256 (20 with --tiny)")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            write_tiny(folder)
            model = paradec.load(folder)
        question, text, length = "Sort: pear fig apple", "kiwi <mask:2> pear", 20
    else:
        model = paradec.load(args.model, dtype="bfloat16", device=args.device)
        question, text, length = "Why is the sky blue?", "The cat <mask> on the <mask:2>, which was still warm.", 256
    question, length = args.prompt or question, args.max_new_tokens or length
    request: dict[str, Any] = {"max_new_tokens": length, "seed": 0}

    out = paradec.generate(model, question, **request)
    print(f"{out.text}\n{describe_cost(out)}")
    rule = paradec.samplers.create("canvas", rule=args.rule)
    out = paradec.generate(model, question, sampler=rule, **request)
    print(f"\n{args.rule}: {out.text}\n{describe_cost(out)}")

    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    out = paradec.infill(model, turns)
    print(f"\n{text}\n{out.text}\n{describe_cost(out)}")

    if args.tiny:
        ids = torch.tensor([model.tokenizer(question)["input_ids"]])
        torch.manual_seed(0)
        output = model.module.generate(ids, max_new_tokens=length, eos_token_id=list(model.facts.eos_token_ids))
        expected = output.sequences[:, ids.shape[1] : ids.shape[1] + length]
        out = paradec.generate(model, input_ids=ids.tolist(), max_new_tokens=length, rng="reference", seed=0)
        # transformers' `generate` returns no canvases after a row's end
        print(f"the same tokens as generate()'s: {torch.equal(out.new_tokens[:, : expected.shape[1]], expected)}")


if __name__ == "__main__":
    main()
