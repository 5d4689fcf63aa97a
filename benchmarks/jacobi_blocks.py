"""Jacobi decoding in blocks, and its early exit: forwards, and how much of token-by-token decoding is kept.

    python benchmarks/jacobi_blocks.py [--images 100]

Pictures of the packaged "digits-ar", every setting with the same noise: the lossless ones make the same codes. "again"
is the early exit that the library does not have: it commits the block as the last iteration leaves it and evaluates it
once more, so that keys and values are those of the committed tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from digit_quality import load_classifier
from torch import Tensor

import paradec
from paradec.core.protocol import Commit, Proposal
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.verification import Verified
from paradec.samplers.causal.window import Jacobi


@dataclass(frozen=True)
class Again(Jacobi):
    """Feeds the block that an early exit leaves once more, and commits it then."""

    def _over(self, state: CausalState, proposal: Proposal) -> Tensor:
        return state.memory.read(proposal.rows)["iteration"].unsqueeze(1) >= self._limit

    def _final(self, state: CausalState, proposal: Proposal, found: Verified) -> Tensor:
        whole = proposal.available.sum(1, keepdim=True)
        return torch.where((found.accepted + 1 == whole) | self._over(state, proposal), whole, 0)

    def commit(self, state: CausalState, proposal: Proposal) -> Commit:
        fed = torch.nn.functional.pad(proposal.available[:, 1:], (0, 1)) & self._over(state, proposal)
        drafts = state.memory.read(proposal.rows)["drafts"]
        proposal.values = torch.where(fed, drafts, proposal.values)
        return super().commit(state, proposal)


def settings(group: int) -> dict[str, Jacobi]:
    """By label."""
    found: dict[str, Jacobi] = {f"window {group}": Jacobi(window=group), f"group {group}": Jacobi(group=group)}
    for limit in (limit for limit in (2, 4, 8, 22) if limit < group):
        label = f"group {group}, at most {limit}"
        found[f"{label}: prefix"] = Jacobi(group=group, max_iterations=limit)
        found[f"{label}: published"] = Jacobi(group=group, max_iterations=limit, early_exit="published")
        found[f"{label}: again"] = Again(group=group, max_iterations=limit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, classifier = paradec.load("digits-ar"), load_classifier()
    labels = [index % 10 for index in range(options.images)]

    def made(sampler: Jacobi, temperature: float) -> Any:
        given = {"class_labels": labels, "seed": 0, "output_type": "pt", "temperature": temperature}
        return paradec.generate_images(model, sampler=sampler, **given)

    for temperature in (0.0, 1.0):
        print(f"\n| temperature {temperature:g} | forwards | codes as token by token, % | right class, % |")
        print("|---|---|---|---|")
        plain = made(Jacobi(window=1), temperature)
        for label, sampler in {"token by token": Jacobi(window=1), **settings(16), **settings(36)}.items():
            out = made(sampler, temperature)
            with torch.inference_mode():
                seen = classifier.output(classifier.features(out.images)).argmax(-1)
            same = 100 * float((out.codes == plain.codes).double().mean())
            right = 100 * float((seen == torch.tensor(labels)).double().mean())
            print(f"| {label} | {np.mean(out.row_nfe):.1f} | {same:.1f} | {right:.0f} |", flush=True)


if __name__ == "__main__":
    main()
