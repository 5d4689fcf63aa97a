"""paradec's `sjd` compared with SJD's public code: whole images of a random LlamaGen, in turns.

    python benchmarks/peers/sjd.py --python ENVIRONMENT/bin/python --sjd CHECKOUT [--turns 7]

The public code needs an older transformers: `--python` is an interpreter with torch, transformers 4.46.3 and
safetensors, in which it runs in a separate process with the same weights. Each program has one thread; times are CPU
times. Window (16), random guesses and guidance are those of the public script for LlamaGen. With top_k=1 both programs
must return the codes of greedy decoding, which are compared. With top_k=1000 they draw different random numbers, so the
numbers of forwards differ. These are in the result, and only the time per forward is comparable.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import common
import torch
from common import Contestant, Elsewhere
from provenance import write_result
from safetensors.torch import save_file

import paradec
from paradec.models.images.llamagen import LlamaGen, LlamaGenConfig, LlamaGenModel

RESULT = common.BENCHMARKS / "results" / "peers_sjd.json"
PATCHED = "its timing by CUDA events is disabled, and absl's logging is replaced by Python's"
SIZES = {
    # dim, layers, heads, codes, grid
    "tiny": (64, 2, 2, 512, 8),
    "small": (384, 6, 6, 16_384, 16),
}
LABEL, GUIDANCE, WINDOW = 207, 7.5, 16


def random_model(size: str) -> LlamaGenModel:
    """Build a random LlamaGen. Its weights are scaled so that some drafts are accepted."""
    dim, layers, heads, codes, grid = SIZES[size]
    torch.manual_seed(0)
    module = LlamaGen(LlamaGenConfig(dim=dim, n_layer=layers, n_head=heads, vocab_size=codes, grid=grid))
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    return LlamaGenModel(module)


def paradec_run(model: LlamaGenModel, top_k: int) -> Any:
    """Build a function that returns the codes of one image and the number of forwards: [1, cells + 1]."""
    sampler = paradec.samplers.create("sjd", window=WINDOW, guess_distribution="one_hot")
    request: dict[str, Any] = {"sampler": sampler, "top_k": top_k, "guidance_scale": GUIDANCE, "temperature": 1.0}

    def run() -> torch.Tensor:
        out = paradec.generate_images(model, class_labels=LABEL, seed=0, output_type="latent", **request)
        return torch.cat((out.codes.view(1, -1), torch.tensor([[out.nfe]])), 1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sjd", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--python", required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = random_model(args.size)
    config = model.module.config
    result: dict[str, Any] = {
        **common.machine(), "model": dataclasses.asdict(config), "window": WINDOW, "guidance": GUIDANCE,
        "turns": args.turns, "patched": PATCHED, "cases": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as away:
        weights = Path(away) / "weights.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in model.module.state_dict().items()}, weights)
        sizes = {
            "dim": config.dim, "n_layer": config.n_layer, "n_head": config.n_head, "vocab_size": config.vocab_size,
            "block_size": config.grid**2, "cls_token_num": 1, "model_type": "c2i",
        }  # fmt: skip
        for top_k in (1, 1000):
            task = {
                "weights": str(weights), "sizes": sizes, "window": WINDOW, "guidance": GUIDANCE, "label": LABEL,
                "top_k": top_k, "dtype": "float32", "version": common.checkout_commit(args.sjd),
            }  # fmt: skip
            (Path(away) / "task.json").write_text(json.dumps(task))
            script = Path(__file__).with_name("sjd_reference.py")
            paradec_entry = Contestant("paradec", paradec_run(model, top_k))
            with Elsewhere("sjd", args.python, script, str(args.sjd), f"{away}/task.json") as peer:
                common.alternate([paradec_entry, peer], args.turns, warm_up=1)
            contestants = [paradec_entry, peer]
            for contestant in contestants:  # split the last turn's result into codes and number of forwards
                contestant.facts["forwards"] = int(contestant.result[0, -1])
                contestant.result = contestant.result[:, :-1]
            entries = common.report(contestants, ("sjd",), {"paradec": "sjd"} if top_k == 1 else {})
            name = f"top_k={top_k}"
            result["cases"][name] = {"contestants": entries}
            print(common.show(name, entries, ("sjd",)), [entry["forwards"] for entry in entries], flush=True)
    write_result(args.out, result)


if __name__ == "__main__":
    main()
