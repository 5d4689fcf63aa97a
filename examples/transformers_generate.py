"""Call transformers' own `model.generate`, and let paradec decode several tokens per forward.

    python examples/transformers_generate.py --model FOLDER --prediction same --mask-token-id 126336 --device cuda
    python examples/transformers_generate.py --tiny    # the small model inside the package: no download, no GPU

FOLDER contains weights that were trained for masked diffusion, in the format of a class of transformers (Llama, Qwen2,
Qwen3). `--prediction` says which token the logits at position i predict: i ("same", LLaDA) or i + 1 ("shifted", Dream).
"""

from __future__ import annotations

import argparse
import functools
import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import paradec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Reverse: pear fig apple kiwi")
    parser.add_argument("--model", help="a folder or hub id that transformers loads")
    parser.add_argument("--tiny", action="store_true", help="the packaged model, written in transformers' format")
    parser.add_argument("--prediction", choices=("same", "shifted"), default="same")
    parser.add_argument("--mask-token-id", type=int, default=None)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.model is None and not args.tiny:
        parser.error("give --model, or --tiny")

    with tempfile.TemporaryDirectory() as folder:
        if args.tiny:
            packaged = paradec.load()
            packaged.module.save_pretrained(folder)
            packaged.tokenizer.save_pretrained(folder)
            args.mask_token_id = packaged.facts.mask_token_id
        tokenizer = AutoTokenizer.from_pretrained(folder if args.tiny else args.model)
        model = AutoModelForCausalLM.from_pretrained(folder if args.tiny else args.model).to(args.device)

    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    for sampler in ("low_confidence", "threshold"):
        # transformers passes neither streamer nor tokenizer to custom methods, so bind them
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        decode = functools.partial(paradec.hf_generate, streamer=streamer, tokenizer=tokenizer)
        out = model.generate(
            **inputs.to(args.device),
            custom_generate=decode,
            prediction=args.prediction,
            mask_token_id=args.mask_token_id,
            sampler=sampler,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            return_dict_in_generate=True,
        )
        print(f"({sampler}: {out.nfe} forward{'s' * (out.nfe != 1)}, {out.tokens_per_forward:.1f} tokens per forward)")


if __name__ == "__main__":
    main()
