"""Protein backbones: coordinates of N, CA, C and O, atoms around them, and their files."""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paradec.core.checks import check_int, short_repr, unknown_name
from paradec.core.text_files import number_lines

LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
"""Letters of residues in the order of ProteinMPNN's ids; X is an unknown residue."""
ATOMS = ("N", "CA", "C", "O")
RESIDUES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
NAMES = dict(zip(RESIDUES.split(), LETTERS, strict=False))
MODIFIED = ("ASX", "CSO", "GLX", "HIP", "HSD", "HSE", "HSP", "MSE", "PTR", "SEC", "SEP", "TPO", "XAA", "XLE")
"""Modified residues, which files list among the ligands (HETATM). They read as X."""
WATER = ("HOH", "DOD", "WAT", "H2O", "OH2", "TIP", "TIP2", "TIP3", "TIP4")
ELEMENTS = (
    *"H HE LI BE B C N O F NE NA MG AL SI P S CL AR K CA SC TI V CR MN FE CO NI CU ZN GA GE AS SE BR KR".split(),
    *"RB SR Y ZR NB MO TC RU RH PD AG CD IN SN SB TE I XE CS BA LA CE PR ND PM SM EU GD TB DY HO ER TM YB LU".split(),
    *"HF TA W RE OS IR PT AU HG TL PB BI PO AT RN FR RA AC TH PA U NP PU AM CM BK CF ES FM MD NO LR".split(),
    *"RF DB SG BH HS MT DS RG CN NH FL MC LV TS OG".split(),
)
"""Symbols of the elements by their numbers, from 1."""
NAMED_RESIDUES = re.compile(r"(?:(\w+):|([^\d-]?))(-?\d+)([A-Za-z]?)(?:-(?:\1:|\2)?(-?\d+)([A-Za-z]?))?")
"""A residue (chain, number, insertion code) or a range of residues. A colon ends a chain of several letters."""
LAST_CODE = "~"
"""A code that sorts after all insertion codes, so that a range contains all residues with its last number."""
MEMBRANE = {0: "none of the others", 1: "interface", 2: "buried"}
"""Residue labels for membrane models. The model with one label per protein takes 0 (soluble) or 1 (transmembrane)."""


@dataclass(frozen=True, eq=False)
class Structure:
    """The backbone of one or more chains, `L` residues in all.

    Args:
        coordinates: [L, 4, 3] float: of N, CA, C and O, in angstrom; NaN where an atom is missing.
        sequence: L letters of `LETTERS` ("-" reads as "X").
        chains, numbers, insertions: L labels, residue numbers and insertion codes ("" for none), as in the file.
        atoms: [A, 3] float, in angstrom: atoms of ligands, metals and nucleic acids, which LigandMPNN reads.
        elements: the atoms' A symbols, of `ELEMENTS`.
        membrane: L labels for membrane models: 2 is buried in the membrane, 1 at its interface, 0 neither; for the
            model with one label, 1 (transmembrane) or 0 for all. An integer is the label of all residues.

    Raises:
        ValueError, TypeError: fields that are wrong or do not fit each other; the message names them."""

    coordinates: Tensor
    sequence: str
    chains: Sequence[str] | None = None
    numbers: Sequence[int] | None = None
    name: str = "structure"
    atoms: Tensor | None = None
    elements: Sequence[str] = ()
    membrane: Sequence[int] | int | None = None
    insertions: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.coordinates, Tensor) or not self.coordinates.is_floating_point():
            raise TypeError(f"coordinates of {self.name} must be floating-point, not {_type_name(self.coordinates)}")
        shape = tuple(self.coordinates.shape)
        if len(shape) != 3 or shape[0] < 1 or shape[1:] != (len(ATOMS), 3):
            raise ValueError(f"coordinates of {self.name} have shape {shape}; expected [residues, 4, 3], not empty")
        if self.coordinates.isinf().any():
            raise ValueError(f"coordinates of {self.name} are infinite; a missing atom is NaN")
        if not isinstance(self.sequence, str):
            raise TypeError(f"sequence of {self.name} must be a text, not {_type_name(self.sequence)}")
        object.__setattr__(self, "sequence", self.sequence.upper().replace("-", "X"))
        object.__setattr__(self, "chains", tuple(self.chains) if self.chains is not None else ("A",) * shape[0])
        object.__setattr__(
            self, "numbers", tuple(self.numbers) if self.numbers is not None else tuple(range(1, shape[0] + 1))
        )
        insertions = ("",) * shape[0] if self.insertions is None else tuple(self.insertions)
        object.__setattr__(self, "insertions", insertions)
        for name in ("sequence", "chains", "numbers", "insertions"):
            if len(getattr(self, name)) != shape[0]:
                raise ValueError(
                    f"{name} of {self.name} has {len(getattr(self, name))} entries; its coordinates have {shape[0]} "
                    "residues"
                )
        if invalid := sorted({*self.sequence} - {*LETTERS}):
            raise ValueError(f"sequence of {self.name} holds {', '.join(invalid)}; allowed are {LETTERS}")
        self._check_atoms()
        if self.membrane is not None:
            labels = (self.membrane,) * len(self) if isinstance(self.membrane, int) else tuple(self.membrane)
            if len(labels) != len(self):
                raise ValueError(f"membrane of {self.name} has {len(labels)} entries; it has {len(self)} residues")
            for label in labels:
                check_int("membrane", label, low=min(MEMBRANE), high=max(MEMBRANE))
            object.__setattr__(self, "membrane", labels)

    def _check_atoms(self) -> None:
        atoms = torch.zeros(0, 3, dtype=self.coordinates.dtype) if self.atoms is None else self.atoms
        if not isinstance(atoms, Tensor) or not atoms.is_floating_point():
            raise TypeError(f"atoms of {self.name} must be a floating-point tensor, not {_type_name(atoms)}")
        elements = tuple(str(element).upper() for element in self.elements)
        if tuple(atoms.shape) != (len(elements), 3):
            raise ValueError(
                f"atoms of {self.name} have shape {tuple(atoms.shape)}; expected [{len(elements)}, 3], a row for each "
                "element"
            )
        if not atoms.isfinite().all():
            raise ValueError(f"atoms of {self.name} hold NaN or infinite coordinates; leave such atoms out")
        if invalid := sorted({*elements} - {*ELEMENTS}):
            raise ValueError(f"elements of {self.name} hold {short_repr(invalid)}; allowed are the symbols of elements")
        object.__setattr__(self, "atoms", atoms)
        object.__setattr__(self, "elements", elements)

    def __repr__(self) -> str:
        chains, atoms = ", ".join(dict.fromkeys(self.chains or ())), len(self.elements)
        return f"Structure({self.name!r}: {len(self)} residues, chains {chains}, {atoms} other atoms)"

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def complete(self) -> Tensor:
        """[L] bool: residues with all four atoms."""
        return self.coordinates.isfinite().flatten(1).all(1)

    @property
    def index(self) -> list[int]:
        """L positions along the chain: the residue numbers, but a repeated number shifts all later numbers by one."""
        indices: list[int] = []
        num_repeated, previous = 0, None
        for number in self.numbers or ():
            num_repeated += number == previous
            indices.append(number + num_repeated)
            previous = number
        return indices

    def find_residues(self, names: str | Iterable[str | int], argument: str = "names") -> list[int]:
        """Return the indices, from 0, of residues with these names: `find_residues("H100A, H95-H102")`.

        names: chain, number and insertion code as in the file, or ranges of these ("A20-24"; "AA:12" for a chain of
            several letters), in a text with commas or a list. Integers are indices.
        argument: the argument's name in errors.
        Raises ValueError for an invalid name, or a residue that does not exist."""
        indices: list[int] = []
        labels = list(zip(self.chains or (), self.numbers or (), self.insertions or (), strict=True))
        chains = {chain for chain, *_ in labels}
        parts = names.split(",") if isinstance(names, str) and names else names
        for part in parts:
            if not isinstance(part, str):
                check_int(argument, part, low=0, high=len(self) - 1)
                indices.append(part)
                continue
            match = NAMED_RESIDUES.fullmatch(part.strip())
            if match is None:
                raise ValueError(f"{argument} {part!r} must be a chain and a number, like A12, H100A, A20-24 or AA:12")
            chain, first = match[1] or match[2], (int(match[3]), match[4].upper())
            last = first if match[5] is None else (int(match[5]), match[6].upper() or LAST_CODE)
            if not chain and len(chains) > 1:
                raise ValueError(f"{argument} {part!r} needs a chain: {self.name} has {', '.join(sorted(chains))}")
            if first > last:
                raise ValueError(f"{argument} {part!r} is a reversed range; write the lower number first")
            matches = [
                i for i, (name, *number) in enumerate(labels) if chain in ("", name) and first <= tuple(number) <= last
            ]
            if not matches:
                raise ValueError(f"{argument} {part!r}: {self.name} has no such residue")
            indices += matches
        return indices

    def select_chains(self, chains: Iterable[str] | None) -> list[str]:
        """List `chains`; None lists all. Raises ValueError for an unknown chain."""
        labels = dict.fromkeys(self.chains or ())
        selected = [*labels] if chains is None else list(chains)
        for chain in selected:
            if chain not in labels:
                raise ValueError(unknown_name("chain", chain, labels))
        return selected

    def copies(self, chains: Iterable[str] | None = None) -> list[list[int]]:
        """List the ties of a homo-oligomer, for `DesignRules`: groups of residue indices, from 0, with the same residue
        number in at least two of `chains` (None: of all chains). Raises ValueError for an unknown chain or no tie."""
        selected = self.select_chains(chains)
        groups: dict[tuple[int, int], list[int]] = {}
        occurrences: dict[tuple[str, int], int] = {}
        for residue, key in enumerate(zip(self.chains or (), self.numbers or (), strict=True)):
            occurrences[key] = occurrences.get(key, 0) + 1
            if key[0] in selected:
                groups.setdefault((key[1], occurrences[key]), []).append(residue)
        ties = [tie for tie in groups.values() if len(tie) > 1]
        if not ties:
            raise ValueError(f"chains {', '.join(selected)} of {self.name} have no common residue number; list ties")
        return ties

    def by_chain(self, text: str) -> dict[str, str]:
        """Split a text of L letters by chain. Raises ValueError for another length."""
        if len(text) != len(self):
            hint = "for a model with ties, model.letters(out.sequences) returns all letters"
            raise ValueError(f"text has {len(text)} letters; {self.name} has {len(self)} residues ({hint})")
        texts: dict[str, str] = {}
        for chain, letter in zip(self.chains or (), text, strict=True):
            texts[chain] = texts.get(chain, "") + letter
        return texts


class _Atom(NamedTuple):
    """One atom of a file. `number` is the text of an integer for residues of proteins, any text for other molecules."""

    is_residue: bool
    chain: str
    number: str
    insertion: str
    residue: str
    name: str
    element: str
    xyz: list[float]
    occupancy: float


def read_structure(source: str | os.PathLike[str], chains: Iterable[str] | None = None) -> Structure:
    """Read a backbone and its ligands from a file in PDB format (wwPDB, format 3.3), or in mmCIF format if its name
    ends in `.cif` or `.mmcif` (needs the package gemmi). Files whose names end in `.gz` are unpacked.

    The first of several models is read, and the first of an atom's alternative locations. Atoms of occupancy 0 count as
    missing. Residues are ATOM records with a CA, and modified residues among the HETATM records (`MODIFIED`); their
    other three atoms may be missing. Residues with unknown names read as X. Other molecules (ligands, metals, nucleic
    acids) become `Structure.atoms`, without water and hydrogen. If no element is stated, the atom's name implies it.
    Unknown elements are left out. Chains and residues of mmCIF files get the author's names, as in PDB files.

    Args:
        chains: labels of the chains to read, in the file's order; None reads all.

    Raises:
        ValueError: a line that is cut off, an unknown chain, or a file without residues. OSError: a missing file.
        ImportError: an mmCIF file without gemmi."""
    selected = None if chains is None else {*chains}
    path = Path(source)
    is_packed = path.name.lower().endswith(".gz")
    name = path.name[: -len(".gz")] if is_packed else path.name
    data = path.read_bytes()
    if is_packed:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path.name} is not a gzip file, or is cut off: {error}") from None
    read = _read_mmcif if name.lower().endswith((".cif", ".mmcif")) else _read_pdb
    # residue or other molecule -> name of an atom -> position and element
    groups: dict[tuple[str, str, str, str], dict[str, tuple[list[float], str]]] = {}
    letters: dict[tuple[str, str, str, str], str] = {}
    protein_keys = set[tuple[str, str, str, str]]()
    for atom in read(path.name, data.decode("utf-8-sig", "replace")):
        if selected is not None and atom.chain not in selected or atom.residue in WATER:
            continue
        if not all(map(math.isfinite, atom.xyz)):
            raise ValueError(f"an atom of residue {atom.chain}{atom.number} of {path.name} has no finite coordinates")
        symbols = "".join(letter for letter in atom.name[:2] if letter.isalpha()).upper()
        element = atom.element or (symbols if symbols in ELEMENTS else symbols[:1])  # implied by the name
        atom_name = f"{atom.name.strip()} of calcium" if element == "CA" else atom.name.strip()  # no C-alpha
        is_residue = atom.is_residue or atom.residue in MODIFIED
        key = (atom.chain, atom.number, atom.insertion, "" if is_residue else atom.residue)
        letters.setdefault(key, NAMES.get(atom.residue, "X"))
        if is_residue and atom_name == "CA":
            protein_keys.add(key)  # not a ligand, even if the CA counts as missing
        if atom.occupancy > 0:
            groups.setdefault(key, {}).setdefault(atom_name, (atom.xyz, element))
    residue_keys = [key for key, atoms in groups.items() if key in protein_keys and "CA" in atoms]
    if selected is not None and (missing_chains := sorted(selected - {key[0] for key in residue_keys})):
        raise ValueError(f"chains={short_repr(missing_chains)} are not in {path.name}")
    if not residue_keys:
        raise ValueError(f"{path.name} is not a structure: it has no residues with a CA atom")
    missing_xyz = [float("nan")] * 3
    allowed_elements = {*ELEMENTS} - {"H"}
    ligand_atoms = [atom for key, atoms in groups.items() if key not in protein_keys for atom in atoms.values()]
    ligand_atoms = [(xyz, element) for xyz, element in ligand_atoms if element in allowed_elements]
    coordinates = [[groups[key].get(atom, (missing_xyz, ""))[0] for atom in ATOMS] for key in residue_keys]
    return Structure(
        torch.tensor(coordinates, dtype=torch.float64),
        "".join(letters[key] for key in residue_keys),
        [chain for chain, *_ in residue_keys],
        [int(number) for _, number, *_ in residue_keys],
        Path(name).stem,
        torch.tensor([xyz for xyz, _ in ligand_atoms], dtype=torch.float64).reshape(-1, 3),
        [element for _, element in ligand_atoms],
        insertions=[insertion for _, _, insertion, _ in residue_keys],
    )


def _read_pdb(name: str, text: str) -> Iterator[_Atom]:
    """Read the atoms of a file's first model."""
    for line_number, line in number_lines(text):
        record = line[:6].strip()
        if record == "ENDMDL":
            break
        residue = line[17:20].strip()
        if record not in ("ATOM", "HETATM") or residue in WATER:
            continue
        is_residue = record == "ATOM" or residue in MODIFIED
        try:
            xyz = [float(line[first : first + 8]) for first in (30, 38, 46)]
            if is_residue:
                int(line[22:26])
            occupancy = float(line[54:60].strip() or 1)
        except ValueError:
            raise ValueError(f"line {line_number} of {name} is not an ATOM record of the PDB format") from None
        residue_id = line[21:22], line[22:26].strip(), line[26:27].strip()
        yield _Atom(record == "ATOM", *residue_id, residue, line[12:16], line[76:78].strip().upper(), xyz, occupancy)


def _read_mmcif(name: str, text: str) -> Iterator[_Atom]:
    """Read the atoms of a file's first model."""
    try:
        from gemmi import cif
    except ImportError:
        raise ImportError("mmCIF files are read by gemmi: pip install gemmi (extra 'proteins')") from None
    columns = ("group_PDB", "auth_asym_id", "auth_seq_id", "label_comp_id", "label_atom_id", "Cartn_x", "Cartn_y")
    optional = ("type_symbol", "occupancy", "pdbx_PDB_ins_code", "pdbx_PDB_model_num")
    try:
        table = cif.read_string(text)[0].find("_atom_site.", [*columns, "Cartn_z", *(f"?{tag}" for tag in optional)])
        rows = [[cif.as_string(row[index]) if row.has(index) else "" for index in range(12)] for row in table]
    except (ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"{name} is not an mmCIF file: {error}") from None
    for index, (group, chain, number, residue, atom, x, y, z, element, occupancy, insertion, model) in enumerate(rows):
        if model != rows[0][11]:
            break
        try:
            xyz, atom_occupancy = [float(value) for value in (x, y, z)], float(occupancy or 1)
            int(number)
        except ValueError:
            raise ValueError(f"atom {index + 1} of {name} has no number or no coordinates") from None
        padded_name = atom if len(element) == 2 else f" {atom}"  # as PDB files write it
        names = (chain, number, insertion, residue, padded_name, element.upper())
        yield _Atom(group == "ATOM", *names, xyz, atom_occupancy)


def _type_name(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__
