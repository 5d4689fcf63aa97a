"""`paradec design`: design sequences for backbones with ProteinMPNN models, and print them as FASTA.

Design i of a structure depends only on the structure, the options and seed + i.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradec.cli import options, show
from paradec.cli.files import SOME_FAILED
from paradec.core.checks import check_choice, check_temperature, short_repr
from paradec.core.interrupts import EXIT_CODE
from paradec.core.text_files import read_fasta

if TYPE_CHECKING:
    from paradec.models.proteins.mpnn import ProteinMPNNModel
    from paradec.models.proteins.rules import DesignRules
    from paradec.models.proteins.structure import Structure

FASTA = ">{structure}, seed={seed}, score={score:.4f}, recovery={recovery:.4f}, designed={designed}{calls}\n{sequence}"
LETTER_BIAS = re.compile(r"([A-Za-z])[:=]([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")

WEIGHTS = typer.Argument(metavar="WEIGHTS.pt", exists=True, dir_okay=False, help="A file of weights for ligandmpnn.")
ENDINGS = tuple(f".{kind}{packed}" for kind in ("pdb", "cif", "mmcif") for packed in ("", ".gz"))
STRUCTURES = typer.Argument(metavar="STRUCTURE.pdb", exists=True, help="PDB or mmCIF files, also .gz, or folders.")
FIXED = typer.Option(metavar="A12,H100A,A20-24", help="Residues that are kept: chain and number, as in the file.")
REDESIGN = typer.Option(metavar="A12,H100A,A20-24", help="Residues that are designed; all others are kept.")
BIAS = typer.Option(metavar="A:-1.2,W:0.5", help="Numbers to add to letters' logits, before the temperature.")
TIE = typer.Option(
    metavar="A12=B12,A20-24=B20-24", help="Residues that share a letter (mean of logits; weights: A12*0.7=B12*0.3)."
)
BURIED = typer.Option(metavar="A12,A20-24", help="Residues buried in a membrane (per_residue_label_membrane_mpnn).")
INTERFACE = typer.Option(metavar="A12,A20-24", help="Residues at a membrane's interface (the same model).")
SCORE = typer.Option(metavar="FASTA", help="Only score sequences: those of a FASTA file, or one as text (AAA:CCC).")
MEMBRANE = typer.Option("--transmembrane", help="A transmembrane protein (global_label_membrane_mpnn).")


@options.include("sampler set_ seed device as_json", sampler="jacobi")
def design(
    weights: Annotated[Path, WEIGHTS],
    structures: Annotated[list[Path], STRUCTURES],
    num_designs: int = typer.Option(1, "--designs", "-n", min=1, help="Designs of each structure."),
    temperature: float = typer.Option(0.1, help="0 takes the likeliest residue."),
    fixed: Annotated[str | None, FIXED] = None,
    redesign: Annotated[str | None, REDESIGN] = None,
    chains: str | None = typer.Option(None, metavar="A,B", help="Chains to design; by default all. Others are kept."),
    order: str = typer.Option("random", help="Order of the residues: random, or chain (first to last)."),
    batch: int = typer.Option(8, min=1, help="Designs of a structure that are decoded together."),
    bias: Annotated[str | None, BIAS] = None,
    omit: str = typer.Option("", "--omit", "--exclude", metavar="CM", help="Letters that are never proposed."),
    tie: Annotated[str | None, TIE] = None,
    homo_oligomer: bool = typer.Option(False, "--homo-oligomer", help="Tie residues of equal number in all chains."),
    buried: Annotated[str | None, BURIED] = None,
    interface: Annotated[str | None, INTERFACE] = None,
    transmembrane: Annotated[bool, MEMBRANE] = False,
    score: Annotated[str | None, SCORE] = None,
    **shared: Any,
) -> None:
    """Design sequences for backbones, and score them.

    score: minus the mean log-probability of the designed residues, without bias, in the order in which they were
    decided (masked samplers: in a random order). Tied residues count once. recovery: the share of designed residues
    that equal those of the file. A colon separates chains. --score: sequence i is scored in the order of design i, from
    0. Without --seed, these orders and the scores differ from run to run.
    """
    check_temperature("--temperature", temperature)
    check_choice("--order", order, ("random", "chain"))
    read_bias(bias)
    records = None if score is None else read_sequences(score)
    if records is not None and num_designs != 1:
        raise ValueError(f"--designs {num_designs} does not work with --score: leave it out")
    designs = num_designs if records is None else len(records)
    seed = secrets.randbelow(2**31) if shared["seed"] is None else shared["seed"]
    options.FIELDS["seed"].metadata["check"]("--seed", seed)
    files: list[Path] = []
    for path in structures:
        path_files = sorted(f for f in path.iterdir() if f.name.endswith(ENDINGS)) if path.is_dir() else [path]
        if not path_files:
            raise ValueError(f"STRUCTURE {str(path)!r} is a folder without *.pdb or *.cif files")
        if path.suffix == ".pt" or weights.name.endswith(ENDINGS):
            raise ValueError(f"WEIGHTS.pt comes first, then structures: {weights} would be weights, {path} a structure")
        files += path_files
    with show.waiting("loading"):
        from paradec import samplers
        from paradec.models.checkpoint import CheckpointError
        from paradec.models.proteins.mpnn import load_protein_mpnn
        from paradec.models.proteins.structure import read_structure

        method = samplers.create(shared["sampler"], **options.read_settings(shared["set_"]))
    if order == "chain" and method.family != "draft_verify":
        raise ValueError(f"--order chain has no meaning for sampler {method.name!r}, which chooses the order itself")
    request: dict[str, Any] = {"sampler": method, "temperature": temperature}
    load: Callable[..., ProteinMPNNModel] = partial(load_protein_mpnn, weights, device=shared["device"])
    start, code, rows = time.perf_counter(), 0, list[dict[str, Any]]()
    with show.Bar() as bar:
        try:
            for file_index, file in enumerate(files):
                try:
                    structure = set_membrane(read_structure(file), buried, interface, transmembrane)
                    texts = None if records is None else [check_sequence(structure, *record) for record in records]
                    model = load(structure, rules=make_rules(structure, bias, omit, tie, homo_oligomer))
                    load = model.on  # the next structures reuse the weights
                    chain_names = None if chains is None else [chain.strip() for chain in chains.split(",")]
                    fixed_residues = structure.find_residues(fixed or "", "--fixed")
                    redesigned = None if redesign is None else structure.find_residues(redesign, "--redesign")
                    prompt = model.prompt(fixed=fixed_residues, chains=chain_names, redesign=redesigned)
                    for first in range(seed, seed + designs, batch):
                        seeds = range(first, min(first + batch, seed + designs))
                        bar.set_range(file_index * designs + first - seed, len(seeds), designs * len(files))
                        batch_texts = None if texts is None else texts[first - seed : first - seed + batch]
                        entries = design_batch(model, prompt, order, seeds, batch_texts, callback=bar.update, **request)
                        rows += entries
                        if not shared["as_json"]:
                            bar.stop()
                            for entry in entries:
                                calls = f", calls={entry['calls']}" if "calls" in entry else ""
                                typer.echo(FASTA.format(**entry | {"calls": calls}))
                except (ValueError, OSError) as error:
                    if len(files) == 1 or isinstance(error, CheckpointError):
                        raise
                    bar.stop()
                    typer.echo(f"error: {file}: {error}", err=True)
                    code = SOME_FAILED
        except KeyboardInterrupt:
            code = EXIT_CODE
    if shared["as_json"]:
        seconds = round(time.perf_counter() - start, 3)
        typer.echo(json.dumps({"designs": rows, "sampler": method.to_dict(), "seed": seed, "seconds": seconds}))
    raise typer.Exit(code)


def design_batch(
    model: ProteinMPNNModel, prompt: list[int], order: str, seeds: range, texts: list[str] | None, **request: Any
) -> list[dict[str, Any]]:
    """Design sequences for several seeds in one batch, or score `texts`. request: arguments of `generate`."""
    import torch

    import paradec
    from paradec.core import orders

    keys = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds])
    order_kind = orders.create("raster" if order == "chain" else "random")
    row_orders = order_kind.groups(1, len(prompt) - 1, orders.draws_from_keys(keys)).order.tolist()
    if texts is None:
        request |= {"order": row_orders} if request["sampler"].family == "draft_verify" else {}
        out = paradec.generate(model, [prompt] * len(seeds), seed=[*seeds], **request)
        scores, sequences = model.score(prompt, out.sequences, row_orders).neg().tolist(), model.letters(out.sequences)
    else:
        scores, sequences = model.score(prompt, texts, row_orders).neg().tolist(), texts
    structure, columns = model.structures[0], model.columns[0].by_residue.tolist()
    designed = [residue for residue, column in enumerate(columns) if prompt[1 + column] == model.facts.mask_token_id]
    entries = []
    for row, (seed, letters) in enumerate(zip(seeds, sequences, strict=True)):
        entry = {"structure": structure.name, "seed": seed, "sequence": ":".join(structure.by_chain(letters).values())}
        num_equal = sum(letters[residue] == structure.sequence[residue] for residue in designed)
        entry |= {"score": scores[row], "recovery": num_equal / len(designed), "designed": len(designed)}
        entries.append(entry if texts is not None else entry | {"calls": out.row_nfe[row]})
    return entries


def read_sequences(source: str) -> list[tuple[str, str]]:
    """Read the names and sequences of `--score`. Raises ValueError for a file or text that holds no sequence."""
    if os.path.isfile(source):
        return read_fasta(source)
    if not re.sub("[:/]", "", source).isalpha():
        raise ValueError(f"--score {source!r} is neither a file nor a sequence, with a colon between chains")
    return [(source, source)]


def check_sequence(structure: Structure, name: str, sequence: str) -> str:
    """Return the letters of all chains. Raises ValueError unless each residue has one. name: for messages."""
    letters = re.sub("[:/]", "", sequence).upper()  # ProteinMPNN writes "/" between chains
    if len(letters) != len(structure):
        raise ValueError(
            f"--score {short_repr(name)} has {len(letters)} letters; {structure.name} has {len(structure)} residues: "
            "write all chains in one sequence, with a colon between them"
        )
    return letters


def read_bias(text: str | None) -> dict[str, float]:
    """Read `--bias`. Raises ValueError for a text of another form, or a repeated letter."""
    biases: dict[str, float] = {}
    for part in text.split(",") if text else ():
        match = LETTER_BIAS.fullmatch(part.strip())
        if match is None or not math.isfinite(float(match[2])) or match[1].upper() in biases:
            raise ValueError(f"--bias {part!r} must be a letter and its number, like A:-1.2; each letter once")
        biases[match[1].upper()] = float(match[2])
    return biases


def make_rules(structure: Structure, bias: str | None, omit: str, tie: str | None, homo_oligomer: bool) -> DesignRules:
    """Make rules from options. Raises ValueError for unknown residues, ties of unequal length, or two kinds of ties."""
    from paradec.models.proteins.rules import DesignRules

    if tie is not None and homo_oligomer:
        raise ValueError("--tie has no meaning with --homo-oligomer, which ties all chains: leave one out")
    ties = structure.copies() if homo_oligomer else []
    weights: list[list[float] | None] = [None] * len(ties)
    for part in tie.split(",") if tie else ():
        weighted_sides = [side.partition("*") for side in part.split("=")]
        sides = [structure.find_residues(residues, "--tie") for residues, *_ in weighted_sides]
        if len(sides) < 2 or len({len(side) for side in sides}) > 1:
            raise ValueError(f"--tie {part!r} must name as many residues on each side of =, like A20-24=B20-24")
        try:
            part_weights = [float(weight) for _, star, weight in weighted_sides if star]
        except ValueError:
            raise ValueError(f"--tie {part!r} must have numbers after *, like A12*0.7=B12*0.3") from None
        if part_weights and len(part_weights) != len(sides):
            raise ValueError(f"--tie {part!r} must have a weight on each side of =, or none")
        ties += [list(pair) for pair in zip(*sides, strict=True)]
        weights += [part_weights or None] * len(sides[0])
    return DesignRules(read_bias(bias), omit.upper(), ties, tie_weights=weights)


def set_membrane(structure: Structure, buried: str | None, interface: str | None, transmembrane: bool) -> Structure:
    """Copy the structure with membrane labels. Raises ValueError for unknown residues, or residues with two labels."""
    if transmembrane and (buried or interface):
        raise ValueError("--transmembrane labels the whole protein; leave it out with --buried and --interface")
    if not (transmembrane or buried or interface):
        return structure
    labels: Any = [int(transmembrane)] * len(structure)
    for residue in structure.find_residues(buried or "", "--buried"):
        labels[residue] = 2
    for residue in structure.find_residues(interface or "", "--interface"):
        if labels[residue] == 2:
            raise ValueError(f"--interface names a residue that --buried names too: number {residue} from 0")
        labels[residue] = 1
    return dataclasses.replace(structure, membrane=labels)
