"""A custom sampler, which is one pure function, compared with a sampler of the library.

    python examples/own_sampler.py --device cuda --model GSAI-ML/LLaDA-8B-Instruct --prompts mine.jsonl
    python examples/own_sampler.py --tiny              # the small model inside the package: no download, no GPU

A line of mine.jsonl is {"prompt": ..., "answer": ...}. docs/write_a_sampler.md describes more that a sampler can do.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

import paradec
from paradec.core.checks import check_number
from paradec.samplers.masked import MaskedSampler, View
from paradec.tools import evaluation


@dataclass(frozen=True)
class LargestGap(MaskedSampler):
    """Sort the block's confidences and commit all positions above the largest gap between two of them.

    Args:
        floor: minimum confidence, in [0, 1], of committed positions, except the best one.
    """

    floor: float = 0.5

    name = "largest_gap"
    summary = "all above the largest gap among the sorted confidences"

    def __post_init__(self) -> None:
        check_number("floor", self.floor, low=0, high=1)

    def select(self, view: View) -> torch.Tensor:
        # scores [R, W]: confidences, -inf where nothing may be committed
        ordered = view.scores.clamp(min=0).sort(dim=1, descending=True).values
        following = torch.nn.functional.pad(ordered[:, 1:], (0, 1))  # after the last one a confidence of 0
        last = (ordered - following).argmax(1, keepdim=True)
        least = ordered.gather(1, last).clamp(min=self.floor)
        best = view.scores.argmax(1, keepdim=True)  # every step makes at least one token final
        return (view.scores >= least).scatter(1, best, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="hub id or folder; by default the packaged model")
    parser.add_argument("--prompts", type=Path, help="a .jsonl file; by default the packaged tasks")
    parser.add_argument("--tiny", action="store_true", help="the packaged model, on a few of its prompts")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    paradec.samplers.register("largest_gap", LargestGap)  # makes it available by name
    model = paradec.load(None if args.tiny else args.model, dtype=args.dtype, device=args.device)
    if args.prompts is not None:
        questions = evaluation.read_questions(args.prompts, None, None)
    else:
        questions = evaluation.packaged_questions(["sort", "shuffle"], 4 if args.tiny else None)
    if args.model is None or args.tiny:
        print(paradec.generate(model, "Sort: pear fig apple", sampler="largest_gap", cache="dual").text)
    for result in evaluation.compare(model, questions=questions, names=["largest_gap", "low_confidence"]).results:
        right, total = result.right()
        print(f"{result.configuration.name:<26} {right} of {total} right, {result.nfe:.1f} forwards per prompt")


if __name__ == "__main__":
    main()
