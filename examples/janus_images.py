"""Pictures from text with Janus-Pro: one token per forward, then several, and compare.

python examples/janus_images.py --device cuda "a red fox in the snow"
python examples/janus_images.py --tiny          # random weights of the same make: no download, no GPU, and noise
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import paradec
import paradec.api.images


def tiny() -> tuple[Any, dict[str, Any]]:
    """A model of random weights, and a request for it: prompts are ids, since there is no tokenizer."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    from paradec.models.images.janus import JanusModel

    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
        "model_type": "llama",
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
        "num_image_tokens": 16, "projection_dim": 32, "mlp_ratio": 2.0,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": 32, "latent_channels": 16, "base_channels": 32, "num_res_blocks": 1,
        "channel_multiplier": [1, 1], "projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4,
    }  # fmt: skip
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=7)
    module = JanusForConditionalGeneration(config)
    module.generation_config.bos_token_id, module.generation_config.pad_token_id = 1, 0
    return JanusModel(module, boi_token_id=9), {"prompts": [[1, 20, 21, 9]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a red fox in the snow")
    parser.add_argument(
        "--model", default="deepseek-community/Janus-Pro-1B", help="hub id or folder (default: %(default)s)"
    )
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
        request = {"prompts": [f"<|User|>: {args.prompt}\n\n<|Assistant|>:"]}

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
