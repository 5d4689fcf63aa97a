"""Pictures from text with Anole or Lumina-mGPT (Chameleon's kin): one token per forward, then several.

python examples/chameleon_images.py --device cuda "a red fox in the snow" --vq vqgan.ckpt
python examples/chameleon_images.py --model Alpha-VLLM/Lumina-mGPT-7B-768 --vq vqgan.ckpt --device cuda
python examples/chameleon_images.py --tiny          # random weights of the same make: no download, no GPU, and noise
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import paradec
import paradec.api.images


def tiny() -> tuple[Any, dict[str, Any]]:
    """A model of random weights, and a request for it: prompts are ids, since there is no tokenizer."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    from paradec.models.images.chameleon import ChameleonLayout, ChameleonModel
    from paradec.models.images.vq import VQConfig, VQModel

    text: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    letters = "ABCDEFGHIJ"
    vocabulary = {"<image>": 3}
    vocabulary |= {"IMGIMG" + "".join(letters[int(digit)] for digit in str(code)) + "Z": 4 + code for code in range(32)}
    sizes = {
        "embed_dim": 4, "num_embeddings": 32, "latent_channels": 8, "resolution": 16, "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1,
    }  # fmt: skip
    module = ChameleonForConditionalGeneration(ChameleonConfig(**text, vq_config=sizes, vocabulary_map=vocabulary))
    vq = VQModel(
        VQConfig(codebook_size=32, codebook_embed_dim=4, l2_norm=False, channels=32, channel_mult=(1, 1, 1, 1))
    )
    # Lumina-mGPT's layout: rows end with a token, and sizes come before the picture
    layout = ChameleonLayout(start=40, end=41, side=4, row_end=42, end_of_text=2, first_size=50)
    return ChameleonModel(module, layout, vq.eval()), {"prompts": [[1, 45, 2, 40, 51, 52]], "height": 32, "width": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a red fox in the snow")
    parser.add_argument("--model", default="leloy/Anole-7b-v0.1-hf", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--vq", default="vqgan.ckpt", help="Chameleon's VQGAN (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use a small model of random weights")
    parser.add_argument("--sampler", default="sjd", help="what to compare with (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, help="a .png file for the pictures of both runs")
    args = parser.parse_args()

    if args.tiny:
        model, request = tiny()
    else:
        model = paradec.load(args.model, dtype=args.dtype, device=args.device, vq=args.vq)
        request = {"prompts": [args.prompt]}

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
