"""Protein design in a fixed order of residues, with one residue per call."""

from typing import Any

import torch
from torch import Tensor

from paradec.core import rng
from paradec.models.proteins.mpnn import MASK_ID, ProteinMPNNModel
from paradec.models.proteins.structure import LETTERS
from paradec.request import Request
from paradec.samplers.causal.state import NOISE_STREAM
from paradec.samplers.distributions import token_distribution


def conditional(model: ProteinMPNNModel, row: list[int], decided: list[int], place: int) -> Tensor:
    """Return logits [vocabulary] of the residue with index `place`, given the residues `decided` in this order."""
    structure, letters = row[0] - len(LETTERS) - 1, torch.tensor(row[1:])
    rank = torch.full_like(letters, len(row))
    rank[decided] = torch.arange(len(decided))
    logits = model.module(model.encodings[structure], letters.where(letters != MASK_ID, 0)[None], rank[None])[0, place]
    return torch.nn.functional.pad(logits[:20], (0, model.facts.vocab_size - 20), value=-torch.inf)


def sequential(model: Any, row: list[int], order: list[int], key: Tensor, request: Request) -> tuple[list[int], float]:
    """Sample one residue per call, with paradec's random numbers; return the row and the samples' log-probability."""
    row, total = list(row), 0.0
    decided = [place for place, token in enumerate(row[1:]) if token != MASK_ID]
    for place in (place for place in order if row[1 + place] == MASK_ID):
        logits = conditional(model, row, decided, place)
        logits[list(request.suppress_tokens)] = -torch.inf
        drawn = rng.uniform(key[None], torch.tensor([0]), torch.tensor([[place + 1]]), len(logits), NOISE_STREAM)
        best = token_distribution(logits, request).log() + rng.gumbel(drawn)[0, 0]
        row[1 + place] = int((logits if request.temperature == 0 else best).argmax())
        total += float(logits.log_softmax(-1)[row[1 + place]])
        decided.append(place)
    return row, total
