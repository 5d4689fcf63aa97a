"""Chat with Dream, with its authors' settings (entropy, temperature 0.2, top_p 0.95), and stream the text.

python examples/dream_generate.py --device cuda "Write a haiku about rain."
python examples/dream_generate.py --tiny           # a small random model like Dream: its answer is noise
"""

from __future__ import annotations

import argparse

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, TextStreamer

import paradec


def untrained() -> paradec.models.adapter.Model:
    """Build a small random Qwen2 with the packaged tokenizer; bidirectional, with shifted logits, as Dream."""
    packaged = paradec.load()
    facts = packaged.facts
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=facts.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return paradec.wrap(
        Qwen2ForCausalLM(config),
        prediction="shifted",
        topology="bidirectional",
        mask_token_id=facts.mask_token_id,
        eos_token_id=facts.eos_token_ids,
        pad_token_id=facts.pad_token_id,
        tokenizer=packaged.tokenizer,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--model", default="Dream-org/Dream-v0-Instruct-7B", help="hub id or folder")
    parser.add_argument("--tiny", action="store_true", help="use a small random model instead of a checkpoint")
    parser.add_argument("--steps", type=int, default=None, help="forwards; by default as many as new tokens")
    parser.add_argument("--max-new-tokens", type=int, default=None, help="by default 256 (16 with --tiny)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        model, question, length = untrained(), "Sort: pear fig apple", 16
        print("An untrained model like Dream: its answer is noise.")
    else:
        model = paradec.load(args.model, dtype=args.dtype, device=args.device)
        question, length = "Write a haiku about rain.", 256
    length = args.max_new_tokens or length

    chat = [{"role": "user", "content": args.prompt or question}]
    out = paradec.generate(
        model,
        chat,
        sampler=paradec.samplers.create("entropy", alg_temp=0.0),
        steps=args.steps or length,
        max_new_tokens=length,
        temperature=0.2,
        top_p=0.95,
        seed=args.seed,
        streamer=TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    print(f"{out.tokens[0]} tokens, {out.nfe} forwards, {out.tokens_per_forward:.1f} tokens per forward")


if __name__ == "__main__":
    main()
