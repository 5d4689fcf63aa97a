"""What options of `paradec design` say of a structure: residues by chain and number, bias, ties, membrane labels."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paradec.models.proteins.rules import DesignRules
    from paradec.models.proteins.structure import Structure

NAMED_RESIDUES = re.compile(r"([^\d-]?)(-?\d+)(?:-(-?\d+))?")
LETTER_BIAS = re.compile(r"([A-Za-z])[:=]([+-]?[\d.]+(?:[eE][+-]?\d+)?)")

Bias = Annotated[
    str | None, typer.Option(metavar="A:-1.2,W:0.5", help="What is added to letters' logits, before the temperature.")
]
Omit = Annotated[str, typer.Option("--omit", "--exclude", metavar="CM", help="Letters that are never proposed.")]
Tie = Annotated[
    str | None,
    typer.Option(metavar="A12=B12,A20-24=B20-24", help="Residues that share one letter; their logits are averaged."),
]
HomoOligomer = Annotated[bool, typer.Option("--homo-oligomer", help="Tie residues of one number in all chains.")]
Buried = Annotated[
    str | None,
    typer.Option(metavar="A12,A20-24", help="Residues buried in a membrane (per_residue_label_membrane_mpnn)."),
]
Interface = Annotated[
    str | None, typer.Option(metavar="A12,A20-24", help="Residues at a membrane's interface (the same model).")
]
Transmembrane = Annotated[
    bool, typer.Option("--transmembrane", help="A transmembrane protein (global_label_membrane_mpnn).")
]


def places(structure: Structure, text: str | None, option: str) -> list[int]:
    """The residues, from 0, that an option names.

    Raises:
        ValueError: a text that names none, or residues that the structure does not have.
    """
    found: list[int] = []
    labels = list(zip(structure.chains or (), structure.numbers or (), strict=True))
    for part in text.split(",") if text else ():
        said = NAMED_RESIDUES.fullmatch(part.strip())
        if said is None:
            raise ValueError(f"{option} {part!r} is no residue: chain and number, like A12 or A20-24")
        chain, first = said[1], int(said[2])
        last = first if said[3] is None else int(said[3])
        own = {label for label, _ in labels}
        if not chain and len(own) > 1:
            raise ValueError(f"{option} {part!r} names no chain, and {structure.name} has {', '.join(sorted(own))}")
        several = [i for i, (of, number) in enumerate(labels) if of in (chain or of) and first <= number <= last]
        if not several:
            raise ValueError(f"{option} {part!r}: {structure.name} has no such residue")
        found += several
    return found


def bias_of(text: str | None) -> dict[str, float]:
    """The numbers of `--bias`.

    Raises:
        ValueError: a text that is none, or a letter twice.
    """
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        said = LETTER_BIAS.fullmatch(part.strip())
        try:
            number = float(said[2]) if said is not None else math.nan
        except ValueError:
            number = math.nan
        if said is None or not math.isfinite(number) or said[1].upper() in found:
            raise ValueError(f"--bias {part!r} is no letter with its number, once, like A:-1.2")
        found[said[1].upper()] = number
    return found


def rules_of(structure: Structure, bias: str | None, omit: str, tie: str | None, homo_oligomer: bool) -> DesignRules:
    """The rules that options say.

    Raises:
        ValueError: what a structure has not, ties of unequal length, `--tie` beside `--homo-oligomer`.
    """
    from paradec.models.proteins.rules import DesignRules

    if tie is not None and homo_oligomer:
        raise ValueError("--tie has no meaning with --homo-oligomer, which ties all chains: leave one out")
    ties = structure.copies() if homo_oligomer else []
    for part in tie.split(",") if tie else ():
        sides = [places(structure, side, "--tie") for side in part.split("=")]
        if len(sides) < 2 or len({len(side) for side in sides}) > 1:
            raise ValueError(f"--tie {part!r} must name as many residues on each side of =, like A20-24=B20-24")
        ties += [list(each) for each in zip(*sides, strict=True)]
    return DesignRules(bias_of(bias), omit.upper(), ties)


def labelled(structure: Structure, buried: str | None, interface: str | None, transmembrane: bool) -> Structure:
    """The structure with the membrane labels that options say.

    Raises:
        ValueError: residues that it has not or that are both, or labels of both kinds.
    """
    if transmembrane and (buried or interface):
        raise ValueError("--transmembrane labels the whole protein; leave it out beside --buried and --interface")
    if not (transmembrane or buried or interface):
        return structure
    labels: Any = [int(transmembrane)] * len(structure)
    inside = places(structure, buried, "--buried")
    for residue in inside:
        labels[residue] = 2
    for residue in places(structure, interface, "--interface"):
        if residue in inside:
            raise ValueError(f"--interface names a residue that --buried names too: number {residue} from 0")
        labels[residue] = 1
    return dataclasses.replace(structure, membrane=labels)
