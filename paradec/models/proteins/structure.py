"""Backbones of proteins: coordinates of N, CA, C and O, and where they come from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.core.text_files import lines_of

LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
"""The residues in the order of ProteinMPNN's ids; X is an unknown one."""
ATOMS = ("N", "CA", "C", "O")
NAMES = dict(
    zip(
        "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split(), LETTERS, strict=False
    )
)
"""Letters by the names of residues in files."""
MODIFIED = ("MSE",)
"""Residues that files list among the ligands (HETATM). Like every other name of their kind they are an X."""


@dataclass(frozen=True, eq=False)
class Structure:
    """The backbone of one or more chains, `L` residues in all.

    Args:
        coordinates: [L, 4, 3] float: of N, CA, C and O, in angstrom; NaN where an atom is missing.
        sequence: L letters of `LETTERS`, the residues of the file ("-" for those that are not known reads as "X").
        chains: L labels, the chain of each residue.
        numbers: L residue numbers, as the file has them; a number may be repeated (insertion codes).
        name: what messages call it.

    Raises:
        ValueError, TypeError: parts that do not fit each other; the message names them.
    """

    coordinates: Tensor
    sequence: str
    chains: Sequence[str] | None = None
    numbers: Sequence[int] | None = None
    name: str = "structure"

    def __post_init__(self) -> None:
        if not isinstance(self.coordinates, Tensor) or not self.coordinates.is_floating_point():
            raise TypeError(
                f"coordinates of {self.name} must be a floating-point tensor, not {_kind(self.coordinates)}"
            )
        shape = tuple(self.coordinates.shape)
        if len(shape) != 3 or shape[0] < 1 or shape[1:] != (len(ATOMS), 3):
            raise ValueError(f"coordinates of {self.name} have shape {shape}; expected [residues, 4, 3], not empty")
        if self.coordinates.isinf().any():
            raise ValueError(f"coordinates of {self.name} are infinite; a missing atom is NaN")
        if not isinstance(self.sequence, str):
            raise TypeError(f"sequence of {self.name} must be a text, not {_kind(self.sequence)}")
        object.__setattr__(self, "sequence", self.sequence.upper().replace("-", "X"))
        object.__setattr__(self, "chains", tuple(self.chains) if self.chains is not None else ("A",) * shape[0])
        object.__setattr__(
            self, "numbers", tuple(self.numbers) if self.numbers is not None else tuple(range(1, shape[0] + 1))
        )
        for part in ("sequence", "chains", "numbers"):
            if len(getattr(self, part)) != shape[0]:
                raise ValueError(
                    f"{part} of {self.name} has {len(getattr(self, part))} entries; its coordinates have {shape[0]} "
                    "residues"
                )
        if wrong := sorted({*self.sequence} - {*LETTERS}):
            raise ValueError(f"sequence of {self.name} holds {', '.join(wrong)}; allowed are {LETTERS}")

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def complete(self) -> Tensor:
        """[L] bool: residues with all four atoms."""
        return self.coordinates.isfinite().flatten(1).all(1)

    @property
    def index(self) -> list[int]:
        """L numbers for the distance along the chain. A repeated number moves all that follow on by one."""
        found: list[int] = []
        repeated, before = 0, None
        for number in self.numbers or ():
            repeated += number == before
            found.append(number + repeated)
            before = number
        return found

    def by_chain(self, text: str) -> dict[str, str]:
        """The parts of a text of L letters, by chain.

        Raises:
            ValueError: a text of another length.
        """
        if len(text) != len(self):
            raise ValueError(f"text has {len(text)} letters; {self.name} has {len(self)} residues")
        found: dict[str, str] = {}
        for chain, letter in zip(self.chains or (), text, strict=True):
            found[chain] = found.get(chain, "") + letter
        return found


def read_pdb(source: str | os.PathLike[str], chains: Iterable[str] | None = None) -> Structure:
    """Read the backbone out of a file in PDB format (wwPDB, format 3.3, ATOM records).

    Of several models the first is taken, of alternative locations the first of each atom. Atoms of occupancy 0 count as
    missing. A residue without a CA is left out; one without another of the four atoms is kept, with what it has. Names
    beyond the twenty amino acids read as X; of HETATM records those of selenomethionine are read.

    Args:
        source: the file.
        chains: labels of the chains to read, in the file's order; None reads all.

    Raises:
        ValueError: a line that is cut off, no such chain, or nothing to read. OSError: no such file.
    """
    wanted = None if chains is None else {*chains}
    path = Path(source)
    residues: dict[tuple[str, str], dict[str, list[float]]] = {}
    letters: dict[tuple[str, str], str] = {}
    for line_number, line in lines_of(path.read_bytes().decode("utf-8-sig", "replace")):
        record, chain = line[:6].strip(), line[21:22]
        if record == "ENDMDL":
            break
        if record not in ("ATOM", "HETATM") or wanted is not None and chain not in wanted:
            continue
        atom, residue = line[12:16].strip(), line[17:20].strip()
        if atom not in ATOMS or record == "HETATM" and residue not in MODIFIED:
            continue
        place = (chain, line[22:27])
        try:
            number = [float(line[first : first + 8]) for first in (30, 38, 46)]
            int(line[22:26])
            occupied = float(line[54:60].strip() or 1) > 0
        except ValueError:
            raise ValueError(f"line {line_number} of {path.name} is no ATOM record of the PDB format") from None
        atoms = residues.setdefault(place, {})
        letters.setdefault(place, NAMES.get(residue, "X"))
        if occupied:
            atoms.setdefault(atom, number)
    places = [place for place, atoms in residues.items() if "CA" in atoms]
    if wanted is not None and (absent := sorted(wanted - {chain for chain, _ in places})):
        raise ValueError(f"chains={shown(absent)} are not in {path.name}")
    if not places:
        raise ValueError(f"{path.name} has no residues with a CA atom")
    missing = [float("nan")] * 3
    return Structure(
        torch.tensor([[residues[place].get(atom, missing) for atom in ATOMS] for place in places], dtype=torch.float64),
        "".join(letters[place] for place in places),
        [chain for chain, _ in places],
        [int(number[:4]) for _, number in places],
        path.stem,
    )


def _kind(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__
