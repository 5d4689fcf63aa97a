"""transformers' own `generate` for DiffusionGemma, beside ours with the random numbers in its order.

    python benchmarks/peers/diffusion_gemma.py [--turns 5] [--rows 2] [--seed 0]

A small DiffusionGemma with random weights, rows of equal length, two canvases, the checkpoint's thresholds. Tokens are
compared: with `rng="reference"` ours are transformers'. `benchmarks/canvases.py` measures what both take where rows
differ in length and the random numbers are our own. Prints; nothing is written.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import torch
import transformers
from canvas_model import FIRST_TOKEN, PAD, small_module
from common import Contestant
from provenance import COMMIT

import paradec

BOUND, CONFIDENCE = 0.1, 0.005
LENGTH, CANVASES = 12, 2


def main() -> None:
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    module = small_module()
    vocab = module.config.text_config.vocab_size
    draw = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(FIRST_TOKEN, vocab, (args.rows, LENGTH), generator=draw)
    new = CANVASES * module.config.canvas_length
    model = paradec.wrap(module, eos_token_id=[], pad_token_id=PAD)
    sampler = paradec.samplers.create("diffusion_gemma", entropy_bound=BOUND, confidence_threshold=CONFIDENCE)

    def theirs() -> Any:
        torch.manual_seed(args.seed)
        return module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=BOUND),
            confidence_threshold=CONFIDENCE,
            eos_token_id=None,
            pad_token_id=PAD,
        ).sequences[:, LENGTH:]

    def ours() -> Any:
        return paradec.generate(
            model, ids, max_new_tokens=new, sampler=sampler, rng="reference", seed=args.seed
        ).new_tokens

    racing = [Contestant("transformers", theirs, transformers.__version__), Contestant("paradec", ours, COMMIT)]
    common.alternate(racing, args.turns)
    found = common.report(racing, ["transformers"], {"paradec": "transformers"})
    print(common.show("DiffusionGemma, small", found, ["transformers"]))
    print(found[-1]["compared_with"])


if __name__ == "__main__":
    main()
