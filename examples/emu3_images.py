"""Pictures from text with Emu3: one token per forward, then several, and compare.

python examples/emu3_images.py --device cuda "a portrait of a young girl, film grained"
python examples/emu3_images.py --tiny          # random weights of the same make: no download, no GPU, and noise
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import paradec
import paradec.api.images


def tiny() -> tuple[Any, dict[str, Any]]:
    """A model of random weights, and a request for it: prompts are ids, since there is no tokenizer."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    from paradec.models.images.emu3 import Emu3Model

    vocabulary = {"<|extra_200|>": 5, "<image>": 6, "<|extra_201|>": 7, "<|image end|>": 8}
    vocabulary |= {f"<|visual token {code:06d}|>": 20 + code for code in range(32)}
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    vq = {
        "codebook_size": 32, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32,
        "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [],
        "temporal_downsample_factor": 1,
    }  # fmt: skip
    module = Emu3ForConditionalGeneration(Emu3Config(text_config=text, vq_config=vq, vocabulary_map=vocabulary))
    return Emu3Model(module), {"prompts": [[1, 12, 9]], "negative_prompt": [[1, 9]], "height": 40, "width": 40}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a portrait of a young girl, film grained")
    parser.add_argument("--model", default="BAAI/Emu3-Gen-hf", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use a small model of random weights")
    parser.add_argument("--sampler", default="sjd", help="what to compare with (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, help="a .png file for the pictures of both runs")
    args = parser.parse_args()

    if args.tiny:
        model, request = tiny()
    else:
        model = paradec.load(args.model, dtype=args.dtype, device=args.device)
        request = {
            "prompts": [f"{args.prompt}. masterpiece, film grained, best quality."],
            "negative_prompt": "lowres, bad anatomy, bad hands, text, error, cropped, worst quality, blurry.",
        }

    pictures = []
    one_by_one = paradec.samplers.create("sjd", window=1)
    for label, sampler in (("one token per forward", one_by_one), (args.sampler, args.sampler)):
        out = paradec.generate_images(model, **request, sampler=sampler, seed=0)
        print(f"{label}: {out.nfe} forwards, {out.tokens_per_forward:.2f} tokens per forward, {out.seconds:.1f} s")
        pictures += out.images
    if args.out is not None:
        paradec.api.images.contact_sheet(pictures, columns=len(pictures) // 2).save(args.out)


if __name__ == "__main__":
    main()
